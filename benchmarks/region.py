"""The time of a region: enter and exit, mpamp's against torch's.

    python benchmarks/region.py [--device cuda] [--json region.json]

A region's time doesn't depend on the model, and a step enters a few at most; it matters where a region is
entered per layer or per token. The target for a plain region is at most 0.7 of torch's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from common import (
    DTYPES,
    Variant,
    measure,
    parser,
    print_table,
    settings,
    start,
    use_mpamps_kernels,
    write_json,
)

import mpamp

TARGET = 0.7
"""The share of torch's time that a plain region may take."""

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
new_mpamp = functools.partial(entered_anew, mpamp.autocast)


def reused(region: Any) -> Callable[[int], None]:
    def batch(n: int) -> None:
        for _ in range(n):
            with region:
                pass

    return batch


def decorated(region: Any) -> Callable[[int], None]:
    @region
    def function() -> None:
        pass

    def batch(n: int) -> None:
        for _ in range(n):
            function()

    return batch


def cases(device: str, dtype: torch.dtype) -> list[tuple[str, Variant | None, Variant]]:
    """Return (case, torch's variant, mpamp's variant); None where torch has nothing like it."""

    def torchs(batch: Callable[[int], None], *, is_nested: bool = False) -> Variant:
        outer = {"context": lambda: torch.autocast(device, dtype=dtype)} if is_nested else {}
        return Variant("torch", batch, **outer)

    def ours(batch: Callable[[int], None], *, is_nested: bool = False) -> Variant:
        outer = {"context": lambda: mpamp.autocast(device, dtype=dtype)} if is_nested else {}
        return Variant("mpamp", batch, **outer)

    torch_new, mpamp_new = new_torch(device, dtype), new_mpamp(device, dtype)
    off = {"enabled": False}
    rules = {"softmax": "lower_precision_fp"}
    table = mpamp.get_op_table(device).override(rules)
    return [
        ("plain", torchs(torch_new), ours(mpamp_new)),
        (
            "one object, entered again",
            torchs(reused(torch.autocast(device, dtype=dtype))),
            ours(reused(mpamp.autocast(device, dtype=dtype))),
        ),
        (
            "decorated function",
            torchs(decorated(torch.autocast(device, dtype=dtype))),
            ours(decorated(mpamp.autocast(device, dtype=dtype))),
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
        ("ops={...}, one object", None, ours(reused(mpamp.autocast(device, dtype=dtype, ops=rules)))),
        ("ops={...}, nested", None, ours(new_mpamp(device, dtype, ops=rules), is_nested=True)),
    ]


def main() -> None:
    options = parser(__doc__, threads=1).parse_args()
    start(options)
    use_mpamps_kernels(options.device, DTYPES[options.dtype])
    found = cases(options.device.type, DTYPES[options.dtype])
    variants = [variant for _, *pair in found for variant in pair if variant is not None]
    turn_s = 0.0005 if options.quick else 0.02
    timings = iter(measure(variants, options.device, rounds=options.rounds, turn_s=turn_s, warm_up=50))
    rows = []
    for case, torchs, _ in found:
        theirs = None if torchs is None else next(timings)
        ours = next(timings)
        ratio = None if theirs is None else round(ours.us / theirs.us, 3)
        rows.append({"case": case, "torch": theirs, "mpamp": ours, "ratio": ratio})
    print_table(
        "Enter and exit of one region, us (medians)",
        ("case", "torch.autocast", "mpamp.autocast", "mpamp / torch"),
        [(r["case"], r["torch"] and r["torch"].us, r["mpamp"].us, r["ratio"]) for r in rows],
    )
    ratio = rows[0]["ratio"]
    print(f"\nplain region: {ratio:.2f} of torch.autocast's time (target: at most {TARGET})")
    write_json(options.json, "region", options.device, settings(options), target=TARGET, ratio=ratio, rows=rows)


if __name__ == "__main__":
    main()
