"""``redirect``, ``install`` and ``uninstall``: in force everywhere in the process, and gone without a trace."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import threading
import types

import pytest
import torch
import torch.cuda.comm
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._device import DeviceContext, _device_constructors

import mpamp
from mpamp import redirect as room
from mpamp.errors import RedirectError
from mpamp.redirect.redirection import _active

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here: its names mean what they say")

MODULES = [
    "torch",
    "torch.accelerator",
    "torch.amp",
    "torch.amp.autocast_mode",
    "torch.backends.cuda",
    "torch.cuda",
    "torch.cuda.amp",
    "torch.cuda.comm",
    "torch.cuda.graphs",
    "torch.cuda.memory",
    "torch.cuda.nccl",
    "torch.cuda.nvtx",
    "torch.cuda.profiler",
    "torch.cuda.random",
    "torch.cuda.streams",
    "torch.cuda.tunable",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.distributed_c10d",
    "torch.fft",
    "torch.jit",
    "torch.nested",
    "torch.nn.parallel",
    "torch.nn.parallel.comm",
    "torch.nn.parallel.data_parallel",
    "torch.nn.parallel.scatter_gather",
    "torch.random",
    "torch.serialization",
    "torch.xpu",
    "torch.xpu.memory",
    "torch.xpu.random",
    "torch.xpu.streams",
]
MODULES += [f"torch.cuda.{name}" for name in ("gds", "green_contexts") if hasattr(torch.cuda, name)]  # newer torch
if importlib.util.find_spec("torch.xpu.graphs"):  # from torch 2.11 on
    MODULES.append("torch.xpu.graphs")
CLASSES = [
    DeviceMesh,
    FullyShardedDataParallel,
    torch.Tensor,
    torch.nn.Module,
    torch.nn.SyncBatchNorm,
    torch.nn.parallel.DistributedDataParallel,
    torch.nn.utils.rnn.PackedSequence,
    torch.profiler.profile,
    torch.storage._StorageBase,
    torch.storage.TypedStorage,
    torch.utils.data.DataLoader,
    torch.amp.autocast_mode.autocast,
    torch.amp.GradScaler,
    DeviceContext,
    *([torch.cuda.green_contexts.GreenContext] if hasattr(torch.cuda, "green_contexts") else []),
]


def names():
    """All that is in the namespaces that are touched, by identity."""
    owners = [*(importlib.import_module(name) for name in MODULES), *CLASSES]
    return {(str(owner), name): id(value) for owner in owners for name, value in vars(owner).items()}


@pytest.fixture(autouse=True)
def _nothing_stays():
    with mpamp.autocast("cpu"):  # the first region has torch's DataParallel carry regions, for good
        pass
    before = names()
    yield
    assert names() == before
    assert _active == []


def test_the_listed_namespaces_are_those_that_are_touched():
    with room.redirect("cpu"):
        owners = {place.owner for place, _ in _active[0].patches._layers}
    listed = [*(sys.modules[name] for name in MODULES), *CLASSES]
    assert owners <= set(listed)
    assert len(owners) > 25


def test_all_is_as_before_after_an_exception():
    before = names()
    with pytest.raises(ZeroDivisionError), room.redirect("cpu"):
        raise ZeroDivisionError
    assert names() == before
    # As torch was built, and whether there is a driver.
    error, text = (RuntimeError, "NVIDIA|No CUDA GPUs") if torch.version.cuda else (AssertionError, "CUDA")
    with pytest.raises(error, match=text):
        torch.zeros(1, device="cuda")


def test_what_fails_half_way_changes_nothing(monkeypatch):
    from mpamp.redirect import redirection

    def fail(patches, target):
        raise OSError("half way")

    monkeypatch.setattr(redirection, "redirect_parallel", fail)
    with pytest.raises(OSError, match="half way"):
        room.install("cpu")
    assert isinstance(torch.zeros, types.BuiltinFunctionType)


def test_installs_are_counted():
    room.install("cpu")
    with room.redirect(torch.device("cpu")):
        pass
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    room.uninstall()
    room.uninstall()  # one too many does nothing
    assert not torch.cuda.is_available()


def test_one_device_at_a_time(monkeypatch):
    with room.redirect("cpu"), pytest.raises(RedirectError, match=r"'cpu' already.*uninstall"):
        room.install("meta")
    with pytest.raises(RedirectError, match="no xpu device"):
        room.install("xpu")


def test_two_threads_leave_no_trace():
    errors = []

    def work():
        try:
            for _ in range(20):
                with room.redirect("cpu"):
                    assert torch.ones(1).cuda().is_cuda
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_regions_of_absent_devices_end_with_it():
    a = torch.ones(2, 2)
    with room.redirect("cpu"):
        region = mpamp.autocast("cuda", torch.float16)
        with region:
            assert (a @ a).dtype is torch.float16
        assert mpamp.get_backend("cuda").device_type == "cpu"
    assert mpamp.autocast("cuda", torch.float16).device_type == "cuda"
    assert mpamp.autocast("cuda", torch.float16) is not region
    assert mpamp.get_backend("cuda").device_type == "cuda"


def test_decorated_functions_follow_the_device():
    class Seen(torch.autograd.Function):
        @staticmethod
        @mpamp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, a):
            return a + 0

        @staticmethod
        @mpamp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            assert not torch.is_autocast_enabled("cpu")
            return grad

    a = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with room.redirect("cpu"), mpamp.autocast("cuda", torch.float16):
        out = Seen.apply(a)
        assert out.dtype is torch.float32
        out.sum().backward()
    assert a.grad.tolist() == [1.0, 1.0]


def test_only_the_first_absent_device_says_that_it_is_there():
    with room.redirect("cpu"):
        assert [torch.cuda.is_available(), torch.xpu.is_available()] == [True, False]
        assert [torch.cuda.device_count(), torch.xpu.device_count()] == [1, 0]
        assert torch.ones(1).to("xpu").device.type == "cpu"
        assert [torch.ones(1).is_cuda, torch.ones(1).is_xpu] == [True, False]


def test_devices_that_are_no_accelerators_are_left_alone():
    with room.redirect("cpu"):
        assert torch.ones(1).cpu().device.type == "cpu"
        assert torch.ones(1, device="meta").device.type == "meta"
        assert torch.ones(1).to("meta").is_cuda is False
        with pytest.raises(RuntimeError):
            torch.ones(1, device="cudaa")


def test_functions_keep_their_names_and_pickle():
    with room.redirect("cpu"):
        for function in (torch.zeros, torch.tensor, torch.cuda.synchronize, torch.device, torch.load):
            assert pickle.loads(pickle.dumps(function)) is function
        assert torch.zeros.__name__ == "zeros"
        assert isinstance(torch.cuda.Stream, type)
        assert isinstance(torch.cuda.StreamContext, type)


def test_modes_see_torchs_own_functions():
    assert torch.zeros in _device_constructors()
    with room.redirect("cpu"), torch.device("meta"):
        assert torch.zeros(1).device.type == "meta"


def _of_cards():
    """Return what torch has for files and contexts of cards: versions of it differ."""
    gds, green = getattr(torch.cuda, "gds", None), getattr(torch.cuda, "green_contexts", None)
    found = [] if gds is None else [gds.GdsFile, gds.gds_register_buffer, gds.gds_deregister_buffer]
    return found if green is None else [*found, green.GreenContext, green.GreenContext.create]


def test_plans_of_an_absent_device_are_none_and_can_be_limited():
    with room.redirect("cpu"):
        plans = torch.backends.cuda.cufft_plan_cache
        assert plans.size == plans[0].size == 0
        plans.max_size = 16
        plans.clear()
        assert plans["cuda:0"].max_size == 16


def test_what_is_asked_of_memory_and_tools_is_answered_or_refused():
    with room.redirect("cpu"):
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        assert torch.cuda.memory.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"] == 0
        assert torch.cuda.nccl.version() < (2, 10)
        assert not torch.cuda.tunable.is_enabled()
        for refuses in (
            torch.cuda.memory._record_memory_history,
            torch.cuda.memory._snapshot,
            torch.cuda.memory._dump_snapshot,
            torch.cuda.tunable.enable,
            torch.cuda.tunable.set_filename,
            torch.cuda.nccl.all_reduce,
            *_of_cards(),
        ):
            with pytest.raises(RedirectError, match="can't be sent to 'cpu'"):
                refuses()


def test_no_op_costs_more():
    with room.redirect("cpu"):
        for name in ("add", "matmul", "cat", "softmax"):
            assert isinstance(getattr(torch, name), types.BuiltinFunctionType)
        for name in ("add", "__add__", "float", "half", "reshape"):
            assert name not in vars(torch.Tensor)


def test_a_dtype_set_by_an_absent_devices_name_is_the_present_ones():
    before = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
    with room.redirect("cpu"):
        torch.set_autocast_dtype("cuda", torch.float16)
        told = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_dtype("cuda", before[0])
    assert told == (torch.float16, torch.float16)
    assert (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")) == before


def test_regions_are_left_as_they_were_entered_whatever_stands_at_torchs_names():
    before = torch.get_autocast_dtype("cpu")
    with mpamp.install():
        region = torch.autocast("cpu", dtype=torch.float16, enabled=False)
        region.__enter__()
        with room.redirect("cpu"):
            with torch.autocast("cuda", dtype=torch.float16, enabled=False):
                assert torch.get_autocast_dtype("cuda") is torch.float16
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
            region.__exit__(None, None, None)
        assert torch.get_autocast_dtype("cpu") is before
