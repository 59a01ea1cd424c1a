"""The calls of one training step, as they are watched them: what made what, where, and the ranges of all of it."""

from __future__ import annotations

import functools
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
from .module_paths import ModulePaths
from .overflow_measures import Identities, Measures, floats_in, plain_of, range_of

__all__ = ["Loss", "OpCall", "Recorder", "Seen"]

Tensors = list[tuple[str, Tensor]]
_LEAST = torch.finfo(torch.float32).smallest_normal
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


@dataclass(frozen=True, slots=True)
class Loss:
    """What became zero in lower precision and would not have in float32; places in the step's measures.

    Five in a row from ``first``: the values that are zero in lower precision only, all that aren't zero in float32, the
    smallest and the largest magnitude of the former, and the largest of the latter.
    """

    first: int


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
        slots = op._schema.arguments
        named = [(slots[i].name, a) for i, a in enumerate(args)] + list(kwargs.items())
        with unwatched():
            given = _plain([(f"{label}{rest}", t) for label, value in named for rest, t in floats_in(value)])
            inputs = [seen for label, t in given if (seen := self.see(t, label)) is not None]
        result = run()
        made = floats_in(result)
        if not made or name.partition("::")[2].startswith(_UNWRITTEN):
            return result
        with unwatched():
            self._take(op, name, (args, kwargs), named, inputs, _plain(made))
        if any(tensor.requires_grad for _, tensor in made):
            self.used.update(seen.number for seen in inputs)
        self._sign(made)
        return result

    def _take(
        self, op: OpOverload, name: str, arguments: tuple[Any, Any], named: Any, inputs: list[Seen], made: Tensors
    ) -> None:
        # What was written to is new, though in inference mode no counter of versions goes up.
        is_known = {label: self._identities.key(tensor) in self._numbers for label, tensor in made}
        fresh = [(label, tensor) for label, tensor in made if op._schema.is_mutable or not is_known[label]]
        if not fresh:
            return
        call = self._call(name, inputs, named)
        if call.is_backward and self.looks_for_underflow:
            call.loss = self._loss(op, arguments[0], arguments[1], fresh)
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

    def _loss(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[tuple[str, Tensor]]
    ) -> Loss | None:
        """Run a call of the backward pass again in float32; measure what was lost."""
        low = [(i, t) for i, (_, t) in enumerate(made) if _can_underflow(t.dtype) and t.numel()]
        tensors = floats_in([args, kwargs])
        if not low or op._schema.is_mutable or _is_no_arithmetic(op) or len(_plain(tensors)) < len(tensors):
            return None
        dtype = low[0][1].dtype
        widen = functools.partial(_widened, lower=dtype)
        try:
            wide = floats_in(op(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()}))
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # it has no float32 form
            return None
        by_label = dict(wide)
        pairs = [(by_label[label].abs(), made_one) for label, made_one in made if label in by_label]
        pairs = [(w.float(), t) for w, t in pairs if t.dtype is dtype and w.shape == t.shape and t.numel()]
        if not pairs:
            return None
        is_lost = [(w != 0) & (t == 0) for w, t in pairs]
        lost = torch.stack([f.sum() for f in is_lost]).sum()
        alive = torch.stack([(w != 0).sum() for w, _ in pairs]).sum()
        most = torch.finfo(torch.float32).max
        least = torch.stack([torch.where(f, w, most).amin() for f, (w, _) in zip(is_lost, pairs, strict=True)]).amin()
        largest = torch.stack([torch.where(f, w, 0).amax() for f, (w, _) in zip(is_lost, pairs, strict=True)]).amax()
        greatest = torch.stack([w.amax() for w, _ in pairs]).amax()
        return Loss(self.measures.add(lost, alive, least, largest, greatest))


@functools.cache
def _can_underflow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).smallest_normal > _LEAST


@functools.cache
def _is_no_arithmetic(op: OpOverload) -> bool:
    """Tell whether a call only hands its input's values on, or draws random ones."""
    is_view = any(a.alias_info is not None for a in op._schema.returns)
    return is_view or torch.Tag.nondeterministic_seeded in op.tags


def _plain(tensors: Tensors) -> Tensors:
    return [(label, plain) for label, tensor in tensors if (plain := plain_of(tensor)) is not None]


def _widened(value: Any, lower: torch.dtype) -> Any:
    if value is lower:
        return torch.float32
    if isinstance(value, Tensor):
        return value.float() if value.dtype is lower else value
    if isinstance(value, list | tuple):
        return type(value)(_widened(item, lower) for item in value)
    return value
