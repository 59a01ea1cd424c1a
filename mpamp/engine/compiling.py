"""What torch's compiler is told about mpamp, and how a region goes through a program that it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..rules.optable import OpTable
from ..torch_internals import (
    FrameAction,
    FrameExecStrategy,
    PreDispatchTorchFunctionMode,
    get_current_function_mode_stack,
    is_torch_function_mode_enabled,
    register_constant,
    set_code_exec_strategy,
)

__all__ = [
    "Contexts",
    "is_compiling",
    "is_dynamo_compiling",
    "is_exporting",
    "left_out",
    "left_out_by_itself",
    "left_to_python",
    "run_while_tracing",
    "stepped_over",
    "traced",
]

F = TypeVar("F", bound=Callable[..., Any])
Contexts = tuple[tuple[str, torch.dtype, bool], ...]
"""Regions of ``torch.autocast``: a device type, dtype and whether it is enabled, each."""
_SKIP = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)

_STEP_OVER = FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)

register_constant(OpTable)  # else Dynamo in torch 2.8 can't hand one to what it runs


is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def is_compiling() -> bool:
    """Tell whether Dynamo or export traces this thread: torch's own regions are used then, for they know those."""
    return is_dynamo_compiling() or is_exporting()


def is_exporting() -> bool:
    """Tell whether export runs this thread's program to trace it; torch's own flag is the process's."""
    if not is_torch_function_mode_enabled():
        return False

    return any(isinstance(m, PreDispatchTorchFunctionMode) for m in get_current_function_mode_stack())


def run_while_tracing(function: F) -> F:
    """Have Dynamo run ``function`` and keep its result, rather than trace it; its arguments must be constants."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def left_out(function: F) -> F:
    """Have Dynamo never trace ``function``, nor what it calls: compiled code is left for it, as for a disabled one."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "mpamp keeps casts outside of compiled code"  # type: ignore[attr-defined]
    return left_out_by_itself(function)


def left_out_by_itself(function: F) -> F:
    """Have Dynamo trace ``function`` only where compiled code calls it, not where the eager part of a program does."""
    set_code_exec_strategy(function.__code__, _SKIP)
    return function


def stepped_over(function: F) -> F:
    """Have Dynamo trace ``function`` only where compiled code calls it; what it calls is compiled either way."""
    set_code_exec_strategy(function.__code__, _STEP_OVER)
    return function


def left_to_python(function: F) -> F:
    """Have compiled code call ``function``, and nothing that it calls be compiled: it and they run as written."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return left_out_by_itself(function)


def traced(contexts: Contexts) -> contextlib.AbstractContextManager[None]:
    """Return a context in which Dynamo writes one or four regions of ``torch.autocast`` into its program.

    torch's cache is on in them: kernels take it as the sign to look for a mark.
    """
    return _one(*contexts) if len(contexts) == 1 else _four(*contexts)


@contextlib.contextmanager
def _one(device: Any) -> Iterator[None]:
    with torch.autocast(device[0], dtype=device[1], enabled=device[2], cache_enabled=True):
        yield


@contextlib.contextmanager
def _four(first: Any, second: Any, third: Any, device: Any) -> Iterator[None]:
    with (
        torch.autocast(first[0], dtype=first[1], enabled=first[2], cache_enabled=True),
        torch.autocast(second[0], dtype=second[1], enabled=second[2], cache_enabled=True),
        torch.autocast(third[0], dtype=third[1], enabled=third[2], cache_enabled=True),
        torch.autocast(device[0], dtype=device[1], enabled=device[2], cache_enabled=True),
    ):
        yield
