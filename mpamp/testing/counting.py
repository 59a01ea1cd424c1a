"""Count what a piece of code runs: weight casts, and kernels by overload.

Both counters sit below autograd and autocast, so they see the casts that autocast makes, in the forward pass
and in the backward pass, on the thread that entered them and on the backward threads it starts. They do not
see into compiled code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..torch_internals import OpOverload, TorchDispatchMode

__all__ = ["KernelCounter", "WeightCastCounter"]

_aten = torch.ops.aten

# Autocast asks for `to`. Autograd decomposes that into `_to_copy`; in inference mode `to` itself arrives.
_CASTS_OF_FIRST_ARGUMENT = frozenset({_aten._to_copy, _aten.to})


class WeightCastCounter(TorchDispatchMode):
    """Count the casts of some parameters to a smaller floating dtype.

    A cast is counted when its source shares the storage of one of the parameters, so a slice or a detached
    alias of a weight counts as the weight. Casts to a wider dtype and copies in the same dtype do not count.
    The count goes on over several entries of the same counter.

    Args:
        weights: A module, whose parameters are watched, or the parameters themselves.

    Attributes:
        count: The casts seen so far.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> with WeightCastCounter(layer) as casts, torch.autocast("cpu", dtype=torch.bfloat16):
        ...     y = layer(layer(torch.ones(2, 4)))
        >>> casts.count
        1
        >>> with casts, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        ...     y = layer(layer(torch.ones(2, 4)))
        >>> casts.count
        3
    """

    def __init__(self, weights: torch.nn.Module | Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the exemption for torch does not reach super()
        self.count = 0
        self._weights = tuple(weights.parameters() if isinstance(weights, torch.nn.Module) else weights)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        if packet in _CASTS_OF_FIRST_ARGUMENT:
            self._see(args[0], result)
        elif packet is _aten.copy_:
            self._see(args[1], result)
        elif packet is _aten._foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                self._see(source, target)
        return result

    def _see(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if _is_narrowing(source.dtype, target.dtype) and self._is_watched(source):
            self.count += 1

    def _is_watched(self, tensor: torch.Tensor) -> bool:
        storage = _storage_id(tensor)
        # Asked anew each time: `weight.data = other` gives a parameter another storage.
        return storage is not None and any(_storage_id(weight) == storage for weight in self._weights)


class KernelCounter(TorchDispatchMode):
    """Count every op that reaches a kernel, by the name of its overload.

    Attributes:
        counts: Calls by name, as in ``counts["aten::addmm"]`` for a default overload and
            ``counts["aten::sum.dim_IntList"]`` for another.

    Example:
        >>> import torch
        >>> with KernelCounter() as kernels, torch.autocast("cpu", dtype=torch.bfloat16):
        ...     y = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        >>> kernels.counts["aten::mm"], kernels.counts["aten::_to_copy"]
        (1, 2)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the exemption for torch does not reach super()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """The calls of all ops together."""
        return self.counts.total()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name() if isinstance(func, OpOverload) else str(func)
        self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _is_narrowing(source: torch.dtype, target: torch.dtype) -> bool:
    return source.is_floating_point and target.is_floating_point and target.itemsize < source.itemsize


def _storage_id(tensor: torch.Tensor) -> int | None:
    """Identify the storage that a tensor lives in; None for tensors that have none (sparse layouts).

    The storage object's address, not its data's: that is zero for every meta and fake tensor.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
