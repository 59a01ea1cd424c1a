"""Scalers by torch's names: what they are, whoever derived from torch's, and plugins that make their own."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from abc import ABC, abstractmethod
from typing import Any

import pytest
import torch

import mpamp

pytestmark = pytest.mark.usefixtures("installed")


def step(scaler: Any, factor: float = 1.0) -> list[float]:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.tolist()  # type: ignore[no-any-return]


def test_a_scaler_is_torchs_and_mpamps() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert isinstance(scaler, mpamp.GradScaler)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert step(scaler, math.inf) == [1.0]
    assert scaler.history[0].skipped  # type: ignore[attr-defined]
    assert scaler.get_scale() == 2.0


def test_mpamps_own_scaler_is_as_before() -> None:
    assert type(mpamp.GradScaler("cpu")) is mpamp.GradScaler
    assert step(mpamp.GradScaler("cpu", min_scale=1.0)) == [0.0]


def test_one_that_was_made_before_goes_on_as_torchs() -> None:
    mpamp.uninstall()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with mpamp.install():
        assert not isinstance(scaler, mpamp.GradScaler)
        assert step(scaler, math.inf) == [1.0]
        assert scaler.get_scale() == 2.0
        other = pickle.loads(pickle.dumps(scaler))
        assert type(other) is torch.amp.GradScaler
        assert step(other) == [0.0]


def test_one_that_was_made_under_install_goes_on_after_it() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    saved = pickle.dumps(scaler)
    mpamp.uninstall()
    for each in (scaler, pickle.loads(saved), copy.deepcopy(scaler)):
        assert isinstance(each, mpamp.GradScaler)
        assert step(each) == [0.0]
    assert not isinstance(torch.amp.GradScaler("cpu"), mpamp.GradScaler)


class Base(ABC):
    @abstractmethod
    def name(self) -> str: ...


class Abstract(torch.amp.GradScaler, Base):
    def name(self) -> str:
        return "own"


class Unfinished(torch.amp.GradScaler, Base):
    pass


def test_abstract_bases() -> None:
    scaler = Abstract("cpu")
    assert isinstance(scaler, mpamp.GradScaler)
    assert isinstance(scaler, Base)
    assert scaler.name() == "own"
    assert step(scaler) == [0.0]
    with pytest.raises(TypeError, match="abstract"):
        Unfinished("cpu")  # type: ignore[abstract]


class Late(torch.amp.GradScaler):
    """Has attributes before its base has, and asks for one."""

    def __init__(self, device: str = "cpu") -> None:
        self.before = 3
        super().__init__(device, init_scale=8.0)
        self.after = self.get_scale()

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self.after = self.get_scale()


def test_a_subclass_of_before() -> None:
    assert str(inspect.signature(Late)) == "(device: 'str' = 'cpu') -> 'None'"
    scaler = Late()
    assert (scaler.before, scaler.after) == (3, 8.0)
    assert step(scaler, math.nan) == [1.0]
    assert scaler.after == 4.0
    assert type(Late()) is type(scaler)

    class Later(Late):
        pass

    assert issubclass(type(Later()), Later)
    assert step(Later()) == [0.0]


def test_torchs_sharded_scaler() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    class Alone(ShardedGradScaler):
        """Without a process group, which the one of a single process hasn't."""

        def __init__(self) -> None:
            torch.amp.GradScaler.__init__(self, "cpu", init_scale=4.0)

    scaler = Alone()
    assert isinstance(scaler, ShardedGradScaler)
    assert isinstance(scaler, mpamp.GradScaler)


def test_a_plugin_makes_the_scaler_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugins(mpamp.GradScaler):
        flag = "the hardware's"

    made = Plugins("cpu", init_scale=16.0)
    made.own = "state"  # type: ignore[attr-defined]
    calls: list[Any] = []

    def make(args: Any, kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return made

    monkeypatch.setattr(mpamp.GradScaler, "_made_by_plugin", make)
    scaler: Any = torch.amp.GradScaler("cpu", growth_interval=7)
    assert calls == [(("cpu", 65536.0, 2.0, 0.5, 7, True), {})]
    assert type(scaler) is Plugins
    assert (scaler.flag, scaler.own, scaler.get_scale()) == ("the hardware's", "state", 16.0)
    assert step(scaler) == [0.0]
    assert not isinstance(Late(), Plugins)
