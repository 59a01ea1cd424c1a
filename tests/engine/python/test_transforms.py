"""torch.func's transforms: each op in the dtype that an eager call of one example has, at every level."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpamp
from mpamp.devices.registry import device_state
from mpamp.engine.python import kernels
from mpamp.oplists import facts
from tests.torches import needs_transforms

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
Tensor = torch.Tensor

pytestmark = needs_transforms

X, W = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 1, 16).reshape(4, 4)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the others know no forward mode
        return functional.scaled_dot_product_attention(q, k, v)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, W),
    "matmul": lambda x: x @ W,
    "linear of linear": lambda x: functional.linear(functional.linear(x, W), W),
    "tensordot": lambda x: torch.tensordot(x, W, 1),
    "inner": lambda x: torch.inner(x, W),
    "softmax": lambda x: torch.softmax(x @ W, -1),
    "mse_loss": lambda x: functional.mse_loss(x @ W, x),
    "mul by a number": lambda x: x * 2.5,
    "numbers": lambda x: ((1 - x.to(BRAIN)) / 3 + 2) * 0.1,
    "fft": lambda x: torch.fft.rfft(x @ W).abs(),
    "norm": lambda x: torch.linalg.vector_norm(x @ W),
    "gelu": lambda x: functional.gelu(x @ W),
    "cat": lambda x: torch.cat([x, x.to(BRAIN)]),
    "attention": lambda x: attention(x[None, None], W[None], W[None])[0],
    "cross_entropy": lambda x: functional.cross_entropy(x @ W, torch.tensor(1)),
}
RULES: dict[str, dict[str, str]] = {
    "default": {},
    "linear fp32": {"linear": "fp32"},
    "matmul fp32": {"matmul": "fp32"},
    "mm fp32": {"mm": "fp32", "mv": "fp32"},
    "softmax lower": {"softmax": "lower_precision_fp"},
    "softmax fp32": {"softmax": "fp32"},
    "arithmetic fp32": dict.fromkeys(("mul", "add", "sub", "rsub", "div"), "fp32"),
    "matmul as called": {"matmul": "fallthrough", "linear": "fallthrough"},
}


def total(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x).float().sum()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], list[Tensor]]] = {
    "vmap": lambda f: [vmap(f)(X)],
    "vmap of vmap": lambda f: [vmap(vmap(f))(X[None])[0]],
    "vjp": lambda f: [vjp(f, X[0])[0]],
    "jvp": lambda f: [jvp(f, (X[0],), (torch.ones(4),))[0]],
    "vmap of jvp": lambda f: [vmap(lambda x: jvp(f, (x,), (x,))[0])(X)],
    "functionalize": lambda f: [functionalize(f)(X[0])],
    "vmap of functionalize": lambda f: [vmap(functionalize(f))(X)],
    "jvp of vmap": lambda f: [jvp(vmap(f), (X,), (X,))[0]],
}


def is_batched(transform: str) -> bool:
    return "vmap" in transform


@pytest.fixture(autouse=True)
def no_kernels_are_left() -> Any:
    yield
    kernels.withdraw(device_state("cpu"))


@pytest.mark.parametrize("rules", RULES)
def test_values_are_those_of_eager_calls(rules: str) -> None:
    with mpamp.autocast("cpu", BRAIN, ops=RULES[rules] or None):
        for (name, function), (transform, run) in itertools.product(FUNCTIONS.items(), TRANSFORMS.items()):
            expected, (found,) = [function(x) for x in X], run(function)
            reference = torch.stack(expected) if is_batched(transform) else expected[0]
            assert found.dtype is reference.dtype, (name, transform)
            torch.testing.assert_close(found, reference, rtol=0.05, atol=0.05, msg=f"{name}, {transform}")


@pytest.mark.parametrize(("rules", "name"), [("default", n) for n in FUNCTIONS] + [(r, "linear") for r in RULES])
def test_gradients_are_those_of_eager_calls(name: str, rules: str) -> None:
    function = total(FUNCTIONS[name])
    with mpamp.autocast("cpu", BRAIN, ops=RULES[rules] or None):
        expected = []
        for x in X:
            leaf = x.clone().requires_grad_()
            function(leaf).backward()
            expected.append(leaf.grad)
        gradients = {
            "grad": torch.stack([grad(function)(x) for x in X]),
            "vmap of grad": vmap(grad(function))(X),
            "grad of vmap": grad(lambda x: vmap(function)(x).sum())(X),
            "jacrev": torch.stack([jacrev(function)(x) for x in X]),
            "jacfwd": torch.stack([jacfwd(function)(x) for x in X]),
        }
    for transform, found in gradients.items():
        assert found.dtype is FULL, transform
        torch.testing.assert_close(found, torch.stack(expected), rtol=0.1, atol=0.1, msg=transform)


def test_second_derivatives() -> None:
    with mpamp.autocast("cpu", BRAIN, ops={"linear": "fp32"}):
        found = hessian(lambda x: functional.linear(x, W).square().sum())(X[0])
        nested = grad(lambda x: grad(lambda y: (functional.linear(y, W) * 2).pow(3).sum())(x).sum())(X[0])
    torch.testing.assert_close(found, 2 * W.T @ W, rtol=0.02, atol=0.05)
    assert nested.dtype is FULL


def test_a_composite_op_is_seen_by_vmap() -> None:
    """vmap takes composite ops apart above the Autocast keys, where torch never sees them."""
    low = X.to(BRAIN)
    with torch.autocast("cpu", BRAIN), pytest.raises(RuntimeError, match="BFloat16"):
        vmap(torch.fft.fft)(low)
    with mpamp.autocast("cpu", BRAIN):
        assert vmap(torch.fft.fft)(low).dtype is torch.complex64


def test_float64_and_integers_are_left() -> None:
    with mpamp.autocast("cpu", BRAIN):
        assert vmap(lambda x: functional.linear(x, W.double()))(X.double()).dtype is torch.float64
        assert vmap(lambda x: x @ W.long())(X.long()).dtype is torch.int64


@pytest.mark.parametrize("name", ["linear", "inner", "numbers", "softmax", "cross_entropy"])
def test_plain_autocast_is_torchs_own(name: str) -> None:
    function = FUNCTIONS[name]

    def plain() -> list[Any]:
        found: list[Any] = []
        with torch.autocast("cpu", BRAIN):
            for run in (*TRANSFORMS.values(), lambda f: [grad(total(f))(X[0]), vmap(grad(total(f)))(X)]):
                try:
                    found += run(function)
                except RuntimeError as error:
                    found.append(str(error)[:60])
        return found

    before = plain()
    for rules in RULES.values():
        with mpamp.autocast("cpu", BRAIN, ops=rules or None):
            pass
    after = plain()
    for a, b in zip(before, after, strict=True):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert a.dtype is b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["linear", "inner", "numbers", "softmax", "cross_entropy"])
def test_outside_of_autocast_nothing_changes(name: str) -> None:
    function = FUNCTIONS[name]
    before = [*vmap(function)(X), grad(total(function))(X[0])]
    with mpamp.autocast("cpu", BRAIN, ops=RULES["arithmetic fp32"]):
        vmap(function)(X)
    after = [*vmap(function)(X), grad(total(function))(X[0])]
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_disabled_region_casts_nothing() -> None:
    with mpamp.autocast("cpu", BRAIN), mpamp.autocast("cpu", enabled=False):
        assert vmap(lambda x: functional.linear(x, W))(X).dtype is FULL


def test_a_region_inside_of_the_transform() -> None:
    def inside(x: Tensor) -> Tensor:
        with mpamp.autocast("cpu", HALF, ops={"softmax": "lower_precision_fp"}):
            return functional.linear(x, W).softmax(-1)

    assert vmap(inside)(X).dtype is inside(X[0]).dtype is HALF
    assert vmap(grad(lambda x: inside(x).sum()))(X).dtype is FULL


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with mpamp.autocast("cpu", BRAIN, ops={"linear": "fp32"}):
            return vmap(lambda x: functional.linear(x, W))(x), vmap(lambda x: x @ W)(x)

    found = torch.compile(function, backend=backend, fullgraph=True)(X)
    assert [t.dtype for t in found] == [t.dtype for t in function(X)] == [FULL, BRAIN]
    torch._dynamo.reset()


# -- Models whose layers have parameters in float32 beside activations in lower precision --------------------


_MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(8, 8),
    "layer norm": lambda: torch.nn.LayerNorm(8),
    "group norm": lambda: torch.nn.GroupNorm(2, 8),
    "rms norm": lambda: torch.nn.RMSNorm(8),
    "batch norm": lambda: torch.nn.BatchNorm1d(8).eval(),
    "batch norm, training": lambda: torch.nn.BatchNorm1d(8, track_running_stats=False),
    "instance norm": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(-1, (2, 4)), torch.nn.InstanceNorm1d(2, affine=True), torch.nn.Flatten(-2)
    ),
    "conv": lambda: torch.nn.Sequential(torch.nn.Unflatten(-1, (2, 4)), torch.nn.Conv1d(2, 2, 1), torch.nn.Flatten(-2)),
}


def _jvp(f: Any, x: torch.Tensor) -> Any:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


def _hvp(f: Any, x: torch.Tensor) -> Any:
    return _jvp(torch.func.grad(lambda x: f(x).float().pow(2).sum()), x)


def _dual(f: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


_WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "jvp": _jvp,
    "hvp": _hvp,
    "dual level": _dual,
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).float().pow(2).sum())(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).float().pow(2).sum()))(x.expand(2, 3, 8)),
    "vmap": lambda f, x: torch.vmap(f)(x.expand(2, 3, 8)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("way", _WAYS)
def test_models_of_mixed_dtypes(way: str, name: str, dtype: torch.dtype) -> None:
    """They work wherever they do without a region, and give what that gives to the region's precision."""
    if (way, name) == ("hvp", "batch norm, training"):
        pytest.skip("a tangent of ones is what this norm takes away: what is left is rounding")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), _MODELS[name](), torch.nn.GELU(), torch.nn.Linear(8, 3))
    x = torch.randn(3, 8)

    def in_region(x: torch.Tensor) -> torch.Tensor:
        with mpamp.autocast("cpu", dtype=dtype):
            return net(x)  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's rms_norm says that it isn't fused
        want, got = _WAYS[way](net, x), _WAYS[way](in_region, x)
        with mpamp.autocast("cpu", dtype=dtype):
            around = _WAYS[way](net, x)
    size = float(want.detach().abs().max())
    for found in (got, around):
        assert torch.allclose(found.float(), want, atol=0.1 * size)


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated:UserWarning")
def test_a_tangent_has_the_dtype_of_what_a_product_is_given() -> None:
    """An op that no table lists may give a result in lower precision with a tangent in float32."""
    weight = torch.randn(4, 4)
    with forward_ad.dual_level():
        low = torch.ones(2, 4, dtype=torch.bfloat16)
        x = torch.nn.functional.layer_norm(forward_ad.make_dual(low, low), (4,), torch.ones(4), torch.ones(4))
        assert forward_ad.unpack_dual(x).tangent.dtype is torch.float32  # type: ignore[union-attr]
        with mpamp.autocast("cpu", dtype=torch.bfloat16):
            for y in (x @ weight, torch.nn.functional.linear(x, weight), torch.chain_matmul(x, weight, weight)):
                primal, tangent = forward_ad.unpack_dual(y)
                assert primal.dtype is tangent.dtype is torch.bfloat16  # type: ignore[union-attr]


def _called(name: str, x: torch.Tensor) -> Any:
    """Return what an op gives for a matrix, and for what else it must be given."""
    op, _, overload = name.removeprefix("aten::").partition(".")
    more: dict[str, tuple[Any, ...]] = {
        "logaddexp": (-x,), "logaddexp2": (-x,), "ldexp": (x,), "gelu_backward": (x,), "mvlgamma": (1,),
        "logcumsumexp": (0,), "_safe_softmax": (0,),
    }  # fmt: skip
    by_dim = ((0,),) if overload == "dim" else ()
    return getattr(getattr(torch.ops.aten, op), overload or "default")(x, *more.get(op, by_dim))


@pytest.mark.parametrize("name", sorted(facts("float32_tangents")))
def test_a_tangent_has_its_result_s_dtype(name: str) -> None:
    """Where the formula of an op that no table lists is made of ops that run in float32, such as exp."""
    x = torch.linspace(0.1, 0.9, 6, dtype=HALF).reshape(2, 3)

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        found = _called(name, x)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    with mpamp.autocast("cpu", dtype=HALF):
        primals, tangents = torch.func.jvp(results, (x,), (torch.ones_like(x),))
    assert {t.dtype for t in (*primals, *tangents)} == {HALF}


_W = torch.sin(torch.arange(64.0)).reshape(8, 8) / 3
_TAKING_ONE_DTYPE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: functional.linear(x, _W),
    "mm": lambda x: torch.mm(x, _W),
    "bmm": lambda x: torch.bmm(x[None], _W[None])[0],
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], _W[None])[0],
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "conv1d": lambda x: functional.conv1d(x.reshape(3, 2, 4), torch.ones(2, 2, 1)),
    "conv2d": lambda x: functional.conv2d(x.reshape(3, 2, 2, 2), torch.ones(2, 2, 1, 1)),
    "conv3d": lambda x: functional.conv3d(x.reshape(3, 2, 2, 2, 1), torch.ones(2, 2, 1, 1, 1)),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(x.reshape(3, 2, 2, 2), torch.ones(2, 2, 1, 1)),
    "attention": lambda x: attention(x[None, None], x[None, None], x[None, None]),
    "index": lambda x: x[torch.tensor([0, 2])],
    "gather": lambda x: x.gather(1, torch.tensor([[0, 2], [1, 1], [3, 0]])),
    "max_pool1d": lambda x: functional.max_pool1d(x[None], 2),
    "avg_pool1d": lambda x: functional.avg_pool1d(x[None], 2),
    "sort": lambda x: x.sort()[0],
}


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("way", ["hvp", "hessian", "vmap of hvp", "jvp of vjp"])
@pytest.mark.parametrize("name", _TAKING_ONE_DTYPE)
def test_a_gradient_s_tangent_is_taken_by_what_takes_one_dtype(name: str, way: str, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(_TAKING_ONE_DTYPE[name](x @ _W))

    def vjp_of(x: torch.Tensor) -> Any:
        result, pull = torch.func.vjp(function, x)
        return pull(torch.ones_like(result))[0]

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "hvp": lambda x: _hvp(function, x),
        "hessian": lambda x: _WAYS["hessian"](function, x),
        "vmap of hvp": lambda x: torch.vmap(lambda x: _hvp(function, x))(torch.stack([x, x / 2])),
        "jvp of vjp": lambda x: _jvp(vjp_of, x),
    }
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    want = ways[way](x)
    with mpamp.autocast("cpu", dtype=dtype):
        found = ways[way](x)
    assert torch.allclose(found.float(), want, atol=0.1 * float(want.abs().max()))
