"""``scale_loss``: a backward pass on a scaled loss, after which gradients are unscaled and old ones added."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ..engine.casts.cache import clear_cache
from .attachment import stash_of
from .errors import AmpIndexError, AmpUsageError
from .holding import is_optimizer
from .scaler import LossScaler
from .stash import Stash
from .state import state

__all__ = ["scale_loss", "unscale"]


@contextlib.contextmanager
def scale_loss(
    loss: Any,
    optimizers: Optimizer | Iterable[Optimizer],
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Give the loss multiplied by its scale; on leaving, unscale the gradients of a backward pass on it.

    Gradients that were there before are put aside on entry and added unscaled on exit, so blocks with
    different scales accumulate exactly. If the new ones overflow, each of ``optimizers`` skips its next step.
    After an exception in the block the gradients are what they were before it.

    Args:
        loss: Any shape; a floating tensor, which becomes float32.
        optimizers: The optimizers whose parameters this backward pass reaches.
        loss_id: The number of the loss's scaler, below ``num_losses``.
        model: Ignored, as in apex.
        delay_unscale: Leave the gradients scaled, for a later block with the same scaler to unscale.
        delay_overflow_check: Unscale, and neither look for overflow nor move the scale.

    Raises:
        AmpUsageError: ``initialize`` has not been called.
        AmpIndexError: There is no scaler of that number.
        AmpAttributeError: An optimizer never went through ``initialize``.

    Example:
        >>> from mpamp.apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> with scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> amp.shutdown()
    """
    properties = getattr(state, "opt_properties", None)
    if properties is None:
        raise AmpUsageError(
            "amp.scale_loss was called before amp.initialize. Call `model, optimizer = amp.initialize(model, "
            "optimizer, opt_level=...)` first; amp.init and its handle have a scale_loss of their own."
        )
    if not properties.enabled:
        yield loss
        return
    given = [optimizers] if _is_one(optimizers) else list(optimizers)  # type: ignore[arg-type]
    scaler = _scaler(loss_id)
    is_plain = not properties.master_weights and not scaler.dynamic and scaler.loss_scale() == 1.0
    stashes = [] if is_plain else [stash_of(optimizer) for optimizer in given]
    try:
        if is_plain:
            yield loss.float()
        else:
            yield from _scaled(loss, stashes, scaler, loss_id, delay_unscale, delay_overflow_check)
    finally:
        if properties.patch_torch_functions:
            clear_cache()


def _scaled(
    loss: torch.Tensor, stashes: list[Stash], scaler: LossScaler, loss_id: int, delay_unscale: bool, delay_check: bool
) -> Iterator[torch.Tensor]:
    scaler.clear_overflow_state()
    if not delay_unscale:
        for stash in stashes:
            if not stash.params_have_scaled_gradients:
                stash.prepare()
    try:
        yield loss.float() * scaler.loss_scale()
    except BaseException:
        for stash in stashes:
            stash.abandon()
        raise
    if delay_unscale:
        for stash in stashes:
            stash.params_have_scaled_gradients = True
        return
    seen: set[int] = set()
    for stash in stashes:
        stash.finish(scaler, seen, check=scaler.dynamic and not delay_check)
    if not delay_check and scaler.update_scale():
        for stash in stashes:
            stash.skip_next(scaler, loss_id)


def _is_one(optimizers: Any) -> bool:
    return is_optimizer(optimizers) or hasattr(optimizers, "param_groups")


def _scaler(loss_id: int) -> LossScaler:
    try:
        scaler: LossScaler = state.loss_scalers[loss_id]
    except IndexError:
        raise AmpIndexError(
            f"loss_id {loss_id} is out of range: amp.initialize(..., num_losses={len(state.loss_scalers)}) made "
            f"that many loss scalers, numbered from 0."
        ) from None
    return scaler


def unscale(grads: Iterable[torch.Tensor | None], loss_id: int = 0) -> list[torch.Tensor | None]:
    """Return gradients that ``torch.autograd.grad`` gave for a scaled loss, divided by its scale; same shapes.

    apex has no such function: ``scale_loss`` unscales what lands in ``.grad`` only. Outside of scaling
    they come back as they are.

    Example:
        >>> unscale([None])
        [None]
    """
    properties = getattr(state, "opt_properties", None)
    if properties is None or not properties.enabled:
        return list(grads)
    scale = _scaler(loss_id).loss_scale()
    return [None if grad is None else grad * (1.0 / scale) for grad in grads]
