"""find_overflow: the first op whose result was not finite, and the gradients that became zero."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..engine.compiledcode import CompiledCalls
from ..engine.watching import unwatched, watch_calls
from ..errors import MpampError
from ..regions.region import Region, autocast
from .module_paths import ModulePaths
from .overflow_calls import Recorder, Seen
from .overflow_causes import Culprit, StepValues
from .overflow_measures import floats_in, plain_of
from .overflow_report import StepReport
from .overflow_trials import Watched, with_advice
from .repeated_step import Change, RepeatedStep, run_backward
from .scale_search import Backward, with_scales
from .surrounding import is_in_region

__all__ = ["OverflowFinder", "find_overflow"]

_KEPT_STEPS = 100


class OverflowFinder:
    """Watches the steps of a model; made by ``find_overflow``.

    A context manager around a training loop: a step is a forward pass of the model and the backward passes after
    it. Each is read when the next begins, and the last one at the end: one wait for the device a step.

    Attributes:
        steps: How many were read.
        reports: Of the steps in which something went wrong, the last hundred.
        waits: How often the host waited for the device.
        give_way: Called where others want to find overflows meanwhile; it must end the watch. None: that is an error.
    """

    def __init__(self, model: torch.nn.Module, scaler: Any, least_share: float | None) -> None:
        self.model = model
        self.scaler = scaler
        self.steps = self.waits = 0
        self.reports: deque[StepReport] = deque(maxlen=_KEPT_STEPS)
        self.give_way: Callable[[], None] | None = None
        self._least_share = least_share
        self._recorder = Recorder(ModulePaths(model), looks_for_underflow=least_share is not None)
        self._open: contextlib.ExitStack | None = None
        self._gradients: dict[str, int] = {}
        self._lacks: dict[str, int] = {}
        self._ends: list[int] = []
        self._scale: int | None = None
        self._device = torch.device("cpu")
        self._compiled: CompiledCalls | None = None
        self._given: Any = ()
        self._last = Watched(None, None)
        """The overflow of the step that was read last, and the call that made it."""

    @property
    def first(self) -> StepReport | None:
        """The first of the reports, or None if nothing went wrong."""
        return self.reports[0] if self.reports else None

    @property
    def is_open(self) -> bool:
        """Whether it is watching."""
        return self._open is not None

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass of the step that is being watched has brought gradients."""
        return bool(self._gradients)

    @property
    def skips(self) -> list[StepReport]:
        """The steps with an inf or NaN in a gradient, which a scaler skips: whose it was, and which op made it.

        Those that the scaler skipped for an inf or NaN that isn't of this process, or not of this step, are among them.
        """
        return [report for report in self.reports if report.parameters or report.is_skipped_for_others]

    @property
    def compiled_calls(self) -> int:
        """How often compiled code ran meanwhile, which isn't seen into."""
        return 0 if self._compiled is None else self._compiled.count

    @property
    def unseen(self) -> tuple[str, ...]:
        """What wasn't looked at, in words."""
        found = [f"It couldn't look at a call: {problem}" for problem in self._recorder.problems]
        if self.compiled_calls:
            found.append(f"Compiled code ran {self.compiled_calls} times, and is not seen into.")
        return tuple(found)

    def __str__(self) -> str:
        clear = f"{self.steps} steps: nothing overflows, and no gradient underflows"
        clear += ", in what was seen" if self.unseen else ""
        return "\n".join([*(map(str, self.reports) if self.reports else [clear]), *self.unseen])

    def __enter__(self) -> OverflowFinder:
        if self._open is not None:
            raise MpampError("this finder is watching already.")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._recorder.paths.followed(self._begin, self._see_output))
            for name, param in self.model.named_parameters():
                if param.requires_grad:
                    hook = param.register_hook(self._gradient_hook(name))
                    stack.callback(hook.remove)
            self._compiled = stack.enter_context(watch_calls(self._recorder, self.give_way))
            self._reset()
            self._recorder.looked(lambda: self._recorder.take_as_given(self._given))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._open is not None
        stack, self._open = self._open, None
        stack.close()
        self.read()

    def begin_inside(self) -> None:
        """Begin to watch in a call of the model that has just begun, as a hook of the model's may."""
        self.__enter__()
        self._recorder.paths.entered(self.model)

    def read(self) -> StepReport | None:
        """End the step that is being watched, and return what went wrong in it; None if nothing was run.

        Waits for the device once.
        """
        recorder = self._recorder
        if not recorder.calls and not self._ends:
            return None
        with unwatched():
            after = None if self._scale is None else self._scale_now(self._device)
            values = StepValues(recorder, recorder.measures.read())
        self.waits += 1
        self.steps += 1
        report = self._report(values, None if after is None else values.value(after))
        if not report.is_clean:
            self.reports.append(report)
        self._reset()
        return report

    def _report(self, values: StepValues, scale_after: float | None) -> StepReport:
        scale = None if self._scale is None else values.value(self._scale)
        sinks = [
            seen.number
            for call in self._recorder.calls
            if not call.is_backward and call.is_differentiable
            for seen in call.outputs
            if seen.number not in self._recorder.used
        ]
        names = [name for name, _ in self.model.named_parameters() if name in self._gradients]
        bad = tuple(name for name in names if not values.is_finite(self._gradients[name]))
        overflow = values.overflow([*self._ends, *sinks, *self._gradients.values()])
        self._last = Watched(overflow, values.culprit, self._recorder.arguments)
        least = self._least_share
        underflows = () if least is None else values.underflows(self._gradients, self._lacks, least, scale)
        is_lower = scale is not None and scale_after is not None and scale_after < scale
        is_others = is_lower and not bad and overflow is None
        return StepReport(self.steps, overflow, bad, tuple(underflows), scale, is_others)

    def _reset(self) -> None:
        self._recorder.begin()
        self._gradients, self._lacks, self._ends, self._scale = {}, {}, [], None

    def _begin(self) -> None:
        if self._gradients:
            self.read()

    def _advise(self, step: RepeatedStep) -> None:
        """Say what helps against the overflow of the step that was read last, by running that again."""
        if self._last.overflow is None:
            return
        overflow = with_advice(self._last, step, _watch, is_compiled=bool(self.compiled_calls))
        self.reports.append(dataclasses.replace(self.reports.pop(), overflow=overflow))

    def _see_output(self, output: Any) -> None:
        found = self._recorder.looked(lambda: self._seen_in(output)) or []
        self._ends += [seen.number for seen in found if seen is not None]

    def _seen_in(self, output: Any) -> list[Seen | None]:
        plain = [plain_of(tensor) for _, tensor in floats_in(output)]
        return [self._recorder.see(tensor, "output") for tensor in plain if tensor is not None]

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        return lambda grad: self._recorder.looked(lambda: self._see_gradient(name, grad))

    def _see_gradient(self, name: str, grad: Tensor) -> None:
        if self._scale is None:
            self._device = grad.device
            self._scale = self._scale_now(grad.device)
        plain = plain_of(grad)
        if plain is None:
            return
        seen, lack = self._recorder.see(plain, name), self._recorder.lost.gradient(name, plain)
        if lack is not None:
            self._lacks[name] = lack
        if seen is not None:
            self._gradients[name] = seen.number

    def _scale_now(self, device: torch.device) -> int | None:
        if self.scaler is None:
            return None
        scale = self.scaler._scale
        if scale is None:
            scale = torch.tensor(self.scaler.get_scale(), device=device)
        return self._recorder.measures.add(scale.detach().clone())


def find_overflow(
    model: torch.nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    scaler: Any = None,
    region: Region | None = None,
    least_share: float | None = 0.1,
    **kwargs: Any,
) -> OverflowFinder:
    """Find the first op of a step whose result is not finite, and the parameters whose gradients become zero.

    With inputs, runs one step of the model and leaves weights and gradients as they are. Without, returns a finder to
    put around a training loop. Every op runs as it would without, in the same dtypes; a step takes some times longer.

    Args:
        model: Any module. Compiled ones are not seen into.
        inputs: The model's arguments.
        loss: Makes the loss of the model's output. None: only the forward pass is run.
        scaler: A GradScaler. Its scale is used, and named with each step that it skips; it isn't changed.
        region: Where the model and the loss run. None: the region around, else one of the model's device.
        least_share: Name parameters whose gradients are off by so much, from 0 to 1, because values on the way to them
            were too small for a lower dtype. None doesn't look: that takes up to three more runs, in float32, of each
            op of the backward pass. Loss scales that are named were run.
        kwargs: The model's keyword arguments.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.fill_(300.0)
        >>> found = find_overflow(model, torch.full((2, 4), 100.0), region=autocast("cpu", torch.float16))
        >>> print(found.first.overflow.op, found.first.overflow.module, found.first.overflow.rule)
        linear 0 {'linear': 'fp32'}
    """
    finder = OverflowFinder(model, scaler, least_share)
    if not inputs and not kwargs:
        return finder
    device = next(
        (t.device.type for t in (*model.parameters(), *_tensors(inputs, kwargs))), torch.get_default_device().type
    )
    if region is None:
        region = None if is_in_region() else autocast(device)
    params: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    scale = None if scaler is None or not scaler.is_enabled() else scaler.get_scale()
    step = None
    if not _is_one_of_several():
        with contextlib.suppress(Exception):  # inputs that can't be copied: the step is run once
            step = RepeatedStep(model, inputs, kwargs, loss, device, region, scale or 1.0)
    finder._recorder.keeps_whole = True
    finder._given = (inputs, kwargs)
    run, can_repeat, whole = None, False, None
    with finder:
        with contextlib.nullcontext() if region is None else region:
            output = model(*inputs, **kwargs)
            value = None if loss is None else loss(output)
            finder._see_output(value)
        if value is not None and params:
            run = functools.partial(run_backward, value, params, device)
            can_repeat = _run_once(run, 1.0 if scale is None else scale)
            whole = finder._recorder.lost.whole
    if step is not None:
        finder._advise(step)
    if run is not None and can_repeat and finder.reports and whole is not None:
        with contextlib.suppress(RuntimeError):  # a backward pass that can't be run twice: no scale is named
            again = Backward(run, whole, scale or 1.0)
            report = with_scales(finder.reports.pop(), again, least_share or 1.0)
            finder.reports.extend([] if report.is_clean else [report])
    return finder


def _is_one_of_several() -> bool:
    """Tell whether other ranks run the same step: they'd wait for each other if one of them ran it again."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _watch(step: RepeatedStep, change: Change, kept: Culprit | None) -> Watched:
    """Run a step again and watch it."""
    finder = OverflowFinder(step.model, None, None)
    finder._recorder.tries_alone = False
    finder._given = step.inputs
    if kept is not None:
        finder._recorder.kept = (kept.place, kept.kernel)
    with finder:
        step.run(change, finder._see_output)
    return finder._last


def _run_once(run: Callable[..., Any], scale: float) -> bool:
    """Run a backward pass; tell whether its graph is kept, to be run again. That of compiled code may not be."""
    try:
        run(scale)
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        run(scale, retain_graph=False)
        return False
    return True


def _tensors(*values: Any) -> list[Tensor]:
    return [tensor for _, tensor in floats_in(list(values))]
