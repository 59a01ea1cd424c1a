"""The calls of one training step, as they are watched them: what made what, where, and the ranges of all of it."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..engine.watching import Run, unwatched
from ..rules.eligibility import overload_name
from .frames import Frame, frame_of
from .lost_gradients import Given, Loss, LostGradients
from .module_paths import ModulePaths
from .overflow_measures import Identities, Measures, floats_in, plain_of, range_of

__all__ = ["OpCall", "Recorder", "Seen"]

Tensors = list[tuple[str, Tensor]]
_METADATA = "mpamp.insight"
_UNWRITTEN = ("empty", "new_empty", "resize", "_resize")
"""Ops with results that nobody has written yet."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor, as it was at one moment.

    Attributes:
        number: It has one among the tensors of the step.
        label: Its argument's name, or where it is in a result.
    """

    number: int
    label: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(slots=True)
class OpCall:
    """One call that made a floating tensor."""

    op: str
    around: tuple[Frame, ...]
    """The calls that it was a part of, and itself, outermost first."""
    module: str | None
    inputs: list[Seen]
    outputs: list[Seen] = field(default_factory=list)
    is_backward: bool = False
    forward: OpCall | None = None
    """Of a call in the backward pass: what it is the derivative of."""
    node: str | None = None
    has_given_infinity: bool = False
    """Whether the caller asked for an inf or NaN, as for a mask."""
    is_differentiable: bool = False
    """Whether a loss may be made of its results."""
    loss: Loss | None = None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[Frame] = []


class Recorder:
    """The calls of one step; an ``Around`` for ``watch_calls``."""

    def __init__(self, paths: ModulePaths, *, looks_for_underflow: bool) -> None:
        self.paths = paths
        self.keeps_whole = False
        """Whether gradients are kept as they would be without underflow."""
        self.looks_for_underflow = looks_for_underflow
        self._stack = _Stack()
        self.begin()

    def begin(self) -> None:
        """Forget the step; the model's tensors are called as they are from now on."""
        self.paths.refresh()
        self.measures = Measures()
        self.calls: list[OpCall] = []
        self.seen: list[tuple[int, OpCall | None]] = []
        """By a tensor's number: the place of its range in the measures, and what made it."""
        self.used: set[int] = set()
        """The tensors that a call of the forward pass took."""
        self._identities = Identities()
        self.lost = LostGradients(self._identities, self.measures, self.keeps_whole)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._writers: dict[int, OpCall] = {}
        self.names: dict[int, str] = {}
        """What a tensor that no call made is, by its number."""

    # -- Calls -----------------------------------------------------------------------------------

    def __call__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        name = overload_name(op)
        calls = self._stack.calls
        calls.append(frame_of(name, args, kwargs))
        try:
            return self._run(op, name, args, kwargs, run)
        finally:
            calls.pop()

    def _run(self, op: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        makes_gradient = self.looks_for_underflow and _makes_gradient()
        slots = op._schema.arguments
        named = [(slots[i].name, a) for i, a in enumerate(args)] + list(kwargs.items())
        with unwatched():
            given = _plain([(f"{label}{rest}", t) for label, value in named for rest, t in floats_in(value)])
            inputs = [seen for label, t in given if (seen := self.see(t, label)) is not None]
            before = self.lost.before(op, args, kwargs) if makes_gradient else None
        result = run()
        made = floats_in(result)
        if not made or name.partition("::")[2].startswith(_UNWRITTEN):
            return result
        with unwatched():
            self._take(op, name, before, named, inputs, _plain(made))
        if any(tensor.requires_grad for _, tensor in made):
            self.used.update(seen.number for seen in inputs)
        self._sign(made)
        return result

    def _take(
        self, op: OpOverload, name: str, before: Given | None, named: Any, inputs: list[Seen], made: Tensors
    ) -> None:
        # What was written to is new, though in inference mode no counter of versions goes up.
        is_known = {label: self._identities.key(tensor) in self._numbers for label, tensor in made}
        fresh = [(label, tensor) for label, tensor in made if op._schema.is_mutable or not is_known[label]]
        if not fresh:
            return
        call = self._call(name, inputs, named)
        if before is not None:
            call.loss = self.lost.after(op, before, fresh)
        call.outputs = [s for label, t in fresh if (s := self.see(t, label, call)) is not None]
        storages = (self._identities.storage(tensor) for _, tensor in fresh)
        self._writers.update({storage: call for storage in storages if storage is not None})
        self.calls.append(call)

    def _call(self, name: str, inputs: list[Seen], named: list[tuple[str, Any]]) -> OpCall:
        node = torch._C._current_autograd_node()
        call = OpCall(name, tuple(self._stack.calls), self.paths.here(), inputs)
        call.has_given_infinity = any(isinstance(v, float) and not math.isfinite(v) for _, v in named)
        if node is not None:
            call.is_backward, call.node = True, node.name()
            call.forward = node.metadata.get(_METADATA)  # type: ignore[attr-defined]
            if call.forward is not None:
                call.module = call.forward.module
        return call

    def _sign(self, made: list[tuple[str, Tensor]]) -> None:
        """Have the nodes of autograd's graph know which call they are of."""
        for _, tensor in made:
            producer = self.producer(tensor) if tensor.requires_grad else None
            if producer is not None:
                producer.is_differentiable = True
                if tensor.grad_fn is not None:
                    tensor.grad_fn.metadata.setdefault(_METADATA, producer)  # type: ignore[attr-defined]

    # -- Tensors -----------------------------------------------------------------------------------

    def see(self, tensor: Tensor, label: str, made_by: OpCall | None = None) -> Seen | None:
        """Measure a tensor, unless that was done; call it outside of what is watched."""
        key = self._identities.key(tensor)
        number = self._numbers.get(key) if key is not None and made_by is None else None
        if number is None:
            found = range_of(tensor)
            if found is None:
                return None
            storage = self._identities.storage(tensor)
            if made_by is None and storage is not None:
                made_by = self._writers.get(storage)
            number = len(self.seen)
            self.seen.append((self.measures.add(*found), made_by))
            if key is not None:
                self._numbers[key] = number
            if made_by is None and storage is not None and (name := self.paths.tensor_name(tensor)) is not None:
                self.names[number] = name
        return Seen(number, label, tensor.dtype, tuple(tensor.shape))

    def producer(self, tensor: Tensor) -> OpCall | None:
        """Return the call that made a tensor."""
        with torch.no_grad():
            plain = plain_of(tensor)
        number = None if plain is None else self._numbers.get(self._identities.key(plain) or ())
        return None if number is None else self.seen[number][1]


def _makes_gradient() -> bool:
    """Tell whether a call makes a gradient, and is not part of a recompute or of a graph of gradients."""
    return torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()


def _plain(tensors: Tensors) -> Tensors:
    return [(label, plain) for label, tensor in tensors if (plain := plain_of(tensor)) is not None]
