"""All that replaces torch's names, in force at once: each does its own, and goes in any order without a trace."""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch

import mpamp
import mpamp.apex
from mpamp import children, redirect
from mpamp.apex import scaler as apex_scaler
from mpamp.insight import reporting
from mpamp.insight.report.plain import autocast_off
from mpamp.scaler.stepping import SteppingPart
from mpamp.scaler.unscaling import UnscalingPart

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here: its names mean what they say")

BF16 = torch.bfloat16
CLASSES: tuple[Any, ...] = (
    *(torch.autocast, torch.cuda.amp.autocast, torch.cpu.amp.autocast),
    *(torch.amp.GradScaler, torch.cuda.amp.GradScaler, SteppingPart, UnscalingPart, apex_scaler.LossScaler),
    *(torch.Tensor, torch.nn.Module, torch.nn.SyncBatchNorm, torch.utils.data.DataLoader),
    *(torch.storage._StorageBase, torch.nn.parallel.DistributedDataParallel),
)


@contextmanager
def apex() -> Any:
    mpamp.apex.install()
    try:
        yield
    finally:
        mpamp.apex.uninstall()


PARTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "install": mpamp.install,
    "redirect": lambda: redirect.redirect("cpu"),
    "report": lambda: reporting(None),
    "apex": apex,
}


def names() -> dict[Any, Any]:
    """Return what is callable in torch and in mpamp, by where it is, and what child processes and imports find."""
    rooms = ("torch._dynamo", "torch._inductor", "torch.fx", "torch.testing")
    modules = [(n, m) for n, m in list(sys.modules.items()) if n.partition(".")[0] in ("torch", "mpamp")]
    owners = [(n, m) for n, m in modules if not n.startswith(rooms)] + [(f"{c.__module__}.{c}", c) for c in CLASSES]
    found = {(o, n): v for o, owner in owners for n, v in list(vars(owner).items()) if callable(v)}
    found["environment"] = tuple(os.environ.get(n) for n in (children.VARIABLE, "PYTHONPATH"))
    found["imported"] = tuple(sorted(n for n in sys.modules if n.partition(".")[0] in ("apex", "amp_C", "apex_C")))
    return found


def differences(before: dict[Any, Any]) -> list[str]:
    owners = {n[0] for n in before if isinstance(n, tuple)}  # modules imported since have what they found then
    after = {n: value for n, value in names().items() if not isinstance(n, tuple) or n[0] in owners}
    same = {n for n in before if before[n] is after.get(n) or (isinstance(n, str) and before[n] == after[n])}
    return sorted(map(str, (before.keys() | after.keys()) - same))


@pytest.fixture(scope="module", autouse=True)
def _all_is_loaded() -> None:
    """What torch and mpamp make at their first use is there before anything is compared."""
    for part in (*PARTS.values(), autocast_off):
        with part(), mpamp.autocast("cpu"):
            pass


def is_ours() -> bool:
    """Tell by an op that torch has no rule for whether a region by torch's name is mpamp's."""
    with torch.autocast("cpu"):
        y = torch.ones(4, 4) @ torch.ones(4, 4)
        assert y.dtype is BF16
        try:
            return torch.fft.hfft2(y).dtype is torch.float32
        except RuntimeError:
            return False


def is_redirected() -> bool:
    """Tell whether each way of naming the device that is absent says the same, and what."""
    said = {torch.cuda.is_available(), torch.autocast("cuda", enabled=False).device == "cpu"}
    if torch.cuda.is_available():
        said.add(torch.amp.GradScaler("cuda", enabled=True)._device == "cpu")
    (found,) = said
    return found


def counted(report: Any) -> bool:
    """Tell whether a report counts a region as one of torch's."""
    before = report._torch_regions[0]
    with torch.autocast("cpu"):
        pass
    return bool(report._torch_regions[0] > before)


def check(live: dict[str, Any]) -> None:
    """Check that what is in force does its own, and that nothing else is."""
    assert is_ours() == ("install" in live)
    assert isinstance(torch.amp.GradScaler("cpu"), mpamp.GradScaler) == ("install" in live)
    assert (torch.amp.custom_fwd.__module__ == "mpamp.standins.functions") == ("install" in live)
    assert is_redirected() == ("redirect" in live)
    assert ("apex.optimizers" in sys.modules) == ("apex" in live)
    if "report" in live:
        assert counted(live["report"]) == ("install" not in live)


def play(order: list[str], looks: bool = True) -> None:
    """Put each part in force at its first turn and take it away at its second."""
    live: dict[str, Any] = {}
    for part in order:
        if part in live:
            live.pop(part).__exit__(None, None, None)
        else:
            live[part] = PARTS[part]()
            live[part].__enter__()
        if looks:
            check(live)


def orders(count: int) -> list[list[str]]:
    chosen, parts = random.Random(11), [*PARTS, *PARTS]
    return [chosen.sample(parts, len(parts)) for _ in range(count)]


@pytest.mark.parametrize("order", orders(12), ids=" ".join)
def test_each_does_its_own_and_leaves_no_trace_in_any_order(order: list[str]) -> None:
    before = names()
    play(order)
    assert differences(before) == []


@pytest.mark.sweep
def test_every_order_of_going_after_every_order_of_coming() -> None:
    before, wrong = names(), {}
    for coming in itertools.permutations(PARTS):
        for going in itertools.permutations(PARTS):
            play([*coming, *going], looks=False)
            if found := differences(before):
                wrong[coming, going] = found
    assert wrong == {}


@pytest.mark.parametrize("off_first", [False, True])
def test_regions_that_are_off_are_so_under_any_other(off_first: bool) -> None:
    before = names()
    off, others = autocast_off(), [part() for part in PARTS.values()]
    for part in [off, *others] if off_first else [*others, off]:
        part.__enter__()
    for device in ("cpu", "cuda"):
        with torch.autocast(device, dtype=BF16), mpamp.autocast(device, dtype=BF16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    off.__exit__(None, None, None)
    assert is_ours()
    for part in others:
        part.__exit__(None, None, None)
    assert differences(before) == []


def test_functions_imported_meanwhile_by_a_name_that_is_redirected_are_torchs_afterwards() -> None:
    before = names()
    module = type(sys)("mpamp_test_meanwhile")
    sys.modules[module.__name__] = module
    try:
        with redirect.redirect("cpu"), mpamp.install():
            module.custom_fwd = torch.amp.custom_fwd  # type: ignore[attr-defined]
        assert module.custom_fwd is before["torch.amp.autocast_mode", "custom_fwd"]
    finally:
        del sys.modules[module.__name__]
    assert differences(before) == []


@pytest.mark.parametrize("innermost", PARTS)
def test_after_an_exception(innermost: str) -> None:
    before = names()
    with ExitStack() as outer:
        for part in PARTS.keys() - {innermost}:
            outer.enter_context(PARTS[part]())
        with pytest.raises(ZeroDivisionError), PARTS[innermost](), torch.autocast("cpu"):
            _ = 1 / 0
    assert differences(before) == []
    assert not torch.is_autocast_enabled("cpu")


def test_two_threads() -> None:
    before, errors = names(), []

    def work(parts: list[str]) -> None:
        try:
            for _ in range(15):
                for part in parts:
                    with PARTS[part](), torch.autocast("cpu"):
                        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is BF16
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(p,)) for p in (["install", "redirect"], ["redirect", "install"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert differences(before) == []


def test_a_region_that_is_entered_while_the_names_are_put_back_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is in ours already when the names become torch's, and has yet to note that it is."""
    from mpamp.standins import regions, uninstall

    before, x = names(), torch.ones(2, 2)
    make, region = regions.region_of, torch.autocast("cpu")

    def late(*args: Any, **kwargs: Any) -> Any:
        uninstall()
        return make(*args, **kwargs)

    mpamp.install()
    monkeypatch.setattr(regions, "region_of", late)
    region.__enter__()  # a with statement would have looked for the other end by now
    assert torch.fft.hfft2(x @ x).dtype is torch.float32
    region.__exit__(None, None, None)
    assert not torch.is_autocast_enabled("cpu")
    monkeypatch.undo()
    assert differences(before) == []
