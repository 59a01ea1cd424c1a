"""Numbers where a schema says Tensor: what kernels hand on promotes as torch's own wrapped numbers do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mpamp
from mpamp.engine.python.wrapping import as_tensors, number_slots, wrap

BRAIN, FULL = torch.bfloat16, torch.float32
NUMBERS = [True, 3, -2, 0.5, -0.0, 1e30, 1j]
DTYPES = [torch.bool, torch.int8, torch.int64, torch.float16, BRAIN, FULL, torch.float64, torch.complex64]
SHAPES = [(), (2,)]


def operands(number: complex) -> list[torch.Tensor]:
    experimental = {torch.float16, BRAIN} if hasattr(torch, "bcomplex32") else {torch.float16}  # their complex numbers
    dtypes = [d for d in DTYPES if d not in experimental or not isinstance(number, complex)]
    return [torch.ones(shape, dtype=dtype) for dtype in dtypes for shape in SHAPES]


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_a_wrapped_number_promotes_as_the_number(number: complex) -> None:
    for tensor in operands(number):
        expected, found = tensor * number, tensor * wrap(number)
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_an_unwrapped_number_promotes_as_the_number(number: complex) -> None:
    for tensor in operands(number):
        left, right = as_tensors((tensor, number), frozenset({0, 1}))
        assert (left * right).dtype is (tensor * number).dtype
        assert torch.equal(left * right, tensor * number)


def test_a_wrapped_number_keeps_its_sign_and_value() -> None:
    assert torch.copysign(torch.ones(()), wrap(-0.0)).item() == -1.0
    first, second = wrap(2.5), wrap(3.5)
    assert (first.item(), second.item()) == (2.5, 3.5)


@pytest.mark.parametrize("value", [None, "x", [1, 2], torch.float32], ids=str)
def test_other_values_stay(value: object) -> None:
    assert wrap(value) is value


def test_a_number_is_wrapped_in_any_state_of_the_thread() -> None:
    packed: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with torch.no_grad(), hooks, torch.autocast("cpu"):
        assert wrap(0.1).item() == 0.1
    with torch.inference_mode(), torch.device("meta"):
        assert wrap(0.1).item() == 0.1
    assert not packed


def test_dispatch_modes_see_no_wrapping() -> None:
    seen: list[object] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    with mpamp.autocast("cpu", BRAIN, ops={"mul": "fp32"}):
        pass
    for region in (mpamp.autocast("cpu", BRAIN), torch.autocast("cpu", BRAIN)):
        with region, Mode():
            assert (7 * x).tolist() == [7.0, 7.0, 7.0]
    assert seen == [torch.ops.aten.mul.Tensor] * 2


def test_slots_come_from_the_overloads_that_take_a_number() -> None:
    aten = torch.ops.aten
    assert number_slots(aten.special_zeta.default) == {0, 1}
    assert number_slots(aten.lerp.Tensor) == {2}
    assert not number_slots(aten.linear.default)
    assert not number_slots(aten.exp.default)  # exp.float is TorchScript's


X, N = torch.tensor([1.5, 2.5]), torch.tensor([5, 6])
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "zeta": lambda: torch.special.zeta(X, 2.0),
    "zeta, number first": lambda: torch.special.zeta(2.0, X),
    "chebyshev": lambda: torch.special.chebyshev_polynomial_t(X, 2),
    "hermite": lambda: torch.special.hermite_polynomial_h(2.0, N),
    "xlogy": lambda: torch.xlogy(X, 2.0),
    "xlogy, number first": lambda: torch.xlogy(2.0, X),
    "xlog1py": lambda: torch.special.xlog1py(X, 0.5),
    "copysign": lambda: torch.copysign(X, -0.0),
    "fmod": lambda: torch.fmod(X, 0.7),
    "remainder": lambda: torch.remainder(2.0, X),
    "and": lambda: N & 3,
    "or, number first": lambda: 8 | N,
    "xor": lambda: N ^ True,
    "shift": lambda: N << 1,
    "shift, number first": lambda: torch.bitwise_right_shift(64, N),
    "mul": lambda: N * 2.5,
    "sub, number first": lambda: 1 - X,
    "div": lambda: X / 3,
    "floor_divide": lambda: X // 2,
    "div, floor": lambda: torch.div(X, 2, rounding_mode="floor"),
    "pow": lambda: X**2,
    "pow, number first": lambda: 2**X,
    "eq": lambda: X == 1.5,
    "clamp": lambda: X.clamp(2.0),
    "where": lambda: torch.where(X > 2, X, 0.0),
    "lerp": lambda: torch.lerp(X, X + 1, 0.25),
    "masked_fill": lambda: X.masked_fill(X > 2, 9.0),
    "isin": lambda: torch.isin(X, 1.5),
    "float_power": lambda: torch.float_power(2, N),
    "add, complex": lambda: X + 1j,
}
LISTS = [
    "special_zeta special_chebyshev_polynomial_t special_hermite_polynomial_h xlogy special_xlog1py copysign fmod",
    "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__",
    "mul sub rsub div floor_divide remainder pow eq clamp clamp_min where lerp masked_fill isin float_power add",
]
EVERY_OP = " ".join(LISTS).split()


@pytest.mark.parametrize("policy", ["fp32", "lower_precision_fp", "promote", "fallthrough"])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_take_numbers(name: str, policy: str) -> None:
    """In a region with rules, and afterwards, under a plain torch.autocast that finds the kernels installed."""
    call = CALLS[name]
    expected = call()
    with mpamp.autocast("cpu", BRAIN, ops=dict.fromkeys(EVERY_OP, policy)):
        has_none = policy == "lower_precision_fp" and (
            name.partition(",")[0] in ("zeta", "chebyshev") or (name == "add, complex" and hasattr(torch, "bcomplex32"))
        )
        with pytest.raises(NotImplementedError) if has_none else nullcontext():
            inside = call()
    with torch.autocast("cpu", BRAIN):
        plain = call()
    assert plain.dtype is expected.dtype
    assert torch.equal(plain, expected)
    if has_none:
        return
    if policy != "lower_precision_fp":
        assert inside.dtype is expected.dtype
        assert torch.equal(inside, expected)
    elif expected.dtype is FULL and name not in ("hermite", "mul"):  # those have integers
        assert inside.dtype is BRAIN


@pytest.mark.parametrize("name", CALLS)
def test_a_default_region_leaves_numbers_to_plain_autocast(name: str) -> None:
    for dtype in (BRAIN, torch.float16):
        with mpamp.autocast("cpu", dtype):
            pass
    with torch.autocast("cpu", BRAIN):
        assert torch.equal(CALLS[name](), CALLS[name]())


def test_numbers_of_symbolic_shapes_are_handed_on() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        with mpamp.autocast("cpu", BRAIN, ops={"mul": "fp32"}):
            return (x * x.shape[0]) * (x.shape[0] / 2)

    x = torch.ones(3, 2, dtype=BRAIN)
    found = torch.compile(scaled, backend="aot_eager", dynamic=True, fullgraph=True)(x)
    assert found.dtype is FULL
    assert torch.equal(found, torch.full((3, 2), 4.5))
    torch._dynamo.reset()


def test_a_number_that_autograd_keeps_does_not_change() -> None:
    """A kernel that rules of a region past asked for hands numbers on wrapped; each is a tensor of its own."""
    x = torch.ones(3, requires_grad=True)
    with mpamp.autocast("cpu", ops={"mul": "fp32"}):
        pass
    with mpamp.autocast("cpu"):
        (x * 2.0 * 3.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0, 6.0]
