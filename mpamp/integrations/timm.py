"""timm's ``NativeScaler`` with mpamp's scaler: in its place, with its calls, on any device."""

from __future__ import annotations

from typing import Any

import timm.utils
import torch

from ..scaler import GradScaler

__all__ = ["NativeScaler"]


class NativeScaler(timm.utils.NativeScaler):
    """A ``timm.utils.NativeScaler`` whose scaler is ``mpamp.GradScaler``.

    Called as timm's: ``loss_scaler(loss, optimizer, clip_grad, clip_mode, parameters, create_graph, need_update)``.
    Clipping in any of timm's modes sees unscaled gradients. The forward pass goes into ``mpamp.autocast``.

    Args:
        device: Device type, as a string or a torch.device. None is the current accelerator, else the processor; timm's
            own takes CUDA unless it is told.
        options: As those of ``mpamp.GradScaler``.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_scaler = NativeScaler("cpu", init_scale=1024.0)
        >>> loss_scaler(model(torch.ones(4, 2)).sum(), optimizer, clip_grad=1.0, parameters=model.parameters())
        >>> loss_scaler.scaler.last_step_skipped(optimizer)
        False
    """

    def __init__(self, device: str | torch.device | None = None, **options: Any) -> None:
        self._scaler = GradScaler(device, **options)  # timm's own __init__ only makes torch's

    @property
    def scaler(self) -> GradScaler:
        """The scaler, to ask about skipped steps."""
        return self._scaler
