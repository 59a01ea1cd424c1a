"""What the tests of integrations share: digits, a small model that remembers its dtypes, and what can be imported."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 0.02, F16: 0.005, F32: 1e-6}
"""How far a loss may be from float32's, relative to it: two units of the dtype's last place add up over the steps."""


def missing(*modules: str) -> str:
    """Return why one of these can't be imported; empty if all can."""
    for module in modules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(module)
        except Exception as error:  # torchvision beside another torch raises RuntimeError, for one
            return f"{module} can't be imported: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def needs(*modules: str) -> None:
    """Skip the calling test module where one of these can't be imported."""
    if reason := missing(*modules):
        pytest.skip(reason, allow_module_level=True)


def skip_without(*modules: str) -> None:
    """Skip the calling test where one of these can't be imported."""
    if reason := missing(*modules):
        pytest.skip(reason)


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits: images of shape [1797, 64] in [0, 1], labels of shape [1797]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data, dtype=F32) / 16, torch.tensor(data.target)


def batches(count: int, size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first batches of the digits."""
    images, labels = digits()
    for i in range(count):
        yield images[i * size : (i + 1) * size], labels[i * size : (i + 1) * size]


class Net(torch.nn.Module):
    """Two layers, and the dtypes that the first one gave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = torch.nn.Linear(64, 48)
        self.out = torch.nn.Linear(48, 10)
        self.seen: list[torch.dtype] = []

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.hidden(images)
        self.seen.append(hidden.dtype)
        return self.out(hidden.relu())


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    """Return an optimizer with momentum, so that resuming has something to keep."""
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)


def weights_of(model: torch.nn.Module) -> Tensor:
    """Return all weights, as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
