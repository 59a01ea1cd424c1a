"""Which overloads a rule may apply to, and how a rule's name is resolved to them."""

from __future__ import annotations

import functools

import torch

from ..errors import UnknownOpError, nearest
from ..torch_internals import (
    OpOverload,
    OpOverloadPacket,
    dispatch_get_all_op_names,
    dispatch_has_kernel,
    jit_get_schemas_for_operator,
)

__all__ = ["find_overload", "full_name", "is_in_place", "is_out_of_place", "overload_name", "resolve"]


def full_name(name: str) -> str:
    """Return an op's name with its namespace, which is aten unless it has one.

    Example:
        >>> full_name("softmax.int"), full_name("quantized::linear_dynamic")
        ('aten::softmax.int', 'quantized::linear_dynamic')
    """
    return name if "::" in name else f"aten::{name}"


def overload_name(op: OpOverload) -> str:
    """Return ``ns::op`` or ``ns::op.overload``, the form that tables use.

    Example:
        >>> overload_name(torch.ops.aten.mm.default), overload_name(torch.ops.aten.softmax.int)
        ('aten::mm', 'aten::softmax.int')
    """
    schema = op._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def is_in_place(op: OpOverload) -> bool:
    """Tell whether the overload writes into its first argument and into nothing else."""
    writes = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    return bool(writes) and writes[0] and not any(writes[1:])


OBSERVERS = frozenset({"aten::fused_moving_avg_obs_fake_quant"})
"""Ops that write into running ranges beside their input, which are never cast."""
WRITTEN = {"running_mean", "running_var"}
"""Arguments that normalization layers write into, though their schemas don't say so."""
HELD = {"max", "max_val", "min", "min_val", "threshold", "value"}
"""Numbers that a result may hold, by their argument's name: ``promote`` takes one that 16 bits can't for float32's."""
NEED_ONE_DTYPE = {"aten::_safe_softmax"}
"""Ops with a dtype argument whose derivative raises where it isn't the input's: that is cast as well."""
DTYPE_OF_WEIGHTS = {"aten::quantized_gru", "aten::quantized_lstm"}
"""Ops whose dtype argument says what their weights are stored in, not what a call computes in."""
PARAMETERS = {"weight", "bias", *WRITTEN}
"""What such a layer wants in one dtype, its input's or float32."""


@functools.cache
def is_out_of_place(op: OpOverload) -> bool:
    """Tell whether autocast may cast this overload's arguments at all.

    It may where the overload takes tensors and writes into none of them: neither an in-place
    variant nor an ``out=`` one. Source: torch's op eligibility rules
    (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-eligibility).

    Example:
        >>> is_out_of_place(torch.ops.aten.mm.default), is_out_of_place(torch.ops.aten.mm.out)
        (True, False)
    """
    arguments = op._schema.arguments
    if not dispatch_has_kernel(overload_name(op)):
        return False  # TorchScript's own, such as einsum.sublist
    if op._schema.name in OBSERVERS:
        return True
    has_tensor = any("Tensor" in str(a.type) for a in arguments)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    return has_tensor and not writes


def find_overload(name: str) -> OpOverload | None:
    """Return the overload that ``ns::op[.overload]`` names in this process, or None."""
    if name in _torchs_own:
        return _torchs_own[name]
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    found = getattr(_packet(namespace, op), overload or "default", None)
    if not isinstance(found, OpOverload):
        return None
    if namespace == "aten":
        _torchs_own[name] = found
    return found


_torchs_own: dict[str, OpOverload] = {}
"""Overloads found before; those of other namespaces may be defined anew, or go."""


def _packet(namespace: str, op: str) -> OpOverloadPacket | None:
    """Return torch's packet of an op that exists: ``torch.ops``, asked for another, keeps a namespace for it."""
    if not jit_get_schemas_for_operator(f"{namespace}::{op}"):
        return None
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return packet if isinstance(packet, OpOverloadPacket) else None


def resolve(name: str) -> list[str]:
    """Return the overloads that a rule's name means.

    ``op`` means every out-of-place overload of ``aten::op``; ``ns::op`` the same in another
    namespace; ``ns::op.overload`` exactly one, which may then be an in-place one.

    Raises:
        UnknownOpError: torch has no such op, or none of its overloads can be autocast.

    Example:
        >>> resolve("pow")
        ['aten::pow.Scalar', 'aten::pow.Tensor_Scalar', 'aten::pow.Tensor_Tensor']
    """
    full = full_name(name)
    namespace, _, rest = full.partition("::")
    op, dot, overload = rest.partition(".")
    packet = _packet(namespace, op)
    if packet is None:
        hint = nearest(op, _known_ops(namespace))
        raise UnknownOpError(
            f"unknown op {name!r}: torch has no operator {namespace}::{op}{hint} "
            "Write 'op' or 'namespace::op', with '.overload' to mean a single one."
        )
    overloads: list[str] = packet.overloads()
    if dot or (op.endswith("_") and not op.startswith("__")):
        return [_single(name, packet, overload or "default", overloads)]
    found = [getattr(packet, o) for o in sorted(overloads)]
    eligible = [overload_name(o) for o in found if is_out_of_place(o)]
    if not eligible:
        raise UnknownOpError(
            f"no overload of {namespace}::{op} can be autocast: all of them write into an argument or take "
            f"no tensor ({', '.join(sorted(overloads))})."
        )
    return eligible


def _single(name: str, packet: object, overload: str, overloads: list[str]) -> str:
    op = getattr(packet, overload, None)
    if not isinstance(op, OpOverload):
        raise UnknownOpError(
            f"unknown overload in {name!r}{nearest(overload, overloads)} Overloads are: {', '.join(sorted(overloads))}."
        )
    if not is_out_of_place(op) and not is_in_place(op):
        raise UnknownOpError(f"{name!r} can't be autocast: it is an out= variant or takes no tensor.")
    return overload_name(op)


@functools.lru_cache(maxsize=8)
def _known_ops(namespace: str) -> list[str]:
    prefix = f"{namespace}::"
    names = dispatch_get_all_op_names()
    return sorted({n[len(prefix) :].partition(".")[0] for n in names if n.startswith(prefix)})
