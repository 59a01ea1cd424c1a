"""Regions by torch's names in compiled and exported code: mpamp's dtypes, and torch's again after uninstall.

What tells them apart: ``exp`` of float16 on the CPU, which torch runs as called and mpamp in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mpamp
from tests import processes
from tests.torches import traces_availability

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OURS, TORCHS = [FP16, FP32], [FP16, FP16]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "aot_eager", fullgraph: bool = True) -> Any:
    return torch.compile(function, fullgraph=fullgraph, backend=backend)


def told(x: torch.Tensor) -> list[torch.Tensor]:
    y = x @ x
    return [y, y.exp()]


def in_region(x: torch.Tensor) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.float16):
        return told(x)


def dtypes(tensors: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors]


X = torch.full((4, 4), 0.25)
SHARED = torch.autocast("cpu", dtype=FP16)


def in_shared(x: torch.Tensor) -> list[torch.Tensor]:
    with SHARED:
        return told(x)


@torch.autocast("cpu", dtype=FP16)
def decorated(x: torch.Tensor) -> list[torch.Tensor]:
    return told(x)


def in_form(x: torch.Tensor) -> list[torch.Tensor]:
    with torch.cpu.amp.autocast(dtype=torch.float16):
        return told(x)


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [in_region, in_shared, decorated, in_form])
def test_every_way_to_be_in_a_region(function: Any, backend: str) -> None:
    assert dtypes(function(X)) == dtypes(compiled(function, backend)(X)) == TORCHS
    with mpamp.install():
        assert dtypes(function(X)) == OURS
        assert dtypes(compiled(function, backend)(X)) == OURS


def test_compiled_before_between_and_after() -> None:
    function = compiled(in_region)
    assert dtypes(function(X)) == TORCHS
    for _ in range(2):
        with mpamp.install():
            assert dtypes(function(X)) == OURS
        assert dtypes(function(X)) == TORCHS


@pytest.mark.slow
def test_dynamo_that_is_imported_under_install_is_served_too() -> None:
    code = """
import sys, torch, mpamp
def f(x):
    with torch.autocast("cpu", dtype=torch.float16):
        y = x @ x
        return y.exp().dtype
with mpamp.install():
    assert "torch._dynamo" not in sys.modules
    print(torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2, 2)))
print(torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2, 2)))
"""
    done = processes.python("-c", code)
    assert done.stdout.split() == ["torch.float32", "torch.float16"], done.stderr


def test_nested_and_disabled_regions(installed: None) -> None:
    def function(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = x @ x
            with torch.autocast("cpu", dtype=torch.float16):
                b = told(x)
                with torch.autocast("cpu", enabled=False):
                    c = told(x)
            return [a, *b, *c, x @ x, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()]

    expected = [BF16, FP16, FP32, FP32, FP32, BF16]
    assert dtypes(function(X)[:6]) == dtypes(compiled(function)(X)[:6]) == expected
    assert function(X)[6:] == compiled(function)(X)[6:] == [True, True]


def test_a_region_around_compiled_code(installed: None) -> None:
    function = compiled(told)
    with torch.autocast("cpu", dtype=FP16):
        assert dtypes(function(X)) == OURS
        with torch.autocast("cpu", enabled=False):
            assert dtypes(function(X)) == [FP32, FP32]
    assert dtypes(function(X)) == [FP32, FP32]


def test_a_graph_break_inside(installed: None) -> None:
    seen: list[torch.dtype] = []

    def function(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            y = x @ x
            torch._dynamo.graph_break()
            seen.append(y.exp().dtype)
            return told(y.float())

    assert dtypes(compiled(function, fullgraph=False)(X)) == OURS
    assert seen == [FP32]
    assert not torch.is_autocast_enabled("cpu")


def test_training(installed: None) -> None:
    weight = torch.nn.Parameter(torch.full((4, 4), 0.5))

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return (x @ weight).exp().sum()

    results = []
    for function in (step, compiled(step)):
        weight.grad = None
        loss = function(X)
        loss.backward()
        assert loss.dtype is FP32
        assert weight.grad is not None
        results.append((loss.detach(), weight.grad))
    torch.testing.assert_close(results[0], results[1])


class Derived(torch.autocast):
    def __init__(self) -> None:
        super().__init__("cpu", dtype=FP16)


@traces_availability
def test_a_subclass_is_torchs_in_what_is_compiled() -> None:
    def function(x: torch.Tensor) -> Any:
        with Derived():
            return told(x)

    outcomes = []
    for names in (contextlib.nullcontext, mpamp.install):
        with names():
            for fullgraph in (True, False):
                torch._dynamo.reset()
                outcomes.append(dtypes(compiled(function, fullgraph=fullgraph)(X)))
            assert dtypes(function(X)) == (OURS if names is mpamp.install else TORCHS)
    assert outcomes == [TORCHS] * 4


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return tuple(in_region(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export(installed: None, strict: bool) -> None:
    program = torch.export.export(Model(), (X,), strict=strict)
    assert dtypes(program.module()(X)) == OURS
    mpamp.uninstall()
    assert dtypes(program.module()(X)) == OURS


def test_export_without_install_is_torchs() -> None:
    with mpamp.install():
        pass
    assert dtypes(torch.export.export(Model(), (X,), strict=False).module()(X)) == TORCHS


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_functions_under_compile(installed: None) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return 2 * ctx.saved_tensors[0] * grad

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return Square.apply(x @ x)  # type: ignore[no-any-return]

    x = X.clone().requires_grad_()
    assert function(x).dtype is compiled(function)(x).dtype is FP32
    compiled(function)(x).sum().backward()
    assert x.grad is not None
