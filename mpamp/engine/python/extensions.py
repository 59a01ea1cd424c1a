"""Kernels over ops of others, which may be defined anew, taken away, or given a kernel while ours stands."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...rules.eligibility import overload_name
from ...torch_internals import DispatchKey, OpOverload
from .building import Kernel

__all__ = ["cover", "overriding", "put_on_top", "surviving", "watch"]


class _Kernels(dict[Any, Any]):
    """An op's kernels in Python; ``torch.library.register_autocast`` takes out one that it thinks is there."""

    def pop(self, key: Any, default: Any = None) -> Any:
        return super().pop(key, default)


def put_on_top(library: torch.library.Library, name: str, key_name: str, kernel: Kernel) -> None:
    """Register a boxed kernel that is given the key set, over whatever is there; called in ``overriding()``.

    Not by ``Library.impl``, which ``watch`` tells others of.
    """
    assert library.m is not None
    library.m.impl(name, key_name, kernel, True)


@contextlib.contextmanager
def overriding() -> Iterator[None]:
    """Don't have torch warn that a kernel goes over another: that is about others' kernels."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*[Oo]verriding a previously registered kernel")
        yield


def cover(op: OpOverload, key: DispatchKey) -> None:
    """Have torch's Python dispatcher, which looks for kernels in a place of its own, find the one on top at ``key``."""
    op.py_kernels = _Kernels(op.py_kernels)
    op.py_kernels.pop(key)
    op._dispatch_cache.clear()


def surviving(native: Kernel, below: Kernel) -> Kernel:
    """Return a kernel that calls ``native``, and ``below`` once the library that ``native`` came from is gone."""
    run_native: Kernel | None = native

    def run(keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal run_native
        if run_native is not None:
            try:
                return run_native(keys, *args, **kwargs)
            except RuntimeError as error:
                if "SafeKernelFunction has been invalidated" not in str(error):
                    raise
                run_native = None
        return below(keys, *args, **kwargs)

    return run


def watch(defined: Callable[[str], None], registered: Callable[[str, str], None]) -> None:
    """Have ``torch.library`` tell what it does from now on.

    Args:
        defined: Is given each overload that is defined, perhaps anew and with another schema.
        registered: Is given the Autocast key and the overload of each kernel registered at such a key.
    """
    library: Any = torch.library.Library
    original_define, original_impl = library.define, library.impl

    @functools.wraps(original_define)
    def define(self: Any, schema: str, *args: Any, **options: Any) -> Any:
        result = original_define(self, schema, *args, **options)
        defined(_full_name(self, schema.partition("(")[0].strip()))
        return result

    @functools.wraps(original_impl)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        result = original_impl(self, op_name, fn, dispatch_key, **options)
        key = dispatch_key or self.dispatch_key
        if key.startswith("Autocast"):
            registered(key, _full_name(self, op_name if isinstance(op_name, str) else overload_name(op_name)))
        return result

    library.define, library.impl = define, impl


def _full_name(library: Any, name: str) -> str:
    return (name if "::" in name else f"{library.ns}::{name}").removesuffix(".default")
