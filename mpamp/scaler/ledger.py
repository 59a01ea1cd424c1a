"""Which gradients are unscaled since the last update, and to which a scaled one was added after that."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ScalerUsageError
from .gradients import gradients_of, name_gradients, parameters_of, unique
from .passes import Passes

__all__ = ["Ledger", "Share"]

Optimizer = torch.optim.Optimizer
Reference = Callable[[], "Tensor | None"] | None
Share = tuple["Tensor | None", list[Tensor]]
"""Gradients that are unscaled, unless the tensor beside them, if there is one, is 1."""


class _Entry:
    """A parameter, or several with one gradient, as an optimizer's unscaling left it."""

    __slots__ = ("at_pass", "grad", "is_mixed", "is_scaled", "record")

    def __init__(self, record: _Record, grad: Reference) -> None:
        self.record = record
        self.grad = grad
        self.at_pass = grad
        """The gradient when the first backward pass after the unscaling began; or one that an unscaled loss left."""
        self.is_scaled = False
        """Whether a scaled gradient has arrived since; what was there was scaled again then."""
        self.is_mixed = False
        """Whether one was added out of autograd's sight, as FSDP2 does: nobody can divide only a part."""

    @property
    def skip(self) -> Tensor | None:
        """The record's, if its kernel has seen a gradient here."""
        return None if self.grad is None else self.record.skip


class _Record:
    """One optimizer's unscaling. Gradients are held weakly: to hold them until the update would cost memory."""

    __slots__ = ("grads", "is_blind", "is_known", "is_within", "optimizer", "params", "passes", "skip", "state")

    def __init__(self, optimizer: Optimizer, state: dict[str, Any], ledger: Ledger) -> None:
        self.optimizer = optimizer
        self.state = state
        self.params = parameters_of(optimizer)
        self.grads = [_reference(param.grad) for param in self.params]
        self.passes = ledger.passes.count
        self.is_within = ledger.passes.running > 0
        """Whether it was within a backward pass, as from a parameter's hook: others' gradients were to come."""
        self.is_blind = not ledger.passes.has_seen_losses
        """Whether no loss was watched before: passes then go unseen, as where a subclass scales by itself."""
        self.skip: Tensor | None = None
        """Shape []; if it is 1, the fused kernel skipped and left the gradients scaled."""
        self.is_known = True
        """Whether the gradients' scale is known: what a fused kernel of others leaves isn't."""


class Ledger:
    """What was unscaled since the last update, and what came after."""

    def __init__(self, states: object = None) -> None:
        self._states = states
        self._records: dict[int, _Record] = {}
        self._fresh: list[_Record] = []
        """Records whose parameters have no entry yet: nobody has asked."""
        self._unwatched: list[_Record] = []
        self._by_param: dict[int, _Entry] = {}
        self._by_grad: dict[int, _Entry] = {}
        self.passes = Passes(self)
        self._passes_before = 0

    # What the scaler says:

    def begin(self, states: object) -> None:
        """Forget everything, unless the optimizers' states are those known: an update makes new ones.

        A subclass may make them by itself, so they are looked at rather than the calls of ``update``.
        """
        if states is self._states:
            return
        self.passes.leave()
        self._states = states
        self._records, self._fresh, self._unwatched = {}, [], []
        self._by_param, self._by_grad = {}, {}
        self._passes_before = self.passes.count

    def open(self, states: dict[int, dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state. If it is a new one, made by the user, what it was like before is forgotten."""
        self.begin(states)
        state = states[id(optimizer)]
        record = self._records.get(id(optimizer))
        if record is not None and record.state is not state:
            self._forget(record)
        return state

    def _forget(self, record: _Record) -> None:
        del self._records[id(record.optimizer)]
        for index in (self._by_param, self._by_grad):
            for key in [key for key, entry in index.items() if entry.record is record]:
                del index[key]
        for records in (self._fresh, self._unwatched):
            if record in records:
                records.remove(record)

    def record(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Note that an optimizer's gradients are unscaled now."""
        record = _Record(optimizer, state, self)
        self._records[id(optimizer)] = record
        self._fresh.append(record)
        self._unwatched.append(record)

    def record_fused(self, optimizer: Optimizer, state: dict[str, Any], found_inf: Tensor, *, is_known: bool) -> None:
        """Note that an optimizer's kernel has unscaled its gradients, unless it skipped."""
        self.record(optimizer, state)
        record = self._records[id(optimizer)]
        record.skip, record.is_known = found_inf, is_known

    # What the scaler asks:

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers whose gradients were looked at since the last update."""
        return [record.optimizer for record in self._records.values()]

    def has_passed(self) -> bool:
        """Tell whether a backward pass of a scaled loss has begun since the last update."""
        return self.passes.count > self._passes_before

    def split(self, optimizer: Optimizer) -> tuple[list[Tensor], list[Share]]:
        """Split an optimizer's gradients into the scaled ones, and shares of those that are unscaled.

        Raises:
            ScalerUsageError: It can't be known which of the two one is.
        """
        if not self._records:
            return gradients_of(optimizer), []
        scaled, shares = [], dict[int, Share]()
        for param in parameters_of(optimizer):
            grad = param.grad
            if grad is None:
                continue
            entry = self._unscaled(optimizer, param, grad)
            if entry is None:
                scaled.append(grad)
            else:
                shares.setdefault(id(entry.skip), (entry.skip, []))[1].append(grad)
        return unique(scaled), [(skip, unique(grads)) for skip, grads in shares.values()]

    def shares(self, optimizer: Optimizer) -> bool:
        """Tell whether a gradient of the optimizer was unscaled since the last update.

        Raises:
            ScalerUsageError: It can't be known.
        """
        return bool(self.split(optimizer)[1])

    def has_late(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer that was unscaled has gradients that it wasn't unscaled, and checked, with.

        Raises:
            ScalerUsageError: It can't be known.
        """
        record = self._records.get(id(optimizer))
        if record is None or record.is_blind:
            return False
        params = parameters_of(optimizer)
        is_quiet = record.passes == self.passes.count and not record.is_within
        if is_quiet and list(map(id, record.params)) == list(map(id, params)):
            return False
        entries = [self._unscaled(optimizer, param, grad) for param in params if (grad := param.grad) is not None]
        return any(entry is None or entry.record is not record for entry in entries)

    def _unscaled(self, optimizer: Optimizer, param: Tensor, grad: Tensor) -> _Entry | None:
        """Return the entry of a gradient that is unscaled, or None if it is scaled."""
        entry = self._entry(param, grad)
        if entry is None or entry.is_scaled:
            return None
        record, reference = entry.record, weakref.ref(grad)
        if entry.is_mixed or not record.is_known:
            raise _refusal(optimizer, grad)
        if entry.grad is reference:
            return entry
        # Another tensor: put there by the user, or by a pass that doesn't end in the parameter, as under FSDP.
        if record.is_blind or (record.is_within and entry.grad is None):
            return None
        if record.passes == self.passes.count or entry.at_pass is reference:
            return entry
        if entry.at_pass is None:
            return None
        raise _refusal(optimizer, grad)

    def _entry(self, param: Tensor, grad: Tensor | None) -> _Entry | None:
        for record in self._fresh:
            for each, reference in zip(record.params, record.grads, strict=True):
                self._enter(record, each, reference)
        self._fresh = []
        found = None if grad is None else self._by_grad.get(id(grad))
        if found is not None and found.grad is weakref.ref(grad):
            return found
        return self._by_param.get(id(param))

    def _enter(self, record: _Record, param: Tensor, reference: Reference) -> None:
        grad = None if reference is None else reference()
        entry = None if grad is None else self._by_grad.get(id(grad))
        if entry is None or entry.record is not record or entry.grad is not reference:
            entry = _Entry(record, reference)
        self._by_param[id(param)] = entry
        if grad is not None:
            self._by_grad[id(grad)] = entry

    # What autograd says:

    def begins(self) -> list[Tensor]:
        """Take note of a backward pass that begins; return the parameters whose gradients are to be told of."""
        records, self._unwatched = self._unwatched, []
        for record in records:
            for param in record.params:
                entry = self._entry(param, None)
                assert entry is not None
                entry.at_pass = _reference(param.grad)
        return [param for record in records for param in record.params]

    def arrives(self, param: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Take note of a scaled gradient that is about to be added to what a parameter has.

        Returns:
            What it has, if that is unscaled and so has to be scaled before, to be unscaled with the new one; and the
            tensor that is 1 if it is scaled after all. Each may be None.
        """
        grad = param.grad
        entry = self._entry(param, grad)
        if entry is None or entry.is_scaled:
            return None, None
        entry.is_scaled = self._by_param[id(param)].is_scaled = True
        if grad is None:  # FSDP1 has put away what it will add the new one to
            grad = getattr(param, "_saved_grad_shard", None)
        return grad, entry.skip

    def accumulated(self, param: Tensor, *, is_scaled: bool) -> None:
        """Take note of a gradient that has been added: unscaled, or past ``arrives``, as FSDP2 adds it."""
        grad = param.grad
        entry = self._entry(param, grad)
        if grad is None or entry is None or entry.is_scaled:
            return
        if not is_scaled:
            entry.at_pass = weakref.ref(grad)
        elif entry.grad is weakref.ref(grad):
            entry.is_mixed = True
        else:
            entry.is_scaled = True


def _reference(grad: Tensor | None) -> Reference:
    return None if grad is None else weakref.ref(grad)


def _refusal(optimizer: Optimizer, grad: Tensor) -> ScalerUsageError:
    names = name_gradients(optimizer, lambda other: other is grad)
    return ScalerUsageError(
        f"whether the gradient of {names} is scaled can't be known: it was unscaled, and then a fused kernel, a "
        "sharded accumulation or an assignment after another backward pass may have put a scaled one in its place. "
        "Change unscaled gradients in place; call zero_grad(set_to_none=True) before a backward pass whose gradients "
        "are assigned; of optimizers that share parameters call scaler.unscale_() with all before one of them steps."
    )
