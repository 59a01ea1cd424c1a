"""What stands in for streams, and for those who spoil what they are given."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpamp.engine.casts import streams

__all__ = ["Queues", "Spoils"]

Tensor = torch.Tensor


class Queues:
    """Stands for a device with streams: counts what is done to them, in order."""

    def __init__(self) -> None:
        self.current = 0
        self.log: list[tuple[str, int]] = []

    def stream(self, device: object = None) -> SimpleNamespace:
        number = self.current
        return SimpleNamespace(number=number, wait_event=lambda e: self.log.append((f"waits for {e.number}", number)))

    def event(self, device: object) -> SimpleNamespace:
        event = SimpleNamespace(number=None)

        def record(stream: Any) -> None:
            event.number = stream.number
            self.log.append(("records", stream.number))

        event.record = record
        return event

    def number(self, tensor: Tensor) -> int:
        return self.current

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have kept casts take this for the device's streams and events."""
        accelerator = SimpleNamespace(current_stream=self.stream)
        monkeypatch.setattr(streams, "torch", SimpleNamespace(accelerator=accelerator, Event=self.event))
        monkeypatch.setattr(streams, "_homes", {})
        monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: self.log.append(("holds", stream.number)))


class Spoils(TorchDispatchMode):
    """Writes into, or asks for a gradient of, every lower-precision tensor that it sees."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.act = act

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (*args, result):
            if isinstance(tensor, Tensor) and tensor.dtype is torch.bfloat16:
                self.act(tensor)
        return result
