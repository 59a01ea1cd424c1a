"""Finds kept casts whose weight was written in a way that nothing can see, such as by its address."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...devices.registry import is_capturing
from ...errors import StaleCastError
from ...torch_internals import DisableTorchFunction, disable_current_modes
from .cache import Kept, kept
from .weights import live_tensors

__all__ = ["CHECKS_REGIONS", "StaleCast", "checked", "verify_cache"]

F = TypeVar("F", bound=Callable[..., Any])
Tensor = torch.Tensor
CHECKS_REGIONS = os.environ.get("MPAMP_CHECK_CACHE") == "1"
"""Whether every region checks its thread's casts as it is entered; read once."""


@dataclass(frozen=True, slots=True)
class StaleCast:
    """A kept cast that would be used for a weight that holds something else by now."""

    name: str | None
    """The weight's name in the model, if one was given and has it."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """What it was cast to."""
    device: torch.device

    def __str__(self) -> str:
        name = "a weight" if self.name is None else repr(self.name)
        return f"{name} of shape {self.shape} on {self.device}, cast to {self.dtype}"


def verify_cache(model: torch.nn.Module | None = None) -> list[StaleCast]:
    """Compare every kept cast, of all threads, with its weight, and return those that went stale.

    A cast is stale if it would be used although the weight has changed: by a write that raises no version counter
    and is no optimizer's. ``mpamp.clear_cache()`` after such a write is the remedy. This waits for the devices that
    casts are on. ``MPAMP_CHECK_CACHE=1`` in the environment does it at the entry of each region, for the casts of the
    thread, and raises ``StaleCastError``.

    Args:
        model: What to take the weights' names from.

    Example:
        >>> import ctypes, mpamp
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> with mpamp.autocast("cpu"):
        ...     _ = layer(torch.ones(2))
        ...     _ = ctypes.memset(layer.weight.data_ptr(), 0, 16)
        ...     [stale.name for stale in mpamp.verify_cache(layer)]
        ['weight']
    """
    named = {} if model is None else _named_tensors(model)
    return _stale(kept(), named)


def checked(enter: F) -> F:
    """Return a region's ``__enter__`` such that it raises first where a kept cast of its thread is stale.

    Raises:
        StaleCastError: When it is called.
    """

    @functools.wraps(enter)
    def checked_enter(self: Any) -> Any:
        if not is_capturing():
            stale = _stale(kept(of_all_threads=False), {})
            if stale:
                raise StaleCastError(
                    f"kept casts are stale: {'; '.join(map(str, stale))}. Their weights were written past torch's "
                    "version counters, as a kernel that is given an address does: call mpamp.clear_cache() after such "
                    "a write. mpamp.verify_cache(model) names them."
                )
        return enter(self)

    return checked_enter  # type: ignore[return-value]


def _named_tensors(model: torch.nn.Module) -> dict[int, tuple[str, Tensor]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {id(tensor): (name, tensor) for name, tensor in tensors}


def _stale(casts: Iterable[Kept], named: dict[int, tuple[str, Tensor]]) -> list[StaleCast]:
    with _as_called():
        suspects = _changed(list(casts))
        if not suspects:
            return []
        # Entries don't keep their weights, so they are looked for.
        tensors = [*(tensor for _, tensor in named.values()), *live_tensors()]
        found: dict[Any, StaleCast] = {}
        for cast in suspects:
            weight = next((t for t in tensors if cast.serves(t)), None)
            if weight is not None and _differ(weight, cast.low).item():
                name = named[id(weight)][0] if id(weight) in named else None
                stale = StaleCast(name, tuple(weight.shape), cast.low.dtype, weight.device)
                found[id(weight), stale.dtype] = stale  # several threads may have it
        return list(found.values())


@contextlib.contextmanager
def _as_called() -> Iterator[None]:
    """Keep whoever watches or changes what torch does out of this."""
    with DisableTorchFunction(), disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def _changed(casts: list[Kept]) -> list[Kept]:
    """Return the casts that aren't of what is in their weight's memory, or whose memory can't be read from here.

    An ordinary write does that too: then the cast isn't used any more.
    """
    for device in {cast.low.device for cast in casts if cast.has_streams}:
        torch.accelerator.synchronize(device)
    unread: list[Kept] = []
    flags: dict[torch.device, list[tuple[Kept, Tensor]]] = {}
    for cast in casts:
        weight = cast.weight()
        if weight is None:
            unread.append(cast)
        else:
            flags.setdefault(cast.low.device, []).append((cast, _differ(weight, cast.low)))
    for found in flags.values():  # one wait a device
        differing = torch.stack([flag for _, flag in found]).tolist()
        unread += [cast for (cast, _), differs in zip(found, differing, strict=True) if differs]
    return unread


def _differ(weight: Tensor, low: Tensor) -> Tensor:
    """Return whether a cast has other bits than one made now: NaN is equal to itself here."""
    return (weight.detach().to(low.dtype).view(torch.int16) != low.detach().view(torch.int16)).any()
