"""Kept casts on devices that run several queues of work side by side: a cast is ready only on the one that makes it.

A stream that meets a cast of another one waits for it on the device; the host waits for nothing. As long as a
program has one stream, no event is made.
"""

from __future__ import annotations

import torch

__all__ = ["Readiness"]

_homes: dict[torch.device, tuple[int, torch.Stream]] = {}
"""Each device's first stream that made a kept cast, and its number; mostly the device's default one."""


class Readiness:
    """Which streams may read one cast."""

    __slots__ = ("event", "ready", "stream")

    def __init__(self, device: torch.device, stream: int) -> None:
        """Note that the cast has just been queued on the current stream, whose number is ``stream``."""
        self.stream, self.ready = stream, {stream}
        home = _homes.get(device) or _homes.setdefault(device, (stream, torch.accelerator.current_stream(device)))
        # Where the home stream made it, an event recorded there later does as well. Other streams may be gone by then,
        # or be recording a graph.
        self.event = None if home[0] == stream else _record(torch.accelerator.current_stream(device), device)

    def admit(self, low: torch.Tensor, stream: int) -> bool:
        """Have the current stream, whose number is ``stream``, wait for the cast; tell whether it may read it."""
        if stream not in self.ready:
            device = low.device
            current = torch.accelerator.current_stream(device)
            event = self.event or _record(_homes[device][1], device)
            current.wait_event(event)
            try:
                low.record_stream(current)  # else its memory could be given away while this stream still reads it
            except NotImplementedError:
                return False
            self.ready.add(stream)
        return True


def _record(stream: torch.Stream, device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(stream)
    return event
