"""Advice on planted overflows is followed: each cures, or none is given and what is wrong is said."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

import mpamp
from mpamp.insight.overflow import OverflowFinder
from tests.insight import overflows
from tests.insight.overflows import HALF, PLANTED, Planted

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")


def found_in(
    planted: Planted,
    dtype: torch.dtype,
    ops: dict[str, str] | None = None,
    modules: dict[str, str] | None = None,
    *,
    in_a_loop: bool = False,
) -> OverflowFinder:
    model, x = overflows.model(planted), overflows.inputs()
    region = mpamp.autocast("cpu", dtype, ops={**(planted.ops or {}), **(ops or {})} or None)
    rules = mpamp.module_rules(model, modules) if modules else contextlib.nullcontext()
    with rules:
        if not in_a_loop:
            return mpamp.find_overflow(model, x, loss=planted.loss, region=region)
        with mpamp.find_overflow(model) as finder:
            with region:
                loss = planted.loss(model(x))
            loss.backward()
        return finder


def is_clean(finder: OverflowFinder) -> bool:
    return finder.first is None or finder.first.overflow is None


@pytest.mark.parametrize(("name", "dtype"), overflows.cases())
def test_advice_is_followed_and_cures_or_none_is_given(name: str, dtype: torch.dtype) -> None:
    planted = PLANTED[name]
    finder = found_in(planted, dtype)
    assert finder.first is not None
    overflow = finder.first.overflow
    assert overflow is not None
    assert overflow.op == planted.op
    assert overflow.module == (None if planted.op == "cross_entropy_loss" else "fault")
    assert finder.unseen == ()
    assert planted.says in overflow.advice
    if planted.says:
        assert (overflow.rule, overflow.module_rules) == ({}, {})
        return
    assert overflow.rule or overflow.module_rules
    assert not overflow.rule or is_clean(found_in(planted, dtype, overflow.rule))
    assert not overflow.module_rules or is_clean(found_in(planted, dtype, modules=overflow.module_rules))


@pytest.mark.parametrize(("name", "dtype"), overflows.cases()[::4])
def test_a_rule_that_is_given_in_a_loop_cures_too(name: str, dtype: torch.dtype) -> None:
    finder = found_in(PLANTED[name], dtype, in_a_loop=True)
    assert finder.first is not None
    overflow = finder.first.overflow
    assert overflow is not None
    assert not overflow.rule or is_clean(found_in(PLANTED[name], dtype, overflow.rule))
    assert not PLANTED[name].says or not overflow.rule
    assert finder.unseen == ()


def test_there_are_forty_faults() -> None:
    assert len(PLANTED) >= 40


def test_what_is_too_much_for_the_next_layer_gets_rules_for_both() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.Conv1d(8, 4, 1))
    nn.init.constant_(model[0].weight, 300.0)
    x = torch.full((8, 8), 100.0)

    def region(ops: dict[str, str] | None = None) -> mpamp.Region:
        return mpamp.autocast("cpu", HALF, ops=ops)

    finder = mpamp.find_overflow(model, x, region=region())
    assert finder.first is not None
    overflow = finder.first.overflow
    assert overflow is not None
    assert set(overflow.module_rules) >= {"0", "2"}
    assert len(overflow.rule) > 1
    assert is_clean(mpamp.find_overflow(model, x, region=region(overflow.rule)))


def test_a_local_fault_gets_a_rule_for_its_module() -> None:
    finder = found_in(Planted(lambda y: nn.functional.linear(y, torch.full((16, 16), 1e5)) / 1e6, "linear"), HALF)
    assert finder.first is not None
    overflow = finder.first.overflow
    assert overflow is not None
    assert overflow.advice.startswith("module_rules(model, {'fault': 'fp32'})")
    assert overflow.module_rules == {"fault": "fp32"}


class Counting(nn.Module):
    """Changes buffers, random numbers and its input in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x.mul_(2)
        return self.norm(nn.functional.dropout(self.layer(x) * 1e6))


def test_trying_leaves_buffers_and_random_numbers_as_after_one_step() -> None:
    torch.manual_seed(0)
    one, two, x = Counting(), Counting(), torch.randn(4, 8)
    two.load_state_dict(one.state_dict())
    random = torch.get_rng_state()
    given = x.clone()
    with mpamp.autocast("cpu", HALF):
        one(given)
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    finder = mpamp.find_overflow(two, x, loss=lambda y: y.float().sum(), region=mpamp.autocast("cpu", HALF))
    assert finder.first is not None
    assert finder.first.overflow is not None
    torch.testing.assert_close(dict(two.named_buffers()), dict(one.named_buffers()), equal_nan=True)
    torch.testing.assert_close(torch.get_rng_state(), after)
    torch.testing.assert_close(x, given)
    assert all(p.grad is None for p in two.parameters())


def test_a_step_that_cannot_be_run_twice_gets_no_rule() -> None:
    class Once(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                raise LookupError("only once")
            return super().forward(x) * 1e6

    finder = mpamp.find_overflow(Once(8, 8), torch.randn(4, 8), region=mpamp.autocast("cpu", HALF))
    assert finder.first is not None
    overflow = finder.first.overflow
    assert overflow is not None
    assert (overflow.op, overflow.rule) == ("mul", {})
    assert "no rule was tried (LookupError)" in overflow.advice


def test_a_range_that_only_bfloat16_holds_is_said() -> None:
    def everywhere(y: Tensor) -> Tensor:
        for op in (torch.mul, torch.add, torch.sub, torch.maximum, torch.minimum, torch.hypot):
            y = op(y * 1e6, torch.ones_like(y)).half().to(y.dtype) if y.dtype is HALF else op(y, torch.ones_like(y))
        return y

    finder = found_in(Planted(everywhere, "mul"), HALF)
    assert finder.first is not None
    assert finder.first.overflow is not None
    assert is_clean(found_in(Planted(everywhere, "mul"), HALF, finder.first.overflow.rule or None)) or (
        not finder.first.overflow.rule
    )


@pytest.mark.filterwarnings("default")  # Dynamo asks tensors for .grad
@pytest.mark.parametrize("how", ["model", "part", "in place"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_looked_at_with_nothing_compiled(how: str, backend: str) -> None:
    torch._dynamo.reset()
    model: nn.Module = overflows.model(PLANTED["product"])
    if how == "model":
        model = torch.compile(model, backend=backend)
    elif how == "part":
        model.fault = torch.compile(model.fault, backend=backend)
    else:
        model.fault.compile(backend=backend)
    finder = mpamp.find_overflow(
        model, overflows.inputs(), loss=PLANTED["product"].loss, region=mpamp.autocast("cpu", HALF)
    )
    assert finder.first is not None
    overflow = finder.first.overflow
    assert overflow is not None
    assert (overflow.op, overflow.rule) == ("mul", {"mul": "fp32"})
    assert "torch.compile off" in overflow.advice
    assert finder.compiled_calls >= 1
    assert "Compiled code ran" in str(finder)


def test_reentrant_checkpoints_are_looked_into() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
            nn.init.constant_(self.inner.weight, 6e4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=True)

    model = Checkpointed()
    finder = mpamp.find_overflow(
        model, torch.full((2, 4), 50.0), loss=lambda y: y.float().sum(), region=mpamp.autocast("cpu", HALF)
    )
    assert finder.first is not None
    overflow = finder.first.overflow
    assert overflow is not None
    assert (overflow.op, overflow.module) == ("linear", "inner")
    assert all(p.grad is None for p in model.parameters())
