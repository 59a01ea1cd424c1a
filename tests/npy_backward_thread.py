"""Run decorated Functions on a device in pure Python, whose backward autograd runs on a thread of its own.

Prints for each region whether backward ran on another thread, and fails where its dtype isn't forward's. The last
line is for the processor, whose backward runs where it is called.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch

import mpamp
from mpamp.functions.custom import custom_bwd, custom_fwd

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "mpamp-npy" / "src"))
from mpamp_npy.device import register

register()  # the device alone, without its backend for mpamp


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
