"""Modules of ``apex.amp`` under apex's names, for scripts that reach into them."""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
