"""The region that a thread is in, mpamp's or torch's: entered again so that it is seen, or with rules on top."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch

from ..devices.registry import device_state
from ..engine.resolving import resolve
from ..engine.scope import THREAD
from ..errors import MpampError
from ..regions.region import autocast
from ..rules.optable import OpTable

__all__ = ["entered", "is_in_region", "lowered", "with_rules"]


def is_in_region() -> bool:
    """Tell whether the thread is in a region: also in one that is off.

    Example:
        >>> with torch.autocast("cpu", enabled=False):
        ...     print(is_in_region())
        True
        >>> is_in_region()
        False
    """
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()  # torch can't be asked for it
    return depth > 0 or bool(THREAD.state.entries)


def lowered(device_types: Collection[str]) -> list[str]:
    """Return those of some device types that autocast is on for."""
    return [t for t in device_types if torch.amp.is_autocast_available(t) and torch.is_autocast_enabled(t)]


@contextlib.contextmanager
def entered(device_types: Collection[str]) -> Iterator[None]:
    """Have the calls inside be seen as what they are: in the region around, or in a default one of the first device.

    A region of torch's is entered again as one of mpamp's with torch's table and dtype, by which the same is cast.
    """
    with contextlib.ExitStack() as stack:
        if THREAD.state.entries:
            pass
        elif is_in_region():
            for kind in lowered(device_types):
                with contextlib.suppress(MpampError):  # no backend has it: it runs, but isn't seen
                    stack.enter_context(_region(kind, OpTable.named("native", kind)))
        else:
            stack.enter_context(autocast(next(iter(device_types), None)))
        yield


@contextlib.contextmanager
def with_rules(device_types: Collection[str], rules: Mapping[str, str]) -> Iterator[None]:
    """Have rules hold inside, on top of those of the region around."""
    with contextlib.ExitStack() as stack:
        for kind in lowered(device_types):
            state = device_state(kind)
            scope = resolve(state)
            table = state.table if scope is None else scope.table
            stack.enter_context(_region(kind, table.override(rules)))
        yield


def _region(kind: str, table: OpTable) -> contextlib.AbstractContextManager[object]:
    return autocast(kind, torch.get_autocast_dtype(kind), True, torch.is_autocast_cache_enabled(), ops=table)
