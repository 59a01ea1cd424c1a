"""Calls where autocast is off: no kernel of the engine's runs that would tell of them, so they are watched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

from torch import Tensor

from ..devices.registry import device_state
from ..engine.watching import Run, watch_calls
from ..errors import MpampError
from ..rules.eligibility import overload_name
from ..torch_internals import OpOverload
from .overflow_measures import floats_in
from .recording import Recorder

__all__ = ["listed_as_called"]


@contextlib.contextmanager
def listed_as_called(recorder: Recorder) -> Iterator[None]:
    """Have a recorder take down the calls inside of ops that their device's table lists, as they run: without casts."""
    depth = 0

    def around(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        nonlocal depth
        name, given = overload_name(op), [tensor for _, tensor in floats_in([args, kwargs])]
        if depth or not given or not _is_listed(name, given[0]):
            return run()
        depth, began = depth + 1, perf_counter_ns()
        try:
            result = run()
        finally:
            depth -= 1
        recorder.add_as_called(name, given, [t for _, t in floats_in(result)], perf_counter_ns() - began)
        return result

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(MpampError):  # others watch: then nothing is listed
            stack.enter_context(watch_calls(around))
        yield


def _is_listed(op: str, tensor: Tensor) -> bool:
    try:
        return op in device_state(tensor.device.type).table
    except MpampError:
        return False
