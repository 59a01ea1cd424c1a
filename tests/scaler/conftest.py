"""What the scaler's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from mpamp.scaler import GradScaler

Backward = Callable[..., None]


def backward(scaler: Any, params: Iterable[torch.Tensor], *, factor: float = 1.0) -> None:
    """Give every parameter the gradient ``factor``, scaled; inf or NaN if that is the factor."""
    loss = sum((p.real.sum() if p.is_complex() else p.sum().float()) for p in params)
    scaler.scale(loss * factor).backward()


@pytest.fixture
def run_backward() -> Backward:
    """Return what gives parameters a scaled gradient."""
    return backward


@pytest.fixture
def weights() -> list[torch.nn.Parameter]:
    """Return two parameters of ones."""
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]


@pytest.fixture
def scaler() -> GradScaler:
    """Return a scaler of the CPU with scale 1024."""
    return GradScaler("cpu", init_scale=1024.0)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scaler take the CPU for a device that has no kernels for gradient scaling."""
    monkeypatch.setattr("mpamp.scaler.kernels.has_kernel", lambda device_type, op: False)


@pytest.fixture
def like_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scaler take the CPU for a device that the host has to wait for."""
    monkeypatch.setattr("mpamp.scaler.kernels.is_on_host", lambda tensor: False)
