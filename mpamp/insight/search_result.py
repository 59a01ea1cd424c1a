"""What a precision search found."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from ..rules.optable import OpTable
from ..rules.tablefile import TORCH_VERSION

__all__ = ["PrecisionSearch", "RowEffect"]


@dataclass(frozen=True, slots=True)
class RowEffect:
    """What one row of the result does: the metric and the time with all rows, and with all but this one.

    Attributes:
        name: An op or a module.
        policy: What it is given.
        value: The metric with it.
        value_without: The metric without it.
        seconds: An evaluation's time with it.
        seconds_without: And without it.
    """

    name: str
    policy: str
    value: float
    value_without: float
    seconds: float
    seconds_without: float

    def __str__(self) -> str:
        metric = f"metric {self.value_without:.6g} -> {self.value:.6g}"
        return f"{metric}, {self.seconds_without:.3g} s -> {self.seconds:.3g} s an evaluation"


@dataclass(frozen=True)
class PrecisionSearch:
    """The result of ``search_precision``.

    Attributes:
        over: ``"ops"`` or ``"modules"``.
        table: The op table to use: the device's default where nothing is wrong, or where modules were searched.
        rules: What was found: names of ops, for ``ops=``, or of modules, for ``module_rules``, to policies.
        rows: What each of them does, measured; empty if the search was interrupted before.
        suspects: Where more is to be found, if the search didn't end.
        is_complete: Whether it ended.
        is_enough: Whether the rules bring the metric within the tolerance. False: the loss is not in what was searched.
        reference: The metric in float32.
        lower: The metric in lower precision, before.
        noise: The spread of the metric over runs that are the same.
        tolerance: The one that was kept: the user's, or twice the noise.
        candidates: How many there were.
        evaluations: How often the metric was run.
    """

    over: str
    device: str
    dtype: torch.dtype
    table: OpTable
    rules: dict[str, str]
    rows: tuple[RowEffect, ...]
    suspects: tuple[str, ...]
    is_complete: bool
    is_enough: bool
    reference: float
    lower: float
    noise: float
    tolerance: float
    candidates: int
    evaluations: int

    def to_toml(self) -> str:
        """Return the rules as TOML: a table that ``OpTable.from_toml`` reads, or what ``module_rules`` takes."""
        effects = {row.name: f"  # {row}" for row in self.rows}
        lines = [f"# {line}" for line in self._summary()]
        if self.over == "ops":
            head = {"name": "searched", "device": self.device, "base": "default", "torch": TORCH_VERSION}
            lines += [f"{key} = {json.dumps(value)}" for key, value in head.items()]
        lines += ["", "[ops]" if self.over == "ops" else "[modules]"]
        lines += [f"{json.dumps(n)} = {json.dumps(p)}{effects.get(n, '')}" for n, p in self.rules.items()]
        return "\n".join(lines) + "\n"

    def _summary(self) -> list[str]:
        dtype = str(self.dtype).removeprefix("torch.")
        noise = f"noise {self.noise:.3g}, tolerance {self.tolerance:.3g}"
        lines = [
            f"metric: {self.reference:.6g} in float32, {self.lower:.6g} in {dtype}; {noise}",
            f"{self.evaluations} evaluations, {self.candidates} {self.over} to choose from",
        ]
        if not self.is_complete:
            lines.append(f"interrupted; more may be wanted among: {', '.join(self.suspects)}")
        elif not self.is_enough:
            lines.append(f"all of these {self.over} in float32 don't bring the metric back: search elsewhere")
        return lines

    def __str__(self) -> str:
        effects = {row.name: f": {row}" for row in self.rows}
        found = [f"  {name} = {policy}{effects.get(name, '')}" for name, policy in self.rules.items()]
        return "\n".join(
            [*self._summary(), *(found or ["no rule is needed" if self.is_enough else "no rule is known"])]
        )
