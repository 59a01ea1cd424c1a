"""Casts one argument of a call: anew, or by the kept cast of a weight where one may be used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...oplists import lower_precision_ops
from ...rules.eligibility import overload_name
from ...rules.policy import CASTABLE
from ...torch_internals import OpOverload, is_tracing, peek_interpreter_stack
from ..casts.cache import is_weight
from ..observing import telling_cast

if TYPE_CHECKING:
    from ...plugins.backend import Backend
    from ..scope import Scope

__all__ = ["caster", "keeper", "returns_new", "telling_caster"]


@functools.cache
def keeper(backend: Backend) -> tuple[Callable[[Scope], bool], Callable[..., torch.Tensor]]:
    """Return a check whether casts may be kept now, and the function that gives a float32 weight's kept cast.

    The latter views the kept cast for a view of a weight. It returns what is neither as it is.
    """
    on_device, capturing, stream_of = backend.tensor_check(), backend.capture_check(), backend.stream_check()
    tracing, functorch, plain = is_tracing, peek_interpreter_stack, torch.Tensor

    def may_keep(scope: Scope) -> bool:
        if scope.cache is None or tracing() or functorch() is not None:
            return False
        return capturing is None or not capturing()

    def kept(tensor: torch.Tensor, target: torch.dtype, cache: Any) -> torch.Tensor:
        found = cache.find(tensor, target, stream_of)
        if found is not None:
            return found  # type: ignore[no-any-return]
        if type(tensor) is plain and (base := tensor._base) is not None:
            found = cache.of_view(tensor, base, target, stream_of) if on_device(tensor) else None
            return tensor if found is None else found
        if is_weight(tensor) and on_device(tensor):
            return cache.add(tensor, target, stream_of)  # type: ignore[no-any-return]
        return tensor

    return may_keep, kept


@functools.cache
def caster(backend: Backend, *, keep: bool) -> Callable[[torch.Tensor, torch.dtype, Scope], torch.Tensor]:
    """Return the function that casts one argument, or finds the kept cast of a weight.

    ``keep`` is False for ops that may return an argument itself: a kept cast must not reach the user.
    """
    return _caster(backend, keep, *keeper(backend))


def telling_caster(backend: Backend, *, keep: bool) -> Callable[[torch.Tensor, torch.dtype, Scope], torch.Tensor]:
    """Return the same function for kernels that are observed: it says which kept casts it finds, and makes."""
    may_keep, kept = keeper(backend)
    return _caster(backend, keep, may_keep, telling_cast(kept))


def _caster(
    backend: Backend, keep: bool, may_keep: Callable[[Scope], bool], kept: Callable[..., torch.Tensor]
) -> Callable[[torch.Tensor, torch.dtype, Scope], torch.Tensor]:
    on_device = backend.tensor_check()

    def cast(tensor: torch.Tensor, target: torch.dtype, scope: Scope) -> torch.Tensor:
        dtype = tensor.dtype
        if dtype is target or dtype not in CASTABLE:
            return tensor
        if keep and dtype is torch.float32 and may_keep(scope):
            tensor = kept(tensor, target, scope.cache)
        if tensor.dtype is target or not on_device(tensor):
            return tensor
        return tensor.to(target)

    return cast


def returns_new(op: OpOverload) -> bool:
    """Tell whether an op surely returns no argument nor a view of one, and runs nobody else's code.

    A kept cast must reach neither. What a schema says is no proof: a composite op may return its input, as dropout
    does in evaluation, and a custom op may do what it likes.
    """
    return overload_name(op) in lower_precision_ops()
