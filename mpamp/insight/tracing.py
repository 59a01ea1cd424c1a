"""The trace: what autocast did while it was open, in numbers, as text, as a table, as a page and as a picture."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..devices.registry import devices_in_use
from ..engine import Observation, observe
from ..torch_internals import DYNAMO
from .as_called import listed_as_called
from .difference import TraceDiff, diff
from .dtype_errors import explain_error
from .overflow_measures import floats_in
from .page import page, table_of
from .picture import draw
from .recording import Recorder
from .records import Finding, OpUse, Summary, use_to_dict
from .surrounding import entered, is_in_region, lowered
from .text import as_rich, as_text
from .trying import forget_casts, tried

__all__ = ["TORCH_REGIONS", "Trace", "explain"]

TORCH_REGIONS = "Regions of torch.autocast outside of mpamp's."
"""The line that says so, where nobody knows whether there were any."""


class Trace:
    """What each op was given, was cast to and gave back, by module, and what of it is worth a look.

    A context manager: it sees the calls, in regions of mpamp, of every thread while it is open, those of backward
    passes included. It may be read at any time, and opened again, which adds to it.
    """

    def __init__(self, history: int = 1000) -> None:
        if not isinstance(history, int) or history < 0:
            raise ValueError(f"history is how many calls to keep, a number of at least 0; got {history!r}.")
        self._recorder = Recorder(history)
        self._observation: Observation | None = None
        self._compiled: dict[str, None] = {}
        self._tried: tuple[Finding, ...] | None = None
        """The findings, once their rules were tried."""

    def __enter__(self) -> Trace:
        self._tried = None
        if self._observation is not None:
            raise RuntimeError("this trace is open: one that is opened twice would count calls twice.")
        self._observation = observe(self._recorder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        observation, self._observation = self._observation, None
        if observation is not None:
            observation.close()

    # -- What was seen -----------------------------------------------------------------------------------

    @property
    def uses(self) -> list[OpUse]:
        """How each op was used, in the order in which they were first called."""
        return self._recorder.uses()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is worth a change: what rules and code of one's own do, by the bytes that it casts."""
        if self._tried is not None:
            return self._tried
        return tuple(finding for finding in self._recorder.faults.findings() if not finding.is_shipped)

    @property
    def by_design(self) -> tuple[Finding, ...]:
        """Casts there and back that the tables that ship with mpamp ask for, for the range of an op in float16."""
        return tuple(finding for finding in self._recorder.faults.findings() if finding.is_shipped)

    @property
    def history(self) -> list[tuple[str, str, str, int, int]]:
        """The last calls: op, module, phase, casts, and host time in nanoseconds."""
        return list(self._recorder.history)

    @property
    def has_calls(self) -> bool:
        """Whether an op was seen; quick to ask."""
        return self._recorder.has_calls

    @property
    def calls(self) -> int:
        """Calls of ops that ran, those of compiled programs not among them."""
        return self.summary().total("calls")

    @property
    def casts(self) -> int:
        """Arguments that were cast."""
        return self.summary().total("casts")

    @property
    def kept_used(self) -> int:
        """Arguments that a kept cast stood in for."""
        return self.summary().total("kept_used")

    @property
    def cast_bytes(self) -> int:
        """Bytes that casts read and wrote."""
        return self.summary().total("cast_bytes")

    @property
    def unseen(self) -> tuple[str, ...]:
        """What a trace of this process can't see."""
        found = [
            "Casts that gradients go through on their way back: autograd's, one for each cast that has a gradient.",
            TORCH_REGIONS,
        ]
        if DYNAMO in sys.modules:
            found.append(
                "Runs of compiled code; what was compiled while the trace was open is listed once a graph, as compiled."
            )
        found += [f"{name} is compiled: of code that it had before, nothing is listed." for name in self._compiled]
        return tuple(found)

    def summary(self) -> Summary:
        """Return what was seen up to now, as a value that doesn't change."""
        return Summary(tuple(self.uses), self.findings, self.unseen, self.by_design)

    # -- As something else -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the history as values that JSON has."""
        seen = self.summary()
        return {
            "torch": torch.__version__,
            "tables": {d.type: {"name": d.table.name, "fingerprint": d.table.fingerprint} for d in devices_in_use()},
            "totals": {name: seen.total(name) for name in ("calls", "casts", "kept_used", "cast_bytes")},
            "uses": [use_to_dict(use) for use in seen.uses],
            "findings": [finding.to_dict() for finding in seen.findings],
            "by_design": [finding.to_dict() for finding in seen.by_design],
            "unseen": list(seen.unseen),
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the trace as JSON text, and write it to ``path`` if one is given."""
        return _written(json.dumps(self.to_dict(), indent=1), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the trace as one HTML page that needs nothing else, and write it to ``path`` if one is given."""
        return _written(page(self.summary()), path)

    def _repr_html_(self) -> str:
        return table_of(self.summary())

    def __str__(self) -> str:
        return as_text(self.summary())

    def __rich__(self) -> Any:
        return as_rich(self.summary())

    def __repr__(self) -> str:
        return f"<Trace: {self.calls} calls, {self.casts} casts, {len(self.findings)} findings>"

    def plot(self, ax: Any = None, top: int = 12) -> Any:
        """Draw the bytes that casts moved, by op; needs matplotlib.

        Args:
            ax: Where to; None makes a figure.
            top: How many ops to draw.

        Returns:
            The matplotlib axes.
        """
        return draw(self.summary(), ax, top)

    def diff(self, other: Trace) -> TraceDiff:
        """Return on which ops, in which modules, ``other`` differs from this trace."""
        return diff(self.uses, other.uses)


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def explain(model: torch.nn.Module, *inputs: Any, **kwargs: Any) -> Trace:
    """Run a model once and return what autocast did."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"explain takes a torch.nn.Module, got {type(model).__name__}.")
    seen = Trace()
    seen._recorder.places.add(model)
    seen._compiled.update(
        dict.fromkeys(name or type(model).__name__ for name, m in model.named_modules() if _is_compiled(m))
    )
    devices = _devices_of(model, inputs, kwargs)

    def run() -> None:
        model(*inputs, **kwargs)

    with entered(devices), _unchanged(model):
        is_off = is_in_region() and not lowered(devices)
        try:
            with seen, listed_as_called(seen._recorder) if is_off else contextlib.nullcontext():
                run()
        except Exception as error:
            explain_error(error, model, run, devices)
            raise
        if any(finding.ops for finding in seen.findings) and not seen._compiled:
            seen._tried = tried(seen.findings, model, functools.partial(_again, model, run), devices)
    return seen


def _again(
    model: torch.nn.Module, run: Callable[[], None], rules: contextlib.AbstractContextManager[object]
) -> Summary:
    """Run a model once more, with rules, and return what is seen."""
    seen = Trace()
    seen._recorder.places.add(model)
    forget_casts()
    with rules, seen:
        run()
    return seen.summary()


def _devices_of(*values: Any) -> list[str]:
    """Return the device types of a model and its arguments, the model's first."""
    model, *given = values
    tensors = [*model.parameters(), *model.buffers(), *(t for _, t in floats_in(given))]
    return list(dict.fromkeys(tensor.device.type for tensor in tensors))


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({buffer.device for buffer in (*model.buffers(), *model.parameters())}, key=str)
    with contextlib.ExitStack() as stack:
        for device in devices:
            if device.type == _accelerator():
                stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        stack.enter_context(torch.random.fork_rng([]))
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _accelerator() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    return "" if device is None else device.type


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
