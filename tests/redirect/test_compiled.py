"""Compiled code whose regions are of an absent device: without graph breaks of their own, and with those of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

import mpamp
from mpamp.redirect import redirect
from tests import processes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here: its names mean what they say")
Tensor = torch.Tensor
model = torch.nn.Linear(4, 4).requires_grad_(False)


def plain(x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(x)


def older(x: Tensor) -> Tensor:
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        return model(x)


def nested(x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with torch.autocast("cuda", enabled=False):
            x = model(x)
        return model(x)


def asking(x: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        return x
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() is torch.get_autocast_dtype("cuda") is torch.bfloat16
        return model(x)


def breaking(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return model(y)

    with torch.autocast("cuda", dtype=torch.bfloat16):
        return inner(x)


@pytest.fixture(autouse=True)
def _redirected() -> Iterator[None]:
    torch._dynamo.reset()
    with mpamp.install(), redirect("cpu"):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("function", [plain, older, nested, asking])
def test_regions_are_traced_without_a_break(function: Callable[[Tensor], Any]) -> None:
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for _ in range(2):
        assert compiled(torch.ones(2, 4)).dtype is torch.bfloat16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert compiled(torch.ones(2, 4)).dtype is (torch.float32 if function is asking else torch.bfloat16)


@pytest.mark.parametrize("options", [{}, {"nested_graph_breaks": True}], ids=str)
@pytest.mark.parametrize("function", [plain, older, nested, asking, breaking])
def test_regions_around_breaks(function: Callable[[Tensor], Any], options: dict[str, bool]) -> None:
    if not all(hasattr(torch._dynamo.config, name) for name in options):
        pytest.skip("this torch has no such option")
    compiled = torch.compile(function, backend="aot_eager")
    with torch._dynamo.config.patch(options):
        for _ in range(2):
            assert compiled(torch.ones(2, 4)).dtype is torch.bfloat16


LATE = """
import sys, torch
from mpamp.redirect import redirect
def asking(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return x if torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is torch.bfloat16 else None
with redirect("cpu"):
    assert "torch._dynamo" not in sys.modules
    print(torch.compile(asking, backend="eager", fullgraph=True)(torch.ones(1)))
"""


@pytest.mark.slow
def test_the_state_is_asked_for_where_dynamo_is_imported_later() -> None:
    done = processes.python("-c", LATE)
    assert done.stdout == "tensor([1.])\n", done.stderr
