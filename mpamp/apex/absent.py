"""What apex has and this stand-in hasn't: it can be imported, and says at its first use what to take instead."""

from __future__ import annotations

import importlib
import sys
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from .errors import AmpNotImplementedError

__all__ = ["INSTEAD", "SERVED", "AbsentFinder", "AbsentModule", "instead_of"]

INSTEAD: Mapping[str, str] = {
    "apex.amp._initialize": "amp.initialize",
    "apex.amp._process_optimizer": "amp.initialize, which attaches to optimizers by itself",
    "apex.amp.compat": "torch",
    "apex.amp.rnn_compat": "torch.nn.LSTM, GRU and RNN, which amp casts as they are",
    "apex.amp.wrap": "mpamp.functions, or amp.half_function and amp.float_function",
    "apex.contrib": "what torch itself has",
    "apex.contrib.bottleneck": "torchvision.models.resnet.Bottleneck with torch.compile",
    "apex.contrib.clip_grad": "torch.nn.utils.clip_grad_norm_",
    "apex.contrib.conv_bias_relu": "torch.nn.Conv2d and ReLU with torch.compile",
    "apex.contrib.cudnn_gbn": "apex.parallel.SyncBatchNorm",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.gpu_direct_storage": "torch.cuda.gds",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "apex.parallel.SyncBatchNorm(channel_last=True, fuse_relu=True)",
    "apex.contrib.index_mul_2d": "x[index] * y with torch.compile",
    "apex.contrib.layer_norm": "apex.normalization.FusedLayerNorm",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention, or scaled_dot_product_attention",
    "apex.contrib.nccl_allocator": "torch.cuda.MemPool with ProcessGroupNCCL's allocator",
    "apex.contrib.openfold_triton": "torch with torch.compile",
    "apex.contrib.optimizers": "FSDP, or torch.distributed.optim.ZeroRedundancyOptimizer",
    "apex.contrib.peer_memory": "torch.distributed",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured, or torch.ao.pruning",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib.xentropy": "torch.nn.functional.cross_entropy",
    "apex.pyprof": "torch.profiler, or torch.autograd.profiler.emit_nvtx",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "Megatron Core, or torch.distributed.tensor.parallel and torch.distributed.pipelining",
    "apex.transformer.functional": "scaled_dot_product_attention, or softmax with torch.compile",
    "apex.transformer.layers": "apex.normalization.FusedLayerNorm",
    "amp_C": "torch._foreach functions, or apex.optimizers",
    "apex_C": "apex_C.flatten and unflatten, which are there",
}
"""By the name of a module, and of all in it: what to use."""

_OLD_OPTIMIZERS = ("FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD")
SERVED: Mapping[str, Mapping[str, str]] = {
    "apex.contrib.clip_grad": {"clip_grad_norm_": "torch.nn.utils"},
    "apex.contrib.layer_norm": {"FastLayerNorm": "mpamp.apex.normalization"},
    "apex.contrib.optimizers": dict.fromkeys(_OLD_OPTIMIZERS, "mpamp.apex.optimizers"),
}
"""By the name of a module, or of one above: names that are there all the same, and the modules that have them."""


def instead_of(name: str) -> str | None:
    """Return what to use instead of something in apex, by its dotted name; None if nothing is known.

    Example:
        >>> instead_of("apex.contrib.xentropy.SoftmaxCrossEntropyLoss")
        'torch.nn.functional.cross_entropy'
        >>> instead_of("apex.nothing") is None
        True
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        found = INSTEAD.get(".".join(parts[:end]))
        if found is not None:
            return found
    return None


class _Absent(ABCMeta):
    """The class of classes that stand for what isn't there: they can be named, subclassed and asked about."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        name = cls.absent_name
        raise AmpNotImplementedError(
            f"{name} isn't part of mpamp's stand-in for apex: use {instead_of(name)} instead "
            "(docs/migrating-from-apex.md says what is there)."
        )

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "absent_name":
            raise AttributeError(name)
        return _absent(f"{cls.absent_name}.{name}")


def _absent(name: str) -> Any:
    body = {"absent_name": name, "__module__": name.rpartition(".")[0], "__doc__": f"Not here: see {instead_of(name)}."}
    return _Absent(name.rpartition(".")[2], (), body)


class AbsentModule(ModuleType):
    """A module of apex's that isn't there; whatever is asked of it refuses to be called.

    Example:
        >>> module = AbsentModule("apex.contrib.xentropy")
        >>> loss = module.SoftmaxCrossEntropyLoss
        >>> loss()
        Traceback (most recent call last):
        ...
        mpamp.apex.errors.AmpNotImplementedError: apex.contrib.xentropy.SoftmaxCrossEntropyLoss isn't part of ...
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Not here: use {instead_of(name)}.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = next((getattr(importlib.import_module(at), name) for at in self._served(name)), None)
        if value is None:
            value = _absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def _served(self, name: str) -> list[str]:
        above = f"{self.__name__}."
        return [of[name] for module, of in SERVED.items() if above.startswith(f"{module}.") and name in of]


class AbsentFinder(MetaPathFinder, Loader):
    """Finds what apex has and this stand-in hasn't."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of an absent module, or None for any other."""
        if instead_of(fullname) is None:
            return None
        return spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an absent module."""
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: all that it has is made when asked for."""

    def forget(self) -> None:
        """Take the absent modules out of those that were imported."""
        for name, module in list(sys.modules.items()):
            if isinstance(module, AbsentModule):
                del sys.modules[name]
