"""One call of an op in a region, by what the op's policy has to do.

The tensors are small, so that the time is the host's: dispatch, policy, casts and one small kernel. ``pure`` calls the
op outside of every region, with arguments that are cast already: what is above it is the price of autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import linear

from ...regions.region import autocast
from ..counts import count
from ..precisions import BASE, use_mpamps_kernels, use_torchs_kernels
from ..rows import Row, with_ratios
from ..timing import Variant, joined, measure, repeat

__all__ = ["Case", "cases", "run"]

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One op in one situation.

    Attributes:
        op: The overload.
        situation: What autocast finds.
        plain: The call outside regions, on arguments as the op gets them.
        call: The call in a region.
        weights: The parameters among its arguments.
        options: What both regions are opened with.
        ours: What only mpamp's region is opened with.
        grad: Whether gradients are recorded.
        is_kept: Whether a call's result outlives it, and with it the graph that holds a cached cast.
    """

    op: str
    situation: str
    plain: Call
    call: Call
    weights: tuple[torch.Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    grad: bool = False
    is_kept: bool = True


def cases(device: torch.device, dtype: torch.dtype, size: int) -> list[Case]:
    """Return the cases, on square matrices of ``size``."""

    def tensor() -> torch.Tensor:
        return torch.randn(size, size, device=device)

    x, y = tensor(), tensor()
    low_x, low_y = x.to(dtype), y.to(dtype)
    weight, bias = torch.nn.Parameter(tensor()), torch.nn.Parameter(torch.randn(size, device=device))
    frozen = torch.nn.Parameter(tensor(), requires_grad=False)
    frozen_bias = torch.nn.Parameter(bias.detach().clone(), requires_grad=False)
    low_weight, low_bias = (torch.nn.Parameter(t.detach().to(dtype)) for t in (weight, bias))
    partial = functools.partial
    plain_mm, plain_linear = partial(torch.mm, low_x, low_y), partial(linear, low_x, low_weight, low_bias)
    found = [
        Case("aten::mm", "no cast", plain_mm, plain_mm),
        Case("aten::mm", "two casts", plain_mm, partial(torch.mm, x, y)),
        Case("aten::mm", "cached weight", plain_mm, partial(torch.mm, low_x, weight), (weight,)),
        Case("aten::mm", "frozen weight", plain_mm, partial(torch.mm, low_x, frozen), (frozen,)),
        Case("aten::linear", "no cast", plain_linear, plain_linear),
    ]
    trainable = partial(linear, low_x, weight, bias)
    still = partial(linear, low_x, frozen, frozen_bias)
    both, both_frozen = (weight, bias), (frozen, frozen_bias)
    inner = low_x.clone().requires_grad_()
    plain_grad = partial(linear, inner, low_weight, low_bias)
    trainable_grad = partial(linear, inner, weight, bias)
    on: dict[str, Any] = {"grad": True}
    found += [
        Case("aten::linear", "cached weight + bias, grad", plain_grad, trainable_grad, both, **on),
        Case("aten::linear", "the same, graph gone", plain_grad, trainable_grad, both, **on, is_kept=False),
        Case("aten::linear", "frozen weight + bias, grad", plain_linear, still, both_frozen, **on),
        Case("aten::linear", "cached weight + bias, no_grad", plain_linear, trainable, both),
        Case("aten::linear", "frozen weight + bias, no_grad", plain_linear, still, both_frozen),
        Case(
            "aten::linear", "persistent cache, no_grad", plain_linear, trainable, both, ours={"persistent_cache": True}
        ),
        Case("aten::linear", "no cache, no_grad", plain_linear, trainable, both, options={"cache_enabled": False}),
    ]
    softmax, cat = partial(torch.softmax, dim=-1), torch.cat
    fft, hfft2 = torch.fft.fft, torch.fft.hfft2
    return [
        *found,
        Case("aten::softmax.int", "float32 in", partial(softmax, x), partial(softmax, x)),
        Case("aten::softmax.int", "lower precision in", partial(softmax, x), partial(softmax, low_x)),
        Case("aten::cat", "one dtype", partial(cat, [low_x, low_y]), partial(cat, [low_x, low_y])),
        Case("aten::cat", "two dtypes", partial(cat, [x, y]), partial(cat, [x, low_y])),
        Case("aten::fft_fft", "float32 in", partial(fft, x), partial(fft, x)),
        Case("aten::fft_fft", "lower precision in", partial(fft, x), partial(fft, low_x)),
        Case("aten::fft_hfft2", "float32 in", partial(hfft2, x), partial(hfft2, x)),
        Case("aten::fft_hfft2", "lower precision in", partial(hfft2, x), partial(hfft2, low_x)),
        Case("aten::relu", "not in a table", partial(torch.relu, low_x), partial(torch.relu, low_x)),
    ]


def repeat_keeping(call: Call) -> Callable[[int], None]:
    """Return a batch in which each result lives until the next one is there."""
    kept: list[torch.Tensor | None] = [None]

    def batch(n: int) -> None:
        for _ in range(n):
            kept[0] = call()

    return batch


def run(device: torch.device, dtype: torch.dtype, rounds: int, *, is_quick: bool) -> list[Row]:
    """Time all cases, each in the four situations that it can run in."""
    found: list[Row] = []
    for case in cases(device, dtype, 16):
        variants = _variants(case, device, dtype)
        turn_s = 0.0005 if is_quick else 0.01
        timings = measure(variants, device, rounds=rounds, turn_s=turn_s, warm_up=2 if is_quick else 20)
        counts = [count(variant, case.weights, device, is_compiled=False) for variant in variants]
        work = f"{case.op.removeprefix('aten::')}: {case.situation}"
        rows = [
            Row("micro", work, variant.name, time=timing, counts=seen)
            for variant, timing, seen in zip(variants, timings, counts, strict=True)
        ]
        found += with_ratios(rows, BASE)
    return found


def _variants(case: Case, device: torch.device, dtype: torch.dtype) -> list[Variant]:
    grad = functools.partial(torch.set_grad_enabled, case.grad)
    torchs = joined(grad, functools.partial(torch.autocast, device.type, dtype=dtype, **case.options))
    ours = joined(grad, functools.partial(autocast, device.type, dtype=dtype, **case.options, **case.ours))
    remove = functools.partial(use_torchs_kernels, device)
    put = functools.partial(use_mpamps_kernels, device, dtype)
    call, plain = ((repeat_keeping if case.is_kept else repeat)(each) for each in (case.call, case.plain))
    found = [
        Variant("pure", plain, joined(grad), remove),
        Variant(BASE, call, torchs, remove),
        Variant("mpamp persistent" if case.ours else "mpamp", call, ours, put),
        Variant("torch.autocast over mpamp", call, torchs, put),
    ]
    return [variant for variant in found if _runs(variant)]


def _runs(variant: Variant) -> bool:
    """Tell whether a variant can run: some rows that mpamp adds are errors in torch."""
    variant.setup()
    try:
        with variant.context():
            variant.batch(1)
    except (RuntimeError, NotImplementedError):
        return False
    return True
