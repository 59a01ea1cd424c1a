"""apex's first interface: a handle that casts and scales; and what the later one shares with it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..engine.casts import cache as castcache
from ..engine.casts.weights import live_tensors
from ..errors import MpampWarning
from ..torch_internals import current_graph_task_id
from . import ambient, blocks
from .errors import AmpUsageError
from .holding import with_wrapped
from .lists import enter
from .scale import scale_loss
from .scaler import LossScaler
from .state import say, state
from .steps import Watch, was_called
from .wrapper import OptimWrapper, unscale_in_place

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "init", "scale_loss"]


class AmpHandle:
    """What ``init`` returns: process-wide casts, and a loss scale of its own for ``handle.scale_loss``."""

    def __init__(self, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False) -> None:
        self._enable_caching, self._verbose = enable_caching, verbose
        self._default_scaler = LossScaler(loss_scale)
        self._all_wrappers: list[OptimWrapper] = []
        self._is_active = True
        self._skipping: set[int] = set()

    def is_active(self) -> bool:
        """Tell whether functions are cast now, on this thread."""
        return self._is_active and blocks.is_casting()

    @contextlib.contextmanager
    def scale_loss(self, loss: Any, optimizer: Any) -> Iterator[Any]:
        """Give the loss multiplied by the handle's scale; on leaving, unscale the optimizer's gradients in place.

        If they overflowed, the optimizer's next step does nothing.

        Raises:
            AmpUsageError: The handle wraps optimizers: each has a ``scale_loss`` then.
        """
        if not self.is_active():
            yield loss
            return
        if self._all_wrappers:
            raise AmpUsageError(
                "this handle has wrapped optimizers, which scale losses by themselves: "
                "`with optimizer.scale_loss(loss) as scaled_loss:`."
            )
        scaler = self._default_scaler
        scaled = loss * scaler.loss_scale()
        try:
            with _notice_unscaled_backward(loss, scaled):
                yield scaled
            if unscale_in_place(optimizer, scaler):
                self._skip_once(optimizer)
        finally:
            self._clear_cache()

    def _skip_once(self, optimizer: Any) -> None:
        if id(optimizer) in self._skipping:
            return
        self._skipping.add(id(optimizer))
        watches: list[Watch] = []

        def skip(step: Any, args: Any, kwargs: Any) -> None:
            say("Gradient overflow, skipping update")
            self._skipping.discard(id(optimizer))
            for watch in watches:
                was_called(watch.optimizer)
                watch.stop()

        watches += [Watch(each, skip) for each in with_wrapped(optimizer)]

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return the optimizer wrapped for ``num_loss`` losses a step, each with a scale of its own."""
        self._default_scaler = LossScaler("dynamic")
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        with blocks.casts_off():
            yield

    @property
    def has_cache(self) -> bool:
        """Whether casts of weights are kept."""
        return self._enable_caching

    @property
    def cache(self) -> dict[Any, torch.Tensor]:
        """The weights whose casts this thread keeps, and the casts."""
        kept = list(castcache.kept(of_all_threads=False))
        # Nothing refers to the weights: who asks for them, which scripts don't, waits until they are found.
        weights = live_tensors() if kept else []
        return {weight: each.low for weight in weights for each in kept if each.serves(weight)}

    def remove_cache(self, param: torch.Tensor) -> None:
        """Drop a weight's cast."""
        for dtype in (torch.float16, torch.bfloat16):
            castcache.REGION_CACHE.drop(param, dtype)

    def _clear_cache(self) -> None:
        castcache.clear_cache()

    @property
    def verbose(self) -> bool:
        """Whether it was asked to print each cast."""
        return self._verbose

    def _save_func(self, mod: Any, fn: Any, func: Any) -> None:
        """Do nothing: what is replaced is remembered where it is replaced."""

    def _deactivate(self) -> None:
        """End the casts, process-wide; again does nothing."""
        if self._is_active:
            self._is_active = False
            if getattr(state, "handle", None) is self:
                ambient.withdraw()


class NoOpHandle:
    """What ``init(enabled=False)`` returns: everything passes through."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    @contextlib.contextmanager
    def scale_loss(self, loss: Any, optimizer: Any) -> Iterator[Any]:
        """Give the loss itself."""
        yield loss

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return the optimizer in a wrapper that passes everything through."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def _clear_cache(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def _notice_unscaled_backward(loss: Any, scaled: Any) -> Iterator[None]:
    """Warn of a backward pass in the block that starts at the loss rather than at the scaled one."""
    if not (isinstance(loss, torch.Tensor) and loss.requires_grad):
        yield
        return
    passes: set[int] = set()
    task = current_graph_task_id

    def check(_: torch.Tensor) -> None:
        if task() not in passes:
            warnings.warn(
                "backward() was called on the loss itself inside handle.scale_loss, which is almost certainly an "
                "error: call it on the scaled loss that the block gives.",
                MpampWarning,
                stacklevel=2,
            )

    hooks = [scaled.register_hook(lambda _: passes.add(task())), loss.register_hook(check)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def init(
    enabled: bool = True,
    loss_scale: Any = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    dtype: torch.dtype = torch.float16,
    devices: Iterable[str] = (),
) -> AmpHandle | NoOpHandle:
    """Cast functions' arguments, process-wide, from now on, and return the handle of apex's first interface.

    Positional arguments of before February 2019, ``init(enabled, enable_caching, verbose, allow_banned)``, are
    told by a bool in second place.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: The scale of ``handle.scale_loss``: "dynamic" or a number.
        enable_caching: Whether a weight's cast is kept until the next optimizer step.
        verbose: Accepted; what is cast is told by ``mpamp``'s own tools.
        allow_banned: Run ``binary_cross_entropy`` in float32 instead of refusing it.
        dtype: What is lower precision.
        devices: The device types to cast on; those of this machine if there are none.

    Example:
        >>> handle = init()
        >>> a = torch.ones(2, 2)
        >>> if a.device.type in blocks.devices():
        ...     assert (a @ a).dtype is torch.float16
        >>> handle._deactivate()
    """
    if isinstance(loss_scale, bool):
        loss_scale, enable_caching, verbose, allow_banned = "dynamic", loss_scale, enable_caching, verbose
    if not enabled:
        return NoOpHandle()
    enter(set(devices), dtype, cache=enable_caching, allow_banned=allow_banned)
    state.handle = handle = AmpHandle(loss_scale, enable_caching, verbose)
    return handle


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Run a block, or as a decorator a function, without casts on this thread; where there are none, do nothing.

    Example:
        >>> with disable_casts():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    with blocks.casts_off():
        yield
