"""Collects what a report holds while a script runs, and writes the report however the script ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..._version import __version__
from ...devices.registry import DeviceState, device_state, devices_in_use
from ...errors import MpampError, shown
from ...plugins.manager import manager
from ..machine import describe_device, describe_engine
from ..tracing import Trace
from .advice import advise
from .clock import Clock
from .plain import torch_regions_counted
from .report import Comparison, Outcome, Report, Section
from .roots import Roots
from .scaling import ScalerWatch
from .steps import StepWatch
from .training import TrainingWatch

__all__ = ["Reporting"]

_HALF = (torch.float16, torch.bfloat16)
_HOOK = "mpamp_report_sections"


class Reporting:
    """A context manager that looks at what runs inside, and writes a report at its end; made by ``reporting``.

    What is raised inside goes on: the report says so.

    Attributes:
        report: Once it is over, the report; None before.
        compare: Called at the end, where the script ended well; gives what the report says beside float32.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        script: str = "",
        watch: int = 20,
        compare: Callable[[], Comparison] | None = None,
    ) -> None:
        if path is not None and importlib.util.find_spec("jinja2") is None:
            raise MpampError("a report as HTML needs jinja2, which is not installed: pip install 'mpamp[report]'")
        self.path = None if path is None else Path(path)
        self.report: Report | None = None
        self.compare = compare
        self._script = script
        self._trace, self._clock, self._torch_regions = Trace(), Clock(), [0]
        self._half_models: dict[str, None] = {}
        self._roots = Roots(self._begin)
        self._steps = StepWatch(watch, self._is_mixed, self._roots.label)
        self._training = TrainingWatch()
        self._scalers = ScalerWatch(self._steps, self._roots, self._training)
        self._open: contextlib.ExitStack | None = None

    def __enter__(self) -> Reporting:
        if self._open is not None or self.report is not None:
            raise RuntimeError("a report is made once: ask for another.")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._clock.running())
            stack.enter_context(torch_regions_counted(self._torch_regions))
            stack.enter_context(self._scalers.listening())
            stack.enter_context(self._training.looking())
            stack.enter_context(self._roots.followed())
            hook = register_optimizer_step_pre_hook(lambda *_: self._steps.end())
            stack.callback(hook.remove)
            stack.enter_context(self._trace)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._open is not None
        stack, self._open = self._open, None
        try:
            self._steps.close()
        except Exception as problem:  # after a device's error nothing there can be read
            self._steps.found.why_not = f"the last step couldn't be read: {shown(problem)}."
        finally:
            stack.close()
        self._finish(_outcome(error))

    def _finish(self, outcome: Outcome) -> None:
        report = self._made(outcome)
        try:
            _add_sections(report)
        finally:
            self.report = report
            if self.path is not None:
                from .rendering import render  # needs jinja2

                self.path.write_text(render(report), encoding="utf-8")

    def _made(self, outcome: Outcome) -> Report:
        clock = self._clock.to_dict()
        report = Report(
            script=self._script,
            outcome=outcome,
            clock=clock,
            machine=_machine(),
            tables=[_table(device) for device in devices_in_use()],
            summary=self._trace.summary(),
            scalers=self._scalers.logs,
            steps=self._steps.found,
            training=self._training.found,
            torch_regions=self._torch_regions[0],
            half_models=tuple(self._half_models),
            comparison=self._compared(outcome),
        )
        report.advice += advise(report)
        return report

    def _compared(self, outcome: Outcome) -> Comparison | None:
        if self.compare is None:
            return None
        if not outcome.is_well:
            return Comparison("float32", problem="The script didn't run to its end, so it wasn't run again.")
        return self.compare()

    def _begin(self, root: torch.nn.Module) -> None:
        first = next(root.parameters(), None)
        if first is not None and first.dtype in _HALF:
            self._half_models[self._roots.label(root)] = None
        self._steps.begin(root)

    def _is_mixed(self, root: torch.nn.Module) -> bool:
        """Tell whether a model that is about to run, or ran before, has to do with lower precision."""
        first = next(root.parameters(), None)
        if first is None:
            return False
        kind = first.device.type
        is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return is_on or self._trace.has_calls or any(p.dtype in _HALF for p in root.parameters())


def _outcome(error: BaseException | None) -> Outcome:
    if error is None:
        return Outcome("finished")
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        said = f"{code}" if error.code is None or isinstance(error.code, int) else f"{code}: {error.code}"
        before = error.__context__
        if isinstance(before, KeyboardInterrupt):
            return Outcome("interrupted")
        return Outcome("exited", said, "" if before is None else _trace_of(before))
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted")
    return Outcome("raised", shown(error), _trace_of(error))


def _trace_of(error: BaseException) -> str:
    """Return the traceback, from the script's first line on."""
    frame = error.__traceback__
    while frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith(("mpamp.", "runpy")):
        frame = frame.tb_next
    own = error.__traceback__ if frame is None else frame
    return "".join(traceback.format_exception(type(error), error, own))


def _machine() -> dict[str, Any]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    current = "cpu" if accelerator is None else accelerator.type
    devices, problems = [], []
    for name in dict.fromkeys((current, *(device.type for device in devices_in_use()))):
        try:
            devices.append(describe_device(device_state(name)))
        except Exception as error:  # a plugin may fail, and so may the vendor's module in torch
            problems.append(f"{name}: {shown(error)}")
    try:
        engine = describe_engine(current)
    except MpampError as error:
        engine = None
        problems.append(shown(error))
    return {
        "mpamp": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "device": current,
        "devices": devices,
        "engine": engine,
        "plugins": [f"{p.name} of {p.distribution} {p.version}: {p.status}" for p in manager().infos.values()],
        "problems": problems,
    }


def _table(device: DeviceState) -> dict[str, Any]:
    table, base = device.table, device.base
    own = [
        {"op": op, "policy": str(row), "source": row.source}
        for op, row in table.items()
        if op not in base or base[op] != row
    ]
    return {
        "device": device.type,
        "name": table.name,
        "rows": len(table),
        "fingerprint": table.fingerprint,
        "own": own,
    }


def _add_sections(report: Report) -> None:
    """Have plugins add sections, each all of its own or none; the report names those that fail."""
    manager().load_packs()
    for plugin, add in manager().implementations(_HOOK):
        before, report.sections = report.sections, []
        added: list[Section] = []
        try:
            with manager().leaving_out(plugin, _HOOK, "report sections"):
                added = _added(report, plugin, add)
        finally:
            report.sections = [*before, *added]


def _added(report: Report, plugin: str, add: Callable[..., Any]) -> list[Section]:
    try:
        add(report=report)
    except BaseException as error:
        report.left_out.append(f"The sections of plugin {plugin!r} are left out: {shown(error)}")
        raise
    return [Section(one.title, one.parts, plugin) for one in report.sections]
