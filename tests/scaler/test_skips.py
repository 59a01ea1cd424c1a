"""Skipped steps: visible, without false warnings, and never for long in silence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from mpamp.devices.registry import get_backend
from mpamp.errors import GradientOverflowError, MpampWarning
from mpamp.plugins.backend import Backend
from mpamp.scaler import GradScaler, StepResult
from mpamp.scaler.watch import SkipWatch

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
}
SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 1),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=9),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Reads(TorchDispatchMode):
    """Counts the reads of values by the host, and copies from the device to it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def tolist_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count reads of scalars by ``tolist``, which on the CPU run no op. Copies that have arrived are no scalars."""
    reads: list[int] = []
    real = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        reads.extend([1] * (tensor.dim() == 0))
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    return reads


@every_optimizer
def test_last_step_skipped(make: Any, scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = make(weights)
    assert scaler.last_step(optimizer) is None
    assert scaler.last_step_skipped(optimizer) is False
    seen = []
    for factor in (1.0, math.inf, math.nan, 1.0):
        optimizer.zero_grad()
        run_backward(scaler, weights, factor=factor)
        scaler.step(optimizer)
        before = scaler.last_step_skipped(optimizer)
        scaler.update()
        assert scaler.last_step_skipped(optimizer) is before
        seen.append(before)
    assert seen == [False, True, True, False]
    result = scaler.last_step(optimizer)
    assert isinstance(result, StepResult)
    assert (result.step, result.skipped, result.scale) == (4, False, 256.0)


@pytest.mark.parametrize("is_accelerator", [False, True])
@every_optimizer
def test_results_of_past_steps_stay(
    make: Any, is_accelerator: bool, weights: Any, run_backward: Any, request: pytest.FixtureRequest
) -> None:
    if is_accelerator:
        request.getfixturevalue("like_accelerator")
    scaler = GradScaler("cpu", init_scale=64.0)
    optimizer = make(weights)
    results: list[Any] = []
    for factor in (1.0, math.inf, 1.0, math.inf):
        optimizer.zero_grad()
        run_backward(scaler, weights, factor=factor)
        scaler.step(optimizer)
        results.append(scaler.last_step(optimizer))
        scaler.update()
    assert [(r.skipped, r.scale) for r in results] == [(False, 64.0), (True, 64.0), (False, 32.0), (True, 32.0)]


@pytest.mark.parametrize(("name", "reads"), [("plain", 1), ("foreach", 1), ("fused", 0)])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_reads_of_the_device(
    like_accelerator: None,
    tolist_reads: list[int],
    name: str,
    reads: int,
    clips: bool,
    factor: float,
    weights: Any,
    run_backward: Any,
) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=None)
    optimizer = OPTIMIZERS[name](weights)
    for _ in range(2):
        optimizer.zero_grad()
        run_backward(scaler, weights, factor=factor)
        tolist_reads.clear()
        with Reads() as counted:
            if clips:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        # Adam itself reads its step counts: they are CPU tensors.
        own = 0 if name == "fused" or factor != 1.0 else counted.count
        assert counted.count - own + len(tolist_reads) == reads
    tolist_reads.clear()
    assert scaler.last_step_skipped(optimizer) is (factor != 1.0)
    assert len(tolist_reads) == 1 - reads
    assert scaler.last_step(optimizer).scale == (65536.0 if factor == 1.0 else 32768.0)


def test_result_says_when_it_is_not_read(like_accelerator: None, weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(weights, lr=0.1, fused=True)
    run_backward(scaler, weights)
    scaler.step(optimizer)
    assert repr(scaler.last_step(optimizer)) == "StepResult(step=1, not read yet)"
    assert not scaler.last_step_skipped(optimizer)
    assert repr(scaler.last_step(optimizer)) == "StepResult(step=1, skipped=False)"


@every_optimizer
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_no_order_warning_after_a_skipped_first_step(
    make: Any, scheduler: Any, scaler: GradScaler, weights: Any, run_backward: Any
) -> None:
    optimizer = make(weights)
    schedule = scheduler(optimizer)
    run_backward(scaler, weights, factor=math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
        scaler.update()
        schedule.step()


@every_optimizer
def test_order_warning_where_the_order_is_wrong(make: Any, scaler: GradScaler, weights: Any) -> None:
    optimizer = make(weights)
    schedule = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before"):
        schedule.step()


@every_optimizer
def test_step_scheduler_advances_with_its_optimizer(
    make: Any, scaler: GradScaler, weights: Any, run_backward: Any
) -> None:
    optimizer = make(weights)
    schedule = lr_scheduler.StepLR(optimizer, 1)
    advanced = []
    for factor in (math.inf, 1.0, math.nan, 1.0):
        optimizer.zero_grad()
        run_backward(scaler, weights, factor=factor)
        scaler.step(optimizer)
        scaler.update()
        advanced.append(scaler.step_scheduler(schedule))
    assert advanced == [False, True, False, True]
    assert schedule.last_epoch == 2


def test_step_scheduler_passes_arguments_and_takes_an_optimizer(
    scaler: GradScaler, weights: Any, run_backward: Any
) -> None:
    first, second = (torch.optim.SGD([w], lr=0.1) for w in weights)
    plateau = lr_scheduler.ReduceLROnPlateau(first, patience=0)
    run_backward(scaler, weights[:1])
    run_backward(scaler, weights[1:], factor=math.inf)
    scaler.step(first)
    scaler.step(second)
    assert not scaler.step_scheduler(plateau, second, 1.0)
    assert scaler.step_scheduler(plateau, first, metrics=1.0)
    assert plateau.last_epoch == 1


def test_step_scheduler_of_a_disabled_scaler_advances(weights: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1)
    scaler = GradScaler("cpu", enabled=False)
    scaler.step(optimizer)
    assert scaler.step_scheduler(schedule)


def skip(scaler: GradScaler, optimizer: Any, run_backward: Any, *, factor: float = math.inf) -> None:
    optimizer.zero_grad()
    run_backward(scaler, [p for g in optimizer.param_groups for p in g["params"]], factor=factor)
    scaler.step(optimizer)
    scaler.update()


def test_scale_never_reaches_zero_or_inf(weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", init_scale=1.0, max_consecutive_skips=None, growth_interval=1)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for _ in range(40):
        skip(scaler, optimizer, run_backward)
    assert scaler.get_scale() == 2.0**-16
    for _ in range(200):
        skip(scaler, optimizer, run_backward, factor=1e-30)
        assert scaler.get_scale() <= 2.0**126
    assert not scaler.last_step_skipped(optimizer)


def test_bounds_are_kept(weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=3.0, max_scale=10.0, growth_interval=1)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    skip(scaler, optimizer, run_backward, factor=1.0)
    assert scaler.get_scale() == 10.0
    skip(scaler, optimizer, run_backward)
    skip(scaler, optimizer, run_backward)
    assert scaler.get_scale() == 3.0


@every_optimizer
def test_warning_after_too_many_skips_names_the_parameters(make: Any, run_backward: Any) -> None:
    good, bad = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(5))
    optimizer = make([("layer.good", good), ("layer.bad", bad)])
    scaler = GradScaler("cpu", max_consecutive_skips=3)

    def train(factor: float) -> None:
        optimizer.zero_grad()
        run_backward(scaler, [good])
        run_backward(scaler, [bad], factor=factor)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(2):
        train(math.nan)
    train(1.0)
    for _ in range(2):
        train(math.nan)
    with pytest.warns(MpampWarning, match=r"last 3 updates.*'layer.bad' of group 0") as caught:
        train(math.nan)
    assert "layer.good" not in str(caught[0].message)
    assert caught[0].lineno == train.__code__.co_firstlineno + 5
    for _ in range(2):
        train(math.nan)
    with pytest.warns(MpampWarning, match="last 6 updates"):
        train(math.nan)
    train(1.0)
    for _ in range(2):
        train(math.nan)
    with pytest.warns(MpampWarning, match="last 3 updates"):
        train(math.nan)


def test_error_after_too_many_skips_leaves_a_usable_scaler(weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", init_scale=16.0, max_consecutive_skips=2, error_on_max_skips=True)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    skip(scaler, optimizer, run_backward)
    with pytest.raises(GradientOverflowError, match="parameter 0 of group 0"):
        skip(scaler, optimizer, run_backward)
    assert scaler.get_scale() == 4.0
    skip(scaler, optimizer, run_backward, factor=1.0)
    assert not scaler.last_step_skipped(optimizer)


def test_no_warning_where_none_is_asked(weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=None)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for _ in range(130):
        skip(scaler, optimizer, run_backward)


def test_default_warns_at_a_hundred(weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for _ in range(99):
        skip(scaler, optimizer, run_backward)
    with pytest.warns(MpampWarning, match="last 100 updates"):
        skip(scaler, optimizer, run_backward)


def test_unscaled_but_not_stepped_counts(weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=1)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    run_backward(scaler, weights, factor=math.inf)
    scaler.unscale_(optimizer)
    with pytest.warns(MpampWarning, match="last 1 updates"):
        scaler.update()


class Late(Backend):
    """Values arrive at the host two polls after they were sent."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.sent = 0

    def read_later(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        self.sent += 1
        copy, polls = tensor.clone(), iter([None])
        return lambda: next(polls, copy)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, like_accelerator: None) -> Late:
    """Make the CPU like an accelerator whose values take a while."""
    backend = Late()
    monkeypatch.setattr("mpamp.scaler.outcomes.device_state", lambda _: type("State", (), {"backend": backend}))
    return backend


def test_fused_skips_are_reported_late_and_without_waiting(
    late: Late, tolist_reads: list[int], weights: Any, run_backward: Any
) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=3)
    optimizer = torch.optim.SGD(weights, lr=0.1, fused=True)
    tolist_reads.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        number = 0
        while not caught and number < 10:
            number += 1
            skip(scaler, optimizer, run_backward)
    assert "parameter 0 of group 0" in str(caught[0].message)
    assert 3 < number <= 7
    assert tolist_reads == []
    assert late.sent >= 2


def test_fused_skips_beyond_what_is_sent_at_once_add_up(late: Late, weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=100)
    optimizer = torch.optim.SGD(weights, lr=0.1, fused=True)

    def skip_often(times: int) -> None:
        for _ in range(times):
            skip(scaler, optimizer, run_backward)

    skip_often(99)
    skip(scaler, optimizer, run_backward, factor=1.0)
    skip_often(99)
    with pytest.warns(MpampWarning, match=r"last 1\d\d updates"):
        skip_often(20)
    assert late.sent <= 16


def test_plain_skips_are_reported_at_once_for_the_host_knows(late: Late, weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=3)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for factor in (1.0, math.inf, math.inf):
        skip(scaler, optimizer, run_backward, factor=factor)
    with pytest.warns(MpampWarning, match="last 3 updates"):
        skip(scaler, optimizer, run_backward)
    assert late.sent == 0


def test_what_is_on_its_way_is_forgotten_once_the_host_knows_better(late: Late) -> None:
    watch, bad = SkipWatch(2), torch.tensor([1.0, 1.0])
    assert not watch.saw_on_device(bad, late)
    assert not watch.saw(False)
    for _ in range(2):
        assert not watch.saw_on_device(torch.tensor([1.0, 0.0]), late)
        assert watch.streak == 0


def test_a_read_on_the_way_counts(late: Late, weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=2)
    optimizer = torch.optim.SGD(weights, lr=0.1, fused=True)
    run_backward(scaler, weights, factor=math.inf)
    scaler.step(optimizer)
    assert scaler.last_step_skipped(optimizer)
    scaler.update()
    assert scaler._outcomes.watch.streak == 1


def test_fused_good_steps_are_not_reported(late: Late, weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=2)
    optimizer = torch.optim.SGD(weights, lr=0.1, fused=True)
    for _ in range(6):
        skip(scaler, optimizer, run_backward, factor=1.0)
    assert scaler._outcomes.watch.streak == 0


def test_base_backend_gives_a_copy_of_the_value() -> None:
    value = torch.tensor(3.0)
    arrived = get_backend("cpu").read_later(value)
    value.fill_(4.0)
    copy = arrived()
    assert copy is not None
    assert copy.item() == 3.0
