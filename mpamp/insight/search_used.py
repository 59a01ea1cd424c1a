"""Which ops and modules of a model do floating-point arithmetic under autocast, and in which precision."""

from __future__ import annotations

from typing import Any

import torch

from ..engine.watching import Run
from ..rules.eligibility import overload_name
from ..torch_internals import OpOverload, current_autograd_node
from .frames import Frame, deciding, frame_of
from .module_paths import ModulePaths
from .overflow_measures import floats_in

__all__ = ["UsedOps"]

_MOVES = frozenset({"aten::_to_copy", "aten::copy_", "aten::clone", "aten::lift_fresh", "aten::fill_", "aten::zero_"})


class UsedOps:
    """Collects them from a run; an ``Around`` for ``watch_calls``.

    Attributes:
        lower: Rows, by the names of their ops, that had a call touch lower precision: float32 is an alternative.
        wide: Rows that had a call run in float32 by the table.
        modules: The modules, by name, that made calls of ``lower``.
    """

    def __init__(self, paths: ModulePaths) -> None:
        self.lower: dict[str, None] = {}
        self.wide: dict[str, None] = {}
        self.modules: dict[str, None] = {}
        self._paths = paths
        self._frames: list[Frame] = []
        self._count = 0

    def __call__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        if current_autograd_node() is not None:  # backward passes go by what the forward ran in
            return run()
        name = overload_name(op)
        self._count += 1
        before = self._count
        self._frames.append(frame_of(name, args, kwargs))
        try:
            result = run()
            if self._count == before and not _only_moves(op):
                self._take(floats_in([args, kwargs, result]))
            return result
        finally:
            self._frames.pop()

    def _take(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        dtypes = {tensor.dtype for _, tensor in tensors}
        row = deciding(self._frames) if dtypes else None
        if row is None:
            return
        if any(dtype.itemsize < 4 for dtype in dtypes):
            self.lower[row] = None
            module = self._paths.here()
            if module is not None:
                self.modules[module] = None
        elif any(frame.is_listed for frame in self._frames):
            self.wide[row] = None


def _only_moves(op: OpOverload) -> bool:
    is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in op._schema.returns)
    return is_view or op._schema.name in _MOVES
