"""What mpamp asks torch for itself is no part of the caller's program, wherever the first region is entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from mpamp.probing import probing
from tests import processes

Ask = Callable[[torch.Tensor], torch.Tensor]


def _in_fake_mode(ask: Ask, x: torch.Tensor) -> None:
    with FakeTensorMode():
        ask(torch.ones(2))


def _in_dual_level(ask: Ask, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        ask(forward_ad.make_dual(x, x))


def _in_inference_mode(ask: Ask, x: torch.Tensor) -> None:
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        ask(x)


PLACES: dict[str, Callable[[Ask, torch.Tensor], Any]] = {
    "grad": lambda ask, x: torch.func.grad(lambda t: ask(t).sum())(x),
    "vjp": lambda ask, x: torch.func.vjp(ask, x),
    "jvp": lambda ask, x: torch.func.jvp(ask, (x,), (x,)),
    "hessian": lambda ask, x: torch.func.hessian(lambda t: ask(t).sum())(x),
    "vmap": lambda ask, x: torch.func.vmap(ask)(x),
    "jacrev": lambda ask, x: torch.func.jacrev(ask)(x),
    "functionalize": lambda ask, x: torch.func.functionalize(ask)(x),
    "jit.trace": lambda ask, x: torch.jit.trace(ask, x, check_trace=False),
    "make_fx": lambda ask, x: make_fx(ask)(x),
    "make_fx, symbolic": lambda ask, x: make_fx(ask, tracing_mode="symbolic")(x),
    "make_fx, before dispatch": lambda ask, x: make_fx(ask, pre_dispatch=True)(x),
    "checkpoint": lambda ask, x: checkpoint(ask, x.requires_grad_(), use_reentrant=False).sum().backward(),
    "fake tensors": _in_fake_mode,
    "dual level": _in_dual_level,
    "inference mode": _in_inference_mode,
}


@pytest.mark.parametrize("place", PLACES)
def test_outside(place: str) -> None:
    """A tensor made there is an ordinary one, and nothing of it is left in the program around it."""
    seen = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        with probing():
            y = torch.ones(2)
            y.add_(1)
            seen.append(
                (type(y), y.device.type, y.is_inference(), y.tolist(), (y @ y).dtype, y.untyped_storage().nbytes())
            )
        return x * 2

    PLACES[place](ask, torch.ones(2))
    assert set(map(repr, seen)) == {repr((torch.Tensor, "cpu", False, [2.0, 2.0], torch.float32, 8))}


def test_nothing_of_it_is_traced() -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        with probing():
            torch.ones(2).sum().item()
        return x * 2

    nodes = [n.target for n in make_fx(ask)(torch.ones(2)).graph.nodes if n.op == "call_function"]
    assert nodes == [torch.ops.aten.mul.Tensor]
    assert "sum" not in str(torch.jit.trace(ask, torch.ones(2)).graph)


_FIRST = """
import sys, types, warnings
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
import mpamp
assert "mpamp.engine.casts.remaking" not in sys.modules, "loaded by a region"
layer, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv1d(2, 2, 1)), torch.ones(2, 4)
def f(x):
    with mpamp.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype is torch.bfloat16
        return y.float()
{place}
assert f(torch.ones(2, 4)).isfinite().all()
"""


@pytest.mark.parametrize(
    "place",
    [
        "torch.func.hessian(lambda x: f(x).sum())(x)",
        "layer.requires_grad_(False); torch.jit.trace(lambda x: f(x), x, check_trace=False)",
        "with FakeTensorMode(allow_non_fake_inputs=True): f(torch.ones(2, 4))",
        "torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x.expand(2, 2, 4))",
    ],
)
def test_the_first_region_of_a_process(place: str) -> None:
    code = _FIRST.format(place=place)
    run = processes.python("-W", "ignore", "-c", code)
    assert run.returncode == 0, run.stderr[-2000:]
