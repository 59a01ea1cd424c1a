"""Regions by torch's names: what of mpamp serves in them, and what is left to torch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from typing import Any

import pytest
import torch

import mpamp
from mpamp.standins.callers import is_torchs
from mpamp.testing import WeightCastCounter

pytestmark = pytest.mark.usefixtures("installed")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def told() -> bool:
    """Tell whether mpamp serves, by float16's ``exp``, which torch runs as it is called."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).exp().dtype is FP32


def test_weights_are_cast_once_and_frozen_ones_too() -> None:
    frozen = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    with torch.autocast("cpu"), WeightCastCounter(frozen) as counter:
        for _ in range(3):
            frozen(torch.ones(1, 4))
    assert counter.count == 1


def test_without_a_cache_each_use_casts() -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    with torch.autocast("cpu", cache_enabled=False), WeightCastCounter(model) as counter:
        for _ in range(3):
            model(torch.ones(1, 4))
    assert counter.count == 3


def test_rules_of_the_process_hold() -> None:
    mpamp.set_op_rules("cpu", {"gelu": "fp32"})
    try:
        with torch.autocast("cpu"):
            assert torch.nn.functional.gelu(torch.ones(2, dtype=BF16)).dtype is FP32
    finally:
        mpamp.set_op_rules("cpu", None)


def test_an_object_is_entered_twice_and_by_two_threads() -> None:
    region, seen = torch.autocast("cpu", dtype=FP16), []

    def work() -> None:
        with region:
            seen.append(told())
        seen.append(product() is FP32)

    with region, region:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
        assert told()
    assert seen == [True, True]
    assert product() is FP32


def test_regions_of_both_names_nest() -> None:
    with torch.autocast("cpu", dtype=FP16), mpamp.autocast("cpu", BF16):
        assert product() is BF16
        with torch.autocast("cpu"):
            assert product() is BF16
    with mpamp.autocast("cpu", FP16, ops={"exp": "fallthrough"}):
        assert not told()
        with torch.autocast("cpu", enabled=False):
            assert product() is FP32
        with torch.autocast("cpu", dtype=FP16):
            assert told()


def test_generators_and_async_functions_are_decorated() -> None:
    @torch.autocast("cpu")
    def generate() -> Any:
        yield product()
        yield product()

    @torch.autocast("cpu")
    async def work() -> torch.dtype:
        await asyncio.sleep(0)
        return product()

    steps = generate()
    assert (next(steps), product(), next(steps)) == (BF16, FP32, BF16)
    assert asyncio.run(work()) is BF16  # type: ignore[arg-type]


def test_what_mpamp_has_no_backend_for_is_torchs() -> None:
    with torch.autocast("mps", dtype=FP16):
        assert torch.is_autocast_enabled("mps")
        assert product() is FP32
    assert not torch.is_autocast_enabled("mps")


@pytest.mark.skipif(torch.xpu.is_available(), reason="needs a machine without XPU")
def test_a_device_that_is_not_here_is_torchs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("xpu", dtype=BF16):
            assert torch.is_autocast_enabled("xpu")
            assert product() is FP32
    assert not torch.is_autocast_enabled("xpu")


def test_mpamps_own_regions_say_whether_they_keep_casts() -> None:
    with mpamp.autocast("cpu"):
        assert torch.is_autocast_cache_enabled()
        with mpamp.autocast("cpu", cache_enabled=False):
            assert not torch.is_autocast_cache_enabled()
    mpamp.uninstall()
    with mpamp.autocast("cpu"):
        assert not torch.is_autocast_cache_enabled()


def test_an_exit_out_of_order() -> None:
    outer, inner = torch.autocast("cpu", dtype=FP16), torch.autocast("cpu")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert product() is BF16 or product() is FP16
    inner.__exit__(None, None, None)
    assert product() is FP32


def test_an_error_while_entering_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpamp.regions.region import Region

    def fail(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Region, "__enter__", fail)
        with pytest.raises(KeyboardInterrupt), torch.autocast("cpu"):
            pass
    before = vars(torch.autocast)["__exit__"]
    mpamp.uninstall()
    assert vars(torch.autocast)["__exit__"] is not before
    with contextlib.suppress(KeyboardInterrupt), torch.autocast("cpu"):
        assert product() is BF16


@pytest.mark.parametrize(
    ("module", "function", "expected"),
    [
        ("torch.amp.autocast_mode", "decorate_bwd", True),
        ("torch.amp.autocast_mode", "decorate_autocast", False),
        ("mpamp.regions.saved", "_plain", True),
        ("torchvision", "f", False),
        ("mpamp_plugin", "f", False),
        ("__main__", "f", False),
        ("", "f", False),
    ],
)
def test_whose_code_it_is(module: str, function: str, expected: bool) -> None:
    assert is_torchs(module, function) is expected
