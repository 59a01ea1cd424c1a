"""Backward passes of scaled losses, and the gradients that arrive in them.

``scale`` leaves a hook on the loss. In a pass that comes after an unscaling, each parameter of that says when one
arrives. A loop that unscales after its last pass has no hook on a parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..engine.compiling import is_dynamo_compiling, left_out_by_itself
from ..torch_internals import execution_engine

__all__ = ["Listener", "Passes"]

Rescale = Callable[[Tensor, "Tensor | None"], None]


class Listener(Protocol):
    """What is told; ``Ledger`` says what the methods do."""

    def begins(self) -> list[Tensor]: ...

    def arrives(self, param: Tensor) -> tuple[Tensor | None, Tensor | None]: ...

    def accumulated(self, param: Tensor, *, is_scaled: bool) -> None: ...


class Passes:
    """Tells a listener of backward passes of scaled losses."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._followed: dict[int, tuple[Any, ...]] = {}
        self.count = 0
        """Those that have begun."""
        self.running = 0
        """Those of them that have not ended."""
        self.has_seen_losses = False
        """Whether a loss ever came here: a subclass may scale by itself."""

    def watch(self, loss: Tensor, scale: Tensor, rescale: Callable[[Tensor, Tensor, Tensor | None], None]) -> None:
        """Have a scaled loss say when a backward pass begins at it.

        Args:
            loss: The scaled loss.
            scale: The scaler's, shape [].
            rescale: Multiplies a gradient by the scale, in place, unless the third argument is 1.
        """
        self.has_seen_losses = True
        if loss.grad_fn is not None:
            loss.grad_fn.register_prehook(partial(self._begin, partial(rescale, scale)))

    def leave(self) -> None:
        """Follow no parameter any more; a pass that has failed is not running."""
        for _, *handles in self._followed.values():
            for handle in handles:
                handle.remove()
        self._followed, self.running = {}, 0

    @left_out_by_itself
    def _begin(self, rescale: Rescale, _: Any) -> None:
        if is_dynamo_compiling():  # compiled autograd, in which passes go unseen
            return
        self.count += 1
        self.running += 1
        _call_at_the_end(self._end)
        for param in self._listener.begins():
            if id(param) not in self._followed and param.is_leaf and param.requires_grad:
                node = get_gradient_edge(param).node  # kept, for the parameter itself doesn't
                arrival = node.register_prehook(partial(_weakly(self._arrive), param, rescale))
                accumulation = param.register_post_accumulate_grad_hook(_weakly(self._accumulated))
                self._followed[id(param)] = (node, arrival, accumulation)

    @left_out_by_itself
    def _end(self) -> None:
        _call_at_the_end(self._end_last)  # after what was queued in the pass, such as FSDP2's reduction of gradients

    @left_out_by_itself
    def _end_last(self) -> None:
        self.running = max(0, self.running - 1)

    @left_out_by_itself
    def _arrive(self, param: Tensor, rescale: Rescale, _: Any) -> None:
        if self.running:
            grad, skip = self._listener.arrives(param)
            if grad is not None:
                rescale(grad, skip)

    @left_out_by_itself
    def _accumulated(self, param: Tensor) -> None:
        self._listener.accumulated(param, is_scaled=self.running > 0)


def _call_at_the_end(function: Callable[[], None]) -> None:
    execution_engine.queue_callback(function)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that doesn't keep its object: the garbage collector sees no cycle through autograd's graph."""
    reference = weakref.WeakMethod(method)

    @left_out_by_itself
    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call
