"""The calls of one training step, as they are watched them: what made what, where, and the ranges of all of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..engine.watching import Run, unwatched
from ..rules.eligibility import overload_name
from ..torch_internals import OpOverload, current_autograd_node
from .frames import Frame, frame_of
from .lost_gradients import Given, Loss, LostGradients
from .module_paths import ModulePaths
from .overflow_measures import Identities, Measures, floats_in, plain_of, range_of

__all__ = ["OpCall", "Recorder", "Seen", "widened"]

Tensors = list[tuple[str, Tensor]]
_METADATA = "mpamp.insight"
T = TypeVar("T")
_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "set_"}
)
"""Ops whose first argument's values don't matter."""
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
    now: int | None = None
    """The place of its range when a call took it, where another call had made it: it may have been written unseen."""


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
    wide: int | None = None
    """The place of the range of its results in float32, where it was run again so."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[Frame] = []


class Recorder:
    """The calls of one step; an ``Around`` for ``watch_calls``."""

    def __init__(self, paths: ModulePaths, *, looks_for_underflow: bool) -> None:
        self.paths = paths
        self.keeps_whole = False
        """Whether gradients are kept as they would be without underflow."""
        self.tries_alone = True
        """Whether each call in a lower dtype is run again in float32, to know whether that would help."""
        self.kept: tuple[int, str] | None = None
        """The call whose arguments are kept when it comes: its place among those of its op in the step, and the op."""
        self.problems: dict[str, None] = {}
        """What couldn't be looked at, and why."""
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
        self._running = threading.local()
        self._identities = Identities()
        self.lost = LostGradients(self._identities, self.measures, self.keeps_whole)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._writers: dict[int, OpCall] = {}
        self.names: dict[int, str] = {}
        """What a tensor that no call made is, by its number."""
        self.given: set[int] = set()
        """The model's own inputs, by their numbers."""
        self.arguments: dict[str, Any] | None = None
        """Of the call that was to be kept: copies, by their names."""

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
        depth = getattr(self._running, "depth", 0)
        if depth and self.looked(lambda: self._is_of_scratch(named)):
            return run()
        inputs = self.looked(lambda: self._inputs(op, name, named)) or []
        before = self.looked(lambda: self.lost.before(op, args, kwargs)) if makes_gradient else None
        self._running.depth = depth + 1
        try:
            result = run()
        finally:
            self._running.depth = depth
        made = floats_in(result)
        if not made or name.partition("::")[2].startswith(_UNWRITTEN):
            return result
        self.looked(lambda: self._take(op, name, (args, kwargs), before, named, inputs, _plain(made)))
        if any(tensor.requires_grad for _, tensor in made):
            self.used.update(seen.number for seen in inputs)
        self.looked(lambda: self._sign(made), is_watched=True)
        return result

    def looked(self, look: Callable[[], T], *, is_watched: bool = False) -> T | None:
        """Look at something; None if that fails, for what is looked at is a script that runs without it."""
        try:
            with contextlib.nullcontext() if is_watched else unwatched():
                return look()
        except Exception as error:
            self.problems[f"{type(error).__name__}: {error}".partition("\n")[0]] = None
            return None

    def _is_of_scratch(self, named: list[tuple[str, Any]]) -> bool:
        """Tell whether a call inside of another op's is of its own memory alone, which nobody may have written."""
        given = [tensor for _, value in named for _, tensor in floats_in(value)]
        return bool(given) and not any(self._identities.knows(tensor) for tensor in given)

    def _inputs(self, op: OpOverload, name: str, named: list[tuple[str, Any]]) -> list[Seen]:
        """Measure what a call takes; memory that it only writes to is none of that."""
        written = _written_over(op)
        if self.kept is not None and self.kept == (sum(call.op == name for call in self.calls), name):
            self.arguments = {label: _copied(value) for label, value in named}
        taken = [(label, value) for label, value in named if label not in written]
        given = _plain([(f"{label}{rest}", t) for label, value in taken for rest, t in floats_in(value)])
        return [seen for label, t in given if (seen := self._see_at_use(t, label)) is not None]

    def _see_at_use(self, tensor: Tensor, label: str) -> Seen | None:
        count = len(self.seen)
        seen = self.see(tensor, label)
        if seen is None or seen.number >= count or self.seen[seen.number][1] is None:
            return seen
        found = range_of(tensor)
        return seen if found is None else dataclasses.replace(seen, now=self.measures.add(*found))

    def _take(
        self,
        op: OpOverload,
        name: str,
        arguments: tuple[Any, Any],
        before: Given | None,
        named: Any,
        inputs: list[Seen],
        made: Tensors,
    ) -> None:
        # What was written to is new, though in inference mode no counter of versions goes up.
        is_known = {label: self._identities.key(tensor) in self._numbers for label, tensor in made}
        fresh = [(label, tensor) for label, tensor in made if op._schema.is_mutable or not is_known[label]]
        if not fresh:
            return
        call = self._call(name, inputs, named)
        if before is not None:
            call.loss = self.lost.after(op, before, fresh)
        if self.tries_alone and not op._schema.is_mutable:
            call.wide = self._alone(op, *arguments, fresh)
        call.outputs = [s for label, t in fresh if (s := self.see(t, label, call)) is not None]
        storages = (self._identities.storage(tensor) for _, tensor in fresh)
        self._writers.update({storage: call for storage in storages if storage is not None})
        self.calls.append(call)

    def _call(self, name: str, inputs: list[Seen], named: list[tuple[str, Any]]) -> OpCall:
        node = current_autograd_node()
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

    def _alone(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensors) -> int | None:
        """Run a call again in float32, where it ran in a lower dtype; return the place of its results' range."""
        tensors = [t for _, t in (*floats_in([args, kwargs]), *made)]
        if not any(_is_lower(t.dtype) for t in tensors) or torch.Tag.nondeterministic_seeded in op.tags:
            return None
        try:
            wide = op(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()})
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # it has no float32 form
            return None
        ranges = [found for _, t in floats_in(wide) if (found := range_of(t)) is not None]
        if not ranges:
            return None
        least = torch.stack([least.float() for least, _ in ranges]).amin()
        return self.measures.add(least, torch.stack([greatest.float() for _, greatest in ranges]).amax())

    # -- Tensors -----------------------------------------------------------------------------------

    def take_as_given(self, value: Any) -> None:
        """Know that tensors are the model's inputs."""
        for _, tensor in floats_in(value):
            plain = plain_of(tensor)
            seen = None if plain is None else self.see(plain, "input")
            if seen is not None and self.seen[seen.number][1] is None:
                self.given.add(seen.number)

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
    return current_autograd_node() is not None and not torch.is_grad_enabled()


@functools.cache
def _written_over(op: OpOverload) -> frozenset[str]:
    """Return the arguments that a call writes to whatever they hold."""
    slots = op._schema.arguments
    written = [slot.name for slot in slots if slot.is_out]
    if op._schema.name.partition("::")[2] in _OVERWRITING:
        written.append(slots[0].name)
    return frozenset(written)


def _is_lower(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def widened(value: Any) -> Any:
    """Return a call's argument such that it runs in float32 rather than in a lower dtype."""
    if isinstance(value, Tensor):
        return value.float() if _is_lower(value.dtype) else value
    if isinstance(value, torch.dtype):
        return torch.float32 if _is_lower(value) else value
    if isinstance(value, list | tuple):
        return type(value)([widened(item) for item in value])
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(tensors: Tensors) -> Tensors:
    return [(label, plain) for label, tensor in tensors if (plain := plain_of(tensor)) is not None]
