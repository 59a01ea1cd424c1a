"""Evaluations of the user's metric: made, timed, counted, remembered in a file, and judged by their noise."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from ..errors import MpampError

__all__ = ["Better", "Evaluation", "Judge", "Trials"]

Better = Literal["higher", "lower"] | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One run of the metric.

    Attributes:
        value: What it returned.
        seconds: How long it took.
    """

    value: float
    seconds: float


class Trials:
    """Runs a configuration's metric, unless the state file has it."""

    def __init__(
        self,
        configured: Callable[[str, Collection[str]], AbstractContextManager[None]],
        run: Callable[[], float],
        device: str,
        path: str | os.PathLike[str] | None,
        key: Any,
    ) -> None:
        self._configured, self._run, self._device, self._key = configured, run, device, key
        self._path = None if path is None else Path(path)
        self._made: dict[str, list[Evaluation]] = {}
        self.notes: dict[str, Any] = {}
        """What else is to be found again when the search is resumed."""
        self.on_evaluation: Callable[[int], None] = lambda count: None
        if self._path is not None and self._path.exists():
            self._load(self._path)

    @property
    def count(self) -> int:
        """The evaluations made so far, those of earlier runs of the same search included."""
        return sum(map(len, self._made.values()))

    def evaluate(self, kind: str, names: Collection[str] = (), *, repeat: int = 0) -> Evaluation:
        """Return the evaluation of a configuration; ``repeat`` counts those of the same one."""
        made = self._made.setdefault(json.dumps([kind, *sorted(names)]), [])
        while len(made) <= repeat:
            with self._configured(kind, names):  # a new table's kernels are put in there, which isn't timed
                started = self._now()
                value = float(self._run())
                made.append(Evaluation(value, self._now() - started))
            self.save()
            self.on_evaluation(self.count)
        return made[repeat]

    def all_of(self, kind: str, names: Collection[str] = ()) -> list[Evaluation]:
        """Return what there is of a configuration."""
        return self._made.get(json.dumps([kind, *sorted(names)]), [])

    def _now(self) -> float:
        module = torch.get_device_module(self._device)
        if hasattr(module, "synchronize"):
            module.synchronize()
        return perf_counter()

    def _load(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            made = {name: [Evaluation(**one) for one in found] for name, found in data["evaluations"].items()}
            key, notes = data["search"], data["notes"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MpampError(f"{path} is no state of a precision search: {error!r}. Give another file.") from error
        if key != json.loads(json.dumps(self._key)):
            raise MpampError(f"{path} is the state of another search, of {key}; this one is of {self._key}.")
        self._made, self.notes = made, notes

    def save(self) -> None:
        """Write what there is to the state file, if there is to be one."""
        if self._path is None:
            return
        made = {name: [asdict(one) for one in found] for name, found in self._made.items() if found}
        text = json.dumps({"search": self._key, "notes": self.notes, "evaluations": made}, indent=1)
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(self._path)


class Judge:
    """Says whether a value is as good as float32's, as far as the metric's noise lets it be said.

    Attributes:
        reference: The mean of float32's values.
        noise: The spread of these; 0 if they were all the same.
        tolerance: The user's, or twice the noise if that is more.
    """

    _MOST_REPEATS = 3

    def __init__(self, trials: Trials, tolerance: float, better: Better) -> None:
        self._trials, self._better = trials, better
        values = [trials.evaluate("float32", repeat=i).value for i in range(2)]
        if values[0] != values[1]:
            values += [trials.evaluate("float32", repeat=i).value for i in range(2, 4)]
        if not all(map(math.isfinite, values)):
            raise MpampError(f"the metric isn't finite in float32: {values}. There is nothing to compare with.")
        self.reference = sum(values) / len(values)
        self.noise = max(values) - min(values)
        self.tolerance = max(tolerance, 2 * self.noise)

    def loss(self, value: float) -> float:
        """Return how much worse a value is than float32's; infinite if it is NaN."""
        if math.isnan(value):
            return math.inf
        if self._better is None:
            return abs(value - self.reference)
        return self.reference - value if self._better == "higher" else value - self.reference

    def accepts(self, kind: str, names: Collection[str]) -> bool:
        """Evaluate a configuration, more than once where the noise could turn the answer."""
        losses: list[float] = []
        while True:
            losses.append(self.loss(self._trials.evaluate(kind, names, repeat=len(losses)).value))
            mean = sum(losses) / len(losses)
            margin = self.noise / len(losses)
            if not abs(mean - self.tolerance) < margin or len(losses) == self._MOST_REPEATS:
                return mean <= self.tolerance
