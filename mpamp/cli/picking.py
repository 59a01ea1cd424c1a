"""What the commands that compute share: which device they compute on."""

from __future__ import annotations

import click
import torch

import mpamp
from mpamp.devices.registry import device_state
from mpamp.errors import PluginConflictError, PluginLoadError

__all__ = ["pick_device"]


def pick_device(name: str | None) -> torch.device:
    """Return the device that ``--device`` names, or the best one here.

    Raises:
        click.BadParameter: It is unknown, or not on this machine.
        click.ClickException: The plugin that brings it fails.
    """
    if name is None:
        return _best_device()
    try:
        backend = device_state(name.partition(":")[0]).backend
        device = torch.device(name)
        is_here = backend.is_available()
    except (PluginConflictError, PluginLoadError) as error:
        raise click.ClickException(str(error)) from error
    except mpamp.MpampError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    except RuntimeError as error:
        raise click.BadParameter(f"{name!r} is not a device: {error}", param_hint="--device") from error
    if not is_here:
        raise click.BadParameter(f"there is no {device.type} device on this machine", param_hint="--device")
    count = torch.get_device_module(device).device_count()
    if (device.index or 0) >= count:
        raise click.BadParameter(
            f"{name!r} is not on this machine, which has {count} of that type", param_hint="--device"
        )
    return device


def _best_device() -> torch.device:
    """Pick the accelerator of this machine if mpamp has a backend for it, else the processor."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        try:
            device_state(accelerator.type)
        except mpamp.MpampError:
            pass
        else:
            return accelerator
    return torch.device("cpu")
