"""``apex.amp.utils``: what scripts use of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "as_inplace",
    "casted_args",
    "collect_fp_tensor_types",
    "get_cuda_version",
    "get_func",
    "has_func",
    "is_cuda_enabled",
    "is_fp_tensor",
    "is_nested",
    "maybe_float",
    "maybe_half",
    "set_func",
    "should_cache",
    "type_string",
]


def is_cuda_enabled() -> bool:
    """Tell whether torch was built for CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """Return the version of CUDA that torch was built for; empty without."""
    return tuple(map(int, (torch.version.cuda or "").split("."))) if is_cuda_enabled() else ()


def is_nested(x: Any) -> bool:
    """Tell whether a value is a list or tuple."""
    return isinstance(x, list | tuple)


def is_fp_tensor(x: Any) -> bool:
    """Tell whether a value is a floating tensor, or a list or tuple of nothing else.

    Example:
        >>> is_fp_tensor([torch.ones(1)]), is_fp_tensor(1.0)
        (True, False)
    """
    return all(map(is_fp_tensor, x)) if is_nested(x) else isinstance(x, Tensor) and x.is_floating_point()


def should_cache(x: Any) -> bool:
    """Tell whether a value is a float32 parameter, or a list or tuple of nothing else."""
    if is_nested(x):
        return all(map(should_cache, x))
    return isinstance(x, torch.nn.Parameter) and x.dtype is torch.float32


def type_string(x: Tensor) -> str:
    """Return a tensor's type by its old name.

    Example:
        >>> type_string(torch.ones(1))
        'FloatTensor'
    """
    return x.type().split(".")[-1]


def collect_fp_tensor_types(args: Iterable[Any], kwargs: dict[str, Any]) -> set[str]:
    """Return the types of the floating tensors among arguments."""
    values, found = [*args, *kwargs.values()], set()
    for x in filter(is_fp_tensor, values):
        found |= collect_fp_tensor_types(x, {}) if is_nested(x) else {type_string(x)}
    return found


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a floating tensor, or those of a list or tuple, in float16."""
    return _cast(x, torch.float16, name, verbose)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a floating tensor, or those of a list or tuple, in float32."""
    return _cast(x, torch.float32, name, verbose)


def _cast(x: Any, dtype: torch.dtype, name: str, verbose: bool) -> Any:
    if is_nested(x):
        return type(x)([_cast(item, dtype, name, verbose) for item in x])
    if verbose and x.dtype is not dtype:
        print(f"{'Float->Half' if dtype is torch.float16 else 'Half->Float'} ({name})")
    return x.to(dtype)


def casted_args(cast_fn: Callable[[Any], Any], args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return arguments with floating tensors cast; keyword arguments are cast in place."""
    kwargs.update((key, cast_fn(value)) for key, value in list(kwargs.items()) if is_fp_tensor(value))
    return [cast_fn(x) if is_fp_tensor(x) else x for x in args]


def as_inplace(fns: Iterable[str]) -> Iterator[str]:
    """Yield the names of the in-place forms of functions."""
    return (f"{name}_" for name in fns)


def has_func(mod: Any, fn: str) -> bool:
    """Tell whether a module, or a dict, has a function."""
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)


def get_func(mod: Any, fn: str) -> Any:
    """Return a function of a module, or of a dict."""
    return mod[fn] if isinstance(mod, dict) else getattr(mod, fn)


def set_func(mod: Any, fn: str, new_fn: Any) -> None:
    """Set a function of a module, or of a dict."""
    if isinstance(mod, dict):
        mod[fn] = new_fn
    else:
        setattr(mod, fn, new_fn)
