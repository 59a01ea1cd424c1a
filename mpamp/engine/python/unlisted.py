"""Ops that an observer is told of though no table need list them."""

from __future__ import annotations

import functools

import torch

from ...oplists import refused
from ...rules.eligibility import find_overload, is_out_of_place
from ...torch_internals import OpOverload, dispatch_get_all_op_names, dispatch_has_kernel_for_dispatch_key

__all__ = ["is_unlisted", "unlisted"]

_OF_TORCH = (
    "aten prim prims quantized _quantized symm_mem static_runtime c10d onednn _c10d_functional mkldnn sparse inductor",
    "profiler _test _c10d_functional_autograd mkldnn_prepacked mkl quantization debugprims rngprims _native export",
    "inductor_prims debug_mode_ops _dtensor fsdp _inductor_test higher_order xnnpack metal vulkan streams bucketing",
)
_TORCHS = frozenset(name for names in _OF_TORCH for name in names.split(" "))
"""Namespaces that torch brings along."""
_TOO = frozenset({"aten::_to_copy", "aten::dropout"})
"""No pointwise ops by torch's tags, but dtypes go through them: the casts that code asks for, and a hidden product."""


def unlisted() -> set[str]:
    """Return the pointwise overloads of torch's own, where dtypes meet, its casts, and all of other libraries."""
    return {name for name in dispatch_get_all_op_names() if is_unlisted(name)}


def is_unlisted(name: str) -> bool:
    """Tell whether an overload is one of those."""
    if name in _TOO:
        return True
    return name not in refused() and (_is_pointwise(name) if name.startswith("aten::") else _is_others(name))


@functools.cache
def _is_pointwise(name: str) -> bool:
    op = find_overload(name)
    return op is not None and torch.Tag.pointwise in op.tags and _can_be_seen(op)


def _is_others(name: str) -> bool:
    op = find_overload(name) if name.partition("::")[0] not in _TORCHS else None
    return op is not None and _can_be_seen(op)


def _can_be_seen(op: OpOverload) -> bool:
    """Tell whether a call reaches a kernel whole, and gives something new."""
    return is_out_of_place(op) and not op._schema.name.endswith("_like") and not _is_composite(op)


def _is_composite(op: OpOverload) -> bool:
    return bool(dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))
