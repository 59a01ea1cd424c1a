"""From an inf or NaN at the end of a step back to the call that made it; and from a gradient to what it lost."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .frames import deciding, plain_name
from .overflow_calls import OpCall, Recorder, Seen
from .overflow_measures import Range
from .overflow_report import Overflow, TensorRange, Underflow

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
            _advice(call, rule, lower),
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

    def underflows(
        self, gradients: dict[str, int], lacks: dict[str, int], least_share: float, scale: float | None
    ) -> list[Underflow]:
        """Return the parameters whose gradients lack so much, the worst first.

        Args:
            gradients: By a parameter's name: the number of its gradient.
            lacks: By its name: the place of the norm of what its gradient lacks, and of the gradient as it would be.
            least_share: Of the former over the latter.
            scale: The loss scale.
        """
        culprits = self._culprits()
        found = []
        for name, place in lacks.items():
            lack, whole = self._values[place : place + 2]
            share = min(1.0, lack / whole) if whole else 0.0
            if share >= least_share and (culprit := culprits.get(gradients[name])) is not None:
                found.append(self._lost(name, share, culprit, scale))
        return sorted(found, key=lambda underflow: -underflow.share)

    def _culprits(self) -> dict[int, OpCall]:
        """Return, by a tensor's number, the call that most of what it lacks was lost in."""
        lost: dict[int, tuple[float, OpCall]] = {}
        for call in self._calls:
            before = max((lost[s.number] for s in call.inputs if s.number in lost), key=_first, default=None)
            if call.loss is not None:
                own, through, whole = self._values[call.loss.first : call.loss.first + 3]
                if before is None or own > through:
                    before = (own / whole if whole else 0.0, call)
                elif whole:
                    before = (through / whole, before[1])
            if before is not None and before[0] > 0:
                lost.update({seen.number: before for seen in call.outputs})
        return {number: call for number, (_, call) in lost.items()}

    def _lost(self, name: str, share: float, call: OpCall, scale: float | None) -> Underflow:
        forward = self._decided_in(call)
        rule_op = deciding(forward.around)
        rule = {} if rule_op is None else {rule_op: "fp32"}
        return Underflow(name, share, rule_op or _named(forward), forward.module, scale or 1.0, rule)


def _first(pair: tuple[float, OpCall]) -> float:
    return pair[0]


def _is_cast(call: OpCall) -> bool:
    return plain_name(call.op) in ("_to_copy", "to", "copy_") and bool(call.inputs)


def _is_move(call: OpCall) -> bool:
    return call.op.partition(".")[0] in _MOVES | _VIEWS


def _named(call: OpCall) -> str:
    return plain_name(call.around[0].op)


def _advice(call: OpCall, rule: dict[str, str], lower: torch.dtype | None) -> str:
    if lower is None:
        return "it ran in float32, so that no rule helps: look at its inputs' ranges."
    return f"ops={rule!r}" if rule else "float32 for it: no rule decides it, since autocast was off or it is in place"
