"""What a backend says of itself, and regions on its device: nesting, kept casts, checkpoints, custom functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..errors import UnsupportedDtypeError
from ..functions.custom import custom_bwd, custom_fwd
from ..rules.optable import OpTable
from ..rules.policy import CASTABLE, CastPolicy
from ..torch_internals import unset_fake_temporarily
from .conformance_report import Inapplicable, require
from .conformance_subject import Subject, Test
from .counting import WeightCastCounter

__all__ = ["backend_tests", "cache_tests", "checkpoint_tests", "custom_function_tests", "nesting_tests"]

FULL = torch.float32
_RULES = {"mm": "lower_precision_fp", "linear": "lower_precision_fp", "softmax": "fp32"}


def _tests(subject: Subject, tests: dict[str, Callable[[Subject], object]]) -> Iterator[Test]:
    for name, test in tests.items():
        yield name, functools.partial(_on_tensors, subject, test)


def _on_tensors(subject: Subject, test: Callable[[Subject], object]) -> None:
    with subject.tensors():
        test(subject)


# -- What the backend says -----------------------------------------------------------------------------


def backend_tests(subject: Subject) -> Iterator[Test]:
    """Return the checks of a backend's attributes and of its table as a whole."""
    yield from _tests(
        subject,
        {
            "default_dtype is one that regions run in": _default_dtype,
            "default_dtype is what a region without dtype runs in": _default_region,
            "default_dtype is what is expected": _expected_default,
            "lower_precision_dtypes are lower precision": _lower_dtypes,
            "other dtypes are refused": _refused,
            "autocast_key is the one that torch autocasts the device by": _key,
            "is_available and is_emulated give a bool": _answers,
            "is_available is true where the device's tensors can be made": _available,
            "read_later gives the values": _read_later,
            "known_faults answers": lambda subject: subject.backend.known_faults(),
            "tensor_check knows the device's tensors": _tensor_check,
            "op_table is the device's, and the same each time": _same_table,
            "op_table has something run in lower precision": _useful_table,
        },
    )


def _default_dtype(subject: Subject) -> None:
    dtype, allowed = subject.backend.default_dtype, subject.backend.lower_precision_dtypes
    require(dtype in allowed, f"default_dtype is {dtype}, lower_precision_dtypes are {_listed(allowed)}")


def _default_region(subject: Subject) -> None:
    x, expected = subject.rand(4, 4), subject.backend.default_dtype
    with subject.region(ops=_RULES):
        found = subject.mm_dtype(x)
    require(found is expected, f"default_dtype is {expected}, a matrix product in such a region is {found}")
    require(found is not FULL, "default_dtype is float32: such a region casts nothing to lower precision")


def _expected_default(subject: Subject) -> None:
    dtype, expected = subject.backend.default_dtype, subject.default_dtype
    if expected is None:
        raise Inapplicable("check_backend was not given default_dtype=, the dtype that the device's manual promises")
    require(dtype is expected, f"default_dtype is {dtype}, {expected} was expected")


def _lower_dtypes(subject: Subject) -> None:
    dtypes = subject.backend.lower_precision_dtypes
    wrong = [d for d in dtypes if d not in CASTABLE or d is FULL]
    require(dtypes and not wrong, f"{_listed(wrong) or 'none'}: not a floating dtype of fewer bits than float32")
    supported = getattr(getattr(torch, subject.device, None), "get_amp_supported_dtype", None)
    lacking = [d for d in dtypes if supported is not None and d not in supported()]
    require(not lacking, f"torch.{subject.device}.get_amp_supported_dtype() leaves out {_listed(lacking)}")


def _refused(subject: Subject) -> None:
    for dtype in (torch.float64, torch.int8, torch.complex64):
        try:
            subject.region(dtype)
        except UnsupportedDtypeError:
            continue
        require(False, f"a region in {dtype} can be made")


def _key(subject: Subject) -> None:
    require(subject.backend.autocast_key == subject.state.key_name, f"it is {subject.state.key_name} in torch")
    with subject.region():
        require(torch.is_autocast_enabled(subject.device), "torch does not take the device for autocast in a region")
    require(not torch.is_autocast_enabled(subject.device), "the device is autocast outside of regions")


def _answers(subject: Subject) -> None:
    backend = subject.backend
    answers = {f"is_emulated({dtype})": backend.is_emulated(dtype) for dtype in backend.lower_precision_dtypes}
    answers["is_available()"] = backend.is_available()
    wrong = {call: answer for call, answer in answers.items() if not isinstance(answer, bool)}
    require(not wrong, ", ".join(f"{call} is {answer!r}" for call, answer in wrong.items()))


def _available(subject: Subject) -> None:
    if subject.backend.is_available():
        return
    with unset_fake_temporarily():
        try:
            (torch.ones(1).to(subject.device) + 1).cpu()
        except (RuntimeError, AssertionError, NotImplementedError):
            return
    require(False, f"it is False, but a tensor on {subject.device} can be made and read: regions there do nothing")


def _read_later(subject: Subject) -> None:
    subject.need_values()
    tensor = torch.tensor([2.0, 3.0]).to(subject.device)
    arrived = subject.backend.read_later(tensor)
    tensor.cpu()  # waits for what was queued before
    copy = arrived()
    require(copy is not None and copy.tolist() == [2.0, 3.0], f"of 2 and 3 it gives {copy}")


def _tensor_check(subject: Subject) -> None:
    check = subject.backend.tensor_check()
    for tensor in (subject.rand(1), torch.rand(1), torch.rand(1, device="meta")):
        is_here = tensor.device.type == subject.device
        require(bool(check(tensor)) is is_here, f"it says {bool(check(tensor))} of a tensor on {tensor.device}")


def _same_table(subject: Subject) -> None:
    first, second = subject.backend.op_table(), subject.backend.op_table()
    require(isinstance(first, OpTable), f"op_table() returned a {type(first).__name__}")
    require(first.device == subject.device, f"it is for {first.device!r}")
    require(first == second, f"two calls differ: {'; '.join(map(str, first.diff(second)[:3]))}")


def _useful_table(subject: Subject) -> None:
    dtype = subject.backend.default_dtype
    lower = [op for op in subject.state.table if subject.state.table.policy(op, dtype) is CastPolicy.LOWER_PRECISION_FP]
    require(lower, f"no row is lower_precision_fp in a {dtype} region: it makes nothing faster")


def _listed(dtypes: Any) -> str:
    return ", ".join(map(str, dtypes))


# -- Nesting -------------------------------------------------------------------------------------------


def nesting_tests(subject: Subject) -> Iterator[Test]:
    """Return the checks of regions in regions."""
    yield from _tests(
        subject,
        {
            "a region ends": _ends,
            "a disabled region in a region": _disabled_inside,
            "a region of another dtype in a region": _other_inside,
            "a region's own rules end with it": _own_rules,
            "an error ends a region": _error,
        },
    )


def _seen(subject: Subject, x: torch.Tensor, expected: torch.dtype, where: str) -> None:
    found = subject.mm_dtype(x)
    require(found is expected, f"{where}, a matrix product of float32 is {found}, not {expected}")


def _ends(subject: Subject) -> None:
    x, lower = subject.rand(4, 4), subject.backend.default_dtype
    _seen(subject, x, FULL, "before a region")
    with subject.region(ops=_RULES):
        _seen(subject, x, lower, "in a region")
    _seen(subject, x, FULL, "after a region")


def _disabled_inside(subject: Subject) -> None:
    x, lower = subject.rand(4, 4), subject.backend.default_dtype
    with subject.region(ops=_RULES):
        with subject.region(enabled=False):
            _seen(subject, x, FULL, "in a disabled region")
            with subject.region(ops=_RULES):
                _seen(subject, x, lower, "in a region in a disabled one")
        _seen(subject, x, lower, "after a disabled region")


def _other_inside(subject: Subject) -> None:
    x, dtypes = subject.rand(4, 4), (*subject.backend.lower_precision_dtypes, FULL)
    for outer in dtypes:
        for inner in dtypes:
            with subject.region(outer, ops=_RULES):
                with subject.region(inner, ops=_RULES):
                    _seen(subject, x, inner, f"in a {inner} region in a {outer} one")
                _seen(subject, x, outer, f"after a {inner} region in a {outer} one")


def _own_rules(subject: Subject) -> None:
    x, lower = subject.rand(4, 4), subject.backend.default_dtype
    with subject.region(ops=_RULES):
        with subject.region(ops={"mm": "fp32"}):
            _seen(subject, x, FULL, "in a region with mm = fp32")
        _seen(subject, x, lower, "after it")


def _error(subject: Subject) -> None:
    x = subject.rand(4, 4)
    try:
        with subject.region(ops=_RULES):
            raise KeyError
    except KeyError:
        _seen(subject, x, FULL, "after an error in a region")


# -- Kept casts ----------------------------------------------------------------------------------------


def cache_tests(subject: Subject) -> Iterator[Test]:
    """Return the checks of weights' kept casts."""
    yield from _tests(
        subject,
        {
            "a weight is cast once in a region": functools.partial(_casts, options={}, expected=1),
            "cache_enabled=False keeps none": functools.partial(_casts, options={"cache_enabled": False}, expected=2),
            "a changed weight is cast anew": _changed,
            "gradients are float32": _gradients,
        },
    )


def _layer(subject: Subject) -> torch.nn.Linear:
    subject.need_values()
    torch.manual_seed(0)
    layer: torch.nn.Linear = torch.nn.Linear(4, 4, bias=False).to(subject.device)
    return layer


def _casts(subject: Subject, options: dict[str, Any], expected: int) -> None:
    layer, x = _layer(subject), subject.rand(2, 4)
    with WeightCastCounter(layer) as casts, subject.region(ops=_RULES, **options):
        layer(layer(x))
    require(casts.count == expected, f"two uses made {casts.count} casts, not {expected}")


def _changed(subject: Subject) -> None:
    layer, x = _layer(subject), subject.rand(2, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with subject.region(ops=_RULES):
        layer(x).float().sum().backward()
        optimizer.step()
        kept = layer(x)
        fresh = torch.nn.functional.linear(x.to(kept.dtype), layer.weight.detach().to(kept.dtype))
    require(torch.equal(kept.cpu(), fresh.cpu()), "after an optimizer's step a region still uses the old weight")


def _gradients(subject: Subject) -> None:
    layer, x = _layer(subject), subject.rand(2, 4)
    with subject.region(ops=_RULES):
        y = layer(x)
    y.float().sum().backward()
    grad = layer.weight.grad
    require(grad is not None and grad.dtype is FULL, f"a float32 weight's gradient is {getattr(grad, 'dtype', None)}")


# -- Checkpointing -------------------------------------------------------------------------------------


def checkpoint_tests(subject: Subject) -> Iterator[Test]:
    """Return the checks of activation checkpointing, in both of torch's modes."""
    for is_reentrant in (True, False):
        for dtype in subject.backend.lower_precision_dtypes:
            test = functools.partial(_checkpoint, is_reentrant=is_reentrant, dtype=dtype)
            yield from _tests(subject, {f"use_reentrant={is_reentrant} in {dtype}": test})


def _checkpoint(subject: Subject, is_reentrant: bool, dtype: torch.dtype) -> None:
    layer, x = _layer(subject), subject.rand(2, 4).requires_grad_()
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    grads = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        z: torch.Tensor = y.softmax(-1)
        seen.append((y.dtype, z.dtype))
        return z

    for run in (block, functools.partial(checkpoint, block, use_reentrant=is_reentrant)):
        layer.zero_grad()
        with set_checkpoint_early_stop(False), subject.region(dtype, ops=_RULES):
            y = run(x)
        y.square().sum().backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.cpu())
    require(seen[-1] == seen[0], f"forward computed in {_listed(seen[0])}, recomputation in {_listed(seen[-1])}")
    require(len(seen) == 3, "nothing was recomputed")
    require(torch.equal(*grads), "the gradient is another than without checkpointing")


# -- Custom functions ----------------------------------------------------------------------------------


def custom_function_tests(subject: Subject) -> Iterator[Test]:
    """Return the checks of ``custom_fwd`` and ``custom_bwd``."""
    for cast in (None, FULL):
        yield from _tests(subject, {f"custom_fwd with cast_inputs={cast}": functools.partial(_custom, cast=cast)})


def _custom(subject: Subject, cast: torch.dtype | None) -> None:
    seen: list[torch.dtype] = []

    class Identity(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=subject.device, cast_inputs=cast)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            seen.append(subject.mm_dtype(x))
            return x.clone()

        @staticmethod
        @custom_bwd(device_type=subject.device)
        def backward(ctx: Any, *grads: Any) -> Any:
            (x,) = ctx.saved_tensors
            seen.append(subject.mm_dtype(x))
            return grads[0]

    lower = subject.backend.default_dtype
    x = subject.rand(4, 4).requires_grad_(not subject.is_fake)  # torch has no backward thread for an absent device
    with subject.region(ops=_RULES):
        y = Identity.apply(x)  # type: ignore[no-untyped-call]
    if not subject.is_fake:
        with subject.region(enabled=False):
            y.sum().backward()
    expected = [lower if cast is None else FULL] * (1 if subject.is_fake else 2)
    require(seen == expected, f"forward, then backward computed in {_listed(seen)}, not in {_listed(expected)}")
