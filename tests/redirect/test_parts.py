"""The parts of the redirection by themselves: the table of patches, stand-ins, streams and events, advice."""

from __future__ import annotations

import time
import types

import pytest
import torch

from mpamp.errors import RedirectError
from mpamp.redirect import advice, redirect
from mpamp.redirect.classes import stand_in
from mpamp.redirect.host import Event, Stream, StreamContext, namespace
from mpamp.redirect.patches import Patches
from mpamp.redirect.refusals import refused
from mpamp.redirect.target import Target

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")


# -- Patches -------------------------------------------------------------------------------------------


def test_patches_go_back_last_first():
    class Base:
        inherited = 1

    class Owner(Base):
        own = 2

    patches = Patches()
    patches.put(Owner, "own", 3)
    patches.put(Owner, "own", 4)
    patches.put(Owner, "inherited", 5)
    patches.put(Owner, "new", 6)
    assert (Owner.own, Owner.inherited, Owner.new, Base.inherited) == (4, 5, 6, 1)
    patches.undo()
    assert (Owner.own, Owner.inherited, "inherited" in vars(Owner), hasattr(Owner, "new")) == (2, 1, False, False)


def test_what_this_torch_lacks_is_left_out():
    module = types.ModuleType("module")
    patches = Patches()
    patches.wrap(module, "nonesuch", lambda original: original)
    assert not hasattr(module, "nonesuch")


# -- Stand-ins -----------------------------------------------------------------------------------------


def test_a_stand_in_is_the_class_that_it_stands_for():
    Device = stand_in(torch.device, lambda *args: torch.device("cpu"))
    device = Device("anything")
    assert device == torch.device("cpu")
    assert isinstance(device, Device)
    assert issubclass(torch.device, Device)
    assert not isinstance("cpu", Device)
    assert type(device) == Device  # noqa: E721
    assert {torch.device: 1}[Device] == {Device: 1}[torch.device] == 1
    assert isinstance("cpu", Device | str)
    assert (Device.__module__, Device.__name__) == ("torch", "device")


# -- Streams, events, the rest -------------------------------------------------------------------------


def test_events_measure_in_ms():
    first, last = Event(enable_timing=True), Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        first.elapsed_time(last)
    first.record()
    time.sleep(0.002)
    last.record(Stream())
    assert 1.9 < first.elapsed_time(last) < 60_000
    assert first.query()
    first.wait()
    first.synchronize()


def test_streams_are_done_at_once():
    stream = Stream(priority=-1)
    event = stream.record_event()
    assert stream.record_event(event) is event
    stream.wait_event(event)
    stream.wait_stream(Stream())
    stream.synchronize()
    assert stream.query()
    assert stream.priority == -1
    with stream as entered, StreamContext(stream) as nothing:
        assert (entered, nothing) == (stream, None)


def test_cards_are_remembered_by_threads():
    found = namespace(Target(torch.device("cpu")))
    for device, index in ((1, 1), ("cuda:2", 2), ("cuda", 0), (torch.device("cuda", 3), 3), (torch.device("cuda"), 0)):
        found["set_device"](device)
        assert found["current_device"]() == index


# -- Names ---------------------------------------------------------------------------------------------


@needs_no_cuda
def test_what_names_an_absent_device():
    target = Target(torch.device("cpu"))
    for name in ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), 0, 1):
        assert target.present(name) == torch.device("cpu")
    for other in ("cpu", "meta", "Cuda", "", True, None, torch.float32, 1.0, torch.device("meta")):
        assert target.present(other) is other
    assert target.present_type("cuda") == "cpu"
    assert target.absent[0] == "cuda"
    assert "cpu" not in target.absent


# -- Words ---------------------------------------------------------------------------------------------


def test_a_refusal_names_the_idiom_and_the_remedy():
    with pytest.raises(RedirectError, match=r"^torch\.cuda\.graph can't be sent to 'cpu', .*\. Run the steps without"):
        refused("torch.cuda.graph", torch.device("cpu"))(None, pool=None)
    with pytest.raises(RedirectError, match=r"Leave the call out there\.$"):
        refused("torch.cuda.cudart", torch.device("cpu"))()


@needs_no_cuda
@pytest.mark.parametrize(
    "program",
    [
        "torch.zeros(1).cuda()",
        "torch.zeros(1, device='cuda')",
        "torch.zeros(1).to('cuda')",
        "torch.zeros(1).to(0)",
        "torch.cuda.FloatTensor(1)",
        "torch.cuda.Stream()",
        *([] if torch.version.cuda else ["torch.cuda.Event()"]),  # builds for CUDA make it when it is first recorded
        "torch.cuda.current_device()",
        "torch.cuda.synchronize()",
        "torch.Generator('cuda')",
        "torch.cuda.set_device(0)",
        "torch.cuda.get_device_name(0)",
        "torch.zeros(1).pin_memory()",
        "torch.distributed.init_process_group('nccl', init_method='tcp://127.0.0.1:1', rank=0, world_size=1)",
        "raise SomeError('This needs a CUDA device')",
        "raise SomeError('Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU')",
        "raise SomeError('ProcessGroupNCCL is only supported with GPUs, no GPUs found!')",
    ],
)
def test_who_dies_for_want_of_a_device_is_told(program):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(program, {"torch": torch, "SomeError": ValueError})
    line = advice(caught.value)
    assert line is not None
    assert line.count("\n") == 0
    assert "`mpamp run --device cpu`" in line


@needs_no_cuda
def test_an_assertion_without_words_is_read_in_the_source():
    with pytest.raises(AssertionError) as caught:
        assert torch.cuda.is_available(), ""
    assert "--device" in advice(caught.value)


@pytest.mark.parametrize(
    "error", [ValueError("wrong size"), KeyError("barracuda"), RuntimeError("mat1 and mat2"), AssertionError()]
)
def test_who_dies_of_something_else_is_not(error):
    assert advice(error) is None


# -- Profiles ------------------------------------------------------------------------------------------


@needs_no_cuda
def test_a_profile_of_an_absent_device_is_the_processors():
    cuda, cpu = torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU
    for activities in ([cuda], [cpu, cuda], {cuda}):
        with redirect("cpu"), torch.profiler.profile(activities=activities) as found:
            torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
        assert found.activities == {cpu}
        assert any(event.name == "aten::mm" for event in found.events())
