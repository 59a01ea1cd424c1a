"""Tensors go to another device without a wait, but for those that the host reads at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpamp.scaler import kernels


class Copied:
    def to(self, device: torch.device, *, non_blocking: bool) -> Any:
        return device.type, non_blocking


def test_a_copy_to_the_host_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_asynchronous", lambda: frozenset({"xpu"}))
    tensor: Any = Copied()
    assert kernels.moved(tensor, torch.device("cpu")) == ("cpu", False)
    assert kernels.moved(tensor, torch.device("xpu", 1)) == ("xpu", True)


def test_a_tensor_stays_where_it_is() -> None:
    tensor = torch.ones(2)
    assert kernels.moved(tensor, tensor.device) is tensor
    copies = kernels.Copies(tensor)
    assert copies.at(tensor.device) is tensor
    assert copies.at(torch.device("meta")).device.type == "meta"
    assert copies.at(torch.device("meta")) is copies.by_device[torch.device("meta")]
