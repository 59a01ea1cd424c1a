"""The time of one call in a region, by what the op's policy has to do; mpamp's engine against torch's.

    python benchmarks/ops.py [--device cuda] [--size 16] [--json ops.json]

The tensors are small, so that the time is the host's: dispatch, policy, casts and one small kernel. ``plain``
calls the op outside every region with arguments that are cast already: what is above it is the price of autocast.
Torch is timed with mpamp's kernels taken out of the dispatcher. The case ``torch.autocast over mpamp's kernel``
shows what an installed mpamp adds to a plain ``torch.autocast``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import (
    DTYPES,
    Context,
    Counts,
    Timing,
    Variant,
    count,
    joined,
    measure,
    parser,
    print_table,
    repeat,
    settings,
    start,
    use_mpamps_kernels,
    use_torchs_kernels,
    write_json,
)
from torch.nn.functional import linear

import mpamp

ENGINE = "python"
"""The engine of mpamp that runs: kernels in Python, generated per op."""

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
    on = {"grad": True}
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


def variants(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Variant]:
    def in_region(region: Context | None = None) -> Context:
        grad = functools.partial(torch.set_grad_enabled, case.grad)
        return joined(grad) if region is None else joined(grad, region)

    def torchs() -> torch.autocast:
        return torch.autocast(device.type, dtype=dtype, **case.options)

    def mpamps() -> mpamp.Region:
        return mpamp.autocast(device.type, dtype=dtype, **case.options, **case.ours)

    def make(name: str, call: Call, region: Context | None, setup: Callable[[], None]) -> Variant:
        batch = repeat_keeping(call) if case.is_kept else repeat(call)
        return Variant(name, batch, in_region(region), setup)

    remove = functools.partial(use_torchs_kernels, device)
    put = functools.partial(use_mpamps_kernels, device, dtype)
    found = {
        "plain": make("plain", case.plain, None, remove),
        "torch": make("torch.autocast", case.call, torchs, remove),
        "mpamp": make("mpamp", case.call, mpamps, put),
        "torch_over_mpamp": make("torch.autocast over mpamp's kernel", case.call, torchs, put),
    }
    return {key: variant for key, variant in found.items() if _error(variant) is None}


def _error(variant: Variant) -> str | None:
    """Return why a variant can't run: some rows that mpamp adds are errors in torch."""
    variant.setup()
    try:
        with variant.context():
            variant.batch(1)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    return None


def policies(device: torch.device, dtype: torch.dtype, op: str) -> dict[str, str | None]:
    """Return the op's policy in torch's table and in mpamp's; None where it has none."""
    tables = {"torch": mpamp.get_op_table(device, "native"), "mpamp": mpamp.get_op_table(device)}
    rows = {name: table.get(op) for name, table in tables.items()}
    return {name: None if row is None or row.at(dtype) is None else str(row.at(dtype)) for name, row in rows.items()}


def run(case: Case, device: torch.device, dtype: torch.dtype, rounds: int, turn_s: float) -> dict[str, Any]:
    runnable = variants(case, device, dtype)
    timings = measure(list(runnable.values()), device, rounds=rounds, turn_s=turn_s, warm_up=20)
    times: dict[str, Timing] = dict(zip(runnable, timings, strict=True))
    counts: dict[str, Counts] = {key: count(variant, case.weights) for key, variant in runnable.items()}
    ours, theirs = times.get("mpamp"), times.get("torch")
    return {
        "op": case.op,
        "situation": case.situation,
        "policy": policies(device, dtype, case.op),
        "times": times,
        "counts": counts,
        "ratio": None if ours is None or theirs is None else round(ours.us / theirs.us, 3),
    }


def main() -> None:
    options = parser(__doc__, threads=1)
    options.add_argument("--size", type=int, default=16, help="rows and columns of each tensor (default: 16)")
    options = options.parse_args()
    start(options)
    device, dtype = options.device, DTYPES[options.dtype]
    turn_s = 0.0005 if options.quick else 0.01
    rows = [run(case, device, dtype, options.rounds, turn_s) for case in cases(device, dtype, options.size)]
    print_table(
        f"One call, {options.size} x {options.size}, {dtype}, us (medians); kernels and casts of one call",
        (
            "op and situation",
            "policy",
            "plain",
            "torch",
            "mpamp",
            "mpamp / torch",
            "torch over mpamp",
            "kernels t",
            "m",
            "casts t",
            "m",
        ),
        [_line(row) for row in rows],
    )
    use_mpamps_kernels(device, dtype)
    write_json(options.json, "ops", device, settings(options), engine=ENGINE, rows=rows)


def _line(row: dict[str, Any]) -> list[object]:
    times, counts = row["times"], row["counts"]
    name = f"{row['op'].removeprefix('aten::')}, {row['situation']}"
    us = {key: times[key].us if key in times else None for key in ("plain", "torch", "mpamp", "torch_over_mpamp")}
    seen = [getattr(counts.get(key), what, None) for what in ("kernels", "casts") for key in ("torch", "mpamp")]
    policy = row["policy"]["mpamp"]
    return [name, policy, us["plain"], us["torch"], us["mpamp"], row["ratio"], us["torch_over_mpamp"], *seen]


if __name__ == "__main__":
    main()
