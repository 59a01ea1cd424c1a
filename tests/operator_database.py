"""Calls of torch's own operator database, what they give, and processes that may die of them."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import mpamp
from mpamp.errors import OpTableError
from mpamp.rules.eligibility import find_overload, is_out_of_place

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
DTYPES = (FULL, torch.complex64, torch.int64, torch.bool)
UNSET = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Ops whose results hold whatever was in memory."""
Outcome = tuple[Any, ...]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Call:
    """One sample of an op."""

    name: str
    function: Callable[..., Any]
    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, *given: Any) -> Any:
        torch.manual_seed(0)
        return self.function(*(given or (self.input,)), *self.args, **self.kwargs)

    def gradients(self) -> Any:
        """Return the result, and the gradients of what can have one."""
        result = self()
        leaves = [t for t in tree_leaves((self.input, self.args, self.kwargs)) if _is_float(t)]
        wanted = [t for t in leaves if t.is_leaf and t.requires_grad]
        found = [t for t in tree_leaves(result) if _is_float(t) and t.requires_grad]
        if not wanted or not found:
            return result
        return result, torch.autograd.grad(found, wanted, [torch.ones_like(t) for t in found], allow_unused=True)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def calls(step: int = 1, per_op: int = 2, *, grad: bool = False) -> Iterator[Call]:
    """Yield the first samples of every ``step``-th op, in the first of ``DTYPES`` that the op takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

        for op in op_db[::step]:
            name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
            dtype = next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)
            if dtype is None:
                continue
            needs_grad = grad and op.supports_autograd and dtype is FULL
            try:
                made = op.sample_inputs("cpu", dtype, requires_grad=needs_grad)
                samples = [s for s, _ in zip(made, range(per_op), strict=False)]
            except Exception:  # some need what isn't installed
                continue
            for sample in samples:
                yield Call(name, op.op, sample.input, tuple(sample.args), dict(sample.kwargs))


def outcome(call: Callable[[], Any], context: Context) -> Outcome:
    """Return the dtypes and values that a call gives, or the class of its error."""
    try:
        with warnings.catch_warnings(), context():
            warnings.simplefilter("ignore")
            result = call()
    except Exception as error:
        return "raises", type(error).__name__, str(error).partition("\n")[0][:120]
    return "gives", *(_plain(leaf) for leaf in tree_leaves(result))


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)[:200]
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested or leaf.dtype is torch.complex32:
        return str(leaf.dtype), str(leaf.layout), None
    with torch.no_grad():
        return str(leaf.dtype), tuple(leaf.shape), leaf.detach().resolve_conj().resolve_neg().contiguous()


def is_same(left: Outcome, right: Outcome, name: str) -> bool:
    """Tell whether two outcomes have the same dtypes, shapes and values."""
    if left[0] == "raises" or len(left) != len(right):
        return left[:2] == right[:2]
    pairs = zip(left[1:], right[1:], strict=True)
    return all(dtypes_of(a) == dtypes_of(b) and _is_near(a, b, 0.0, name) for a, b in pairs)


def is_near(left: Outcome, right: Outcome, name: str, tolerance: float) -> bool:
    """Tell whether two results have values that are near, whatever their dtypes."""
    pairs = zip(left[1:], right[1:], strict=True)
    return len(left) == len(right) and all(_is_near(a, b, tolerance, name) for a, b in pairs)


def dtypes_of(leaf: Any) -> Any:
    return leaf[:2] if isinstance(leaf, tuple) else leaf


def _is_near(left: Any, right: Any, tolerance: float, name: str) -> bool:
    if not isinstance(left, tuple) or not isinstance(right, tuple):
        return bool(left == right)
    a, b = left[2], right[2]
    if a is None or b is None or name in UNSET:
        return True
    if a.shape != b.shape:
        return False
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(kind), b.to(kind)
    scale = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1.0), equal_nan=True)


@functools.cache
def rules(policy: str) -> dict[str, str]:
    """Return a rule for every overload of aten that takes the policy."""
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    found = [n for n in names if (op := find_overload(n)) is not None and is_out_of_place(op)]
    return {n: policy for n in (n if "." in n else f"{n}.default" for n in found) if _takes(n, policy)}


def _takes(op: str, policy: str) -> bool:
    try:
        mpamp.OpTable({op: policy})
    except OpTableError:
        return False
    return True


def in_process(function: Callable[[], Any], timeout_s: int = 600) -> Any:
    """Return what ``function`` returns in a forked process; a string that says why where it doesn't come to that."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _child(function, write, timeout_s)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return pickle.loads(data) if data else f"ended with status {status}"


def _child(function: Callable[[], Any], write: int, timeout_s: int) -> None:
    try:
        signal.alarm(timeout_s)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        torch.set_num_threads(1)
        found = function()
    except BaseException:
        found = "raised " + traceback.format_exc()
    with os.fdopen(write, "wb") as file:
        pickle.dump(found, file)
    os._exit(0)
