"""The conformance kit: what a vendor runs to know that mixed precision on a device does what mpamp promises."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from ..devices.registry import get_backend
from ..plugins.backend import Backend
from ..plugins.manager import manager
from ..rules.optable import OpTable
from ..rules.rows import parse_dtype
from ..scaler import GradScaler
from .conformance_regions import backend_tests, cache_tests, checkpoint_tests, custom_function_tests, nesting_tests
from .conformance_report import Check, Report, require, run
from .conformance_rows import row_tests
from .conformance_scaler import scaler_tests
from .conformance_subject import Subject, Test, in_force, is_fakeable

__all__ = ["check_backend"]

SECTIONS: dict[str, Callable[[Subject], Iterator[Test]]] = {
    "backend": backend_tests,
    "table": row_tests,
    "nesting": nesting_tests,
    "cache": cache_tests,
    "scaler": scaler_tests,
    "checkpoint": checkpoint_tests,
    "custom functions": custom_function_tests,
}


def check_backend(
    backend: Backend | str,
    *,
    default_dtype: torch.dtype | str | None = None,
    make_scaler: Callable[..., Any] = GradScaler,
    sections: Collection[str] | None = None,
) -> Report:
    """Check a backend against what mpamp promises for every device, on its tensors or else on fake ones.

    Every row of the table in force is called in each dtype, and must come down to the same ops and dtypes as a call
    outside of regions with arguments cast by hand. Nothing is left behind: a backend that isn't registered is in
    force only meanwhile. A report of checks that were all skipped fails, too: nothing is known then.

    Args:
        backend: A backend, or the device type whose registered one is meant.
        default_dtype: What the device's manual promises as the default. None: any of its dtypes will do.
        make_scaler: Makes the scaler to check from the arguments of ``mpamp.GradScaler``.
        sections: Which parts to check: ``"backend"``, ``"table"``, ``"nesting"``, ``"cache"``, ``"scaler"``,
            ``"checkpoint"``, ``"custom functions"``. None: all.

    Raises:
        ValueError: There is no such section.
        UnknownDeviceError: torch knows no such device, and no plugin brings it.

    Example:
        >>> report = check_backend("cpu", default_dtype=torch.bfloat16)
        >>> report.failures
        []
        >>> print(str(report).partition(" tensors")[0])
        <CpuBackend 'cpu'> on this machine's
    """
    unknown = set(sections or ()) - set(SECTIONS)
    if unknown:
        raise ValueError(f"no section {', '.join(sorted(unknown))}; there are: {', '.join(SECTIONS)}.")
    chosen = {name: tests for name, tests in SECTIONS.items() if sections is None or name in sections}
    found = get_backend(backend) if isinstance(backend, str) else backend
    manager().require_known(found)
    first = tuple(run("backend", name, ask) for name, ask in _questions(found).items())
    if any(check.outcome == "failed" for check in first):
        return Report(found.device_type, _name(found), "no", tuple(c for c in first if c.outcome == "failed"))
    with torch.random.fork_rng(devices=[]), in_force(found) as state:
        is_here = found.is_available()
        if not is_here and not is_fakeable(found.device_type):
            reason = "no such device here, and beside another accelerator its tensors can't be faked"
            checks = tuple(Check(section, "all", "skipped", reason) for section in chosen)
        else:
            promised = None if default_dtype is None else parse_dtype(default_dtype)
            subject = Subject(found, state, not is_here, promised, make_scaler)
            checks = tuple(run(s, name, test) for s, tests in chosen.items() for name, test in tests(subject))
    if all(check.outcome == "skipped" for check in checks):
        checks = (*checks, _nothing_ran(found))
    return Report(found.device_type, repr(found), "this machine's" if is_here else "fake", checks)


def _questions(backend: Backend) -> dict[str, Callable[[], object]]:
    """Return what must be answered before a backend can be put in force at all."""
    return {
        "repr() gives a name": lambda: repr(backend),
        "is_available answers": backend.is_available,
        "dtypes are dtypes": lambda: _check_dtypes(backend),
        "op_table can be made": lambda: _check_table(backend),
        "tensor_check can be made": backend.tensor_check,
        "capture_check can be made": backend.capture_check,
        "capture_address can be told": backend.capture_address,
        "prepare works": backend.prepare,
    }


def _check_dtypes(backend: Backend) -> None:
    for dtype in (backend.default_dtype, *backend.lower_precision_dtypes):
        require(isinstance(dtype, torch.dtype), f"{dtype!r} is no torch.dtype")


def _check_table(backend: Backend) -> None:
    table = backend.op_table()
    require(isinstance(table, OpTable), f"op_table() returned a {type(table).__name__}")


def _nothing_ran(backend: Backend) -> Check:
    told = (
        f"nothing was checked: run the kit where there is a {backend.device_type!r} device, or where there is no "
        f"accelerator at all, so that its tensors can be faked; torch.{backend.device_type}.is_available() and "
        "device_count() say whether torch finds one"
    )
    return Check("backend", "something is checked", "failed", told)


def _name(backend: Backend) -> str:
    try:
        return repr(backend)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"<{type(backend).__name__}>"
