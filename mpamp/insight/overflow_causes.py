"""From an inf or NaN at the end of a step back to the call that made it; and from a gradient to what it lost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from .frames import deciding, plain_name
from .overflow_calls import OpCall, Recorder, Seen
from .overflow_inputs import reason_by_ranges
from .overflow_measures import Range
from .overflow_report import Overflow, TensorRange, Underflow

__all__ = ["Culprit", "StepValues"]

_MOVES = frozenset({"aten::to", "aten::_to_copy", "aten::copy_", "aten::clone", "aten::detach", "aten::t"})
_VIEWS = frozenset({"aten::transpose", "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::permute"})


_UNSEEN = "what isn't seen (NumPy, another library, compiled code)"
_MOST_MAKERS = 16


class Culprit(NamedTuple):
    """The call that made an overflow, as it can be found again when the step is run again, and what may help."""

    place: int
    """Among the calls of its kernel in the step."""
    kernel: str
    rule_op: str | None
    """The op whose rule decides its dtypes."""
    makers: tuple[str, ...]
    """The ops whose rules decide what made its inputs, the nearest first."""
    module: str | None
    elsewhere: frozenset[str | None]
    """The ops whose rules decide what other modules run in lower dtypes."""


class _There(NamedTuple):
    """A value that was there before, or came from what isn't seen."""

    number: int
    seen: Seen | None
    user: OpCall | None
    """The first call that took it."""


class _Causes:
    """Where bad values began: in calls, in what was there before (with the place of who took it); and first NaNs."""

    def __init__(self) -> None:
        self.born: list[OpCall] = []
        self.there: list[tuple[int, _There]] = []
        self.first_nan: list[OpCall] = []


class StepValues:
    """A recorded step whose measures have been read."""

    def __init__(self, recorder: Recorder, values: list[float]) -> None:
        self._calls = recorder.calls
        self._order = {id(call): place for place, call in enumerate(recorder.calls)}
        self._names = recorder.names
        self._given = recorder.given
        self.culprit: Culprit | None = None
        """What made the overflow that was described."""
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

    def overflow(self, ends: Iterable[int]) -> Overflow | None:
        """Return the first call that made an inf or NaN of finite values which one of the ``ends`` comes from.

        Where such a value was there before, or came from what isn't seen, that is said. Infinities that the caller
        asked for, and a mask's, are none, unless a NaN was made of them.
        """
        bad = [number for number in ends if not self.is_finite(number)]
        causes = self._causes(bad)
        first = min(causes.there, key=_first, default=None)
        call = min(causes.born, key=self._place, default=None)
        if call is None and first is None and any(self._ranges[number].has_nan for number in bad):
            call = min(causes.first_nan, key=self._place, default=None)
        if first is not None and (call is None or first[0] <= self._place(call)):
            return self._there_before(first[1])
        return None if call is None else self._described(call)

    def _place(self, call: OpCall) -> int:
        return self._order.get(id(call), -1)

    def _causes(self, bad: list[int]) -> _Causes:
        causes = _Causes()
        for number in bad:
            if self._makers[number] is None:
                self._leaf(causes, number, None)
        left, known = list(bad), set(bad)
        while left:
            number = left.pop()
            call = self._makers[number]
            if call is None:
                continue
            wrong = [seen for seen in call.inputs if not self._at_use(seen).is_finite and seen.number != number]
            if not any(self._at_use(seen).has_nan for seen in wrong) and self._ranges[number].has_nan:
                causes.first_nan.append(call)
            if not wrong and not call.has_given_infinity:
                causes.born.append(call)
            for seen in wrong:
                if self._makers[seen.number] is None and not _is_asked_for(seen, self._ranges[seen.number]):
                    self._leaf(causes, seen.number, seen)
                elif self.is_finite(seen.number):
                    causes.there.append((self._place(call), _There(seen.number, seen, call)))
            new = {seen.number for seen in wrong if not self.is_finite(seen.number)} - known
            left += new
            known |= new
        return causes

    def _at_use(self, seen: Seen) -> Range:
        """Return a tensor's range when a call took it."""
        if seen.now is None:
            return self._ranges[seen.number]
        return Range(self._values[seen.now], self._values[seen.now + 1])

    def _leaf(self, causes: _Causes, number: int, seen: Seen | None) -> None:
        """Take a value that no call was seen to make."""
        user = next((c for c in self._calls if any(s.number == number for s in c.inputs)), None)
        place = len(self._calls) if user is None else self._place(user)
        causes.there.append((place, _There(number, seen, user)))

    def _there_before(self, there: _There) -> Overflow:
        number, user = there.number, there.user
        maker, name = self._makers[number], self._names.get(number)
        where = None if user is None else user.module
        taken = "" if user is None else f" when {_named(user)}{_in(where)} took it"
        if maker is not None:
            what = f"the result of {_named(maker)}{_in(maker.module)}"
            advice = f"{what} was finite, and had an inf or NaN{taken}: {_UNSEEN} wrote it."
        elif name is not None or number in self._given:
            what = name or "an input"
            advice = f"{what} had an inf or NaN before the step: look at what wrote it, or at the data."
        else:
            what = "a tensor" if there.seen is None else f"a tensor of shape {list(there.seen.shape)}"
            advice = f"{what} came in with an inf or NaN{taken}: it is data, or {_UNSEEN} made it."
        inputs = () if user is None else self._shown(user.inputs)
        return Overflow(what, "no call", where, name, "forward", inputs, (), None, {}, advice)

    def _described(self, call: OpCall) -> Overflow:
        decided_in = self._decided_in(call)
        lower = self._lower_dtype(call)
        rule_op = deciding(decided_in.around) if lower is not None else None
        self.culprit = self._culprit(call, rule_op)
        rule, advice = self._alone(call, rule_op, lower)
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
            advice,
            reason=self._reason(call),
        )

    # -- What would help ---------------------------------------------------------------------------

    def _culprit(self, call: OpCall, rule_op: str | None) -> Culprit:
        module = self._decided_in(call).module
        calls = [c for c in self._calls if not c.is_backward and self._lower_dtype(c) is not None]
        elsewhere = frozenset(deciding(c.around) for c in calls if c.module != module)
        place = sum(c.op == call.op for c in self._calls[: self._place(call)])
        return Culprit(place, call.op, rule_op, tuple(self._makers_of(call)), module, elsewhere)

    def _makers_of(self, call: OpCall) -> dict[str, None]:
        """Return the rules that decide what made a call's low inputs: the module's own first, the nearest first."""
        found: dict[str, None] = {}
        outside: dict[str, None] = {}
        module = self._decided_in(call).module
        left, known = [s.number for s in (call.forward or call).inputs], set[int]()
        while left and len(known) < _MOST_MAKERS:
            number = left.pop(0)
            maker = self._makers[number]
            if number in known or maker is None or maker.is_backward:
                continue
            known.add(number)
            op = deciding(maker.around) if self._lower_dtype(maker) is not None else None
            if op is not None:
                (found if maker.module == module else outside)[op] = None
            left += [seen.number for seen in maker.inputs]
        return {**found, **outside}

    def _alone(self, call: OpCall, rule_op: str | None, lower: torch.dtype | None) -> tuple[dict[str, str], str]:
        """Return the rule that helps by what the call alone gave in float32, and the advice."""
        if lower is None:
            return {}, _with_reason("it ran in float32, so that no rule helps", self._reason(call))
        name = _short(lower)
        if rule_op is None:
            cast = f"a cast in the code{_in(call.module)} makes {name} of it" if _is_cast(call) else None
            return {}, f"no rule decides it: {cast or f'it runs in {name} in place, or outside of autocast'}."
        if call.wide is None:
            return {}, f"it couldn't be run again in float32: whether ops={{{rule_op!r}: 'fp32'}} helps isn't known."
        wide = Range(self._values[call.wide], self._values[call.wide + 1])
        if not wide.is_finite:
            return {}, _with_reason("float32 gives it too, so that no rule helps", self._reason(call))
        others = self._next_in_lower(call, rule_op) if wide.absmax > torch.finfo(lower).max else ""
        if others:
            text = f"in float32 it gives up to {wide.absmax:.4g}, which {others} takes back to {name}"
            return {}, f"{text}: a rule for one of them doesn't help. bfloat16 holds such values."
        return {rule_op: "fp32"}, f"ops={{{rule_op!r}: 'fp32'}}"

    def _next_in_lower(self, call: OpCall, rule_op: str) -> str:
        """Name an op that would cast a call's result back to a lower dtype; empty for none."""
        numbers = {seen.number for seen in call.outputs}
        for c in self._calls[self._place(call) + 1 :]:
            if not any(seen.number in numbers for seen in c.inputs) or not c.outputs:
                continue
            if not _is_lower(c.outputs[0].dtype):
                continue
            frames = self._decided_in(c).around
            op = deciding(frames)
            if op != rule_op and any(frame.is_listed for frame in frames):
                return op or _named(c)
            if op != rule_op:
                numbers.update(seen.number for seen in c.outputs)
        return ""

    def _reason(self, call: OpCall) -> str:
        return reason_by_ranges(call.op, [(seen.label, self._at_use(seen)) for seen in call.inputs])

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


def _first(pair: tuple[float, Any]) -> float:
    return pair[0]


def _is_cast(call: OpCall) -> bool:
    return plain_name(call.op) in ("_to_copy", "to", "copy_") and bool(call.inputs)


def _is_move(call: OpCall) -> bool:
    return call.op.partition(".")[0] in _MOVES | _VIEWS


def _named(call: OpCall) -> str:
    return plain_name(call.around[0].op)


def _is_lower(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _is_asked_for(seen: Seen, values: Range) -> bool:
    """Tell whether a tensor that came in with infinities is a mask, of zeros and -inf, or a constant."""
    if values.has_nan:
        return False
    return (values.least == -math.inf and values.greatest in (0.0, -math.inf)) or not seen.shape


def _in(module: str | None) -> str:
    return f" in {module}" if module else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_reason(text: str, reason: str) -> str:
    return f"{text}: {reason or 'look at its inputs and their ranges'}."
