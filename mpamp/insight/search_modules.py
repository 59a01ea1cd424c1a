"""Running some modules of a model in float32 for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from ..regions.region import Region, autocast
from ..rules.optable import OpTable

__all__ = ["in_float32"]


@contextlib.contextmanager
def in_float32(model: torch.nn.Module, names: Collection[str], device: str, table: OpTable) -> Iterator[None]:
    """Have modules, and those inside of them, run in float32; what they are given in 16 bits is cast to it.

    Example:
        >>> from mpamp import get_op_table
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> with in_float32(model, ["1"], "cpu", get_op_table("cpu")), autocast("cpu"):
        ...     model[0](torch.ones(2)).dtype, model(torch.ones(2)).dtype
        (torch.bfloat16, torch.float32)
    """
    region = autocast(device, torch.float32, ops=table)
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_wide_forward(model.get_submodule(name), region))
        yield


@contextlib.contextmanager
def _wide_forward(module: torch.nn.Module, region: Region) -> Iterator[None]:
    own = module.__dict__.get("forward")
    forward: Callable[..., Any] = module.forward

    def wide(*args: Any, **kwargs: Any) -> Any:
        with region:
            return forward(*_widened(args), **_widened(kwargs))

    module.forward = wide
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value
    if isinstance(value, dict):
        return type(value)({key: _widened(item) for key, item in value.items()}) if type(value) is dict else value
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(_widened, value))
    if type(value) in (list, tuple):
        return type(value)(map(_widened, value))
    return value
