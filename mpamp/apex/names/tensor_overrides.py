"""``apex.amp.lists.tensor_overrides``: what O1 casts of ``torch.Tensor``."""

import torch

from . import torch_overrides
from .shown import Shown

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

MODULE = torch.Tensor


def _of_tensors(special: str, names: list[str]) -> Shown:
    """Return the special methods, and those of functions that are methods, too."""
    return Shown(" ".join(name for name in [*special.split(), *names] if hasattr(MODULE, name)))


FP16_FUNCS = _of_tensors("__matmul__", torch_overrides.FP16_FUNCS)
FP32_FUNCS = _of_tensors("__ipow__ __pow__ __rpow__ cpu", torch_overrides.FP32_FUNCS)
CASTS = _of_tensors(
    "__add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__ __le__ __lt__ __mul__ "
    "__ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__",
    torch_overrides.CASTS,
)
SEQUENCE_CASTS = Shown("")
