"""What is wrong with the inputs of a call that gives an inf or NaN in float32 too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .frames import plain_name
from .overflow_measures import Range

__all__ = ["reason_by_ranges", "reason_by_values"]

Test = Callable[[Tensor], Tensor]
_MOST = math.log(torch.finfo(torch.float32).max)


def _is(value: float) -> Test:
    return lambda t: t == value


def _below(value: float) -> Test:
    return lambda t: t < value


def _above(value: float) -> Test:
    return lambda t: t > value


_DOMAINS: dict[str, list[tuple[int, str, Test]]] = {
    "div": [(1, "its divisor is 0", _is(0))],
    "true_divide": [(1, "its divisor is 0", _is(0))],
    "remainder": [(1, "its divisor is 0", _is(0))],
    "fmod": [(1, "its divisor is 0", _is(0))],
    "addcdiv": [(2, "its divisor is 0", _is(0))],
    "reciprocal": [(0, "it is taken of 0", _is(0))],
    **{
        log: [(0, "it is taken of 0", _is(0)), (0, "it is taken of a negative value", _below(0))]
        for log in ("log", "log2", "log10")
    },
    "log1p": [(0, "it is taken of -1", _is(-1)), (0, "it is taken of a value below -1", _below(-1))],
    "xlogy": [(1, "its logarithm is taken of 0", _is(0)), (1, "its logarithm is taken of a negative value", _below(0))],
    "sqrt": [(0, "it is taken of a negative value", _below(0))],
    "rsqrt": [(0, "it is taken of 0", _is(0)), (0, "it is taken of a negative value", _below(0))],
    **{op: [(0, "its argument is too large for float32's range", _above(_MOST))] for op in ("exp", "exp2", "expm1")},
    **{op: [(0, "its argument is too large", lambda t: t.abs() > _MOST)] for op in ("sinh", "cosh")},
    **{op: [(0, "its argument is outside of -1 to 1", lambda t: t.abs() > 1)] for op in ("asin", "acos")},
    "atanh": [(0, "its argument is not between -1 and 1", lambda t: t.abs() >= 1)],
    "acosh": [(0, "its argument is below 1", _below(1))],
    "logit": [(0, "its argument is not between 0 and 1", lambda t: (t <= 0) | (t >= 1))],
    "erfinv": [(0, "its argument is not between -1 and 1", lambda t: t.abs() >= 1)],
    "pow": [
        (0, "it is a power of 0 with a negative exponent, or of a negative value with a fraction", lambda t: t <= 0),
    ],
    "lgamma": [(0, "it is taken of 0 or a negative whole number", lambda t: (t <= 0) & (t == t.round()))],
    "digamma": [(0, "it is taken of 0 or a negative whole number", lambda t: (t <= 0) & (t == t.round()))],
}
"""By an op: the position of the argument that matters among its tensors, what is wrong with it, and where."""
_OF_ROWS = ("softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp", "_safe_softmax")


def reason_by_ranges(op: str, inputs: Sequence[tuple[str, Range]]) -> str:
    """Return what is wrong with a call's inputs, as far as their ranges tell; empty where they don't.

    Example:
        >>> reason_by_ranges("aten::div.Tensor", [("self", Range(1.0, 2.0)), ("other", Range(0.0, 3.0))])
        'its divisor is 0'
    """
    name = plain_name(op).rstrip("_")
    ends = [torch.tensor([r.least, r.greatest]) for _, r in inputs]
    for place, text, test in _DOMAINS.get(name, []):
        if place < len(ends) and bool(test(ends[place]).any()):
            return text
    if name in _OF_ROWS and inputs:
        return "one of its rows is -inf only, or has +inf" if not inputs[0][1].is_finite else ""
    return _of_infinities(name, [r for _, r in inputs])


def _of_infinities(name: str, ranges: Sequence[Range]) -> str:
    if not any(math.inf in (abs(r.least), abs(r.greatest)) for r in ranges):
        return ""
    if name in ("mul", "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "dot"):
        return "it multiplies an infinity by 0, or adds infinities of both signs"
    return "it takes infinities"


def reason_by_values(op: str, arguments: Mapping[str, Any]) -> str:
    """Return what is wrong with a call's arguments, and where; empty where that isn't known.

    Example:
        >>> reason_by_values("aten::log", {"self": torch.tensor([[1.0, 2.0], [0.0, 3.0]])})
        'it is taken of 0 at index (1, 0)'
    """
    name = plain_name(op).rstrip("_")
    tensors = [v for v in arguments.values() if isinstance(v, Tensor | float | int) and not isinstance(v, bool)]
    floats = [v.float() if isinstance(v, Tensor) else torch.tensor(float(v)) for v in tensors]
    for place, text, test in _DOMAINS.get(name, []):
        if place < len(floats) and (where := _first_index(test(floats[place]))) is not None:
            return text + where
    if not floats:
        return ""
    if name in _OF_ROWS:
        return _of_rows(floats[0], arguments)
    if name in ("std", "var", "std_mean", "var_mean", "var_std") or name.startswith(("std", "var")):
        return "it is of one value only: correction=0 gives 0" if floats[0].numel() else "it is of no values"
    if name == "mean" and floats[0].numel() == 0:
        return "it is of no values"
    if name.startswith("nll_loss"):
        return "all its targets are ignored, or its weights are 0"
    return _of_infinities(name, [_range(t) for t in floats if t.numel()])


def _of_rows(values: Tensor, arguments: Mapping[str, Any]) -> str:
    dim = arguments.get("dim", -1)
    dims = dim if isinstance(dim, list | tuple) else [dim]
    rows = values.movedim(int(dims[0]), -1) if values.dim() else values[None]
    if (where := _first_index((rows == -math.inf).all(-1))) is not None:
        return f"a row is -inf only{where}: nothing is left to choose from"
    if (where := _first_index((rows == math.inf).any(-1))) is not None:
        return f"a row has +inf{where}"
    return ""


def _range(values: Tensor) -> Range:
    least, greatest = torch.aminmax(values)
    return Range(float(least), float(greatest))


def _first_index(found: Tensor) -> str | None:
    """Return the place of the first true value as text, None if there is none."""
    places = found.nonzero()
    if not len(places):
        return None
    index = tuple(places[0].tolist())
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f" at index {index}{more}" if index else ""
