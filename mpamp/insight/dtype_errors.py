"""What a model raises in a region and doesn't without it: where, at which op, and the rule with which it runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ..engine.watching import Run, watch_calls
from ..errors import MpampError
from ..functions.module_rules import module_rules
from ..regions.region import autocast
from ..rules.eligibility import overload_name
from ..rules.optable import OpTable
from ..torch_internals import OpOverload
from .overflow_measures import floats_in
from .places import module_frame
from .records import name_of, short_name
from .surrounding import lowered, with_rules

__all__ = ["explain_error"]

_WRITES = "@buffer_writes"
_POLICIES = ("promote", "fp32", "lower_precision_fp")
Model = torch.nn.Module


class _Op(NamedTuple):
    """An op that raised, and the dtypes that it was called with."""

    name: str
    dtypes: tuple[str, ...]


def explain_error(error: Exception, model: Model, run: Callable[[], object], device_types: Collection[str]) -> None:
    """Add a note to an error of a model, if it comes of the region around: where, and which rule mends it.

    Runs the model again: without autocast, watched, and with each rule that may help until one does.

    Args:
        error: What ``run`` raised.
        model: The model.
        run: Runs it.
        device_types: Those that it runs on.
    """
    kinds = lowered(device_types)
    if not kinds or isinstance(error, torch.OutOfMemoryError) or not _runs(run, _off(kinds)):
        return
    if _runs(run, contextlib.nullcontext()):
        return  # a warning made an error, say: it isn't raised again
    module, ops = _module_of(error.__traceback__, model), _ops_of(run)
    rules = _first_that_runs(run, model, module, ops, kinds)
    op = ops[0] if rules is None and ops else None if rules is None else rules.op
    _add_note(error, _text(model, module, op, rules, kinds))


def _text(model: Model, module: str | None, op: _Op | None, rules: _Rules | None, kinds: list[str]) -> str:
    what = "it" if op is None else short_name(op.name)
    where = "" if module is None else f" in {module or 'the model itself'} ({_kind(model, module)})"
    given = f", which was given {' and '.join(op.dtypes)}," if op is not None and op.dtypes else ""
    said = f"mpamp: {what}{where}{given} fails in this region, and not without it. "
    if rules is None:
        return said + "No rule of an op or a module mends it: cast by hand, or leave it out of the region."
    if rules.module is None:
        return said + f'With the rule {rules.ops!r} it runs: mpamp.autocast("{kinds[0]}", ops={rules.ops!r}).'
    return said + f"With a rule of that module it runs: mpamp.module_rules(model, {rules.module!r})."


def _kind(model: Model, module: str) -> str:
    return type(model.get_submodule(module)).__name__


def _module_of(trace: TracebackType | None, model: Model) -> str | None:
    """Return the name of the innermost module of the model that an error went through."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    while trace is not None:
        if module_frame(trace.tb_frame) is trace.tb_frame:
            found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def _ops_of(run: Callable[[], object]) -> list[_Op]:
    """Run the model again; return the ops that its error went through, the outermost first."""
    raised: list[tuple[Exception, _Op]] = []

    def around(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], run_op: Run) -> Any:
        try:
            return run_op()
        except Exception as error:
            dtypes = dict.fromkeys(name_of(tensor.dtype) for _, tensor in floats_in([args, kwargs]))
            raised.append((error, _Op(overload_name(op), tuple(dtypes))))
            raise

    try:
        with watch_calls(around):
            run()
    except Exception as last:  # raised by nobody that is known, where others watch or it isn't an op's
        last_calls = [op for error, op in raised if error is last or str(error) == str(last)]
        return list(reversed(last_calls))
    return []


# -- Rules ---------------------------------------------------------------------------------------------


class _Rules(NamedTuple):
    """Rules of ops for the region, and the op that they are for; or of one module."""

    ops: dict[str, str]
    op: _Op | None
    module: dict[str, Any] | None = None

    def holding(self, model: Model, kinds: list[str]) -> contextlib.AbstractContextManager[object]:
        if self.module is not None:
            return module_rules(model, self.module)
        return with_rules(kinds, self.ops)


def _first_that_runs(
    run: Callable[[], object], model: Model, module: str | None, ops: list[_Op], kinds: list[str]
) -> _Rules | None:
    for rules in _candidates(module, ops):
        try:
            holding = rules.holding(model, kinds)
        except MpampError:  # no rule may say so of this op
            continue
        if _runs(run, holding):
            return rules
    return None


def _candidates(module: str | None, ops: list[_Op]) -> Iterator[_Rules]:
    """Yield what may help: what says most of what is wrong first, and what changes most last."""
    writes = OpTable({_WRITES: "promote"})
    yield from (_Rules({_WRITES: "promote"}, op) for op in ops if op.name in writes)
    yield from (_Rules({short_name(op.name): policy}, op) for op in ops for policy in _POLICIES)
    if module is not None:
        first = ops[0] if ops else None
        yield from (_Rules({}, first, {module: rule}) for rule in ("fp32", False))


def _runs(run: Callable[[], object], context: contextlib.AbstractContextManager[object]) -> bool:
    try:
        with warnings.catch_warnings(), context:
            warnings.simplefilter("ignore")  # they were given when it first ran
            run()
    except Exception:
        return False
    return True


@contextlib.contextmanager
def _off(kinds: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(autocast(kind, enabled=False))
        yield


def _add_note(error: Exception, note: str) -> None:
    """Add a note to an error; Python 3.10 has none, there it is part of the message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
