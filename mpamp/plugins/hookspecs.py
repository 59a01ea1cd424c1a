"""What a plugin may implement. Hooks are called when a device is first asked for, never per op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy
import torch

if TYPE_CHECKING:
    import click

    from .backend import Backend
    from .events import ReportSections, ScaleEvent, ScalerArguments

__all__ = ["API_VERSION", "hookimpl", "hookspec"]

PROJECT = "mpamp"
API_VERSION = 1
"""The plugin API that this mpamp speaks; a plugin may name the one it needs as ``MPAMP_API_VERSION``."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def mpamp_backends() -> list[Backend]:  # type: ignore[empty-body]
    """Return the backends that the plugin brings; called once, when the plugin is loaded."""


@hookspec
def mpamp_op_rules(device_type: str, dtype: torch.dtype) -> Mapping[str, Any] | None:
    """Return extra rules for a device, as ``ops=`` takes them, in regions of ``dtype``.

    Called when the device is first asked for, once for each of its lower-precision dtypes.
    """


@hookspec(firstresult=True)
def mpamp_make_scaler(device_type: str, config: ScalerArguments) -> torch.amp.GradScaler | None:
    """Return the gradient scaler for a device, of hardware with an overflow flag of its own for one; or None.

    Called when an enabled ``mpamp.GradScaler`` is made, not for its subclasses. ``config.arguments()`` are the
    arguments of the call, checked. The first scaler returned is what the caller gets.
    """


@hookspec
def mpamp_scale_event(event: ScaleEvent) -> None:
    """Be told of one optimizer's step: its number, the scale, whether it was skipped.

    Called when the host learns of it anyway: in ``scaler.step()``, before the optimizer steps; for a fused optimizer
    on an accelerator only when ``last_step_skipped`` or ``last_step`` is read before the next step.
    """


@hookspec
def mpamp_cli(app: click.Group) -> None:
    """Add commands to ``mpamp``, by ``app.add_command()`` or ``@app.command()``.

    Called when the command is asked for a list of its commands, or for one that is not mpamp's own; ``app`` holds those
    of the plugin alone. A name that is taken is a conflict.
    """


@hookspec
def mpamp_report_sections(report: ReportSections) -> None:
    """Add sections to a report, by ``report.add_section(title, *parts)``; ``report.to_dict()`` is what was seen.

    Called when the script is over, before the report is written. A plugin that fails adds none, and the report says so.
    """
