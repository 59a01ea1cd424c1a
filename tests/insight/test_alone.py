"""Scripts that run alone run the same under each tool: to the bit, and with the same errors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import mpamp
from tests.insight.scripts import SCRIPTS

pytestmark = pytest.mark.filterwarnings("default")


@contextlib.contextmanager
def finding() -> Iterator[None]:
    """Watch the first module that is called, for a script hands none out."""
    finders: list[Any] = []
    call = nn.Module.__call__

    def first_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not finders and not torch.compiler.is_compiling():
            finders.append(mpamp.find_overflow(module))
            finders[0].__enter__()
        return call(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", first_call):
        try:
            yield
        finally:
            if finders:
                finders[0].__exit__(None, None, None)


TOOLS = {
    "trace": mpamp.trace,
    "reporting": lambda: mpamp.reporting(None),
    "find_overflow": finding,
}


ALWAYS = {
    ("compiled function, aot_eager", "reporting"),
    ("compiled function, aot_eager", "find_overflow"),
    ("compiled model, eager", "find_overflow"),
    ("compiled_that_may_not_be_compiled_again", "find_overflow"),
    ("compiled_that_may_not_be_compiled_again", "trace"),
    ("left_out_of_compiled_code", "reporting"),
    ("scripted", "find_overflow"),
    ("per_sample_gradients", "reporting"),
    ("per_sample_gradients", "find_overflow"),
    ("double_backward", "find_overflow"),
    ("reentrant_checkpoints_of_a_whole_model", "find_overflow"),
    ("copies", "find_overflow"),
    ("subclasses", "find_overflow"),
    ("subclasses", "reporting"),
    ("errors_in_a_step", "find_overflow"),
    ("modes", "reporting"),
}
"""What runs in every suite; the rest are a sweep."""
CASES = [
    pytest.param(name, tool, marks=() if (name, tool) in ALWAYS else pytest.mark.sweep)
    for name in SCRIPTS
    for tool in TOOLS
]


def result_of(name: str, tool: Any = contextlib.nullcontext) -> list[Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tool():
            return tree_leaves(SCRIPTS[name]())


@pytest.mark.parametrize(("name", "tool"), CASES)
def test_a_script_runs_as_it_does_alone(name: str, tool: str) -> None:
    wanted, found = result_of(name), result_of(name, TOOLS[tool])
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other


def test_the_cases_that_always_run_are_there() -> None:
    assert {(name, tool) for name in SCRIPTS for tool in TOOLS} >= ALWAYS
