"""Raise an exception at one line of the library: at the n-th that a program runs, for every n."""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import mpamp

HOME = os.path.dirname(mpamp.__file__) + os.sep


@functools.cache
def ends_of_with(code: CodeType) -> frozenset[int]:
    """Return where blocks of ``with`` are left: Python lets nothing in before the context's exit is called."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    ends = set()
    for index, step in enumerate(steps):
        first = index + (step.opname == "SWAP")
        nones = [s.opname == "LOAD_CONST" and s.argval is None for s in steps[first : first + 3]]
        is_exit = nones == [True] * 3 and any("CALL" in s.opname for s in steps[first + 3 : first + 5])
        if is_exit or [s.opname for s in steps[index : index + 2]] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            ends.add(step.offset)
    return frozenset(ends)


@dataclass
class Interrupt:
    """Counts the lines of mpamp that run on this thread, and raises before one of them does."""

    error: type[BaseException]
    at: int
    """The number of the line, from 1 on; 0 only counts."""
    count: int = 0
    where: str = ""
    lines_of_exit: int | None = None
    """How many lines had run since the latest ``__exit__`` began."""

    @property
    def is_at_start_of_exit(self) -> bool:
        """Whether it struck before an exit could begin a ``try``, in itself or what it calls: Python has no better."""
        return bool(self.where) and self.lines_of_exit is not None and self.lines_of_exit <= 2

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if frame.f_code.co_name == "__exit__":
            self.lines_of_exit = 0
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_lasti not in ends_of_with(frame.f_code):
            self.count += 1
            if self.lines_of_exit is not None:
                self.lines_of_exit += 1
            if self.count == self.at:
                code = frame.f_code
                self.where = f"{code.co_filename[len(HOME) :]}:{frame.f_lineno} in {code.co_qualname}"
                sys.settrace(None)
                raise self.error(f"at {self.where}")
        return self._line


def count_lines(work: Callable[[], Any]) -> int:
    """Return how many lines of mpamp ``work`` runs."""
    with Interrupt(KeyboardInterrupt, 0) as counter:
        work()
    return counter.count


def picked(count: int, most: int) -> list[int]:
    """Return the numbers of the lines to raise at: all, or the first and last ones and some between."""
    if count <= most:
        return list(range(1, count + 1))
    edge, step = most // 3, max(1, count // (most // 3))
    return sorted({*range(1, edge + 1), *range(edge, count, step), *range(count - edge + 1, count + 1)})


class Steps:
    """Counts the bytecodes of mpamp that run on this thread: what grows with them grows in time on any machine."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Steps:
        sys.settrace(self._call)
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
