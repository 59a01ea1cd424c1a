"""Observers are told what ran; nothing runs otherwise for it, and nothing is left when they are gone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap

import mpamp
from mpamp import engine
from mpamp.devices.registry import device_state
from mpamp.engine import Call
from mpamp.engine.observing import OBSERVERS
from mpamp.engine.python import building, transforms
from tests.torches import needs_transforms

BRAIN, HALF = torch.bfloat16, torch.float16
STEPS = [pytest.param(10, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.sweep)]


def _ignore(call: Call) -> None:
    pass


def _region(dtype: torch.dtype = BRAIN, **options: Any) -> mpamp.Region:
    return mpamp.autocast("cpu", dtype, **options)


def _ops() -> list[torch.dtype]:
    """Run ops that torch's kernels serve, ours do, and none does."""
    x, layer = torch.ones(8, 8), torch.nn.Linear(8, 8)
    with _region():
        y = layer(x)
        found = [y, torch.cat([x, y]), y.softmax(0), torch.log(y), y + x, y * 2]
    return [t.dtype for t in found]


# -- What is told ------------------------------------------------------------------------------------


def test_a_call_is_told_with_its_tensors_casts_and_result() -> None:
    x, weight = torch.ones(4, 8), torch.nn.Parameter(torch.ones(2, 8))
    told: list[tuple[Any, ...]] = []

    def observe(call: Call) -> None:
        casts = [(c.before is x, c.before is weight, c.after.dtype, c.is_kept, c.was_there) for c in call.casts]
        told.append((call.op, call.policy, call.lower, call.arguments, casts, call.result))

    with _region():
        with engine.observe(observe):
            first = torch.nn.functional.linear(x, weight)
            second = torch.nn.functional.linear(x, weight)
        torch.nn.functional.linear(x, weight)
    assert [t[:3] for t in told] == 2 * [("aten::linear", mpamp.CastPolicy.LOWER_PRECISION_FP, BRAIN)]
    assert all(t[3][0] is x and t[3][1] is weight and t[3][2] is None for t in told)
    kept = [[(True, False, BRAIN, False, False), (False, True, BRAIN, True, was_there)] for was_there in (False, True)]
    assert [t[4] for t in told] == kept
    assert told[0][5] is first
    assert told[1][5] is second


def test_casts_of_lists_and_of_normalizations_are_told() -> None:
    told: dict[str, list[torch.dtype]] = {}
    low, x = torch.ones(4, 8, dtype=BRAIN), torch.ones(4, 8)
    norm = torch.nn.BatchNorm1d(8).to(BRAIN)
    observation = engine.observe(lambda call: told.update({call.op: [c.before.dtype for c in call.casts]}))
    with _region(ops={"batch_norm": "fp32"}), observation:
        torch.cat([low, x, low])
        norm(low)
    assert told["aten::cat"] == [BRAIN, BRAIN]
    assert told["aten::batch_norm"] == 5 * [BRAIN]  # its input, weight, bias, mean and variance


def test_an_op_that_raises_is_told_and_leaves_nothing() -> None:
    told: list[Any] = []
    with _region(), engine.observe(lambda call: told.append((call.op, call.result))):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert [op for op, _ in told] == ["aten::mm", "aten::mm"]
    assert [result is None for _, result in told] == [True, False]


def test_outside_of_regions_nothing_is_told() -> None:
    told: list[str] = []
    x = torch.ones(4, 4)
    with engine.observe(lambda call: told.append(call.op)):
        torch.mm(x, x)
        with torch.autocast("cpu", BRAIN):
            assert torch.mm(x, x).dtype is BRAIN
    assert told == []


def test_a_region_entered_while_observed_is_told_of() -> None:
    told: list[str] = []
    with engine.observe(lambda call: told.append(call.op)), _region(HALF, ops={"tril": "fp32"}):
        assert torch.ones(4, 4, dtype=HALF).tril().dtype is torch.float32
    assert told == ["aten::tril"]
    with _region(HALF, ops={"tril": "fp32"}):
        assert torch.ones(4, 4, dtype=HALF).tril().dtype is torch.float32


def test_closing_twice_leaves_the_others() -> None:
    first, second = engine.observe(_ignore), engine.observe(_ignore)
    first.close()
    first.close()
    assert len(OBSERVERS.all) == 1
    second.close()
    assert OBSERVERS.all == ()


# -- Nothing is left, and nothing is paid --------------------------------------------------------------


def _calls_of_python(function: Callable[[], Any]) -> int:
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _state() -> tuple[Any, ...]:
    kernels = [kernel for ref in building._kernels.values() if (kernel := ref()) is not None]
    codes = sorted((k.__code__.co_filename, k.__code__.co_code, k.__code__.co_names) for k in kernels)
    return (
        engine.installed("cpu"),
        sorted(engine.native_ops(device_state("cpu"))),
        sorted(transforms._installed),
        sorted(transforms._libraries),
        {code for code in codes if "mpamp kernel" in code[0]},
    )


def test_nothing_is_left_and_nothing_is_paid() -> None:
    _ops()
    before, calls = _state(), _calls_of_python(_ops)
    with engine.observe(_ignore):
        _ops()
        assert len(engine.installed("cpu")) > len(before[0]) + 100
        assert _calls_of_python(_ops) > calls
    _ops()
    after = _state()
    assert after[:4] == before[:4]
    assert after[4] <= before[4]  # a kernel that wasn't called again isn't written yet
    assert not any("_told" in name for code in after[4] for name in code[2])
    assert _calls_of_python(_ops) == calls


def test_a_region_left_open_keeps_its_kernels() -> None:
    observation = engine.observe(_ignore)
    with _region(ops={"add": "fp32"}):
        observation.close()
        x = torch.ones(4, dtype=BRAIN)
        assert (x + x).dtype is torch.float32
    device = device_state("cpu")
    engine.tidy(device)
    assert "aten::add.Tensor" not in engine.installed("cpu")


def test_kernels_withdrawn_while_observed_come_back() -> None:
    engine.withdraw(device_state("cpu"))
    left = {name for name, entrance in transforms._installed.items() if not entrance.devices}  # by other tests
    with engine.observe(_ignore):
        _ops()
        engine.withdraw(device_state("cpu"))
        assert _ops()[0] is BRAIN
    assert _ops()[0] is BRAIN
    assert {name for name, entrance in transforms._installed.items() if not entrance.devices} <= left


def _served() -> torch.dtype:
    with _region():
        return torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8)).dtype


@pytest.mark.slow
def test_observing_begins_and_ends_while_others_run() -> None:
    """Ops with kernels of ours: torch's dispatcher itself bears no kernel coming or going under a call of its op."""
    expected, stop = _served(), threading.Event()
    wrong: list[Any] = []

    def work() -> None:
        while not stop.is_set():
            try:
                found = _served()
            except Exception as error:
                wrong.append(error)
                return
            if found is not expected:
                wrong.append(found)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(15):
            with engine.observe(_ignore):
                assert _served() is expected
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert wrong == []


# -- Ops run as they do otherwise ------------------------------------------------------------------------


@pytest.fixture
def observed() -> Iterator[None]:
    with engine.observe(_ignore):
        yield


@needs_transforms
def test_transforms_take_numbers(observed: None) -> None:
    x = torch.ones(3, 2)
    with _region():
        assert vmap(lambda v: v * 2.5 + 1)(x).dtype is torch.float32
        assert grad(lambda v: (v * 2.5 + 1).sum())(x).tolist() == [[2.5, 2.5]] * 3
        assert jvp(lambda v: v**2 / 2, (x,), (x,))[1].tolist() == [[1.0, 1.0]] * 3
        assert vmap(grad(lambda v: torch.mm(v, v).float().sum()))(torch.ones(2, 3, 3)).shape == (2, 3, 3)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_every_op_gives_what_it_gives_unobserved(dtype: torch.dtype, step: int) -> None:
    pytest.importorskip("expecttest", reason="torch's operator database needs it")
    from tests.operator_database import calls, is_same, outcome

    samples = list(calls(step, 1 if step > 1 else 2, grad=True))
    contexts: list[Callable[[], Any]] = [lambda: _region(dtype), lambda: torch.autocast("cpu", dtype)]
    for context in contexts:
        plain = [outcome(call.gradients, context) for call in samples]
        with engine.observe(_ignore):
            seen = [outcome(call.gradients, context) for call in samples]
        again = [outcome(call.gradients, context) for call in samples]
        assert len(plain) > 40
        pairs = zip(samples, plain, seen, again, strict=True)
        wrong = [(c.name, a[:2], b[:2]) for c, a, b, d in pairs if is_same(a, d, c.name) and not is_same(a, b, c.name)]
        assert wrong == []
