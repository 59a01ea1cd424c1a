"""What the scaler takes for an optimizer: whatever has ``param_groups`` and ``step``; and what many of them cost."""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpamp.scaler import GradScaler


@torch.no_grad()
def sgd_step(self: Any) -> None:
    for group in self.param_groups:
        for param in group["params"]:
            param -= 0.5 * param.grad


class Plain:
    def __init__(self, param: Any) -> None:
        self.param_groups = [{"params": [param]}]

    step = sgd_step


@dataclasses.dataclass
class Data:
    param_groups: list[Any]
    step = sgd_step


@dataclasses.dataclass(frozen=True)
class FrozenData:
    param_groups: list[Any]
    step = sgd_step


class WithEq(Plain):
    def __eq__(self, other: object) -> bool:
        raise NotImplementedError


class FalseOne(Plain):
    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0


class Slots:
    __slots__ = ("param_groups",)

    def __init__(self, param: Any) -> None:
        self.param_groups = [{"params": [param]}]

    step = sgd_step


class Several(list[torch.optim.Optimizer]):
    @property
    def param_groups(self) -> Any:
        return [group for optimizer in self for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()


class Named(dict[str, torch.optim.Optimizer]):
    param_groups = property(lambda self: [group for optimizer in self.values() for group in optimizer.param_groups])

    def step(self) -> None:
        for optimizer in self.values():
            optimizer.step()


class Wrapper:
    """Gives what it has not from what it wraps, as frameworks' wrappers do."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__["wrapped"] = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped"], name)


class SettingWrapper(Wrapper):
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)


class SetOfParams(Plain):
    def __init__(self, param: Any) -> None:
        self.param_groups = ({"params": {param}},)  # type: ignore[assignment]


DUCKS = {
    "plain": Plain,
    "dataclass": lambda p: Data([{"params": [p]}]),
    "frozen dataclass": lambda p: FrozenData([{"params": [p]}]),
    "eq that raises": WithEq,
    "false": FalseOne,
    "slots": Slots,
    "list": lambda p: Several([torch.optim.SGD([p], lr=0.5)]),
    "dict": lambda p: Named(one=torch.optim.SGD([p], lr=0.5)),
    "wrapper": lambda p: Wrapper(torch.optim.SGD([p], lr=0.5)),
    "fused wrapper": lambda p: Wrapper(torch.optim.SGD([p], lr=0.5, fused=True)),
    "fused wrapper that sets": lambda p: SettingWrapper(torch.optim.SGD([p], lr=0.5, fused=True)),
    "namespace": lambda p: SimpleNamespace(
        param_groups=[{"params": [p]}], step=lambda: sgd_step(SimpleNamespace(param_groups=[{"params": [p]}]))
    ),
    "set": SetOfParams,
}


@pytest.mark.parametrize("make", DUCKS.values(), ids=DUCKS)
@pytest.mark.parametrize("clips", [False, True])
def test_anything_with_groups_and_a_step(make: Any, clips: bool) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = make(param), GradScaler("cpu", init_scale=64.0)
    results = []
    for factor in (2.0, math.inf, 2.0):
        param.grad = None
        scaler.scale((param * factor).sum()).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_([param], 1.0)
        scaler.step(optimizer)
        results.append(scaler.last_step(optimizer))
        scaler.update()
    assert [result.skipped for result in results if result is not None] == [False, True, False]
    assert param.tolist() == ([0.0, 0.0] if clips else [-1.0, -1.0])
    assert scaler.get_scale() == 32.0


def test_a_new_optimizer_is_not_taken_for_a_dead_one(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.5)
    run_backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update()
    assert len(scaler._outcomes._results) == 1
    del optimizer
    gc.collect()
    assert scaler._outcomes._results == {}


class Calls:
    """Counts calls of Python functions."""

    def __enter__(self) -> Calls:
        self.count = 0
        sys.setprofile(self._see)
        return self

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@pytest.mark.parametrize("way", ["step", "unscale", "passes"])
def test_cost_is_linear_in_the_optimizers(way: str) -> None:
    """As with one optimizer per parameter; ``passes`` is a backward pass before each one's step."""

    def cost(number: int) -> int:
        params = [torch.nn.Parameter(torch.ones(2)) for _ in range(number)]
        optimizers = [torch.optim.SGD([p], lr=0.1, foreach=False) for p in params]
        scaler = GradScaler("cpu", init_scale=64.0)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones(2)
            scaler.scale(torch.ones(()))
            with Calls() as calls:
                for optimizer, param in zip(optimizers, params, strict=True):
                    if way == "passes":
                        scaler.scale(param.sum()).backward()
                    elif way == "unscale":
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                scaler.update()
        return calls.count

    few, many = cost(20), cost(160)
    assert 0 < many <= 8.5 * few


class Ops(TorchDispatchMode):
    """Counts the ops that reach a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "more"), [({"foreach": False}, 3), ({"foreach": True}, 3), ({"fused": True}, 2)], ids=str
)
@pytest.mark.parametrize("clips", [False, True])
def test_ops_beyond_torchs(options: dict[str, bool], more: int, clips: bool) -> None:
    """They keep the history and the bounds of the scale, whatever the number of parameters."""

    def count(make: Any, number: int) -> int:
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(number)]
        optimizer, scaler = torch.optim.Adam(params, **options), make("cpu")  # type: ignore[arg-type]
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(sum(p.sum() for p in params)).backward()
            with Ops() as ops:
                if clips:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(params, 1.0)
                scaler.step(optimizer)
                scaler.update()
        return ops.count

    is_fused = "fused" in options
    for number in (1, 9):
        # A fused optimizer that was unscaled before isn't handed the scale, but a found_inf of 0 or 1.
        expected = 3 + is_fused if clips else more
        assert count(GradScaler, number) - count(torch.amp.GradScaler, number) == expected


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}], ids=str)
def test_many_optimizers_train_as_one(options: dict[str, bool]) -> None:
    found = []
    for is_one in (True, False):
        params = [torch.nn.Parameter(torch.full((2,), float(i))) for i in range(50)]
        groups = [params] if is_one else [[p] for p in params]
        optimizers = [torch.optim.Adam(group, lr=0.1, **options) for group in groups]  # type: ignore[arg-type]
        scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for factor in (1.0, math.inf, 1.0, 1.0):
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(sum(p.square().sum() for p in params) * factor).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        found.append(([p.tolist() for p in params], scaler.state_dict()))
    assert found[0] == found[1]
