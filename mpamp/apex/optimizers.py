"""Making an optimizer amp's: step hooks, which leave ``step`` itself alone, and the methods that apex attached."""

from __future__ import annotations

import functools
import sys
from types import FrameType, MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from . import blocks
from .errors import AmpAssertionError, AmpAttributeError, AmpTypeError, AmpUsageError
from .masterstash import MasterStash, make_stash, refuse_dtype
from .scaler import LossScaler
from .stash import Stash
from .state import say

__all__ = ["attach", "detach", "refuse_attached", "refuse_dtype", "stash_of"]

_METHODS = (
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_amp_lazy_init",
)
_KEPT = ("add_param_group", "zero_grad")


class _Attached:
    """What was added to an optimizer, and how it is taken off."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.handles = [
            optimizer.register_step_pre_hook(_before_step),
            optimizer.register_step_post_hook(_after_step),
        ]
        self.frame: FrameType | None = None
        """The call of ``step`` that is running, the outermost where one calls another."""
        self.is_skipping = False
        self.casts_off: Any = None


def stash_of(optimizer: Any) -> Stash:
    """Return what amp keeps about an optimizer.

    Raises:
        AmpAttributeError: It was never passed through ``initialize``.
    """
    stash = getattr(optimizer, "_amp_stash", None)
    if not isinstance(stash, Stash):
        raise AmpAttributeError(
            f"this {type(optimizer).__name__} was never passed through amp.initialize, so amp can't unscale its "
            "gradients: model, optimizer = amp.initialize(model, optimizer, opt_level=...)."
        )
    return stash


def attach(optimizer: Optimizer, exact: dict[Tensor, Tensor] | None) -> None:
    """Have amp unscale, skip and, with ``exact`` values to start from, keep master weights for an optimizer.

    Raises:
        AmpUsageError: It has been attached already, or has attributes that amp needs.
    """
    refuse_attached(optimizer)
    stash: Any = make_stash(optimizer, exact)
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # torch casts it to the dtypes that it is stepped in
    given: Any = optimizer
    given._amp_stash = stash
    given._amp_attached = _Attached(optimizer)
    given._lazy_init_maybe_master_weights = MethodType(_nothing, optimizer)
    given._amp_lazy_init = MethodType(_nothing, optimizer)
    given._prepare_amp_backward = MethodType(_prepare, optimizer)
    given._post_amp_backward = MethodType(_post, optimizer)
    given.add_param_group = _method(optimizer, "add_param_group", _add_param_group)
    if isinstance(stash, MasterStash):
        given._master_params_to_model_params = MethodType(_write_back, optimizer)
        given.zero_grad = _method(optimizer, "zero_grad", _zero_grad)


def refuse_attached(optimizer: Optimizer) -> None:
    """Refuse an optimizer that amp has attached itself to, or can't attach itself to.

    Raises:
        AmpUsageError: As said.
    """
    if hasattr(optimizer, "_amp_stash"):
        raise AmpUsageError(
            "an optimizer should only be passed through amp.initialize once. Pass all models and optimizers in one "
            "call, as lists; or call amp.shutdown() before a second one."
        )
    taken = [name for name in _METHODS if hasattr(optimizer, name)]
    if taken:
        raise AmpUsageError(f"incoming optimizer already has {', '.join(taken)}, which amp needs for itself.")


def detach(optimizer: Optimizer) -> None:
    """Give an optimizer back as it was; its state stays, in float32 where it had masters."""
    if not hasattr(optimizer, "_amp_stash"):
        return
    stash_of(optimizer).release()
    for handle in vars(optimizer)["_amp_attached"].handles:
        handle.remove()
    for name in ("_amp_stash", "_amp_attached", *_METHODS, *_KEPT):
        vars(optimizer).pop(name, None)


def _method(optimizer: Optimizer, name: str, function: Any) -> MethodType:
    """Return ``function`` as the optimizer's method ``name``, given the one that it replaces."""
    original = getattr(optimizer, name)

    @functools.wraps(original)
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    return MethodType(method, optimizer)


# -- Attached methods --------------------------------------------------------------------------------


def _nothing(self: Any) -> None:
    """Do nothing: masters are there from the start."""


def _prepare(self: Any) -> None:
    stash_of(self).prepare()


def _post(self: Any, loss_scaler: LossScaler) -> None:
    stash_of(self).finish(loss_scaler, set(), check=loss_scaler.dynamic)


def _write_back(self: Any) -> None:
    self._amp_stash.write_back()


def _zero_grad(original: Any, self: Any, set_to_none: bool = False) -> None:
    self._amp_stash.zero_grad(set_to_none)


def _add_param_group(original: Any, self: Any, param_group: dict[str, Any]) -> None:
    if not isinstance(param_group, dict):
        raise AmpAssertionError(f"param_group is a dict with the key 'params', got {type(param_group).__name__}.")
    if isinstance(param_group.get("params"), set | frozenset):
        raise AmpTypeError("the parameters of a group are a list or another ordered collection, not a set.")
    original(param_group)
    if isinstance(self._amp_stash, MasterStash):
        try:
            self._amp_stash.refresh()
        except Exception:
            self.param_groups.pop()
            raise


# -- Around a step -----------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    attached, stash = vars(optimizer)["_amp_attached"], stash_of(optimizer)
    if attached.frame is not None:
        if blocks.is_running(attached.frame):
            return None
        _leave(optimizer)  # an earlier step raised
    attached.frame = sys._getframe(1)
    stash.before_step()
    closure_at = 1 if len(args) > 1 else None
    closure = args[1] if closure_at else kwargs.get("closure")
    if closure is None:
        attached.is_skipping = _take_skip(stash)
    attached.casts_off = blocks.enter_casts_off(attached.frame)
    if closure is None:
        return None
    wrapped = _closure(optimizer, closure)
    return ((*args[:1], wrapped, *args[2:]), kwargs) if closure_at else (args, {**kwargs, "closure": wrapped})


def _closure(optimizer: Optimizer, closure: Any) -> Any:
    attached, stash = vars(optimizer)["_amp_attached"], stash_of(optimizer)

    @functools.wraps(closure, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        stash.before_closure()
        with blocks.casts_on():
            loss = closure(*args, **kwargs)
        if _take_skip(stash):
            attached.is_skipping = True
        return loss

    return wrapped


def _take_skip(stash: Stash) -> bool:
    """Take gradients that overflowed away from the step that is to come; tell whether there were any."""
    if not stash.already_patched:
        return False
    stash.already_patched = False
    if stash.skipped_by is not None:
        scaler, loss_id = stash.skipped_by
        _announce(scaler, loss_id)
    stash.hide()
    return True


def _announce(scaler: LossScaler, loss_id: int) -> None:
    scaler.skips += 1
    if scaler.skips > 10 and scaler.skips & (scaler.skips - 1):
        return
    often = f"  ({scaler.skips} so far.)" if scaler.skips > 10 else ""
    say(f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}{often}")
    if scaler.skips == 1 and scaler.dynamic:
        say("This is no error: a dynamic loss scale starts high, and goes down until gradients fit.")


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    attached = vars(optimizer)["_amp_attached"]
    if attached.frame is sys._getframe(1):
        skipped = attached.is_skipping
        _leave(optimizer)
        stash_of(optimizer).after_step(skipped=skipped)


def _leave(optimizer: Optimizer) -> None:
    attached = vars(optimizer)["_amp_attached"]
    casts_off, attached.casts_off = attached.casts_off, None
    attached.frame, attached.is_skipping = None, False
    blocks.leave_casts_off(casts_off)
