"""A region, entered and left: its time doesn't depend on the model, and matters where a layer or a token enters it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ...devices.registry import get_op_table
from ...regions.region import autocast
from ..precisions import BASE, use_mpamps_kernels
from ..rows import Row, with_ratios
from ..timing import Variant, measure

__all__ = ["cases", "run"]


def run(device: torch.device, dtype: torch.dtype, rounds: int, *, is_quick: bool) -> list[Row]:
    """Time all cases in turns; those that torch has nothing like are compared with a plain region of torch's."""
    use_mpamps_kernels(device, dtype)
    found = cases(device.type, dtype)
    variants = [variant for _, *pair in found for variant in pair if variant is not None]
    turn_s = 0.0005 if is_quick else 0.02
    timings = iter(measure(variants, device, rounds=rounds, turn_s=turn_s, warm_up=2 if is_quick else 50))
    rows: list[Row] = []
    plain: Row | None = None
    for case, torchs, ours in found:
        pair = [
            Row("micro", f"region: {case}", variant.name, time=next(timings))
            for variant in (torchs, ours)
            if variant is not None
        ]
        plain = plain or pair[0]
        rows += with_ratios(pair, BASE) if torchs is not None else with_ratios([plain, *pair], BASE)[1:]
    return rows


# Each batch is written out, so that no call of a wrapper adds the same time to both sides.


def entered_anew(autocast: Any, device: str, dtype: torch.dtype, **options: Any) -> Callable[[int], None]:
    """Return a batch that makes, enters and leaves a region per turn."""

    def batch(n: int) -> None:
        for _ in range(n):
            with autocast(device, dtype=dtype, **options):
                pass

    def plain_batch(n: int) -> None:
        for _ in range(n):
            with autocast(device, dtype=dtype):
                pass

    return batch if options else plain_batch


new_torch = functools.partial(entered_anew, torch.autocast)
new_mpamp = functools.partial(entered_anew, autocast)


def reused(region: Any) -> Callable[[int], None]:
    def batch(n: int) -> None:
        for _ in range(n):
            with region:
                pass

    return batch


def decorated(region: Any) -> Callable[[int], None]:
    @region  # type: ignore[untyped-decorator]
    def function() -> None:
        pass

    def batch(n: int) -> None:
        for _ in range(n):
            function()

    return batch


def cases(device: str, dtype: torch.dtype) -> list[tuple[str, Variant | None, Variant]]:
    """Return (case, torch's variant, mpamp's variant); None where torch has nothing like it."""

    def torchs(batch: Callable[[int], None], *, is_nested: bool = False) -> Variant:
        return Variant(BASE, batch, (lambda: torch.autocast(device, dtype=dtype)) if is_nested else nullcontext)

    def ours(batch: Callable[[int], None], *, is_nested: bool = False) -> Variant:
        return Variant("mpamp", batch, (lambda: autocast(device, dtype=dtype)) if is_nested else nullcontext)

    torch_new, mpamp_new = new_torch(device, dtype), new_mpamp(device, dtype)
    off = {"enabled": False}
    rules = {"softmax": "lower_precision_fp"}
    table = get_op_table(device).override(rules)
    return [
        ("plain", torchs(torch_new), ours(mpamp_new)),
        (
            "one object, entered again",
            torchs(reused(torch.autocast(device, dtype=dtype))),
            ours(reused(autocast(device, dtype=dtype))),
        ),
        (
            "decorated function",
            torchs(decorated(torch.autocast(device, dtype=dtype))),
            ours(decorated(autocast(device, dtype=dtype))),
        ),
        ("nested in one of the same dtype", torchs(torch_new, is_nested=True), ours(mpamp_new, is_nested=True)),
        ("disabled", torchs(new_torch(device, dtype, **off)), ours(new_mpamp(device, dtype, **off))),
        (
            "disabled, nested",
            torchs(new_torch(device, dtype, **off), is_nested=True),
            ours(new_mpamp(device, dtype, **off), is_nested=True),
        ),
        (
            "cache_enabled=False",
            torchs(new_torch(device, dtype, cache_enabled=False)),
            ours(new_mpamp(device, dtype, cache_enabled=False)),
        ),
        ("persistent_cache=True", None, ours(new_mpamp(device, dtype, persistent_cache=True))),
        ("ops={...}", None, ours(new_mpamp(device, dtype, ops=rules))),
        ("ops=OpTable", None, ours(new_mpamp(device, dtype, ops=table))),
        ("ops={...}, one object", None, ours(reused(autocast(device, dtype=dtype, ops=rules)))),
        ("ops={...}, nested", None, ours(new_mpamp(device, dtype, ops=rules), is_nested=True)),
    ]
