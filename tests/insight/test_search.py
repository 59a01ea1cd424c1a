"""search_precision finds what was planted within the number of evaluations that it promises."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mpamp
from mpamp import OpTable, get_op_table, search_precision
from mpamp.insight.search_bisection import Bisection

OPS = [
    "abs",
    "acos",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "deg2rad",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "frac",
    "i0",
    "floor",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logit",
    "neg",
    "rad2deg",
    "reciprocal",
    "relu",
    "round",
    "rsqrt",
    "selu",
    "sgn",
    "sigmoid",
    "sign",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
    "celu",
    "hardtanh",
    "hardsigmoid",
    "hardswish",
    "relu6",
    "silu",
    "mish",
    "softplus",
    "gelu",
    "leaky_relu",
    "elu",
    "hardshrink",
    "softshrink",
    "rrelu",
    "amax",
    "amin",
]
LOWER = dict.fromkeys(OPS, "lower_precision_fp")


class SixtyOps(nn.Module):
    """Calls sixty ops, each on values that suit it, save for some that are given more than float16 holds."""

    def __init__(self, bad: Collection[str] = ()) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, x: Tensor) -> Tensor:
        large = x * 2e5
        found = []
        for name in OPS:
            function = getattr(torch, name, None) or getattr(nn.functional, name)
            found.append(function(large if name in self.bad else x).float().mean() / (2e5 if name in self.bad else 1))
        return torch.stack(found).sum()


class Counted:
    def __init__(self, fail_at: int | None = None) -> None:
        self.calls = 0
        self.fail_at = fail_at

    def __call__(self, model: nn.Module, data: Any) -> float:
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        with torch.no_grad():
            return float(model(data))


def search(model: nn.Module, metric: Any, **kwargs: Any) -> mpamp.PrecisionSearch:
    arguments = {"tolerance": 0.5, "device": "cpu", "dtype": torch.float16, "show_progress": False, **kwargs}
    return search_precision(model, torch.full((8,), 0.5), metric, **arguments)


# -- Ops ------------------------------------------------------------------------------------------


def test_there_are_sixty_different_ops() -> None:
    assert len(set(OPS)) == 60


@pytest.mark.parametrize("bad", ["abs", "neg", "relu", "leaky_relu", "hardshrink"])
def test_one_bad_op_among_sixty_is_found_in_twelve_evaluations(bad: str) -> None:
    metric = Counted()
    found = search(SixtyOps([bad]), metric, ops=LOWER)
    assert found.candidates == 60
    assert found.rules == {bad: "fp32"}
    assert found.is_enough
    assert found.is_complete
    assert found.evaluations == metric.calls <= 12
    (row,) = found.rows
    assert (row.name, row.policy) == (bad, "fp32")
    assert abs(row.value - found.reference) <= 0.5 < abs(row.value_without - found.reference)
    assert row.seconds > 0
    assert row.seconds_without > 0


def test_three_bad_ops_among_sixty_are_found_in_forty_evaluations() -> None:
    metric = Counted()
    found = search(SixtyOps(["abs", "relu", "hardshrink"]), metric, ops=LOWER)
    assert found.rules == dict.fromkeys(["abs", "relu", "hardshrink"], "fp32")
    assert found.is_enough
    assert found.evaluations == metric.calls <= 40
    assert [row.name for row in found.rows] == ["abs", "relu", "hardshrink"]


def test_the_default_table_comes_back_where_nothing_is_wrong() -> None:
    metric = Counted()
    found = search(SixtyOps(), metric)
    assert found.table == get_op_table("cpu")
    assert (found.rules, found.rows, found.is_enough) == ({}, (), True)
    assert found.evaluations == metric.calls == 3


def test_the_table_survives_toml_and_mends_the_model() -> None:
    model = SixtyOps(["relu"])
    found = search(model, Counted(), ops={"relu": "lower_precision_fp"})
    assert found.table.policy("relu") == "fp32"
    read = OpTable.from_toml(found.to_toml())
    assert read.policy("relu") == "fp32"
    assert "# metric" in found.to_toml()
    with mpamp.autocast("cpu", torch.float16, ops=read):
        assert abs(float(model(torch.full((8,), 0.5))) - found.reference) <= 0.5


def test_what_no_row_can_mend_is_said() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.nn.functional.linear(x, torch.eye(8)).float().sum()
            return y * math.inf if torch.get_autocast_dtype("cpu") is torch.float16 else y

    found = search(Half(), Counted())
    assert (found.candidates, found.rules, found.is_enough, found.is_complete) == (1, {}, False, True)
    assert "search elsewhere" in str(found)


# -- Modules --------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Two hundred modules in forty blocks; some of the layers' weights are more than float16 holds."""

    def __init__(self, bad: Collection[str]) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(40))
        for name in bad:
            layer = self.get_submodule(name)
            with torch.no_grad():
                layer.weight.fill_(1e5)  # type: ignore[operator, union-attr]
                layer.weight[:, ::2] *= -1  # type: ignore[index, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().sum()


def test_a_bad_module_among_two_hundred_is_found() -> None:
    torch.manual_seed(0)
    model, metric = Deep(["blocks.23.2"]), Counted()
    assert len(list(model.modules())) == 202
    found = search(model, metric, over="modules")
    assert found.candidates >= 160
    assert found.rules == {"blocks.23.2": "fp32"}
    assert found.evaluations == metric.calls <= 14
    assert '[modules]\n"blocks.23.2" = "fp32"' in found.to_toml()
    assert found.table == get_op_table("cpu")
    assert all("forward" not in vars(module) for module in model.modules())
    with mpamp.module_rules(model, found.to_toml()) as rules, mpamp.autocast("cpu", torch.float16):
        assert list(rules.rules) == ["blocks.23.2"]
        assert abs(model(torch.full((8,), 0.5)).item() - found.reference) <= found.tolerance


def test_two_bad_modules_are_found_together() -> None:
    torch.manual_seed(0)
    found = search(Deep(["blocks.3.0", "blocks.31.2"]), Counted(), over="modules")
    assert set(found.rules) == {"blocks.3.0", "blocks.31.2"}
    assert found.is_enough


# -- Speed ----------------------------------------------------------------------------------------


def test_rows_in_float32_that_need_not_be_are_told_from_those_that_must_or_gain_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("mpamp.insight.search_trials.perf_counter", lambda: clock[0])

    def timed(model: nn.Module, data: Tensor) -> float:
        is_low = [getattr(torch, name)(data).dtype is torch.float16 for name in ("relu", "tanh", "abs")]
        clock[0] += 10.0 - 2.0 * is_low[0] - 3.0 * is_low[2]
        return Counted()(model, data)

    rules = dict.fromkeys(["relu", "tanh", "abs"], "fp32")
    found = search(SixtyOps(["abs"]), timed, goal="speed", ops=rules)
    assert found.rules == {"relu": "lower_precision_fp"}  # abs has to stay, and tanh makes nothing faster
    assert found.is_enough
    (row,) = found.rows
    assert (row.seconds, row.seconds_without) == (8.0, 10.0)
    assert found.table.policy("relu") == "lower_precision_fp"
    assert found.table.policy("abs") == "fp32"


# -- Noise, interruption, resumption --------------------------------------------------------------


def test_the_noise_of_a_metric_is_respected() -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(model: nn.Module, data: Tensor) -> float:
        with torch.no_grad():
            return float(model(data)) + float(torch.randn((), generator=generator))

    found = search(SixtyOps(), noisy, ops=LOWER, tolerance=1e-3)
    assert found.noise > 0.1
    assert found.tolerance == 2 * found.noise
    bad = search(SixtyOps(["relu"]), noisy, ops=LOWER, tolerance=1e-3)
    assert bad.rules == {"relu": "fp32"}


@pytest.mark.parametrize(("better", "rules"), [("lower", {"relu": "fp32"}), ("higher", {})])
def test_a_difference_to_the_good_side_does_not_count(better: Any, rules: dict[str, str]) -> None:
    found = search(SixtyOps(["relu"]), Counted(), ops=LOWER, better=better)  # an inf is higher
    assert found.rules == rules


def test_an_interrupted_search_says_what_it_knows_and_is_resumed(tmp_path: Path) -> None:
    model, state = SixtyOps(["abs", "relu", "hardshrink"]), tmp_path / "search.json"
    whole = search(model, Counted(), ops=LOWER)
    first = Counted(fail_at=14)
    part = search(model, first, ops=LOWER, state=state)
    assert not part.is_complete
    assert part.evaluations == 13
    assert part.rules
    assert set(part.rules) <= set(whole.rules)
    assert set(whole.rules) - set(part.rules) <= set(part.suspects)
    assert "interrupted" in str(part)
    rest = Counted()
    resumed = search(model, rest, ops=LOWER, state=state)
    assert resumed.rules == whole.rules
    assert resumed.evaluations == whole.evaluations == 13 + rest.calls
    again = Counted()
    assert search(model, again, ops=LOWER, state=state).rules == whole.rules
    assert again.calls == 0


def test_before_float32_is_known_an_interruption_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        search(SixtyOps(), Counted(fail_at=1))


def test_the_state_of_another_search_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "search.json"
    search(SixtyOps(), Counted(), state=state)
    with pytest.raises(mpamp.MpampError, match="another search"):
        search(SixtyOps(), Counted(), state=state, dtype=torch.bfloat16)
    state.write_text(json.dumps({"evaluations": 3}))
    with pytest.raises(mpamp.MpampError, match="no state"):
        search(SixtyOps(), Counted(), state=state)


def test_weights_are_put_back_before_each_evaluation_and_at_the_end() -> None:
    model = nn.Linear(8, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def trains(model: nn.Module, data: Tensor) -> float:
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        loss = model(data).float().sum()
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.eval()
        return float(loss.detach())

    found = search(model, trains)
    assert found.noise == 0
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training
    assert model.weight.grad is None


def test_a_metric_that_is_not_finite_in_float32_is_an_error() -> None:
    with pytest.raises(mpamp.MpampError, match="isn't finite"):
        search(SixtyOps(), lambda model, data: math.nan)


@pytest.mark.parametrize("wrong", [{"over": "rows"}, {"goal": "size"}, {"tolerance": -1.0}, {"better": "best"}])
def test_arguments_that_can_not_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        search(SixtyOps(), Counted(), **wrong)


# -- The algorithm --------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1, max_size=5)))
)
def test_bisection_finds_exactly_what_is_needed(case: tuple[int, set[int]]) -> None:
    count, bad = case
    names, needed, tests = [str(i) for i in range(count)], set(map(str, bad)), []

    def passes(kept: Collection[str]) -> bool:
        tests.append(kept)
        return needed <= set(kept)

    bisection = Bisection(names)
    assert bisection.run(passes)
    assert set(bisection.found) == needed
    assert bisection.suspects == []
    assert len(tests) <= len(bad) * (math.ceil(math.log2(count)) + 1) + 1


def test_bisection_says_when_nothing_helps() -> None:
    bisection = Bisection(["a", "b", "c"])
    assert not bisection.run(lambda kept: False)
    assert bisection.found == []
    assert not Bisection([]).run(lambda kept: True)
