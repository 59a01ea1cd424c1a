"""Random calls of ops in regions, and what each gives: run by a process of either engine, or by casts made by hand.

``python -m tests.sweeps.agreement_calls FIRST COUNT OUT`` runs seeds by the engine that ``MPAMP_ENGINE`` names, and
by hand.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mpamp
from mpamp.oplists import load_table, widening_ops
from mpamp.rules.eligibility import HELD, find_overload, is_out_of_place
from mpamp.rules.policy import CASTABLE, LARGEST, RAISING, CastPolicy, target_dtype
from mpamp.rules.rows import APPEND_DTYPE

Tensor = torch.Tensor
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
USUAL = (torch.float32, torch.bfloat16, torch.float16)
REGIONS = (torch.bfloat16, torch.float16, torch.float32)
MODES = ("grad", "grad", "no_grad", "inference", "function mode", "dispatch mode", "vmap", "jvp", "compile")
KINDS = ("plain", "plain", "parameter", "frozen", "leaf", "view", "expanded", "turned", "inference", "sparse")

# What each overload is called with: "T" a 4 x 4 tensor, "V" a vector of 4, "B" a batch, "S" a 0-dim tensor,
# "I" indices,
# "L" a list of tensors, "T?" a tensor or None; "n" a number of any kind; the rest is as it stands.
CALLS: dict[str, tuple[Any, ...]] = {
    "mm": ("T", "T"), "bmm": ("B", "B"), "addmm": ("T", "T", "T"), "addmv": ("V", "T", "V"), "mv": ("T", "V"),
    "baddbmm": ("B", "B", "B"), "linear": ("T", "T", "V?"), "matmul": ("T", "T"), "linalg_vecdot": ("T", "T"),
    "dot": ("V", "V"), "conv1d": ("B", "B", "V?"), "prelu": ("T", "V"), "cat": ("L",), "stack": ("L",),
    "softmax.int": ("T", 0), "log_softmax.int": ("T", -1), "sum": ("T",), "sum.dim_IntList": ("T", [0]), "prod": ("T",),
    "cumsum": ("T", 0), "norm.Scalar": ("T", 2), "linalg_vector_norm": ("T",), "exp": ("T",), "log1p": ("T",),
    "pow.Tensor_Scalar": ("T", "n"), "pow.Tensor_Tensor": ("T", "T"), "pow.Scalar": ("n", "T"), "reciprocal": ("T",),
    "mse_loss": ("T", "T"), "l1_loss": ("T", "T"), "smooth_l1_loss": ("T", "T"), "kl_div": ("T", "T"),
    "binary_cross_entropy": ("T", "T"), "cross_entropy_loss": ("T", "I"), "nll_loss": ("T", "I", "V?"),
    "layer_norm": ("T", [4], "V?", "V?"), "group_norm": ("T", 2, "V?", "V?"),
    "native_layer_norm": ("T", [4], "V?", "V?", 1e-5),
    "index_copy": ("T", 0, "I", "T"), "index_add": ("T", 0, "I", "T"), "index_put": ("T", ["I"], "V"),
    "scatter_add": ("T", 0, "J", "T"), "masked_fill.Scalar": ("T", "M", "n"),
    "index_fill.int_Scalar": ("T", 0, "I", "n"),
    "lerp.Tensor": ("T", "T", "T"), "lerp.Scalar": ("T", "T", "n"), "addcmul": ("T", "T", "T"),
    "addcdiv": ("T", "T", "T"),
    "atan2": ("T", "T"), "dist": ("T", "T"), "cdist": ("T", "T"), "cross": ("C", "C"), "isclose": ("T", "T"),
    "heaviside": ("T", "T"), "linalg_det": ("T",), "inverse": ("T",), "fft_fft": ("T",), "quantile.scalar": ("T", 0.5),
    "quantize_per_tensor": ("T", 0.1, 0, torch.qint8), "fake_quantize_per_tensor_affine": ("T", 0.1, 0, -8, 7),
    "scaled_dot_product_attention": ("B", "B", "B"), "chain_matmul": ("L",), "tensordot": ("T", "T", [1], [0]),
    "gelu": ("T",), "add.Tensor": ("T", "T"), "mul.Tensor": ("T", "S"), "where.self": ("M", "T", "T"),
    "clamp": ("T", "n"),
    "copysign.Tensor": ("T", "T"), "special_ndtri": ("T",), "logsumexp": ("T", [0]), "renorm": ("T", 2, 0, 1.0),
    "allclose": ("T", "T"), "embedding": ("T", "I"), "cosine_embedding_loss": ("T", "T", "V"),
}  # fmt: skip
SHAPES = {"T": (4, 4), "V": (4,), "B": (2, 4, 4), "S": (), "C": (4, 3)}
DTYPED = ("sum", "sum.dim_IntList", "prod", "cumsum", "softmax.int", "log_softmax.int", "linalg_vector_norm")
RULES = ("lower_precision_fp", "fp32", "promote", "fallthrough", "banned")


class SeeFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeeOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@dataclass
class Program:
    """One call, what surrounds it, and the tensors that its gradients are asked of."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    lower: torch.dtype
    ops: dict[str, str] | None
    enabled: bool
    nesting: str
    mode: str
    leaves: list[Tensor] = field(default_factory=list)

    @property
    def op(self) -> Any:
        return find_overload(f"aten::{self.name}")


def program(seed: int) -> Program:
    """Return the program of a seed: the same in every process."""
    r = random.Random(seed)
    name = r.choice(sorted(CALLS))
    mode = r.choice(MODES)
    made = Program(
        name, [], {}, r.choice(REGIONS), None, r.random() > 0.08, r.choice(("", "", "in float32", "in torch's")), mode
    )
    pick = functools.partial(_dtype, r, r.choice(USUAL), r.random() < 0.5)
    for part in CALLS[name]:
        made.args.append(_argument(r, part, pick, made.leaves, mode))
    if name in DTYPED and r.random() < 0.3:
        made.kwargs["dtype"] = r.choice((torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.int64))
    if r.random() < 0.35:
        rules = [*RULES, "fp32_set_opt_dtype"] if name in DTYPED else RULES
        made.ops = {f"aten::{name}" if "." in name else f"aten::{name}.default": r.choice(rules)}
    return made


def _dtype(r: random.Random, usual: torch.dtype, is_alike: bool) -> torch.dtype:
    if is_alike and r.random() < 0.8:
        return usual
    return r.choice(USUAL) if r.random() < 0.6 else r.choice(DTYPES)


def _argument(r: random.Random, part: Any, pick: Callable[[], torch.dtype], leaves: list[Tensor], mode: str) -> Any:
    if isinstance(part, list):
        return [_argument(r, p, pick, leaves, mode) for p in part]
    if not isinstance(part, str):
        return part
    if part == "L":
        return [_argument(r, "T", pick, leaves, mode) for _ in range(r.choice((1, 2, 3)))]
    if part == "n":
        return r.choice((2, 0.5, True, 1e30, 7e4, -1e5, float("inf"), 3))
    if part == "M":
        return torch.tensor([[True, False, True, True]] * 4)
    if part in ("I", "J"):
        return torch.tensor([0, 2, 1, 3]) if part == "I" else torch.tensor([[0, 2, 1, 3]] * 4)
    if part.endswith("?") and r.random() < 0.3:
        return None
    shape = () if part == "T" and r.random() < 0.05 else SHAPES[part[0]]
    return _tensor(r, shape, pick(), r.choice(KINDS) if mode in ("grad", "no_grad", "inference") else "plain", leaves)


def _tensor(r: random.Random, shape: tuple[int, ...], dtype: torch.dtype, kind: str, leaves: list[Tensor]) -> Tensor:
    count = torch.Size(shape).numel()
    numbers = torch.tensor([r.randrange(1, 16) / 16 for _ in range(count)]).reshape(shape)
    try:
        made = (
            torch.quantize_per_tensor(numbers, 0.1, 0, dtype) if str(dtype).startswith("torch.q") else numbers.to(dtype)
        )
    except (RuntimeError, NotImplementedError):  # a dtype without a copy
        made = torch.zeros(shape, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else numbers
    is_differentiable = made.dtype.is_floating_point or made.dtype.is_complex
    if kind in ("parameter", "frozen") and (is_differentiable or kind == "frozen") and not made.is_quantized:
        made = torch.nn.Parameter(made, requires_grad=kind == "parameter")
    elif kind == "leaf" and is_differentiable:
        made = made.requires_grad_()
    elif kind == "view" and shape and not made.is_quantized and dtype.itemsize > 1:
        base = torch.nn.Parameter(torch.cat([made, made]), requires_grad=is_differentiable)
        if is_differentiable:
            leaves.append(base)
        return base[: shape[0]]
    elif kind == "expanded" and shape and not made.is_quantized:
        made = made[:1].expand(shape)
    elif kind == "turned" and len(shape) > 1 and not made.is_quantized:
        made = made.mT.contiguous().mT if dtype.itemsize > 1 else made
    elif kind == "inference" and not made.is_quantized:
        with torch.inference_mode():
            made = made.clone() if dtype in USUAL else made
    elif kind == "sparse" and len(shape) == 2 and dtype is torch.float32 and r.random() < 0.3:
        made = made.to_sparse()
    if made.requires_grad:
        leaves.append(made)
    return made


# -- Running -------------------------------------------------------------------------------------------


def by_engine(made: Program) -> Any:
    """Run a program in its region, by the engine of the process."""
    with _surroundings(made), mpamp.autocast("cpu", dtype=made.lower, enabled=made.enabled, ops=made.ops):
        return _call(made, made.op, made.args, made.kwargs)


@contextlib.contextmanager
def _surroundings(made: Program) -> Any:
    with contextlib.ExitStack() as stack:
        if made.mode == "no_grad":
            stack.enter_context(torch.no_grad())
        elif made.mode == "inference":
            stack.enter_context(torch.inference_mode())
        elif made.mode == "function mode":
            stack.enter_context(SeeFunctions())
        elif made.mode == "dispatch mode":
            stack.enter_context(SeeOps())
        if made.nesting == "in float32":
            stack.enter_context(mpamp.autocast("cpu", dtype=torch.float32))
        elif made.nesting == "in torch's":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        yield


def _call(made: Program, op: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    first = next((i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dim()), None)
    call = functools.partial(op, **kwargs)
    if made.mode == "vmap" and first is not None:
        batched = torch.stack([args[first], args[first]]) if args[first].dtype in USUAL else None
        if batched is not None:
            return torch.vmap(lambda x: call(*args[:first], x, *args[first + 1 :]))(batched)
    if made.mode == "jvp" and first is not None and args[first].dtype in USUAL:
        x = args[first]
        return torch.func.jvp(lambda x: call(*args[:first], x, *args[first + 1 :]), (x,), (torch.ones_like(x),))[0]
    if made.mode == "compile":
        return torch.compile(lambda *args: call(*args), backend="eager", dynamic=False)(*args)
    return call(*args)


def by_hand(made: Program) -> Any:
    """Run a program by its rule, with casts made here and no region; NotImplemented where that isn't all there is."""
    name = f"aten::{made.name}"
    table = mpamp.get_op_table("cpu") if made.ops is None else mpamp.get_op_table("cpu").override(made.ops)
    policy = table.policy(name, made.lower) if made.enabled else CastPolicy.FALLTHROUGH
    tensors = [t for a in made.args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    has_double = any(t.dtype is torch.float64 for t in tensors)
    native = load_table("native", "cpu").get(name)
    is_torchs = native is not None and native.policy is policy
    if policy is None or made.mode in ("vmap", "jvp", "compile") or (has_double and is_torchs and policy in RAISING):
        return NotImplemented
    if any(t.layout is not torch.strided for t in tensors) or not is_out_of_place(made.op):
        return NotImplemented
    args, kwargs, op = made.args, dict(made.kwargs), made.op
    own = kwargs.get("dtype")
    is_set = own is not None and (own.is_floating_point or own.is_complex)
    widens = policy is CastPolicy.FP32 and name in widening_ops() and own is None
    dtypes = [t.dtype for t in tensors if t.dtype in CASTABLE]
    numbers = [
        a for a, s in zip(args, op._schema.arguments, strict=False) if s.name in HELD and isinstance(a, int | float)
    ]
    if not all(abs(n) <= LARGEST[d] or abs(n) == float("inf") for n in numbers for d in dtypes):
        dtypes.append(torch.float32)
    with contextlib.nullcontext() if made.mode != "no_grad" else torch.no_grad():
        target = None if has_double else target_dtype(policy, name, made.lower, dtypes)
        if (policy is CastPolicy.FP32_SET_OPT_DTYPE or widens) and own is None and tensors[0].dtype in CASTABLE:
            kwargs["dtype"], target = torch.float32, None
        elif policy is CastPolicy.FP32_APPEND_DTYPE and tensors[0].dtype in CASTABLE:
            op, kwargs["dtype"] = find_overload(APPEND_DTYPE[name]), torch.float32
        if target is not None and not is_set:
            args = [[_to(t, target) for t in a] if isinstance(a, list) else _to(a, target) for a in args]
        with torch.inference_mode() if made.mode == "inference" else contextlib.nullcontext():
            return op(*args, **kwargs)


def _to(value: Any, target: torch.dtype) -> Any:
    return value.to(target) if isinstance(value, Tensor) and value.dtype in CASTABLE else value


def outcome(run: Callable[[Program], Any], seed: int) -> Any:
    """Return what a seed gives: dtypes, values and gradients, or the error."""
    made = program(seed)
    try:
        result = run(made)
    except Exception as error:
        has_text = made.mode != "compile" and not isinstance(error, NotImplementedError)  # which kernel lacks a dtype
        return [type(error).__name__, str(error).partition("\n")[0][:120] if has_text else ""]
    if result is NotImplemented:
        return None
    found = result if isinstance(result, tuple | list) else [result]
    shown = [_shown(value)[:3] if _is_misread(made, value) else _shown(value) for value in found]
    floats = [t for t in found if isinstance(t, Tensor) and t.requires_grad and not t.dtype.is_complex]
    if floats and made.leaves and not torch.is_inference_mode_enabled():
        try:
            sum(t.float().sum() for t in floats).backward()  # type: ignore[union-attr]
        except Exception as error:
            return [shown, type(error).__name__, str(error).partition("\n")[0][:120]]
        shown += [None if leaf.grad is None else _shown(leaf.grad) for leaf in made.leaves]
    return shown


def _is_misread(made: Program, result: Any) -> bool:
    """Tell whether torch's kernels read what lies behind their arguments, which differs from call to call.

    They take packed numbers for whole bytes, and what is put into a quantized tensor for float32.
    """
    if not isinstance(result, Tensor) or not result.is_quantized:
        return False
    return result.dtype in (torch.quint4x2, torch.quint2x4) or made.name == "index_put"


def _shown(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    plain = value.detach()
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    plain = plain.int_repr() if plain.is_quantized else plain
    try:
        plain = plain.contiguous().resolve_conj().resolve_neg()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    except (RuntimeError, TypeError, NotImplementedError):
        data = b"?"
    return [str(value.dtype), list(value.shape), str(value.layout), hashlib.sha1(data).hexdigest()[:12]]


def main(first: int, count: int, out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    for seed in range(first, first + count):
        if program(seed).mode == "compile":
            torch.compiler.reset()
        results[seed] = [outcome(by_engine, seed), outcome(by_hand, seed)]
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"engine": mpamp.engine.which()[0], "results": results}, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
