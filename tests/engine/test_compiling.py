"""What torch's compiler is told: which functions it runs, which it leaves alone, and that tables are constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree

from mpamp import OpTable
from mpamp.engine.compiling import is_compiling, left_out_by_itself, run_while_tracing, traced

calls: list[str] = []


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    calls.clear()
    yield
    torch._dynamo.reset()


@run_while_tracing
def constant(name: str) -> int:
    calls.append(name)
    return len(name)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x


@torch.compiler.disable(recursive=False)
def eager_part(x: torch.Tensor, function: Any) -> torch.Tensor:
    return function(x)


def graphs_from_eager_part(function: Any) -> int:
    """Return how many graphs a function is compiled to when the eager part of a compiled program calls it."""
    counter = CompileCounter()
    program = torch.compile(lambda x: eager_part(x, function), backend=counter)
    assert program(torch.ones(2)).tolist() == [2.0, 2.0]
    return int(counter.frame_count)


def test_what_runs_while_tracing_leaves_its_result_in_the_program() -> None:
    compiled = torch.compile(lambda x: x * constant("four"), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [4.0, 4.0]
    assert calls == ["four"], "the program calls it no more"


def test_what_is_left_out_by_itself_is_traced_only_from_compiled_code() -> None:
    alone = left_out_by_itself(lambda x: x + x)
    assert (graphs_from_eager_part(doubled), graphs_from_eager_part(alone)) == (1, 0)
    counter = CompileCounter()
    compiled = torch.compile(lambda x: alone(x) * 2, backend=counter, fullgraph=True)
    assert compiled(torch.ones(1)).item() == 4.0
    assert (counter.frame_count, counter.op_count) == (1, 2)


def test_a_table_is_a_constant_of_a_program() -> None:
    table = OpTable({"exp": "fp32", "log": "fp32"})
    leaves, spec = _pytree.tree_flatten({"ops": table, "x": 1})
    assert leaves == [1]
    assert _pytree.tree_unflatten(leaves, spec)["ops"] is table

    @run_while_tracing
    def rules(of: OpTable) -> int:
        return len(of)

    compiled = torch.compile(lambda x, ops: x + rules(ops), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1), table).item() == 2.0
    assert compiled(torch.zeros(1), OpTable({"relu": "fp32"})).item() == 1.0


def test_it_is_known_whether_a_program_is_being_made() -> None:
    assert not is_compiling()
    compiled = torch.compile(lambda x: x + is_compiling(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 1.0


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_traced_region_is_torch_s(is_enabled: bool) -> None:
    with traced((("cpu", torch.float16, is_enabled),)):
        assert torch.is_autocast_enabled("cpu") is is_enabled
        assert torch.is_autocast_cache_enabled()
    marks = tuple((device, torch.bfloat16, True) for device in ("ipu", "maia", "mtia"))
    with traced((("cpu", torch.float16, is_enabled), *marks)):
        assert [torch.is_autocast_enabled(device) for device, _, _ in marks] == [True] * 3
        assert torch.get_autocast_dtype("cpu") is torch.float16
    assert not any(torch.is_autocast_enabled(device) for device in ("cpu", "ipu", "maia", "mtia"))
