"""Weights that are cast again and again, and why their casts aren't kept."""

from __future__ import annotations

import torch

from ..engine import Call, Cast
from ..engine.casts.cache import last_drop, storage_of
from ..engine.casts.weights import REWRITTEN
from ..torch_internals import peek_interpreter_stack
from .origins import Facts
from .places import Places
from .records import TINY, Fault, Faulty, bytes_of, name_of, short_name

__all__ = ["Weights"]

_State = dict[torch.dtype, tuple[int, object]]
"""By target dtype, a weight's version when it was cast, and what stood for the last unseen write then."""


class Weights:
    """What is known of the weights that were cast."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._cast: Facts[_State] = Facts()

    def look(self, call: Call, module: torch.nn.Module | None) -> Faulty:
        """Return the faults of a call, and the bytes that each moved."""
        if call.task != -1 or peek_interpreter_stack() is not None:
            return []  # recomputes and torch.func's transforms make casts of their own
        found: Faulty = []
        for cast in call.casts:
            if cast.was_there or cast.before.dtype is not torch.float32 or cast.after.dtype is torch.float32:
                continue
            name = self._places.tensor(cast.before, module)
            if cast.is_kept:
                if self._is_again(cast):
                    found.append((_again(call, name), bytes_of(cast)))
            elif cast.before.numel() <= TINY or hasattr(storage_of(cast.before), REWRITTEN):
                continue  # FSDP2 gathers a parameter anew, past every counter: what was cast is something else by then
            elif name is not None or _is_weight(cast.before):
                is_parameters = self._places.is_parameters(cast.before)
                found.append((_not_kept(call, cast, name, is_parameters), bytes_of(cast)))
        return found

    def _is_again(self, cast: Cast) -> bool:
        """Tell whether a weight was cast before and hasn't changed since."""
        state = self._cast.get(cast.before)
        if state is None:
            state = {}
            self._cast.put(cast.before, state)
        now = (cast.before._version, last_drop())
        before, state[cast.after.dtype] = state.get(cast.after.dtype), now
        return before is not None and before[0] == now[0] and before[1] is now[1]


def _again(call: Call, name: str | None) -> Fault:
    text = f"{_shown(name)} is cast to {name_of(call.lower)} anew in each region, and hasn't changed."
    return Fault("weight cast again", call.op, text, "autocast(persistent_cache=True) keeps its cast between regions.")


def _not_kept(call: Call, cast: Cast, name: str | None, is_parameters: bool) -> Fault:
    why, advice = _reason(call, cast.before, is_parameters)
    text = f"{_shown(name)} is cast to {name_of(cast.after.dtype)} at every call of {short_name(call.op)}: {why}."
    return Fault("weight cast at every call", call.op, text, advice)


def _reason(call: Call, tensor: torch.Tensor, is_parameters: bool) -> tuple[str, str]:
    """Return why a weight's cast isn't kept, and what would change that."""
    if call.scope.cache is None:
        return "the region keeps no casts", "Enter it with cache_enabled=True."
    if tensor._base is not None and not isinstance(tensor, torch.nn.Parameter):
        return "it is a view, not a parameter", "Make what the op is given a torch.nn.Parameter of its own."
    if not _is_weight(tensor) and is_parameters:
        return (
            "it is the parameter's .data, or detached",
            "Give the op the parameter itself: casts of frozen ones are kept.",
        )
    if not _is_weight(tensor):
        frozen = "torch.nn.Parameter(tensor, requires_grad=False)"
        return "it is a plain tensor, not a parameter", f"Make it a {frozen}: casts of frozen ones are kept."
    storage = storage_of(tensor)
    if storage is not None and storage.nbytes() > 4 * tensor.numel():
        return "it is part of a larger storage", "Give it memory of its own, or cast it once by hand."
    return f"casts for {short_name(call.op)} aren't kept here", "Cast it once by hand, or leave the op in float32."


def _is_weight(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
        return True
    return tensor.is_leaf and tensor.requires_grad


def _shown(name: str | None) -> str:
    return "a weight" if name is None else name.rpartition(".")[2]
