"""What gradients lack because values underflowed on the way to them: found call by call, in float32.

Each tensor of a backward pass that lacks something has a float32 tensor beside it, with the values that it would have
besides. A call is run again in float32 with its arguments as they were and as they would have been: the difference
goes on. To it comes what the call itself lost: results too small for the lower dtype, but nothing that is only rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_internals import OpOverload
from .overflow_measures import Identities, Measures, floats_in, plain_of

__all__ = ["Given", "Loss", "LostGradients"]

_LEAST = torch.finfo(torch.float32).smallest_normal
_NO_FORM = Exception
"""What an op raises that can't run in float32: anything, and none of it is the script's."""
_ROUNDING = 4 * torch.finfo(torch.float16).eps
_SUMS = frozenset({"sum", "mm", "addmm", "bmm", "baddbmm", "convolution_backward"})
"""Ops whose results may be all rounding: a bias before a norm, or of an attention's keys, has no gradient."""
_COPIES = frozenset({"_to_copy", "clone", "copy_"})
Labeled = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Loss:
    """Norms of what a call's results lack; places in the step's measures.

    Three in a row from ``first``: of what the call itself lost, of what its arguments lacked, as its results lack it,
    and of the results as they would be.
    """

    first: int


class Given(NamedTuple):
    """What a call is given, and by a tensor's identity what that lacks."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lacking: dict[int, Tensor]


class LostGradients:
    """What the gradients of one step lack. Call its methods where nothing is watched."""

    def __init__(self, identities: Identities, measures: Measures, keeps_whole: bool = False) -> None:
        self._identities, self._measures = identities, measures
        self._beside: dict[int, Tensor] = {}
        """By a storage: float32 values for each element of it."""
        self._noise: dict[int, Tensor] = {}
        """By a storage of a sum's result: the norm of what rounding in a lower dtype may make of it."""
        self.whole: dict[str, Tensor] | None = {} if keeps_whole else None
        """Gradients as they would be, where they are to be kept."""

    # -- Calls -------------------------------------------------------------------------------------

    def before(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        """Return what a call that makes a gradient is given, as it is before the call writes to it."""
        if _only_views(op) or torch.Tag.nondeterministic_seeded in op.tags:
            return None
        given = floats_in([args, kwargs])
        if any(plain_of(t) is not t for _, t in given):
            return None
        lacking = {id(t): lack for _, t in given if (lack := self._lack(t)) is not None}
        if op._schema.is_mutable and (lacking or any(_can_underflow(t.dtype) for _, t in given)):
            slots = zip(args, op._schema.arguments, strict=False)
            args = tuple([_kept(a, lacking) if s.alias_info is not None else a for a, s in slots])
        return Given(args, kwargs, lacking)

    def after(self, op: OpOverload, given: Given, made: Labeled) -> Loss | None:
        """Take note of what a call's results lack."""
        if not given.lacking and not any(_can_underflow(t.dtype) and t.numel() for _, t in made):
            return None
        again = functools.partial(_run_again, op, given)
        try:
            plain = again({})
            whole = again(given.lacking) if given.lacking else plain
            noise = _noise(op, given) if given.lacking and _sums(op) else {}
        except _NO_FORM:
            return self._in_lower(op, given, made)
        results = [(t, plain[label], label) for label, t in made if label in plain and t.numel()]
        results = [(t, p, label) for t, p, label in results if p.shape == t.shape]
        loss = self._add([(t, _own(p, t), whole[label] - p) for t, p, label in results])
        carried = self._noise_of(op, given)
        for tensor, _, label in results:
            self._note_noise(tensor, noise.get(label, carried))
        return loss

    def _in_lower(self, op: OpOverload, given: Given, made: Labeled) -> Loss | None:
        """Run a call that has no float32 form with what its one gradient would be, scaled so that nothing is lost."""
        if len(given.lacking) != 1 or op._schema.is_mutable:
            return None
        ((number, lack),) = given.lacking.items()
        old = next(t for _, t in floats_in([given.args, given.kwargs]) if id(t) == number)
        whole = old.float() + lack
        scale = torch.exp2(-whole.abs().amax().clamp(min=_LEAST).log2().ceil())
        swap = functools.partial(_swapped, old=old, new=(whole * scale).to(old.dtype))
        try:
            results = dict(floats_in(op(*map(swap, given.args), **{name: swap(v) for name, v in given.kwargs.items()})))
        except _NO_FORM:
            return None
        pairs = [(t, results[label].float() / scale - t.float()) for label, t in made if label in results and t.numel()]
        return self._add([(t, torch.zeros_like(lack), lack) for t, lack in pairs])

    def _add(self, found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Loss | None:
        """Keep what results lack, each for what the call lost and for what its arguments lacked."""
        if not found:
            return None
        for tensor, own, through in found:
            self._put(tensor, own + through)
        norms = [_norm([own for _, own, _ in found]), _norm([through for _, _, through in found])]
        norms.append(_norm([t.float() + own + through for t, own, through in found]))
        return Loss(self._measures.add(*norms))

    # -- Rounding ----------------------------------------------------------------------------------

    def _noise_of(self, op: OpOverload, given: Given) -> Tensor | None:
        """Return the noise in what a call only copies."""
        if _name_of(op) not in _COPIES:
            return None
        found = (self._identities.storage(t) for _, t in floats_in([given.args, given.kwargs]))
        return next((self._noise[storage] for storage in found if storage in self._noise), None)

    def _note_noise(self, tensor: Tensor, noise: Tensor | None) -> None:
        storage = self._identities.storage(tensor)
        if storage is not None and noise is not None:
            self._noise[storage] = noise
        elif storage is not None:
            self._noise.pop(storage, None)

    # -- Tensors -----------------------------------------------------------------------------------

    def _lack(self, tensor: Any) -> Tensor | None:
        """Return what a tensor lacks, of its shape; None for nothing."""
        if not isinstance(tensor, Tensor) or not self._beside or not tensor.is_floating_point():
            return None
        storage = self._identities.storage(tensor)
        beside = None if storage is None else self._beside.get(storage)
        if beside is None or beside.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            return None
        return beside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _put(self, tensor: Tensor, lack: Tensor) -> None:
        for gone in [storage for storage in self._beside if self._identities.is_gone(storage)]:
            del self._beside[gone]
            self._noise.pop(gone, None)
        storage = self._identities.storage(tensor)
        if storage is None:
            return
        there = self._lack(tensor)
        if there is None:
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._beside[storage] = torch.zeros(count, dtype=torch.float32, device=tensor.device)
            there = self._lack(tensor)
        if there is not None:
            there.copy_(lack)

    def gradient(self, name: str, grad: Tensor) -> int | None:
        """Take a parameter's gradient; return the place of two norms: of what it lacks, and of it as it would be.

        The latter is infinite where the gradient is nothing but rounding, as a bias's before a norm.
        """
        lack = self._lack(grad) if grad.numel() else None
        if self.whole is not None:
            self.whole[name] = grad.float().clone() if lack is None else grad.float() + lack
        storage = self._identities.storage(grad)
        if lack is None or storage is None:
            return None
        whole, noise = _norm([grad.float() + lack]), self._noise.get(storage)
        place = self._measures.add(
            _norm([lack]), whole if noise is None else torch.where(whole > noise, whole, torch.inf)
        )
        if lack.numel() == lack.untyped_storage().nbytes() // 4:
            del self._beside[storage]  # autograd may keep the gradient: this is of a parameter's size
        return place


def _kept(value: Any, lacking: dict[int, Tensor]) -> Any:
    """Return a copy of a tensor that is about to be written to, and have what it lacks be the copy's."""
    if not isinstance(value, Tensor):
        return value
    copy = value.clone()
    if id(value) in lacking:
        lacking[id(copy)] = lacking.pop(id(value)).clone()
    return copy


def _own(plain: Tensor, made: Tensor) -> Tensor:
    """Return what of a result was too small for its dtype: zeros where it was only rounded."""
    if not _can_underflow(made.dtype):
        return torch.zeros_like(plain)
    is_small = plain.abs() < torch.finfo(made.dtype).smallest_normal
    return torch.where(is_small, plain - made.float(), 0)


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of some tensors' values; their squares alone may be too small for float32."""
    most: Tensor = torch.stack([t.abs().amax() for t in tensors]).amax()
    parts = [torch.linalg.vector_norm(t / most.clamp(min=_LEAST)) for t in tensors]
    norm: Tensor = most * torch.linalg.vector_norm(torch.stack(parts))
    return norm


def _run_again(op: OpOverload, given: Given, lacking: dict[int, Tensor]) -> dict[str, Tensor]:
    """Run a call in float32, with what its arguments lack; return the results by their labels."""
    widen = functools.partial(_widened, lacking=lacking, copies=op._schema.is_mutable)
    result = op(*map(widen, given.args), **{name: widen(value) for name, value in given.kwargs.items()})
    return {label: tensor.float() for label, tensor in floats_in(result)}


def _noise(op: OpOverload, given: Given) -> dict[str, Tensor]:
    """Return the norm of what rounding in a lower dtype may make of each result of a sum of products, by its label."""
    tensors = [t for _, t in floats_in([given.args, given.kwargs]) if id(t) in given.lacking]
    wholes = [t.float() + given.lacking[id(t)] for t in tensors]
    most = torch.stack([t.abs().amax() for t in wholes]).amax().clamp(min=_LEAST)
    squares = {id(t): (w / most).square() for t, w in zip(tensors, wholes, strict=True)}

    def squared(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return squares[id(value)] if id(value) in squares else value.float().square()
        return torch.float32 if isinstance(value, torch.dtype) else value

    result = op(*map(squared, given.args), **{name: squared(value) for name, value in given.kwargs.items()})
    return {label: _ROUNDING * most * tensor.float().sum().sqrt() for label, tensor in floats_in(result)}


def _widened(value: Any, lacking: dict[int, Tensor], copies: bool) -> Any:
    if isinstance(value, torch.dtype) and _can_underflow(value):
        return torch.float32
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        wide = value.float() if _can_underflow(value.dtype) else value
        lack = lacking.get(id(value))
        return wide + lack if lack is not None else wide.clone() if copies else wide
    if isinstance(value, list | tuple):
        return type(value)(_widened(item, lacking, copies) for item in value)
    return value


def _swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    return new if value is old else value


@functools.cache
def _can_underflow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).smallest_normal > _LEAST


@functools.cache
def _sums(op: OpOverload) -> bool:
    return _name_of(op) in _SUMS


@functools.cache
def _name_of(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::")


@functools.cache
def _only_views(op: OpOverload) -> bool:
    return not op._schema.is_mutable and any(a.alias_info is not None for a in op._schema.returns)
