"""search_precision: which ops or modules cost accuracy in lower precision, and which cost time in float32."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch

from ..devices.registry import device_state
from ..engine.watching import watch_calls
from ..errors import UnsupportedDtypeError
from ..functions.module_rules import module_rules
from ..regions.region import Region, autocast
from ..rules.optable import OpTable
from ..rules.rows import parse_dtype
from .module_paths import ModulePaths
from .search_bisection import Bisection
from .search_progress import progress_bar
from .search_result import PrecisionSearch, RowEffect
from .search_trials import Better, Judge, Trials
from .search_used import UsedOps

__all__ = ["search_precision"]

Over = Literal["ops", "modules"]
Goal = Literal["accuracy", "speed"]
Metric = Callable[[torch.nn.Module, Any], float]
_LEAST_GAIN = 0.01
"""A row is put in lower precision for at least so much of an evaluation's time."""


def search_precision(
    model: torch.nn.Module,
    data: Any,
    metric: Metric,
    *,
    tolerance: float,
    better: Better = None,
    over: Over = "ops",
    goal: Goal = "accuracy",
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    ops: Mapping[str, Any] | OpTable | None = None,
    state: str | os.PathLike[str] | None = None,
    show_progress: bool = True,
) -> PrecisionSearch:
    """Search for the fewest ops or modules that have to run in float32, or for those that need not.

    The metric runs inside of a region of the search's, under other rules each time; regions that it opens itself have
    the device's own rules. The model's weights and buffers are put back before each evaluation, so that it may train.
    Random numbers go on: what they change is the metric's noise, which float32 is run at least twice to know.
    Ctrl-C ends the search with what is known by then, once the metric in float32 is.

    Args:
        model: The model.
        data: Anything; handed to the metric.
        metric: ``metric(model, data)`` returns one number.
        tolerance: How far from float32's the metric may be, in its own units. At least twice the noise is allowed.
        better: Only a ``"higher"`` or ``"lower"`` metric is good, so that differences to that side don't count. None:
            both sides do.
        over: Search the rows of the op table that the model uses, or its modules.
        goal: ``"accuracy"`` asks what to run in float32 that doesn't. ``"speed"`` asks which rows that run in float32
            need not; only rows that make an evaluation faster by one per cent are given.
        device: The device type; None is that of the model's first parameter.
        dtype: The lower precision; None is the device's default.
        ops: Rules to begin with, as for ``autocast``.
        state: A JSON file that keeps each evaluation, and from which the same search goes on.
        show_progress: Whether to show a progress bar, where ``rich`` is installed and there is a terminal.

    Raises:
        MpampError: The metric isn't finite in float32, or ``state`` belongs to another search.
        ValueError: ``goal="speed"`` with modules, or an argument that can't be.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x.square() / 1000).tanh().sigmoid()
        >>> found = search_precision(
        ...     Model(), torch.full((4,), 300.0).half(), lambda model, x: model(x).mean().item(),
        ...     tolerance=1e-2, device="cpu", dtype=torch.float16,
        ... )
        >>> found.rules, found.is_enough
        ({}, True)
    """
    _check(over, goal, tolerance, better)
    if device is None:
        device = next((p.device.type for p in model.parameters()), torch.get_default_device().type)
    backend_state = device_state(device)
    table = backend_state.table if ops is None else backend_state.table_for(ops)
    lower = backend_state.backend.default_dtype if dtype is None else parse_dtype(dtype, UnsupportedDtypeError)
    search = _Search(model, data, metric, device, lower, table, over, goal)
    key = {
        "model": type(model).__qualname__,
        "parameters": [[name, list(p.shape)] for name, p in model.named_parameters()],
        "device": device,
        "dtype": str(lower),
        "table": table.fingerprint,
        "over": over,
        "goal": goal,
    }
    trials = Trials(search.configured, search.run, device, state, key)
    with search.weights_kept(), progress_bar(show_progress) as bar:
        trials.on_evaluation = bar
        return search.search(trials, tolerance, better)


def _check(over: str, goal: str, tolerance: float, better: str | None) -> None:
    if over not in ("ops", "modules") or goal not in ("accuracy", "speed") or better not in (None, "higher", "lower"):
        raise ValueError(
            "over is 'ops' or 'modules', goal 'accuracy' or 'speed', better 'higher', 'lower' or None; got "
            f"{over!r}, {goal!r} and {better!r}."
        )
    if goal == "speed" and over == "modules":
        raise ValueError("goal='speed' is about rows of the op table: modules have no rules that make them slower.")
    if not tolerance >= 0:
        raise ValueError(f"tolerance is a number of at least 0, got {tolerance!r}.")


class _Search:
    """One search: how a configuration is run, and which ones are."""

    def __init__(
        self,
        model: torch.nn.Module,
        data: Any,
        metric: Metric,
        device: str,
        dtype: torch.dtype,
        table: OpTable,
        over: Over,
        goal: Goal,
    ) -> None:
        self._model, self._data, self._metric = model, data, metric
        self._device, self._dtype, self._table = device, dtype, table
        self._over, self._goal = over, goal
        self._paths = ModulePaths(model)
        self._used: UsedOps | None = None

    # -- Running a configuration -------------------------------------------------------------------

    @contextlib.contextmanager
    def weights_kept(self) -> Iterator[None]:
        """Remember the weights, and leave the model as it was."""
        self._weights = {name: t.detach().clone() for name, t in self._model.state_dict().items()}
        is_training = {module: module.training for module in self._model.modules()}
        try:
            yield
        finally:
            self._put_back()
            for module, training in is_training.items():
                module.training = training

    def _put_back(self) -> None:
        with torch.no_grad():
            for name, tensor in self._model.state_dict().items():
                tensor.copy_(self._weights[name])
        for param in self._model.parameters():
            param.grad = None

    @contextlib.contextmanager
    def configured(self, kind: str, names: Collection[str]) -> Iterator[None]:
        """Have the metric run in float32, watched, or with some of the candidates changed."""
        self._put_back()
        with contextlib.ExitStack() as stack:
            if kind == "float32":
                stack.enter_context(autocast(self._device, torch.float32, ops=self._table))
            elif kind == "watched":
                self._used = UsedOps(self._paths)
                stack.enter_context(self._region())
                stack.enter_context(self._paths.followed())
                stack.enter_context(watch_calls(self._used))
            elif self._over == "modules":
                stack.enter_context(self._region())
                stack.enter_context(module_rules(self._model, dict.fromkeys(names, "fp32")))
            else:
                stack.enter_context(self._region(dict.fromkeys(names, kind)))
            yield

    def run(self) -> float:
        """Return the metric."""
        return self._metric(self._model, self._data)

    def _region(self, rules: Mapping[str, str] = MappingProxyType({})) -> Region:
        return autocast(self._device, self._dtype, ops=self._table.override(rules))

    # -- The search --------------------------------------------------------------------------------

    @property
    def _policy(self) -> str:
        return "fp32" if self._goal == "accuracy" else "lower_precision_fp"

    def search(self, trials: Trials, tolerance: float, better: Better) -> PrecisionSearch:
        judge, bisection, rules = None, Bisection([]), None
        is_enough = is_complete = False
        rows: list[RowEffect] = []
        try:
            judge = Judge(trials, tolerance, better)
            bisection = Bisection(self._candidates(trials))
            is_enough = self._bisect(trials, judge, bisection)
            rules = self._chosen(bisection) if is_enough else []
            rows = self._effects(trials, rules)
            is_complete = True
        except KeyboardInterrupt:
            if judge is None:  # nothing is known
                raise
        if rules is None:
            rules = bisection.found if self._goal == "accuracy" else []
        if self._goal == "speed" and is_complete:
            rows = [row for row in rows if row.seconds < (1 - _LEAST_GAIN) * row.seconds_without]
            rules = [row.name for row in rows]
        given = dict.fromkeys(rules, self._policy)
        lower = trials.all_of("watched")
        return PrecisionSearch(
            self._over,
            self._device,
            self._dtype,
            self._table.override(given, name="searched") if given and self._over == "ops" else self._table,
            given,
            tuple(rows),
            tuple(bisection.suspects if not is_complete else ()),
            is_complete,
            is_enough,
            judge.reference,
            lower[0].value if lower else float("nan"),
            judge.noise,
            judge.tolerance,
            len(bisection.candidates),
            trials.count,
        )

    def _candidates(self, trials: Trials) -> list[str]:
        trials.evaluate("watched")
        if not trials.notes and self._used is None:  # it was interrupted just there
            trials.evaluate("watched", repeat=len(trials.all_of("watched")))
        if self._used is not None:
            used = self._used
            modules = [name for name, _ in self._model.named_modules() if name in used.modules]
            trials.notes = {"lower": list(used.lower), "wide": list(used.wide), "modules": modules[::-1]}
            trials.save()
        names = trials.notes["modules" if self._over == "modules" else "lower" if self._goal == "accuracy" else "wide"]
        return [name for name in names if self._over == "modules" or _may_be(name, self._policy)]

    def _bisect(self, trials: Trials, judge: Judge, bisection: Bisection) -> bool:
        if self._goal == "speed":

            def passes(kept: Collection[str]) -> bool:
                return judge.accepts(self._policy, [n for n in bisection.candidates if n not in kept])

        else:
            passes = partial(judge.accepts, self._policy)
        is_fine = judge.accepts("watched", ()) if self._goal == "accuracy" else passes(())
        if is_fine:
            bisection.suspects = []
            return True
        return bisection.run(passes)

    def _chosen(self, bisection: Bisection) -> list[str]:
        if self._goal == "accuracy":
            return bisection.found[::-1]
        return [name for name in bisection.candidates if name not in bisection.found]

    def _effects(self, trials: Trials, rules: list[str]) -> list[RowEffect]:
        """Measure what each rule does: everything without it, against everything."""
        if not rules:
            return []
        whole = trials.evaluate(self._policy, rules)
        rows = []
        for name in rules:
            without = trials.evaluate(self._policy, [other for other in rules if other != name])
            rows.append(RowEffect(name, self._policy, whole.value, without.value, whole.seconds, without.seconds))
        return rows


def _may_be(op: str, policy: str) -> bool:
    try:
        OpTable({op: policy})
    except ValueError:
        return False
    return True
