"""Finds what costs time or accuracy, call by call: each fault is one small look at a call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..engine import Call
from ..functions.ruledforward import RuledForward
from ..rules.policy import RAISING, CastPolicy
from .origins import Facts
from .places import Places
from .records import CAST, TINY, Fault, Faulty, Finding, bytes_of, name_of, results_of, short_name
from .weights import Weights

__all__ = ["Faults"]

Module = torch.nn.Module | None
Tensors = list[torch.Tensor]
_AS_CALLED = {None, CastPolicy.FALLTHROUGH}
_HALF = {torch.float16, torch.bfloat16}
_MOST_NAMES = 3
_BY_DESIGN = (
    "The table means it so, for the range of the op: search_precision(goal='speed') measures whether it needs be."
)


class _Raised(NamedTuple):
    """What made a tensor float32, and what would keep it from that."""

    op: str
    text: str
    advice: str
    rule: tuple[str, str] | None
    is_shipped: bool


class _Count:
    __slots__ = ("bytes", "calls", "modules")

    def __init__(self) -> None:
        self.calls = self.bytes = 0
        self.modules: dict[str, None] = {}


class Faults:
    """The faults found so far, and what is known of the tensors that are alive."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._found: dict[Fault, _Count] = {}
        self._raised: Facts[_Raised] = Facts()
        self._doubles: Facts[bool] = Facts()
        self._weights = Weights(places)

    def look(self, call: Call, tensors: Tensors, rule: str, place: str, module: Module) -> None:
        """Look at a call: its tensors, and the rule, the module's name and the module that it was made under."""
        tensors = [t for t in tensors if t.is_floating_point()]
        if not tensors:
            return
        results = results_of(call)
        for fault, moved in (
            *self._round_trips(call),
            *self._weights.look(call, module),
            *self._float64(call, tensors, results, module),
            *self._mixed(call, tensors, results, module),
            *_tiny(call, tensors),
            *_unknown(call),
        ):
            count = self._found.setdefault(fault, _Count())
            count.calls += 1
            count.bytes += moved
            count.modules[place] = None
        self._follow(call, tensors, results, rule, module)

    def findings(self) -> tuple[Finding, ...]:
        """Return what was found: what somebody's rule or code does first, then what shipped rules do, by bytes."""
        found = [_finding(fault, count) for fault, count in self._found.items()]
        return tuple(sorted(found, key=lambda f: (f.is_shipped, -f.cast_bytes, -f.calls)))

    # -- To float32 and back ---------------------------------------------------------------------------

    def _follow(self, call: Call, tensors: Tensors, results: Tensors, rule: str, module: Module) -> None:
        """Know of a call's float32 results whether they are so only because a rule made them."""
        most = max(t.numel() for t in tensors)  # a scale, a mask or a norm's statistics decide nothing
        wide = [t for t in tensors if t.dtype is torch.float32 and t.dim() and t.numel() == most]
        wide = [t for t in wide if not _is_leaf_weight(t)]
        facts = [self._raised.get(t) for t in wide]
        fact = facts[0] if facts and all(facts) else None
        low = next((t.dtype for t in tensors if t.dtype in _HALF), None)
        if low is not None and not wide:
            if call.policy in RAISING:
                base = call.device.base.get(call.op)
                name = short_name(call.op)
                advice = f"ops={{'{name}': 'fallthrough'}} runs it in {name_of(low)}."
                is_shipped = base is not None and base.source == rule
                by = f"{name} takes {name_of(low)} to float32 (rule: {rule})"
                fact = _Raised(call.op, by, _BY_DESIGN if is_shipped else advice, (name, "fallthrough"), is_shipped)
            elif call.op == CAST:
                fact = _cast_by_code(low, module)
        for result in results:
            if result.dtype is torch.float32 and fact is not None:
                self._raised.put(result, fact)
            elif self._raised.get(result) is not None:
                self._raised.remove(result)

    def _round_trips(self, call: Call) -> Faulty:
        found: Faulty = []
        for cast in call.casts:
            raised = self._raised.get(cast.before) if cast.after.dtype in _HALF and not cast.is_kept else None
            if raised is not None:
                back = f"{short_name(call.op)} takes its result back to {name_of(cast.after.dtype)}"
                text = f"{raised.text}, and {back}."
                fault = Fault("round trip", raised.op, text, raised.advice, raised.rule, raised.is_shipped)
                found.append((fault, 2 * bytes_of(cast)))
        return found

    # -- Dtypes that meet ------------------------------------------------------------------------------

    def _float64(self, call: Call, tensors: Tensors, results: Tensors, module: Module) -> Faulty:
        if call.op == CAST and any(r.dtype is torch.float64 and r.dim() for r in results):
            self._doubles.put(results[0], True)
            text = f"a cast in the code of {_kind_of(module)} makes float64 of {name_of(tensors[0].dtype)}."
            return [(Fault("float64", call.op, text, "Cast to float32: no rule of an op casts float64."), 0)]
        is_ruled = call.policy not in _AS_CALLED
        doubles = [t for t in tensors if t.dtype is torch.float64 and (t.dim() or is_ruled)]
        if not doubles:
            return []
        new = [t for t in doubles if self._doubles.get(t) is None]
        for result in results:
            if result.dtype is torch.float64:
                self._doubles.put(result, True)
        if call.op == CAST:
            return []
        name = short_name(call.op)
        effect = "is left alone as a whole" if is_ruled else "gives float64"
        advice = "Make it float32: no rule of an op casts float64."
        texts = [f"{self._named(t, module)} is float64, so {name} {effect}." for t in new]
        return [(Fault("float64", call.op, text, advice), 0) for text in texts]

    def _mixed(self, call: Call, tensors: Tensors, results: Tensors, module: Module) -> Faulty:
        if call.policy not in _AS_CALLED and call.policy is not CastPolicy.PROMOTE:
            return []
        low = [t for t in tensors if t.dtype in _HALF and t.dim()]
        wide = [t for t in tensors if t.dtype is torch.float32 and t.dim()]
        if not low or not wide or not any(r.dtype is torch.float32 for r in results):
            return []
        most = max(t.numel() for t in low)
        if not all(t.numel() < most or self._places.tensor(t, module) or _is_leaf_weight(t) for t in wide):
            return []  # a float32 stream, such as residuals, which is what autocast means to have
        name, dtype = short_name(call.op), name_of(low[0].dtype)
        text = f"{name} of {dtype} runs in float32 because {self._named(wide[0], module)} is float32."
        advice = f"ops={{'{name}': 'lower_precision_fp'}} runs every {name} in {dtype}; or make that argument {dtype}."
        moved = sum(bytes_of(cast) for cast in call.casts if not cast.was_there)
        return [(Fault("one float32 argument", call.op, text, advice, (name, "lower_precision_fp")), moved)]

    def _named(self, tensor: torch.Tensor, module: Module) -> str:
        name = self._places.tensor(tensor, module)
        return f"an argument of shape {tuple(tensor.shape)}" if name is None else name.rpartition(".")[2]


def _cast_by_code(low: torch.dtype, module: Module) -> _Raised:
    if module is not None and isinstance(vars(module).get("forward"), RuledForward):
        text = f"the rule of a {_kind_of(module)} takes what it gets from {name_of(low)} to float32"
        return _Raised(CAST, text, "Give what follows the module the same rule, or take it away.", None, False)
    text = f"a cast in the code of {_kind_of(module)} takes {name_of(low)} to float32"
    return _Raised(
        CAST, text, "Leave the cast out, or have what follows in float32, by a rule of its module.", None, False
    )


def _kind_of(module: Module) -> str:
    return "what is outside of modules" if module is None else type(module).__name__


def _tiny(call: Call, tensors: Tensors) -> Faulty:
    made = [cast for cast in call.casts if not cast.is_kept]
    if call.policy is not CastPolicy.LOWER_PRECISION_FP or not made or sum(t.numel() for t in tensors) > TINY:
        return []
    name, dtype = short_name(call.op), name_of(call.lower)
    text = f"{name} in {dtype} has at most {TINY} elements to work on: casting them costs more than it saves."
    advice = f"ops={{'{name}': 'fp32'}} leaves every {name} in float32; a rule of the module leaves these."
    return [(Fault("tiny op", call.op, text, advice, (name, "fp32")), sum(map(bytes_of, made)))]


def _unknown(call: Call) -> Faulty:
    if call.op.startswith("aten::") or call.op in call.scope.table:
        return []
    name = short_name(call.op)
    text = f"no table knows {name}: it runs in the dtypes that it is called with."
    advice = f"ops={{'{name}': 'lower_precision_fp'}}, or 'fp32', says what it wants; mpamp.register_op for good."
    return [(Fault("unknown op", call.op, text, advice, (name, "lower_precision_fp")), 0)]


def _is_leaf_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def _finding(fault: Fault, count: _Count) -> Finding:
    modules = tuple(count.modules)
    names = ", ".join(name or "outside of modules" for name in modules[:_MOST_NAMES])
    more = f" and {len(modules) - _MOST_NAMES} more" if len(modules) > _MOST_NAMES else ""
    times = "once" if count.calls == 1 else f"{count.calls} times"
    text = f"{fault.text.rstrip('.')}: {times}, in {names}{more}."
    ops = {} if fault.rule is None else dict([fault.rule])
    return Finding(fault.kind, fault.op, modules, text, fault.advice, ops, count.calls, count.bytes, fault.is_shipped)
