"""From an inf or NaN at the end of a step back to the call that made it; and from a gradient to what it lost."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .frames import deciding, plain_name
from .overflow_calls import OpCall, Recorder, Seen
from .overflow_measures import Range
from .overflow_report import Overflow, TensorRange, Underflow, plain

__all__ = ["StepValues"]

_MOVES = frozenset({"aten::to", "aten::_to_copy", "aten::copy_", "aten::clone", "aten::detach", "aten::t"})
_VIEWS = frozenset({"aten::transpose", "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::permute"})


class StepValues:
    """A recorded step whose measures have been read."""

    def __init__(self, recorder: Recorder, values: list[float]) -> None:
        self._calls = recorder.calls
        self._order = {id(call): place for place, call in enumerate(recorder.calls)}
        self._names = recorder.names
        self._makers = [call for _, call in recorder.seen]
        self._ranges = [Range(values[place], values[place + 1]) for place, _ in recorder.seen]
        self._values = values

    def is_finite(self, number: int) -> bool:
        """Tell whether a tensor has neither inf nor NaN."""
        return self._ranges[number].is_finite

    def value(self, place: int) -> float:
        """Return one value of the step's measures."""
        return self._values[place]

    # -- Overflow ----------------------------------------------------------------------------------

    def overflow(self, ends: Iterable[int], scale: float | None) -> Overflow | None:
        """Return the first call that made an inf or NaN of finite values which one of the ``ends`` comes from.

        Infinities that the caller asked for, as a mask's, are none, unless a NaN was made of them.
        """
        bad = [number for number in ends if not self.is_finite(number)]
        born, given, first_nan = self._causes(bad)
        if born:
            return self._described(min(born, key=self._place), scale)
        if not any(self._ranges[number].has_nan for number in bad):
            return None if given else self._unexplained(bad)
        return self._described(min(first_nan, key=self._place), scale) if first_nan else self._unexplained(bad)

    def _place(self, call: OpCall) -> int:
        return self._order.get(id(call), -1)

    def _causes(self, bad: list[int]) -> tuple[list[OpCall], list[OpCall], list[OpCall]]:
        """Return the calls that bad values began at, those that were asked to make some, and those that made NaN."""
        born: list[OpCall] = []
        given: list[OpCall] = []
        first_nan: list[OpCall] = []
        left, known = list(bad), set(bad)
        while left:
            number = left.pop()
            call = self._makers[number]
            if call is None:
                continue
            wrong = [seen.number for seen in call.inputs if not self.is_finite(seen.number) and seen.number != number]
            if not any(self._ranges[n].has_nan for n in wrong) and self._ranges[number].has_nan:
                first_nan.append(call)
            if not wrong:
                (given if call.has_given_infinity else born).append(call)
            left += [n for n in wrong if n not in known]
            known.update(wrong)
        return born, given, first_nan

    def _unexplained(self, bad: list[int]) -> Overflow | None:
        """Describe an inf or NaN that was there before any call, or that no call was seen to make."""
        if not bad:
            return None
        left, known = list(bad), set(bad)
        while left:
            number = left.pop()
            call = self._makers[number]
            if call is None:
                return self._there_before(number)
            wrong = [s.number for s in call.inputs if not self.is_finite(s.number) and s.number not in known]
            left += wrong
            known.update(wrong)
        return None

    def _there_before(self, number: int) -> Overflow:
        name = self._names.get(number)
        user = next((c for c in self._calls if any(s.number == number for s in c.inputs)), None)
        what = name or "an input"
        inputs = () if user is None else self._shown(user.inputs)
        advice = f"{what} had an inf or NaN before the step: look at what wrote it, or at the data."
        where = None if user is None else user.module
        op = what if user is None else _named(user)
        kernel = "no call" if user is None else user.op
        return Overflow(op, kernel, where, name, "forward", inputs, (), None, {}, advice)

    def _described(self, call: OpCall, scale: float | None) -> Overflow:
        decided_in = self._decided_in(call)
        lower = self._lower_dtype(call)
        rule_op = deciding(decided_in.around) if lower is not None else None
        rule = {} if rule_op is None else {rule_op: "fp32"}
        fits = self._fitting_scale(call, scale)
        return Overflow(
            rule_op or _named(decided_in),
            call.op,
            decided_in.module,
            self._parameter(decided_in),
            "backward" if call.is_backward else "forward",
            self._shown(call.inputs),
            self._shown(call.outputs),
            self._made_by(call),
            rule,
            _advice(call, rule, lower, fits),
            fits,
        )

    def _decided_in(self, call: OpCall) -> OpCall:
        """Return the call of the forward pass whose rule decides the dtype of a call's result.

        A gradient is cast back to the dtype that the value had before its cast: what made that value decides.
        """
        found = call if call.forward is None else call.forward
        if call.is_backward and found is not call and _is_cast(found):
            maker = self._makers[self._origin(found.inputs[0].number)]
            return found if maker is None or maker.is_backward else maker
        return found

    def _lower_dtype(self, call: OpCall) -> torch.dtype | None:
        """Return the lower dtype that a call's values went through, or None."""
        found = [seen.dtype for seen in (*call.outputs, *call.inputs)]
        return next((d for d in found if d.is_floating_point and d.itemsize < 4), None)

    def _fitting_scale(self, call: OpCall, scale: float | None) -> float | None:
        if call.loss is None:
            return None
        greatest = self._values[call.loss.first + 4]
        if not 0 < greatest < math.inf:
            return None
        return _power_of_two_below((scale or 1.0) * torch.finfo(call.outputs[0].dtype).max / greatest)

    def _made_by(self, call: OpCall) -> str | None:
        """Name what made a value that a cast could not hold."""
        if call.is_backward or not _is_cast(call):
            return None
        number = self._origin(call.inputs[0].number)
        maker = self._makers[number]
        if maker is None:
            return self._names.get(number)
        return f"{plain_name(maker.op)} in {maker.module}" if maker.module else plain_name(maker.op)

    def _parameter(self, call: OpCall) -> str | None:
        """Name the parameter that a call takes; the weight rather than the bias."""
        inputs = sorted(call.inputs, key=lambda seen: -len(seen.shape))
        names = (self._names.get(self._origin(seen.number)) for seen in inputs)
        return next((name for name in names if name is not None), None)

    def _origin(self, number: int) -> int:
        """Return the tensor that another one is a cast, a copy or a view of."""
        maker = self._makers[number]
        while maker is not None and _is_move(maker) and maker.inputs:
            number = maker.inputs[0].number
            maker = self._makers[number]
        return number

    def _shown(self, tensors: Iterable[Seen]) -> tuple[TensorRange, ...]:
        return tuple(TensorRange(s.label, s.dtype, s.shape, self._ranges[s.number]) for s in tensors)

    # -- Underflow ---------------------------------------------------------------------------------

    def underflows(self, gradients: dict[str, int], least_share: float, scale: float | None) -> list[Underflow]:
        """Return the parameters of whose gradients so much was lost, the worst first."""
        shares: dict[int, tuple[float, OpCall]] = {}
        """By a tensor: how much of what it is made of was lost, and the call that lost most of that."""
        worst: dict[int, float] = {}
        largest = math.inf
        for call in self._calls:
            if not call.is_backward:
                continue
            own = 0.0
            if call.loss is not None:
                lost, alive, _, _, greatest = self._values[call.loss.first : call.loss.first + 5]
                own = lost / alive if alive else 0.0
                if 0 < greatest < math.inf:
                    largest = min(largest, torch.finfo(call.outputs[0].dtype).max / greatest)
            before = max((shares[s.number] for s in call.inputs if s.number in shares), key=_first, default=None)
            share = own if before is None else 1 - (1 - own) * (1 - before[0])
            if share == 0:
                continue
            culprit = call if before is None or own >= worst[id(before[1])] else before[1]
            worst[id(culprit)] = max(own, worst.get(id(culprit), 0.0)) if culprit is call else worst[id(culprit)]
            shares.update({seen.number: (share, culprit) for seen in call.outputs})
        found = [
            self._lost(name, *shares[number], largest, scale)
            for name, number in gradients.items()
            if shares.get(number, (0.0, None))[0] >= least_share
        ]
        return sorted(found, key=lambda underflow: -underflow.share)

    def _lost(self, name: str, share: float, call: OpCall, largest: float, scale: float | None) -> Underflow:
        assert call.loss is not None
        dtype, least = call.outputs[0].dtype, self._values[call.loss.first + 2]
        used = scale or 1.0
        forward = self._decided_in(call)
        rule_op = deciding(forward.around)
        return Underflow(
            name,
            share,
            rule_op or _named(forward),
            forward.module,
            used,
            _power_of_two_above(used * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / least),
            _power_of_two_below(used * largest),
            {} if rule_op is None else {rule_op: "fp32"},
        )


def _first(pair: tuple[float, OpCall]) -> float:
    return pair[0]


def _is_cast(call: OpCall) -> bool:
    return plain_name(call.op) in ("_to_copy", "to", "copy_") and bool(call.inputs)


def _is_move(call: OpCall) -> bool:
    return call.op.partition(".")[0] in _MOVES | _VIEWS


def _named(call: OpCall) -> str:
    return plain_name(call.around[0].op)


def _advice(call: OpCall, rule: dict[str, str], lower: torch.dtype | None, fits: float | None) -> str:
    if lower is None:
        return "it ran in float32, so that no rule helps: look at its inputs' ranges."
    by_rule = (
        f"ops={rule!r}" if rule else "float32 for it: no rule decides it, since autocast was off or it is in place"
    )
    by_scale = "" if fits is None else f", or a loss scale of at most {plain(fits)}"
    return by_rule + by_scale


def _power_of_two_above(value: float) -> float:
    return 2.0 ** math.ceil(math.log2(value)) if 0 < value < math.inf else value


def _power_of_two_below(value: float) -> float:
    return 2.0 ** math.floor(math.log2(value)) if 0 < value < math.inf else value
