"""Raise an exception at one place in the library: at the n-th that a program comes by, for every n."""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import mpamp

HOME = os.path.dirname(mpamp.__file__) + os.sep


@functools.cache
def opcodes(code: CodeType) -> dict[int, str]:
    """Return the name of each instruction by its offset."""
    return {step.offset: step.opname for step in dis.get_instructions(code)}


def _trace(function: Callable[[FrameType, str, Any], Any]) -> None:
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces bytecodes where a frame had asked before, only
    sys.settrace(function)


@dataclass
class Interrupt:
    """Counts the places in mpamp, as this thread comes by, where Python lets an exception in, and raises at one.

    Signals, such as that of Ctrl-C, are looked for where a function begins, after a call of C code, and where a loop
    goes back; a RecursionError comes where a function begins.
    """

    error: type[BaseException]
    at: int
    """The number of the place, from 1 on; 0 only counts."""
    count: int = 0
    where: str = ""
    calls: int = 0
    exits: list[FrameType] = field(default_factory=list)
    is_at_start_of_exit: bool = False
    """Whether it struck where an exit, or all that an exit does, begins: nothing in Python can be put before that."""

    def __enter__(self) -> Interrupt:
        _trace(self._call)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        self.calls += 1
        code = frame.f_code
        if not code.co_filename.startswith(HOME):
            return None
        is_exit = code.co_name == "__exit__" or (self.exits[-1:] == [frame.f_back] and frame.f_back is not None)
        self.exits = [frame] if code.co_name == "__exit__" else []
        self._pass(frame, is_exit)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        names, before, calls = opcodes(code), "", self.calls

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before, calls
            if event == "opcode":
                name = names.get(frame.f_lasti, "")
                is_done = before.startswith("CALL") or (before.startswith("PRECALL") and not name.startswith("CALL"))
                is_call = is_done and calls == self.calls
                if is_call or before.startswith("JUMP_BACKWARD"):
                    self.exits = []
                    self._pass(frame, False)
                before, calls = name, self.calls
            return step

        return step

    def _pass(self, frame: FrameType, is_exit: bool) -> None:
        self.count += 1
        if self.count == self.at:
            code = frame.f_code
            self.where = f"{code.co_filename[len(HOME) :]}:{frame.f_lineno} in {code.co_qualname}"
            self.is_at_start_of_exit = is_exit
            sys.settrace(None)
            raise self.error(f"at {self.where}")


def count_places(work: Callable[[], Any]) -> int:
    """Return at how many places of mpamp ``work`` can be interrupted."""
    with Interrupt(KeyboardInterrupt, 0) as counter:
        work()
    return counter.count


def picked(count: int, most: int) -> list[int]:
    """Return the numbers of the places to raise at: all, or the first and last ones and some between."""
    if count <= most:
        return list(range(1, count + 1))
    edge, step = most // 3, max(1, count // (most // 3))
    return sorted({*range(1, edge + 1), *range(edge, count, step), *range(count - edge + 1, count + 1)})


class Steps:
    """Counts the bytecodes of mpamp that run on this thread: what grows with them grows in time on any machine."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Steps:
        _trace(self._call)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        self.count += event == "opcode"
        return self._step


def count_steps(work: Callable[[], Any]) -> int:
    """Return how many bytecodes of mpamp ``work`` runs."""
    with Steps() as steps:
        work()
    return steps.count
