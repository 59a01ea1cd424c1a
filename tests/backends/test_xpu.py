"""Intel's documented op lists hold in a region on xpu, on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mpamp
from tests.parity.observe import observe, overload, tensors_at

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
XPU = "fake xpu"
pytestmark = pytest.mark.place(XPU)

# https://intel.github.io/intel-extension-for-pytorch: "Auto Mixed Precision (AMP) on GPU", its three lists
LOWER = ["conv1d", "conv2d", "conv3d", "bmm", "baddbmm", "addmm", "linear", "matmul", "_convolution", "convolution"]
_FFT = ["fft", "fft2", "fftn", "rfft", "rfft2", "rfftn", "hfft"]
FFT = [f"fft_{prefix}{name}" for name in _FFT for prefix in ("", "i")]
FULL_PRECISION = ["log_softmax.int", "nll_loss", "nll_loss_nd", "cross_entropy_loss", "binary_cross_entropy", *FFT]
PROMOTE = ["cat", "stack"]
NO_CARD = "not compiled with XPU"
"""How an op ends that torch can't run on fake tensors; what it was given has been seen by then."""


def _observe(op: str, lower: torch.dtype, form: str) -> dict[str, Any]:
    observation = observe(overload(f"aten::{op}"), XPU, lower, form, mpamp.autocast)
    assert observation["out"] != "raises" or NO_CARD in observation["reason"], observation["reason"]
    assert observation["ops"]
    return observation


def _gives(observation: dict[str, Any], *dtypes: torch.dtype) -> bool:
    return observation["out"] in ("raises", *(f"-> {_name(dtype)}" for dtype in dtypes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_intel_has_fourteen_ffts() -> None:
    assert len(FFT) == 14


@pytest.mark.parametrize("form", ["float32", "lower", "float32, lower", "other"])
@pytest.mark.parametrize("lower", [BRAIN, HALF])
@pytest.mark.parametrize("op", LOWER)
def test_lower_precision(op: str, lower: torch.dtype, form: str) -> None:
    observation = _observe(op, lower, form)
    assert _gives(observation, lower)
    assert not any("float32" in called for called in observation["ops"])


@pytest.mark.parametrize("form", ["float32", "lower", "other"])
@pytest.mark.parametrize("lower", [BRAIN, HALF])
@pytest.mark.parametrize("op", FULL_PRECISION)
def test_float32(op: str, lower: torch.dtype, form: str) -> None:
    observation = _observe(op, lower, form)
    assert _gives(observation, FULL, torch.complex64)
    read = observation["ops"]
    if torch.__version__ >= "2.14":  # there this reads 16 bits by itself, and computes and gives float32
        read = [called for called in read if not called.startswith("aten._log_softmax.default")]
    assert not any("float16" in called for called in read)  # nor bfloat16


@pytest.mark.parametrize(
    ("form", "out"), [("float32", FULL), ("lower", None), ("float32, lower", FULL), ("lower, other", FULL)]
)
@pytest.mark.parametrize("lower", [BRAIN, HALF])
@pytest.mark.parametrize("op", PROMOTE)
def test_promote(op: str, lower: torch.dtype, form: str, out: torch.dtype | None) -> None:
    assert _gives(_observe(op, lower, form), out or lower)


def test_functions_of_torch_nn() -> None:
    with tensors_at(XPU), mpamp.autocast("xpu"):
        x = torch.rand(4, 4, device="xpu")
        hidden = F.linear(x, x)
        target = torch.zeros(4, dtype=torch.int64, device="xpu")
        assert hidden.dtype is BRAIN
        assert F.cross_entropy(hidden, target).dtype is FULL
        assert F.nll_loss(hidden, target).dtype is FULL
        assert F.log_softmax(hidden, 0).dtype is FULL
        assert F.binary_cross_entropy(hidden.sigmoid(), hidden.sigmoid()).dtype is FULL
        assert torch.fft.rfft2(hidden).dtype is torch.complex64
        assert torch.cat([hidden, x]).dtype is FULL


def test_log_softmax_is_given_the_dtype_asked_for() -> None:
    with tensors_at(XPU), mpamp.autocast("xpu"):
        assert torch.rand(4, 4, device="xpu").log_softmax(0, dtype=HALF).dtype is HALF


def test_tensors_of_other_devices_are_left() -> None:
    with tensors_at(XPU), mpamp.autocast("xpu"):
        assert torch.mm(torch.rand(4, 4), torch.rand(4, 4)).dtype is FULL


@pytest.mark.parametrize(("device", "dtype"), [("xpu", BRAIN), ("cuda", HALF), ("cpu", BRAIN)])
def test_default_dtype(device: str, dtype: torch.dtype) -> None:
    assert mpamp.autocast(device).dtype is dtype
    assert mpamp.autocast(f"{device}:0").dtype is dtype
    assert mpamp.autocast(torch.device(device, 0)).dtype is dtype
    assert mpamp.get_backend(device).default_dtype is dtype


def test_default_dtype_is_the_regions() -> None:
    with tensors_at(XPU), mpamp.autocast("xpu"):
        assert torch.get_autocast_dtype("xpu") is BRAIN
        assert torch.is_autocast_enabled("xpu")
