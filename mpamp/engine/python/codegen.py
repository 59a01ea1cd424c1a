"""Writes a kernel's source from an op's schema: no generic loop over arguments, one straight path a call.

    scope -> policy -> the arguments' dtype -> cast -> the op itself, with the Autocast key off

The key is off while arguments are cast, as in torch's own kernels. ``building`` gives the source its globals.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from typing import Any

from ...oplists import parameters_of, widening_ops
from ...rules.eligibility import (
    DTYPE_OF_WEIGHTS,
    HELD,
    NEED_ONE_DTYPE,
    OBSERVERS,
    PARAMETERS,
    WRITTEN,
    is_in_place,
    overload_name,
)
from ...rules.policy import CastPolicy
from ...rules.rows import APPEND_DTYPE
from ...torch_internals import OpOverload
from .wrapping import number_slots, wraps_by_itself

__all__ = ["is_normalization", "kernel_source", "names_of"]


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor argument, or a list of tensors, as the source has it."""

    name: str
    kind: str
    may_be_number: bool

    @property
    def is_list(self) -> bool:
        return self.kind.startswith(("List", "Optional[List"))

    @property
    def guard(self) -> str:
        """What must be true for it to have a dtype, followed by ``and``, or nothing."""
        if self.may_be_number:
            return f"_isinstance({self.name}, _TENSOR) and "
        return f"{self.name} is not None and " if self.kind.startswith("Optional") else ""

    def cast(self) -> list[str]:
        """Return the lines that cast it to ``_target``."""
        if self.is_list:
            is_optional = self.kind.startswith("Optional")
            line = f"{self.name} = _cast_all({self.name}, _target, _scope)"
            return [f"if {self.name} is not None:", f"    {line}"] if is_optional else [line]
        return [
            f"if {self.guard}{self.name}.dtype is not _target:",
            f"    {self.name} = _cast({self.name}, _target, _scope)",
        ]

    def even(self) -> str:
        """Return the line that gives its tangent the dtype that it has itself."""
        if self.is_list:
            is_there = f" if {self.name} is not None else None" if self.kind.startswith("Optional") else ""
            return f"{self.name} = [_even(t, _target) for t in {self.name}]{is_there}"
        return f"{self.name} = _even({self.name}, _target)"

    def wrap(self) -> list[str]:
        """Return the lines that make a number a tensor."""
        if not self.may_be_number:
            return []
        return [f"if not _isinstance({self.name}, _TENSOR):", f"    {self.name} = _wrap({self.name})"]


_RETURN_RESULT = ["if _result is not None:", "    return _result"]


def is_normalization(op: OpOverload) -> bool:
    """Tell whether the op may write into running statistics without saying so."""
    return any(a.name in WRITTEN and a.alias_info is None for a in op._schema.arguments)


def names_of(op: OpOverload) -> tuple[list[str], bool]:
    """Return what a kernel calls the op's arguments, and whether it takes the keyword-only ones by position.

    The kernel's own names start with an underscore. Keyword-only arguments keep theirs, unless one of them
    starts so, too, or is a word of Python's.
    """
    arguments = op._schema.arguments
    by_position = any(a.kwarg_only and (a.name.startswith("_") or keyword.iskeyword(a.name)) for a in arguments)
    names = [a.name if a.kwarg_only and not by_position else f"_{i}" for i, a in enumerate(arguments)]
    return names, by_position


def kernel_source(
    op: OpOverload,
    torchs: CastPolicy | None = None,
    *,
    wraps: bool = True,
    minds_sparse: bool = False,
    is_fused: bool = False,
    observed: bool = False,
) -> str:
    """Return the Python source of an op's kernel.

    Args:
        op: The overload, whose schema the source is specialised on.
        torchs: The policy of torch's own kernel, where some calls may be left to that.
        minds_sparse: Whether products of sparse tensors have no kernel in lower precision.
        wraps: Whether to wrap numbers in what is handed on; else what the op is handed on to does that.
        is_fused: Whether there is a function that may take the arguments of a call in float32 as they are.
        observed: Whether the kernel tells of each call.

    Example:
        >>> from torch import ops
        >>> print(kernel_source(ops.aten.mm.default).splitlines()[0])
        def kernel(_keys, _0, _1):
    """
    schema = op._schema.arguments
    names, by_position = names_of(op)
    numbers, left = number_slots(op), PARAMETERS if is_normalization(op) else set()
    seen = [Argument(names[i], str(a.type), i in numbers) for i, a in enumerate(schema) if "Tensor" in str(a.type)]
    tensors = [t for t in seen if schema[names.index(t.name)].name not in left]
    if op._schema.name in OBSERVERS:
        tensors = tensors[:1]
    passed, head = _passed(op, names), _head(op, names, by_position)
    wrapped = [line for t in seen for line in t.wrap()] if wraps else []
    short = [] if torchs is None or is_in_place(op) else _short_body(torchs, tensors, passed, wrapped)
    body = _in_place_body(tensors) if is_in_place(op) else _body(op, names, seen, tensors, passed)
    call = f"return _normalize(_target, {passed})" if left else f"return _call({passed})"
    to_call = [] if wraps_by_itself(op) else wrapped
    target, casts = body
    if is_fused:
        casts = ["_result = _fused(" + ", ".join(names) + ") if _target is _FLOAT32 else None", *_RETURN_RESULT, *casts]
    begin, end = [], []
    run_absent = f"return _absent(_scope, _keys, {passed})"
    if observed:
        begin, end = [f"_told = _Call(_OP, _device, _scope, _policy, _lower, ({_all(seen)}))"], ["_told.leave()"]
        call, casts = _told(call), [_told(line) for line in casts]
    return "\n".join(
        [
            f"def kernel({head}):",
            "    _scope = _thread.state.scopes[_INDEX]",
            "    if _scope is None or _graph_task() != _scope.task or _mode_depth() or _is_overlaid():",
            "        _scope = _resolve(_device)",
            "        if _scope is None:",
            *_indented(2, wrapped),
            f"            return _outside(_keys, {passed})",
            "    _lower = _get_dtype(_TYPE)",
            "    _policy = _scope.rules[_lower].get(_OP)",
            "    if _policy is None:",
            *_indented(1, _absent_body(seen, run_absent, wrapped) if observed and wraps else [*wrapped, run_absent]),
            *(["    _policy = _policy_of_sparse(_policy, (" + _all(seen) + "))"] if minds_sparse else []),
            *_indented(0, short),
            "    if _is_excluded(_VIEWS) and _is_in_a_kernel():",
            *_indented(1, wrapped),
            f"        return _outside(_keys, {passed})",
            *_indented(0, target),
            *_indented(0, begin),
            "    _set_excluded(_KEY, True)",
            "    try:",
            *_indented(1, casts),
            *_indented(1, to_call),
            f"        {call}",
            "    finally:",
            "        _set_excluded(_KEY, False)",
            *_indented(1, end),
            "",
        ]
    )


def _indented(depth: int, lines: list[str]) -> list[str]:
    return ["    " * (depth + 1) + line for line in lines]


_TELLING = re.compile(r"\b(_cast_all|_cast|_call_append|_call|_normalize)\(")


def _told(line: str) -> str:
    """Return a line such that it tells what is cast, what is called, and what is returned.

    What tells has names of its own: a thread may still be running the kernel as it was before.
    """
    before, word, value = _TELLING.sub(r"\1_told(", line).partition("return ")
    return f"{before}return _told.done({value})" if word else before


def _absent_body(seen: list[Argument], run: str, wrapped: list[str]) -> list[str]:
    """Return the lines for a call that the table gives no policy.

    What autograd's kernels call isn't told, nor the levels of ``torch.func``, each of which comes by here.
    """
    return [
        "if _is_excluded(_VIEWS) or not _is_in_a_kernel() or _is_untold(_scope):",
        *("    " + line for line in [*wrapped, run]),
        f"_told = _Call(_OP, _device, _scope, None, _lower, ({_all(seen)}))",
        "try:",
        *("    " + line for line in [*wrapped, _told(run)]),
        "finally:",
        "    _told.leave()",
    ]


def _head(op: OpOverload, names: list[str], by_position: bool) -> str:
    parts = ["_keys"]
    for i, a in enumerate(op._schema.arguments):
        if a.kwarg_only and not by_position and "*" not in parts:
            parts.append("*")
        is_optional = a.has_default_value() or (by_position and a.kwarg_only)
        parts.append(f"{names[i]}=_D{i}" if is_optional else names[i])
    return ", ".join(parts)


def _passed(op: OpOverload, names: list[str]) -> str:
    schema = op._schema.arguments
    keywords = {a.name: names[i] for i, a in enumerate(schema) if a.kwarg_only}
    parts = [names[i] for i, a in enumerate(schema) if not a.kwarg_only]
    if any(keyword.iskeyword(name) for name in keywords):
        parts.append("**{" + ", ".join(f"{name!r}: {own}" for name, own in keywords.items()) + "}")
    else:
        parts += [f"{name}={own}" for name, own in keywords.items()]
    return ", ".join(parts)


# -- What the policy asks for ------------------------------------------------------------------------


def _short_body(torchs: CastPolicy, tensors: list[Argument], passed: str, wrapped: list[str]) -> list[str]:
    """Return the lines for a call whose policy torch's own kernel follows as well.

    But for some cases: torch keeps no cast of a frozen weight and may keep a stale one, its promote knows
    two dtypes only, and it casts beside a float64 argument.
    """
    run = [*wrapped, f"return _outside(_keys, {passed})"]
    lines = run
    if torchs is CastPolicy.PROMOTE:
        lines = [f"if _knows(_lower, ({_all(tensors)})):", *("    " + line for line in run)]
    elif torchs is CastPolicy.LOWER_PRECISION_FP:
        if any(t.is_list or t.may_be_number for t in tensors):
            return []
        is_double, is_single = (
            " or ".join(f"({t.guard}{t.name}.dtype is {dtype})" for t in tensors) for dtype in ("_FLOAT64", "_FLOAT32")
        )
        lines = [f"if not ({is_double}):"]
        lines += [f"    if ({is_single}) and _lower is not _FLOAT32 and _may_keep(_scope):"]
        lines += ["        _cache = _scope.cache"]
        for t in tensors:
            lines += [f"        if {t.guard}{t.name}.dtype is _FLOAT32:"]
            lines += [f"            {t.name} = _kept({t.name}, _lower, _cache)"]
        lines += ["    " + line for line in run]
    # torch's kernel leaves an argument with a tangent of another dtype, which products refuse.
    return ["if _policy is _TORCHS and _forward_ad._current_level < 0:", *("    " + line for line in lines)]


def _all(tensors: list[Argument]) -> str:
    return "".join(f"{t.name}, " for t in tensors).rstrip()


_Body = tuple[list[str], list[str]]
"""The lines that find the arguments' dtype, and those that cast them to it."""


def _body(op: OpOverload, names: list[str], seen: list[Argument], tensors: list[Argument], passed: str) -> _Body:
    held = [n for n, a in zip(names, op._schema.arguments, strict=True) if a.name in HELD and "number" in str(a.type)]
    parameters = [
        n for n, a in zip(names, op._schema.arguments, strict=True) if a.name in parameters_of(overload_name(op))
    ]
    minded = "".join(f"_unless_double({t.name}), " if t.name in parameters else f"{t.name}, " for t in seen).rstrip()
    target = [f"_target = _target_of(_policy, _lower, ({minded}), ({''.join(n + ', ' for n in held)}))"]
    if not any(t.is_list for t in seen):
        doubles = " or ".join(f"{t.guard}{t.name}.dtype is _FLOAT64" for t in seen if t.name not in parameters)
        target = [
            "if _policy is _LOWER:",
            f"    _target = None if {doubles} else _lower",
            "else:",
            f"    {target[0]}",
        ]
    casts = ["if _target is not None:", *("    " + line for t in tensors for line in t.cast())]
    casts += ["    if _forward_ad._current_level >= 0:", *("        " + t.even() for t in tensors)]
    first = tensors[0]
    is_castable = f"{first.guard}{first.name}.dtype in _CASTABLE"
    if overload_name(op) in APPEND_DTYPE:
        casts += [f"if _policy is _APPEND and {is_castable}:", f"    return _call_append({passed}, dtype=_FLOAT32)"]
    own = next((n for n, a in zip(names, op._schema.arguments, strict=True) if _is_dtype(a)), None)
    own = None if op._schema.name in DTYPE_OF_WEIGHTS else own
    if own is not None:
        # A call that says what it computes in is left to it; a quantized dtype says something else.
        target += [f"if {own} is not None and ({own}.is_floating_point or {own}.is_complex):", "    _target = None"]
    if overload_name(op) in widening_ops():
        target += [f"if _policy is _FP32 and {own} is None and {is_castable}:", f"    _target, {own} = None, _FLOAT32"]
    if overload_name(op) in NEED_ONE_DTYPE:
        target += [f"if _policy is _SET_OPT and {own} is None:", "    _target = _FLOAT32"]
    if own is not None and not first.is_list:
        casts += [f"if _policy is _SET_OPT and {own} is None and {is_castable}:", f"    {own} = _FLOAT32"]
    return target, casts


def _is_dtype(argument: Any) -> bool:
    return argument.name == "dtype" and "ScalarType" in str(argument.real_type)


def _in_place_body(tensors: list[Argument]) -> _Body:
    """Refuse the tensor written to, or cast the other arguments to its dtype."""
    written, *others = tensors
    target = [f"if _policy is _BANNED: _target_of(_policy, _lower, ({written.name},))"]
    if not others:
        return target, []
    target += [f"_target = {written.name}.dtype"]
    casts = ["if _policy is _PROMOTE and _target in _CASTABLE:"]
    return target, [*casts, *("    " + line for t in others for line in t.cast())]
