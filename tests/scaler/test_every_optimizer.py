"""Every optimizer that torch ships, in each of its forms: as torch's scaler trains it, and as true gradients do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mpamp.errors import ScalerUsageError
from mpamp.scaler import GradScaler

FORMS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": False},
    "amsgrad": {"amsgrad": True, "foreach": True},
    "maximize": {"maximize": True, "foreach": False},
    "default": {},
}
MORE: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERWISE = {"LBFGS": "needs a closure", "SparseAdam": "takes sparse gradients alone"}

Program = Callable[[Any, Any, list[Any], float], None]


def each_optimizer() -> Iterator[Any]:
    for name, kind in sorted(vars(torch.optim).items()):
        if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer) or name == "Optimizer":
            continue
        taken = inspect.signature(kind).parameters
        for form, options in FORMS.items():
            if set(options) <= set(taken) and name not in OTHERWISE:
                yield pytest.param(kind, {**MORE.get(name, {}), **options}, id=f"{name}-{form}")


def backward(scaler: Any, weights: list[Any], factor: float) -> None:
    scaler.scale((weights[0] @ weights[1].abs()).float().square().sum() * 2**-4 * factor).backward()


def step(scaler: Any, optimizer: Any, weights: list[Any], factor: float) -> None:
    backward(scaler, weights, factor)


def unscale(scaler: Any, optimizer: Any, weights: list[Any], factor: float) -> None:
    backward(scaler, weights, factor)
    scaler.unscale_(optimizer)


def clip(scaler: Any, optimizer: Any, weights: list[Any], factor: float) -> None:
    unscale(scaler, optimizer, weights, factor)
    torch.nn.utils.clip_grad_value_(weights, 0.25)


def accumulate(scaler: Any, optimizer: Any, weights: list[Any], factor: float) -> None:
    for each in (1.0, factor):
        backward(scaler, weights, each)


def accumulate_after_unscale(scaler: Any, optimizer: Any, weights: list[Any], factor: float) -> None:
    clip(scaler, optimizer, weights, 1.0)
    backward(scaler, weights, factor)


def zero_after_unscale(scaler: Any, optimizer: Any, weights: list[Any], factor: float) -> None:
    unscale(scaler, optimizer, weights, 1.0)
    optimizer.zero_grad(set_to_none=factor != 2.0)
    backward(scaler, weights, factor)


LATE: list[Program] = [accumulate_after_unscale, zero_after_unscale]
PROGRAMS: list[Program] = [step, unscale, clip, accumulate, *LATE]
FACTORS = [1.0, math.inf, 2.0, 1.0, math.nan, 1.0]
SETTINGS: dict[str, Any] = {"init_scale": 16.0, "growth_interval": 2}
SCALES = [16.0, 8.0, 8.0, 16.0, 8.0, 8.0]


def train(scaler: Any, kind: Any, options: Any, dtype: torch.dtype, program: Program) -> tuple[Any, list[float]]:
    """Return the weights and states after training, and the scales."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(3, 3).to(dtype)) for _ in range(2)]
    if dtype is torch.float16 and isinstance(_default(kind, "eps"), float):
        options = {**options, "eps": 2**-8}  # the usual one is zero in float16
    optimizer = kind(weights, lr=2**-5, **options)
    scales = []
    for factor in FACTORS:
        optimizer.zero_grad()
        is_good, before = math.isfinite(factor), [w.tolist() for w in weights]
        program(scaler, optimizer, weights, factor)
        if not scaler.is_enabled() and not is_good:
            continue
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert is_good or [w.tolist() for w in weights] == before
        if isinstance(scaler, GradScaler) and scaler.is_enabled():
            assert scaler.last_step_skipped(optimizer) is not is_good
    states = [[_plain(v) for v in optimizer.state[w].values()] for w in weights]
    return ([w.tolist() for w in weights], states), scales


def _default(kind: Any, name: str) -> Any:
    parameter = inspect.signature(kind).parameters.get(name)
    return None if parameter is None else parameter.default


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def attempt(*arguments: Any) -> Any:
    try:
        return train(*arguments)
    except (RuntimeError, AssertionError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "options"), list(each_optimizer()))
def test_every_optimizer(kind: Any, options: Any) -> None:
    trained = 0
    for dtype in DTYPES:
        for program in PROGRAMS:
            ours = attempt(GradScaler("cpu", allow_fp16_grads=True, **SETTINGS), kind, options, dtype, program)
            by_hand = attempt(GradScaler("cpu", enabled=False), kind, options, dtype, program)
            case = (dtype, program.__name__)
            if isinstance(by_hand[0], type):
                assert ours == by_hand, case
                continue
            trained += 1
            assert repr(ours[0]) == repr(by_hand[0]), case
            assert ours[1] == SCALES, case
            if program not in LATE and (dtype is not torch.float16 or ("fused" in options and program is step)):
                torchs = attempt(torch.amp.GradScaler("cpu", **SETTINGS), kind, options, dtype, program)
                assert repr(ours) == repr(torchs), case
    assert trained > 0 or options.get("capturable")


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("unscales", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_adam(maximize: bool, passes: int, unscales: int) -> None:
    found = []
    for enabled in (True, False):
        torch.manual_seed(0)
        layer = torch.nn.Embedding(4, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(layer.parameters(), lr=0.5, maximize=maximize)
        scaler = GradScaler("cpu", enabled=enabled, **SETTINGS)
        for factor in (1.0, math.inf, 2.0):
            optimizer.zero_grad()
            for number in range(passes):
                scaler.scale(layer(torch.tensor([0, 1, 1 + number])).square().sum() * factor).backward()
                if number < unscales:
                    scaler.unscale_(optimizer)
            if enabled or math.isfinite(factor):
                scaler.step(optimizer)
                scaler.update()
        found.append(layer.weight.tolist())
    assert found[0] == found[1]


def test_lbfgs_is_refused(scaler: GradScaler, weights: Any) -> None:
    with pytest.raises(ScalerUsageError, match="LBFGS"):
        scaler.step(torch.optim.LBFGS(weights), lambda: pytest.fail("the closure was called"))


@pytest.mark.parametrize("kind", [k.values[0] for k in each_optimizer() if k.id and k.id.endswith("-default")])
@pytest.mark.parametrize("factor", [1.0, math.inf])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_differentiable_forms(kind: Any, factor: float) -> None:
    if "differentiable" not in inspect.signature(kind).parameters:
        pytest.skip("it has none")
    found = []
    for enabled in (True, False):
        leaf, slope = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)
        weight = leaf.clone()
        weight.retain_grad()
        optimizer = kind([weight], lr=2**-5, differentiable=True)
        scaler = GradScaler("cpu", enabled=enabled, **SETTINGS)
        scaler.scale((weight.square() * slope).sum() * factor).backward(create_graph=True)
        if enabled or factor == 1.0:
            scaler.step(optimizer)
        derivative = torch.autograd.grad(weight.square().sum(), slope, allow_unused=True)[0]
        found.append((weight.tolist(), None if derivative is None else derivative.item()))
    assert found[0] == found[1]
