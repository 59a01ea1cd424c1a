"""Adds up what the engine tells. Nothing of a call is kept but numbers, names and dtypes."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.fx.traceback as fx_traceback

from ..engine import Call
from ..locks import Rank, made
from ..torch_internals import DisableTorchFunctionSubclass, get_dispatch_mode
from ..torch_internals import TorchDispatchModeKey as ModeKey
from .faults import Faults
from .places import Places, compiled_place
from .records import CAST, OpUse, Phase, bytes_of, name_of, results_of

__all__ = ["Recorder"]

_get_mode = get_dispatch_mode
_Key = tuple[Any, ...]


class _Tally:
    __slots__ = ("bytes", "calls", "cast_ns", "casts", "kept", "ns")

    def __init__(self) -> None:
        self.calls = self.casts = self.kept = self.bytes = self.ns = self.cast_ns = 0


class Recorder:
    """What is given to ``engine.observe``; threads may call it at the same time."""

    def __init__(self, history: int) -> None:
        self.places = Places()
        self.faults = Faults(self.places)
        self.history: deque[tuple[str, str, str, int, int]] = deque(maxlen=history)
        self._tallies: dict[_Key, _Tally] = {}
        self._lock = made(Rank.PART)

    def __call__(self, call: Call) -> None:
        """Take down a call."""
        phase: Phase = "forward" if call.task == -1 else "backward"
        if call.modes and _is_traced():
            is_written = _get_mode(ModeKey.PROXY) is not None or _is_exported()
            if not is_written or phase == "backward":
                return  # a compiler's first look, or a backward pass, where ops run as they are called
            phase = "compiled"
        with DisableTorchFunctionSubclass(), self._lock:
            self._add(call, phase)

    def _add(self, call: Call, phase: Phase) -> None:
        if call.op == CAST and (phase == "backward" or not _is_of_floats(call)):
            return  # backward, they are autograd's
        place, module = self._compiled_here() if phase == "compiled" else self.places.here()
        tensors = [t for t in call.arguments if isinstance(t, torch.Tensor)]
        row = call.scope.table.get(call.op)
        rule = "" if call.policy is None or row is None else row.source
        dtypes = tuple([t.dtype for t in tensors]), tuple([t.dtype for t in results_of(call)])
        key = (call.op, place, phase, call.device.type, call.lower, call.policy, rule, *dtypes)
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = _Tally()
        made = [cast for cast in call.casts if not cast.was_there]
        tally.calls += 1
        tally.casts += len(made)
        tally.kept += len(call.casts) - len(made)
        tally.ns += call.ns
        tally.cast_ns += call.cast_ns if call.casts else 0
        if phase != "compiled":  # there sizes may be symbols, which are not to be asked
            tally.bytes += sum(bytes_of(cast) for cast in made)
            self.history.append((call.op, place, phase, len(made), call.ns))
            self.faults.look(call, tensors, rule, place, module)

    def add_as_called(self, op: str, given: list[torch.Tensor], made: list[torch.Tensor], ns: int) -> None:
        """Take down a call that ran without autocast; its region is said to be of the dtype that it was called in."""
        with DisableTorchFunctionSubclass(), self._lock:
            dtypes = tuple([t.dtype for t in given]), tuple([t.dtype for t in made])
            key = (op, self.places.here()[0], "forward", given[0].device.type, given[0].dtype, None, "", *dtypes)
            tally = self._tallies.setdefault(key, _Tally())
            tally.calls += 1
            tally.ns += ns

    def _compiled_here(self) -> tuple[str, None]:
        place = compiled_place()
        if not place and _is_exported():  # by running the module itself: no graph is there yet that names it
            place = self.places.here()[0].removeprefix("_export_root").removeprefix(".")
        return place, None

    @property
    def has_calls(self) -> bool:
        """Whether there are some."""
        return bool(self._tallies)

    def uses(self) -> list[OpUse]:
        """Return how each op was used, in the order in which they were first called."""
        with self._lock:
            return [_use(key, tally) for key, tally in self._tallies.items()]


def _is_of_floats(call: Call) -> bool:
    """Tell whether a cast that code asks for is one from one floating dtype to another."""
    tensors = [t for t in (*call.arguments, *results_of(call)) if isinstance(t, torch.Tensor)]
    return all(t.is_floating_point() for t in tensors) and len({t.dtype for t in tensors}) > 1


def _is_traced() -> bool:
    return any(_get_mode(key) is not None for key in (ModeKey.PROXY, ModeKey.FUNCTIONAL, ModeKey.FAKE))


def _is_exported() -> bool:
    """Tell whether a call becomes a node of a program that is being exported.

    Such programs are of ops above autocast: their tracer isn't among the modes any more when a kernel runs.
    """
    return torch.compiler.is_exporting() and bool(fx_traceback.current_meta)


def _use(key: _Key, tally: _Tally) -> OpUse:
    op, place, phase, device, lower, policy, rule, dtypes_in, dtypes_out = key
    return OpUse(
        op=op,
        module=place,
        phase=phase,
        device=device,
        region=name_of(lower),
        policy="" if policy is None else str(policy),
        rule=rule,
        dtypes_in=tuple(map(name_of, dtypes_in)),
        dtypes_out=tuple(map(name_of, dtypes_out)),
        calls=tally.calls,
        casts=tally.casts,
        kept_used=tally.kept,
        cast_bytes=tally.bytes,
        host_us=tally.ns / 1000,
        cast_us=tally.cast_ns / 1000,
    )
