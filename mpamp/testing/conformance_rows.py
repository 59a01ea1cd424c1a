"""Every row of a table against the device: a call in a region is the call outside of one, with its arguments cast."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import BannedOpError
from ..oplists import facts, widening_ops
from ..rules.eligibility import OBSERVERS, WRITTEN, find_overload, is_in_place
from ..rules.policy import CASTABLE, CastPolicy, target_dtype
from ..rules.rows import APPEND_DTYPE, Row, check_row
from ..torch_internals import OpOverload, TorchDispatchMode, tree_leaves, tree_map
from .conformance_arguments import Call, Maker, arguments
from .conformance_report import Inapplicable, require
from .conformance_subject import Subject, Test

__all__ = ["row_tests"]

Seen = tuple[list[str], str]
"""The ops below autocast with the dtypes of their arguments; the dtypes that came out, or the error."""
FULL, DOUBLE = torch.float32, torch.float64
_NO_CARD = "raises AcceleratorError"
_UNSEEN = ("aten::_to_copy", "aten::to", "aten::detach", "aten::alias", "prim::device")


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the exemption for torch does not reach super()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in _UNSEEN:
            self.ops.append(f"{func}({_dtypes((args, kwargs))})")
        return func(*args, **(kwargs or {}))


def _dtypes(values: Any) -> str:
    found = [str(v.dtype).removeprefix("torch.") for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
    return ", ".join(found)


def row_tests(subject: Subject) -> Iterator[Test]:
    """Return a check for each row of the table in force."""
    for name, row in subject.state.table.items():
        if row.policies():
            decided = {row.at(lower) for lower in subject.backend.lower_precision_dtypes}
            shown = next(iter(decided)) if len(decided) == 1 else row
            yield f"{name} ({shown})", functools.partial(_check_row, subject, name, row)


def _check_row(subject: Subject, name: str, row: Row) -> None:
    op = find_overload(name)
    if op is None:
        raise Inapplicable("this torch has no such op")
    if op._schema.name in OBSERVERS:
        raise Inapplicable("the kit can't make an argument of type running range")
    if name in facts("on_host") and subject.is_accelerator:
        raise Inapplicable("torch reads its tensors as the processor's: the process would end")
    check_row(name, row)
    with subject.tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of sparse arguments and of old ops
        for lower in subject.backend.lower_precision_dtypes:
            policy = row.at(lower)
            if policy is not None:
                _check_calls(subject, op, name, policy, lower)


def _check_calls(subject: Subject, op: OpOverload, name: str, policy: CastPolicy, lower: torch.dtype) -> None:
    taken = _dtypes_taken(op)
    plain = _call(op, _arguments(subject, op, [FULL]))
    if plain[1].startswith("raises") and not plain[0]:
        raise Inapplicable("can't be called here, with or without autocast")
    for form in _forms(lower, subject.backend.lower_precision_dtypes):
        if len(form) > taken:
            continue
        expected = _expected(subject, op, name, policy, lower, form)
        call = _arguments(subject, op, form)
        with subject.region(lower):
            found = _call(op, call)
        if policy is CastPolicy.FP32_APPEND_DTYPE and form == [DOUBLE]:
            found = (expected[0], found[1])  # torch's own kernel asks for float64 by name
        if found != expected and policy is CastPolicy.FP32 and name in widening_ops():  # asked for float32 as it is
            expected = _expected(subject, op, name, CastPolicy.FP32_SET_OPT_DTYPE, lower, form)
        if subject.is_fake and found[1].startswith(_NO_CARD):
            raise Inapplicable("torch's own kernel needs the device itself")
        where = f"in a {lower} region, given {', '.join(map(str, form))}"
        require(found == expected, f"{where}: {policy} means {_shown(expected)}; it was {_shown(found)}")
        is_broken = expected[1].startswith("raises") and not plain[1].startswith("raises")
        is_own = form == [FULL] and policy is CastPolicy.LOWER_PRECISION_FP and not subject.is_fake
        require(not (is_broken and is_own), f"{where}: {policy}, but the device can't run it so: {expected[1]}")


def _forms(lower: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> list[list[torch.dtype]]:
    others = [[other] for other in dtypes if other is not lower]
    return [[FULL], [lower], [FULL, lower], [lower, FULL], *others, [DOUBLE]]


@functools.cache
def _dtypes_taken(op: OpOverload) -> int:
    make = Maker("cpu", [FULL])
    try:
        arguments(op, make)
    except KeyError as error:
        raise Inapplicable(f"the kit can't make an argument of type {error.args[0]}") from error
    return make.made


def _arguments(subject: Subject, op: OpOverload, form: list[torch.dtype]) -> Call:
    return arguments(op, Maker(subject.device, form))


def _call(op: Any, call: Call) -> Seen:
    recorder = _Recorder()
    with recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            out = _dtypes(op(*call[0], **call[1]))
        except BannedOpError:
            return [], "banned"
        except Exception as error:  # whatever an op raises on these dtypes
            out = f"raises {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    return recorder.ops, out


def _shown(seen: Seen) -> str:
    ops, out = seen
    return f"{'; '.join(ops) or 'no op'} -> {out or 'no tensor'}"


def _expected(
    subject: Subject, op: OpOverload, name: str, policy: CastPolicy, lower: torch.dtype, form: list[torch.dtype]
) -> Seen:
    """Return what is seen when the policy is followed by hand, with no autocast."""
    args, kwargs = _arguments(subject, op, form)
    first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    if policy in (CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE):
        if first.dtype not in CASTABLE:
            return _call(op, (args, kwargs))
        if policy is CastPolicy.FP32_SET_OPT_DTYPE:
            return _call(op, (args, {**kwargs, "dtype": FULL}))
        defaults = [a.default_value for a in op._schema.arguments[len(args) :] if a.name not in kwargs]
        return _call(find_overload(APPEND_DTYPE[name]), ((*args, *defaults), {**kwargs, "dtype": FULL}))
    names = {a.name: i for i, a in enumerate(op._schema.arguments)}
    left = {names[n] for n in WRITTEN if n in names} | ({0} if is_in_place(op) else set())
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    is_eligible = subject.backend.tensor_check()
    dtypes = [t.dtype for t in given if t.dtype in CASTABLE and is_eligible(t)]
    try:
        target = None if DOUBLE in [t.dtype for t in given] else target_dtype(policy, name, lower, dtypes)
    except BannedOpError:
        return [], "banned"
    if is_in_place(op):
        target = first.dtype if policy is CastPolicy.PROMOTE and first.dtype in CASTABLE else None
    if target is None:
        return _call(op, (args, kwargs))

    def cast(value: Any) -> Any:
        return value.to(target) if isinstance(value, torch.Tensor) and value.dtype in CASTABLE else value

    args = tuple(value if i in left else tree_map(cast, value) for i, value in enumerate(args))
    return _call(op, (args, tree_map(cast, kwargs)))
