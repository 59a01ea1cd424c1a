"""What the whole process shares: the options in force, the loss scalers and the handle."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

from .errors import AmpUsageError

__all__ = ["AmpState", "is_enabled", "say", "say_on_first_rank", "state", "warn_or_raise"]


class AmpState:
    """The process-wide state, reachable as ``amp._amp_state``.

    ``opt_properties``, ``loss_scalers``, ``handle``, ``min_loss_scale`` and ``max_loss_scale`` exist once
    ``initialize`` or ``init`` has set them.
    """

    opt_properties: Any
    """``Properties``; none of the three is imported here, since what they are made of stands on this module."""
    loss_scalers: list[Any]
    """Each a ``LossScaler``."""
    handle: Any
    """An ``AmpHandle``."""
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.hard_override = False
        """Print a warning where an option or a model would be refused."""
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.loaded: dict[str, Any] | None = None
        """A state dict that was loaded before ``initialize``, which applies it."""

    def reset(self) -> None:
        """Forget what ``initialize`` and ``init`` have set."""
        for name in ("opt_properties", "loss_scalers", "handle", "min_loss_scale", "max_loss_scale"):
            self.__dict__.pop(name, None)
        self.loaded = None


state = AmpState()


def is_enabled() -> bool:
    """Tell whether ``initialize`` was called, and not with ``enabled=False``."""
    return hasattr(state, "opt_properties") and bool(state.opt_properties.enabled)


def say(text: str) -> None:
    """Print to stdout, on every rank, unless verbosity is 0."""
    if state.verbosity > 0:
        print(text)


def say_on_first_rank(text: str) -> None:
    """Print to stdout on rank 0, unless verbosity is 0."""
    if _rank() == 0:
        say(text)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0


def warn_or_raise(text: str) -> None:
    """Raise a RuntimeError; or, with ``hard_override``, print the text and go on."""
    if not state.hard_override:
        raise AmpUsageError(text)
    print("Warning:  " + text)
