"""Run decorated Functions on a device in pure Python, whose backward autograd runs on a thread of its own.

Prints for each region whether backward ran on another thread, and fails where its dtype isn't forward's. The last
line is for the processor, whose backward runs where it is called.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class DeviceModule:
    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("npy", backend_module=DeviceModule())
tree_map = torch.utils._pytree.tree_map


def host(x: Any) -> Any:
    return x.untyped_storage().payload if isinstance(x, torch.Tensor) and x.device.type == "npy" else x


def device(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        return x
    if 0 in x.stride() and x.numel() > 1:
        x = x.contiguous()
    made = torch._C._acc.create_empty_tensor(tuple(x.shape), x.dtype)
    made.untyped_storage().payload = x
    return made


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    a, k = tree_map(host, (args, kwargs))
    if k.get("device") is not None:
        k["device"] = torch.device("cpu")
    out = op(*a, **k)
    schema = op._schema
    written = {
        s.name: (args[i] if i < len(args) else kwargs.get(s.name))
        for i, s in enumerate(schema.arguments)
        if s.alias_info is not None and s.alias_info.is_write
    }
    if written:
        values = list(written.values())
        return None if not schema.returns else values[0] if len(schema.returns) == 1 else tuple(values)
    return tree_map(device, out)


everything = torch.library.Library("_", "IMPL")
everything.fallback(fallback, "PrivateUse1")
aten = torch.library.Library("aten", "IMPL")


def empty_memory_format(size: Any, **options: Any) -> Any:
    return device(torch.empty(size, dtype=options.get("dtype")))


def empty_strided(size: Any, stride: Any, **options: Any) -> Any:
    return device(torch.empty_strided(size, stride, dtype=options.get("dtype")))


def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    host(target).copy_(host(source))
    return target


aten.impl("empty.memory_format", empty_memory_format, "PrivateUse1")
aten.impl("empty_strided", empty_strided, "PrivateUse1")
aten.impl("_copy_from", copy_from, "PrivateUse1")

import mpamp  # noqa: E402
from mpamp.custom import custom_bwd, custom_fwd  # noqa: E402


def check(where: str, expected: torch.dtype, **options: Any) -> None:
    seen: list[torch.dtype] = []
    threads: list[int] = []

    class F(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            seen.append(x.mm(x).dtype)
            return x.clone()

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            threads.append(threading.get_ident())
            seen.append(x.mm(x).dtype)
            return grad

    x = torch.ones(4, 4).to(where).requires_grad_()
    with mpamp.autocast(where, **options):
        y, other, third = F.apply(x), F.apply(x), F.apply(x)
    y.sum().backward()
    with mpamp.autocast(where, dtype=torch.float16, ops={"mm": "fallthrough"}):
        other.sum().backward()
    with mpamp.autocast(where, enabled=False):
        third.sum().backward()
    assert seen == [expected] * 6, (options, seen)
    print("same" if set(threads) == {threading.get_ident()} else "other")


rules = {"mm": "lower_precision_fp"}
check("npy", torch.bfloat16, dtype=torch.bfloat16, ops=rules)
check("npy", torch.float16, dtype=torch.float16, ops=rules)
check("npy", torch.float32, ops={"mm": "fp32"})
check("cpu", torch.bfloat16)
