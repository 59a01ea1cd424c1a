"""Making an optimizer amp's: its steps are watched, and it gets the methods that apex attached."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from . import blocks
from .errors import AmpAssertionError, AmpAttributeError, AmpTypeError, AmpUsageError
from .holding import Values, is_optimizer, refuse_incomplete, with_wrapped
from .masterstash import MasterStash, make_stash
from .scaler import LossScaler
from .stash import Stash
from .state import say
from .state import state as amp_state
from .steps import Watch, was_called

__all__ = ["attach", "attached", "catch_up", "only_attached", "refuse_attached", "stash_of"]

_METHODS = (
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_amp_lazy_init",
)
_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def attached() -> list[Attachment]:
    """Return what is attached to optimizers that are alive."""
    return list(_attachments)


def only_attached(attachments: Iterable[Attachment]) -> None:
    """Know of these from now on, and of no others."""
    _attachments.clear()
    _attachments.update(attachments)


def stash_of(optimizer: Any) -> Stash:
    """Return what amp keeps about an optimizer, or about the one that it has been wrapped around since.

    Raises:
        AmpAttributeError: It was never passed through ``initialize``.
    """
    stash = getattr(optimizer, "_amp_stash", None)
    if isinstance(stash, Stash):
        return stash
    for attachment in _attachments if is_optimizer(optimizer) else ():
        if attachment.is_inside(optimizer):
            attachment.watch(optimizer)
            return attachment.stash
    raise AmpAttributeError(
        f"this {type(optimizer).__name__} was never passed through amp.initialize, so amp can't unscale its "
        "gradients: model, optimizer = amp.initialize(model, optimizer, opt_level=...)."
    )


def refuse_attached(optimizers: Iterable[Any]) -> None:
    """Refuse optimizers that amp has attached itself to, or can't attach itself to.

    Raises:
        AmpAttributeError: One can't be stepped.
        AmpUsageError: One has gone through ``initialize``, is listed twice, or has attributes that amp needs.
    """
    seen: list[Any] = []
    for optimizer in optimizers:
        if any(optimizer is known for known in seen):
            raise AmpUsageError(
                "an optimizer should only be passed through amp.initialize once; one is listed twice, or beside an "
                "optimizer that wraps it."
            )
        refuse_incomplete(optimizer)
        seen += with_wrapped(optimizer)
    for optimizer in seen:
        if hasattr(optimizer, "_amp_stash"):
            raise AmpUsageError(
                "an optimizer should only be passed through amp.initialize once. Pass all models and optimizers in one "
                "call, as lists; or call amp.shutdown() before a second one."
            )
        taken = [name for name in _METHODS if hasattr(optimizer, name)]
        if taken:
            raise AmpUsageError(f"incoming optimizer already has {', '.join(taken)}, which amp needs for itself.")


class Attachment:
    """What amp has added to an optimizer and to those that it wraps, and what it does around their steps."""

    def __init__(self, optimizer: Any, stash: Stash) -> None:
        self.stash = stash
        self.watches: list[Watch] = []
        self.handles: list[Any] = []
        self._is_running = False
        for each in with_wrapped(optimizer):
            self.watch(each)
        _attachments.add(self)

    def watch(self, optimizer: Any) -> None:
        """Watch an optimizer's steps."""
        self.watches.append(Watch(optimizer, self._around, self._attributes(optimizer)))
        if isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self.handles.append(optimizer.register_step_pre_hook(self._before_unseen))
            self.handles.append(optimizer.register_step_post_hook(self._after_unseen))

    def is_inside(self, optimizer: Any) -> bool:
        """Tell whether another optimizer wraps one of those, or steps the very groups."""
        own = {id(watch.optimizer) for watch in self.watches} | {id(g) for g in self.stash.optimizer.param_groups}
        return any(id(part) in own for part in [*with_wrapped(optimizer), *optimizer.param_groups])

    def stop(self) -> None:
        """Give the optimizers back as they were; their state stays, in float32 where they had masters."""
        for watch in reversed(self.watches):
            watch.stop()
        for handle in self.handles:
            handle.remove()
        self.stash.release()
        _attachments.discard(self)

    # -- Around a step ---------------------------------------------------------------------------------

    def _around(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_running:  # one that the step calls, its parent's or a wrapped optimizer's
            return step(*args, **kwargs)
        self._is_running = True
        try:
            closure = args[0] if args else kwargs.get("closure")
            if callable(closure):
                self.stash.before_step()
                return self._with_closure(step, closure, args, kwargs)
            if _take_skip(self.stash):
                for watch in self.watches:
                    was_called(watch.optimizer)
                self.stash.after_step(skipped=True)
                return None
            self.stash.refuse_scaled()
            self.stash.before_step()
            with blocks.casts_off():
                result = step(*args, **kwargs)
            self.stash.after_step(skipped=False)
            return result
        finally:
            self._is_running = False

    def _with_closure(self, step: Callable[..., Any], closure: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        stash = self.stash
        before = Values(stash.optimizer) if _may_skip() else None

        @functools.wraps(closure, updated=())
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            stash.before_closure()
            with blocks.casts_on():
                loss = closure(*args, **kwargs)
            if _take_skip(stash):
                raise _Overflow(loss)
            return loss

        if args:
            args = (wrapped, *args[1:])
        else:
            kwargs = {**kwargs, "closure": wrapped}
        try:
            with blocks.casts_off():
                result = step(*args, **kwargs)
        except _Overflow as overflow:
            if before is not None:
                before.put_back()
            stash.before_closure()
            stash.after_step(skipped=True)
            return overflow.loss
        stash.after_step(skipped=False)
        return result

    def _before_unseen(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before a step of torch's that wasn't called as ``optimizer.step``: a method that was fetched earlier."""
        if not self._is_running:
            if _take_skip(self.stash):
                self.stash.hide()
            self.stash.refuse_scaled()
            self.stash.before_step()

    def _after_unseen(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_running:
            self.stash.after_step(skipped=self.stash.unhide())

    # -- Attached attributes ---------------------------------------------------------------------------

    def _attributes(self, optimizer: Any) -> dict[str, Any]:
        stash, cls = self.stash, type(optimizer)
        found: dict[str, Any] = {
            "_amp_stash": stash,
            "_amp_attached": self,
            "_lazy_init_maybe_master_weights": _nothing,
            "_amp_lazy_init": _nothing,
            "_prepare_amp_backward": lambda self: stash.prepare(),
            "_post_amp_backward": lambda self, scaler: stash.finish(scaler, set(), check=scaler.dynamic),
        }
        if isinstance(stash, MasterStash):
            found.update((name, self._followed(function)) for name, function in _own_methods(cls))
        if hasattr(cls, "add_param_group"):
            found["add_param_group"] = _add_param_group(cls.add_param_group, stash)
        if isinstance(stash, MasterStash):
            found["_master_params_to_model_params"] = lambda self: stash.write_back()
            found["zero_grad"] = _zero_grad(getattr(cls, "zero_grad", stash.zero_grad), stash)
        return found

    def _followed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of an optimizer's own, which may write into masters, with the model following it."""

        @functools.wraps(function)
        def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(optimizer, *args, **kwargs)
            if not self._is_running:
                self.stash.settle()
            return result

        return method


def _own_methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods that an optimizer's class has beside those of torch's, ``swap_swa_sgd`` say."""
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if isinstance(function, FunctionType) and not name.startswith("_") and not hasattr(Optimizer, name):
            yield name, function


class _Overflow(BaseException):
    """Ends a step in whose closure gradients overflowed; no handler of ``Exception`` takes it."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss


def _nothing(self: Any) -> None:
    """Do nothing: masters are there from the start."""


def _zero_grad(original: Any, stash: MasterStash) -> Any:
    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = False) -> None:
        stash.zero_grad(set_to_none)

    return zero_grad


def _add_param_group(original: Any, stash: Stash) -> Any:
    @functools.wraps(original)
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        if not isinstance(param_group, dict):
            raise AmpAssertionError(f"param_group is a dict with the key 'params', got {type(param_group).__name__}.")
        if isinstance(param_group.get("params"), set | frozenset):
            raise AmpTypeError("the parameters of a group are a list or another ordered collection, not a set.")
        count = len(self.param_groups)
        original(self, param_group)
        try:
            stash.refresh()
        except Exception:
            del self.param_groups[count:]
            raise

    return add_param_group


def attach(optimizer: Any, exact: dict[Tensor, Tensor] | None) -> None:
    """Have amp unscale, skip and, with ``exact`` values to start from, keep master weights for an optimizer.

    Raises:
        AmpUsageError: Its steps can't be seen, or its groups can't be changed.
    """
    stash = make_stash(optimizer, exact)
    for each in with_wrapped(optimizer):
        _cast_state(each)
    Attachment(optimizer, stash)


def catch_up() -> None:
    """Carry over to their models what others than steps have written into masters."""
    for attachment in _attachments:
        attachment.stash.catch_up()


def _cast_state(optimizer: Any) -> None:
    """Cast what an optimizer has of each parameter to the dtype that this is stepped in, as torch does on loading."""
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            of_p: Any = state.get(p) if p.is_floating_point() else None
            for name, value in list(of_p.items()) if isinstance(of_p, dict) else ():
                if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    of_p[name] = value.to(p.dtype)


def _may_skip() -> bool:
    return any(scaler.dynamic for scaler in getattr(amp_state, "loss_scalers", []))


def _take_skip(stash: Stash) -> bool:
    """Tell whether the step that is to come is skipped, and say so; the one after it isn't."""
    if not stash.already_patched:
        return False
    stash.already_patched = False
    if stash.skipped_by is not None:
        scaler, loss_id = stash.skipped_by
        _announce(scaler, loss_id)
    return True


def _announce(scaler: LossScaler, loss_id: int) -> None:
    scaler.skips += 1
    if scaler.skips > 10 and scaler.skips & (scaler.skips - 1):
        return
    often = f"  ({scaler.skips} so far.)" if scaler.skips > 10 else ""
    say(f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}{often}")
    if scaler.skips == 1 and scaler.dynamic:
        say("This is no error: a dynamic loss scale starts high, and goes down until gradients fit.")
