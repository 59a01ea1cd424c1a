"""The gradients of an optimizer: found, sorted into what one kernel call takes, and named in messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..errors import Fp16GradientError
from ..torch_internals import group_tensors_by_device_and_dtype

__all__ = ["Bucket", "gradients_of", "name_gradients", "parameters_of", "sort_gradients", "unique"]

HALF = frozenset({torch.float16, torch.complex32})
NAMED_AT_MOST = 8
_layout_of = attrgetter("layout")
_grad_fn_of = attrgetter("grad_fn")


@dataclass(slots=True)
class Bucket:
    """Gradients of one device, dtype and kind, which one kernel call takes.

    Attributes:
        device: Where they are.
        dtype: Theirs; for sparse ones that of their values.
        tensors: The gradients; for sparse ones their values.
        mesh: The DTensors' device mesh, or None.
        placements: The DTensors' placements.
        is_sparse: Whether they are the values of COO gradients.
        has_graph: Whether they are part of a graph, as ``backward(create_graph=True)`` makes them.
    """

    device: torch.device
    dtype: torch.dtype
    tensors: list[Tensor] = field(default_factory=list)
    mesh: Any = None
    placements: tuple[Any, ...] = ()
    is_sparse: bool = False
    has_graph: bool = False

    @property
    def may_overflow_when_merged(self) -> bool:
        """Whether gradients may have duplicate rows, whose sum has to be checked rather than they."""
        return self.is_sparse and self.dtype in HALF

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks hold different parts of the gradients."""
        return any(not placement.is_replicate() for placement in self.placements)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the optimizer's gradients, each once."""
    return unique([grad for param in parameters_of(optimizer) if (grad := param.grad) is not None])


def unique(grads: list[Tensor]) -> list[Tensor]:
    """Return each of the tensors once."""
    return grads if len(set(map(id, grads))) == len(grads) else list({id(grad): grad for grad in grads}.values())


def sort_gradients(grads: list[Tensor]) -> list[Bucket]:
    """Sort gradients into buckets: plain tensors, then replicated DTensors, then sharded ones.

    The order lets the last buckets' reduction over the mesh carry what the earlier ones found.
    """
    is_plain = set(map(type, grads)) <= {Tensor} and set(map(_layout_of, grads)) <= {torch.strided}
    if is_plain and grads and not has_graph(grads):
        groups = group_tensors_by_device_and_dtype([grads])  # type: ignore[list-item]
        return [Bucket(device, dtype, found[0]) for (device, dtype), (found, _) in groups.items()]  # type: ignore
    buckets: dict[Any, Bucket] = {}
    for grad in grads:
        is_in_graph = has_graph([grad])
        part = grad if is_in_graph else values_of(grad)
        mesh, placements = _mesh_of(grad)
        key = (type(part), part.device, part.dtype, mesh, placements, grad.is_sparse, is_in_graph)
        if key not in buckets:
            buckets[key] = Bucket(part.device, part.dtype, [], mesh, placements, grad.is_sparse, is_in_graph)
        buckets[key].tensors.append(part)
    return sorted(buckets.values(), key=lambda bucket: (bucket.mesh is not None, bucket.is_sharded))


def has_graph(grads: Iterable[Tensor]) -> bool:
    """Tell whether a gradient is part of a graph, so that its derivatives have to be unscaled with it."""
    return any(map(_grad_fn_of, grads))


def values_of(grad: Tensor) -> Tensor:
    """Return the strided tensor that holds a gradient's values."""
    if grad.layout is torch.strided:
        return grad
    return grad._values() if grad.is_sparse else grad.values()


def _mesh_of(grad: Tensor) -> tuple[Any, tuple[Any, ...]]:
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(grad, module.DTensor):
        return None, ()
    return grad.device_mesh, tuple(grad.placements)


def merge_duplicates_(optimizer: torch.optim.Optimizer) -> None:
    """Replace float16 COO gradients that have duplicate rows: the scaled sum is what may overflow, so it is checked."""
    for _, _, param in _parameters(optimizer):
        grad = param.grad
        if grad is not None and grad.is_sparse and grad.dtype in HALF and not grad.is_coalesced():
            # Summed in float32, since some devices can't coalesce float16; a sum that doesn't fit becomes inf again.
            wide = torch.complex64 if grad.dtype.is_complex else torch.float32
            param.grad = grad.to(wide).coalesce().to(grad.dtype)


def check_dtypes(optimizer: torch.optim.Optimizer, buckets: list[Bucket]) -> None:
    """Refuse float16 gradients, before any gradient is touched.

    Raises:
        Fp16GradientError: There are some; the message names them.
    """
    if not any(bucket.dtype in HALF for bucket in buckets):
        return
    names = name_gradients(optimizer, lambda grad: grad.dtype in HALF)
    raise Fp16GradientError(
        f"Attempting to unscale FP16 gradients: {names}. Keep the parameters in float32 (model.float()) and let "
        "mpamp.autocast run their ops in float16; or, to train in float16 throughout, make the scaler with "
        "allow_fp16_grads=True."
    )


def name_gradients(optimizer: torch.optim.Optimizer, is_wanted: Callable[[Tensor], bool]) -> str:
    """Name the parameters whose gradients are wanted: the first few, and how many more; "" if there are none."""
    found = [_describe(optimizer, *place) for place in _parameters(optimizer) if _has(place[2], is_wanted)]
    more = len(found) - NAMED_AT_MOST
    return "; ".join(found[:NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")


def has_non_finite(grad: Tensor) -> bool:
    """Tell whether a gradient has an inf or NaN; of a DTensor, whether this rank's part has. Reads the device."""
    return not bool(torch.isfinite(values_of(local_part(grad))).all())


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; other tensors as they are."""
    mesh, _ = _mesh_of(tensor)
    return tensor if mesh is None else tensor.to_local()  # type: ignore[attr-defined]


def _has(param: Tensor, is_wanted: Callable[[Tensor], bool]) -> bool:
    return param.grad is not None and is_wanted(param.grad)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, int, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            yield number, place, param


def _describe(optimizer: torch.optim.Optimizer, number: int, place: int, param: Tensor) -> str:
    names = optimizer.param_groups[number].get("param_names")
    name = f"parameter {names[place]!r}" if names else f"parameter {place}"
    dtype = param.dtype if param.grad is None else param.grad.dtype
    return f"{name} of group {number}, shape {tuple(param.shape)}, gradient {dtype}"
