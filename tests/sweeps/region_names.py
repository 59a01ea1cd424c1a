"""What the programs of trees call: threads, Functions that recompute, wrappers."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import mpamp

from .region_reference import whole_table
from .region_trees import WHOLE_TABLES

PATIENCE = 120.0
"""Seconds that a thread may take."""


class Boom(Exception):
    """Leaves regions."""


def call_on_thread(function: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Return what ``function`` gives on a fresh thread; raise what it raises, or TimeoutError."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append((function(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError(f"not done after {seconds} s")
    value, error = results[0]
    if error is not None:
        raise error
    return value


def _with_grad_mode(block: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    is_on = torch.is_grad_enabled()

    def work() -> Any:
        with torch.set_grad_enabled(is_on):
            return block(*args)

    return work


def on_thread(block: Callable[..., Any], *args: Any) -> Any:
    return call_on_thread(_with_grad_mode(block, *args))


def at_once(blocks: list[Callable[..., Any]], x: torch.Tensor) -> torch.Tensor:
    calls = [_with_grad_mode(block, x * 1.0) for block in blocks]
    outs: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def work(index: int) -> None:
        barrier.wait(PATIENCE)
        try:
            outs[index] = calls[index]()
        except BaseException as error:
            outs[index] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(calls))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    finally:
        sys.setswitchinterval(interval)
    for out in outs:
        if isinstance(out, BaseException):
            raise out
    return torch.stack([out.float() for out in outs]).sum(0)


def backward_here(block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    block(x.detach().requires_grad_()).float().sum().backward()


def keep_busy() -> None:
    """Make autograd nodes, on this thread, in a region with a table of its own that is over."""
    x = torch.ones(2, 2, requires_grad=True)
    with mpamp.autocast("cpu", ops={"silu": "fp32"}):
        for _ in range(40):
            x = F.silu(x)


class _Recompute(torch.autograd.Function):
    """A checkpoint as a Function of one's own; the decorators are what the subclasses differ in."""

    @staticmethod
    def run(ctx: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def again(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        with torch.autocast("cpu", enabled=False):
            torch.autograd.backward(y, grad)
        return None, x.grad


class ThirdParty(_Recompute):
    """As Megatron's and DeepSpeed's: torch's own triple is saved, and entered again by torch.autocast."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
        state = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        ctx.state = state
        return _Recompute.run(ctx, block, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dtype, enabled, cache = ctx.state
        with torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache):
            return _Recompute.again(ctx, grad)


class Torchs(_Recompute):
    forward = staticmethod(torch.amp.custom_fwd(_Recompute.run, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(_Recompute.again, device_type="cpu"))


class Ours(_Recompute):
    forward = staticmethod(mpamp.custom_fwd(_Recompute.run))
    backward = staticmethod(mpamp.custom_bwd(_Recompute.again))


class OursInFloat32(_Recompute):
    forward = staticmethod(mpamp.custom_fwd(_Recompute.run, cast_inputs=torch.float32))
    backward = staticmethod(mpamp.custom_bwd(_Recompute.again))


class _Module(torch.nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)  # type: ignore[no-any-return]


def wrapped(block: Any, is_reentrant: bool) -> torch.nn.Module:
    kind = CheckpointImpl.REENTRANT if is_reentrant else CheckpointImpl.NO_REENTRANT
    return checkpoint_wrapper(_Module(block), checkpoint_impl=kind)  # type: ignore[no-any-return]


_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
NAMES = {
    "torch": torch,
    "F": F,
    "mpamp": mpamp,
    "checkpoint": checkpoint,
    "checkpoint_sequential": checkpoint_sequential,
    "saving_products": functools.partial(create_selective_checkpoint_contexts, _PRODUCTS),
    "FUNCTIONS": {"third party": ThirdParty, "torch.amp": Torchs, "mpamp": Ours, "mpamp float32": OursInFloat32},
    "Boom": Boom,
    "absent_device": next((d for d in ("xpu", "cuda") if not torch.get_device_module(d).is_available()), "xpu"),
    "whole_tables": [whole_table(i) for i in range(len(WHOLE_TABLES))],
    **{f.__name__: f for f in (on_thread, at_once, backward_here, keep_busy, wrapped)},
}
