"""Numbers where a schema says Tensor: a kernel in Python is given the number, and has to hand on a tensor.

Torch puts a number into a *wrapped* tensor, which yields to other tensors in type promotion
(``int_tensor * 2.5`` is float32), and gives kernels in Python the number back. Only calls of ``torch.ops``
wrap it again, and only for the ops of a list; others, and what calls a kernel below, need it wrapped.
"""

from __future__ import annotations

from typing import Any

import torch

from ...probing import outside, probing
from ...rules.eligibility import overload_name
from ...torch_internals import (
    DisableTorchFunction,
    OpOverload,
    dispatch_has_kernel,
    make_subclass,
    should_allow_numbers_as_tensors,
)

__all__ = ["as_tensors", "number_slots", "wrap", "wraps_by_itself"]


def _template(number: complex) -> torch.Tensor:
    # Autograd keeps the tensor that torch wrapped the number in.
    with probing(), torch.enable_grad():
        product = torch.ones((), dtype=torch.float64, device="cpu", requires_grad=True) * number
        return product.grad_fn._saved_other  # type: ignore[union-attr, no-any-return]


_TEMPLATES = {type(n): _template(n) for n in (True, 1, 1.0, 1j)}
_SYMBOLS = {torch.SymBool: bool, torch.SymInt: int, torch.SymFloat: float}


def wrap(value: Any) -> Any:
    """Return a number wrapped in a tensor (0-dim, on the CPU), as torch does it; anything else as it is.

    Example:
        >>> (torch.ones(2, dtype=torch.int64) + wrap(2.5)).dtype, (torch.ones(2).half() + wrap(2.5)).dtype
        (torch.float32, torch.float16)
    """
    kind = type(value)
    template = _TEMPLATES.get(_SYMBOLS.get(kind, kind))
    if template is None:
        return value
    with outside(), DisableTorchFunction():
        # By way of data, which has a version of its own: autograd keeps what is wrapped, and minds when it changes.
        wrapped = make_subclass(torch.Tensor, template.data)
        if kind in _SYMBOLS:
            wrapped._wrapped_number = value  # what torch gives back
        else:
            wrapped.set_(torch.scalar_tensor(value, dtype=template.dtype, device="cpu"))
    return wrapped


def as_tensors(args: tuple[Any, ...], slots: frozenset[int]) -> tuple[Any, ...]:
    """Return a call's arguments with the numbers at ``slots`` in tensors that promote to the same dtype unwrapped.

    Example:
        >>> [t.dtype for t in as_tensors((torch.ones(2).half(), 2.5), frozenset({0, 1}))]
        [torch.float16, torch.float64]
        >>> [t.dtype for t in as_tensors((torch.ones(2, dtype=torch.int8), 2.5), frozenset({0, 1}))]
        [torch.int8, torch.float32]
    """
    numbers = [i for i in slots if i < len(args) and type(args[i]) in _TEMPLATES]
    if not numbers:
        return args
    tensors = [args[i] for i in slots if i < len(args) and isinstance(args[i], torch.Tensor)]
    other = max(tensors, key=lambda t: (t.dim() > 0, _category(t.dtype)), default=None)
    found = list(args)
    for i in numbers:
        dtype = _TEMPLATES[type(args[i])].dtype
        if other is not None and (other.dim() == 0 or _category(other.dtype) < _category(dtype)):
            dtype = torch.result_type(other, args[i])
        with outside(), DisableTorchFunction():
            found[i] = torch.scalar_tensor(args[i], dtype=dtype, device="cpu")
    return tuple(found)


def _category(dtype: torch.dtype) -> int:
    """Return a dtype's place in type promotion: bool, integer, floating point, complex."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)


def number_slots(op: OpOverload) -> frozenset[int]:
    """Return the positions of Tensor arguments that may be given a number.

    In an op of torch's own those at which another of its overloads takes a number (it wraps that, and calls
    this overload); all where Python's bindings wrap them, or where the op is somebody else's.

    Example:
        >>> number_slots(torch.ops.aten.copysign.Tensor), number_slots(torch.ops.aten.mm.default)
        (frozenset({1}), frozenset())
    """
    tensors = {i for i, a in enumerate(op._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")}
    if op.namespace != "aten" or wraps_by_itself(op):
        return frozenset(tensors)
    packet = op.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    # Some, such as exp.float, are TorchScript's own.
    others = [o._schema.arguments for o in overloads if dispatch_has_kernel(overload_name(o))]
    return frozenset(i for i in tensors if any(len(o) > i and _is_number(str(o[i].type)) for o in others))


def _is_number(kind: str) -> bool:
    return kind.removeprefix("Optional[").rstrip("]") in ("number", "float", "complex", "int", "bool")


def wraps_by_itself(op: OpOverload) -> bool:
    """Tell whether ``torch.ops`` takes numbers for the op's tensors, as Python's bindings do."""
    namespace, _, name = op._schema.name.partition("::")
    return namespace == "aten" and bool(should_allow_numbers_as_tensors(name))
