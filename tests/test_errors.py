"""Errors are also what a program written for torch catches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpamp

ASK: dict[str, Callable[[], Any]] = {
    "autocast": lambda: mpamp.autocast("nosuch"),
    "get_backend": lambda: mpamp.get_backend("nosuch"),
    "get_op_table": lambda: mpamp.get_op_table("nosuch"),
    "set_op_rules": lambda: mpamp.set_op_rules("nosuch", None),
    "register_op": lambda: mpamp.register_op("aten::gelu", "fp32", "nosuch"),
    "GradScaler": lambda: mpamp.GradScaler("nosuch"),
}


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, mpamp.MpampError])
@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_an_unknown_device_is_each_error_that_is_caught_for_it(ask: Callable[[], Any], kind: type[Exception]) -> None:
    with pytest.raises(RuntimeError):
        torch.autocast("nosuch")
    with pytest.raises(kind, match="nosuch") as failed:
        ask()
    assert type(failed.value) is mpamp.UnknownDeviceError
