"""Views of weights: the weight is cast once and viewed alike; values, gradients and hooks are those of a cast view."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mpamp
from mpamp.engine.casts.weights import is_viewable
from mpamp.testing import KernelCounter, WeightCastCounter
from tests.engine.casts.standins import Spoils

BRAIN, FULL = torch.bfloat16, torch.float32
Tensor, Parameter = torch.Tensor, nn.Parameter
IN_BOTH_CACHES = pytest.mark.parametrize("persistent", [False, True], ids=["region", "persistent"])
OF_BOTH_KINDS = pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])


@pytest.fixture(autouse=True)
def cache_is_left_empty() -> Iterator[None]:
    mpamp.clear_cache()
    yield
    mpamp.clear_cache()


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 16).reshape(2, 8)


def new_weight(requires_grad: bool = True, *shape: int) -> Parameter:
    torch.manual_seed(0)
    return Parameter(torch.randn(shape or (8, 8)), requires_grad=requires_grad)


def region(persistent: bool = False, **options: Any) -> mpamp.Region:
    return mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=persistent, **options)


# -- Values and gradients ------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "movedim": lambda w: w.movedim(0, 1),
    "rows": lambda w: w[:4],
    "later rows": lambda w: w[3:],
    "columns": lambda w: w[:, 2:],
    "every second": lambda w: w[::2, ::2],
    "one row": lambda w: w[3],
    "narrow": lambda w: w.narrow(0, 2, 4),
    "select": lambda w: w.select(1, 5),
    "chunk": lambda w: w.chunk(2)[1],
    "split": lambda w: w.split([3, 5])[1],
    "tensor_split": lambda w: w.tensor_split(3)[2],
    "hsplit": lambda w: w.hsplit(2)[1],
    "unbind": lambda w: w.unbind()[2],
    "view": lambda w: w.view(4, 16),
    "view_as": lambda w: w.view_as(torch.ones(16, 4)),
    "reshape": lambda w: w.reshape(2, 32),
    "flatten": lambda w: w.flatten(),
    "unflatten": lambda w: w.unflatten(0, (2, 4)),
    "ravel": lambda w: w.ravel(),
    "squeeze": lambda w: w[:, None].squeeze(1),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "expand": lambda w: w[None].expand(3, 8, 8),
    "expand_as": lambda w: w[:1].expand_as(w),
    "broadcast_to": lambda w: w[0].broadcast_to(5, 8),
    "diagonal": lambda w: w.diagonal(1),
    "unfold": lambda w: w.unfold(0, 4, 2),
    "as_strided": lambda w: w.as_strided((4, 4), (9, 2), 3),
    "overlapping": lambda w: w.as_strided((6, 6), (1, 1), 5),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "real": lambda w: w.real,
    "view of a view": lambda w: w.T[2:].T[:, 1:],
    "view_as_complex and back": lambda w: torch.view_as_real(torch.view_as_complex(w.view(8, 4, 2))).flatten(1),
    "real of complex": lambda w: torch.view_as_complex(w.view(8, 4, 2)).real,
    "imag of complex": lambda w: torch.view_as_complex(w.view(8, 4, 2)).imag,
    "imag of conj": lambda w: torch.view_as_complex(w.view(8, 4, 2)).conj().imag,
    "negative": lambda w: torch._neg_view(w),
    "dtype and back": lambda w: w.view(torch.int32).view(FULL),
    "alias": lambda w: torch.ops.aten.alias(w),
    "detach": lambda w: w.detach(),
    "detached view": lambda w: w.T.detach(),
}
NOT_ALIKE = {"imag of conj", "negative", "detach", "detached view", "dtype and back"}
"""Those whose elements aren't what memory holds, and those that torch doesn't know to be views."""


def reference(weight: Tensor, view: Callable[[Tensor], Tensor], other: Tensor) -> Tensor:
    return torch.matmul(view(weight).to(BRAIN), other.to(BRAIN))


@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_gives_what_its_cast_gives(name: str, grad: Any, requires_grad: bool, persistent: bool) -> None:
    view, weight = VIEWS[name], new_weight(requires_grad)
    with grad():
        other = torch.randn(view(weight).shape[-1], 3)
        expected = reference(weight, view, other)
        before = mpamp.cache_info().casts
        with region(persistent):
            found = [torch.matmul(view(weight), other) for _ in range(3)]
            assert mpamp.cache_info().entries == (name not in NOT_ALIKE)
    for y in found:
        assert (y.dtype, y.requires_grad) == (BRAIN, expected.requires_grad)
        assert torch.allclose(y.float(), expected.float(), rtol=0.02, atol=0.02)
    assert mpamp.cache_info().casts - before == (name not in NOT_ALIKE)
    if expected.requires_grad:
        scale = torch.randn(expected.shape)
        (wanted,) = torch.autograd.grad((expected * scale).sum(), weight)
        for y in found:
            (gradient,) = torch.autograd.grad((y * scale).sum(), weight)
            assert gradient.dtype is FULL
            assert torch.allclose(gradient, wanted, rtol=0.02, atol=0.05)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_every_view_that_torch_has_gives_what_its_cast_gives() -> None:
    """The views are found among all of torch's own samples: whatever returns something whose base is the input."""
    from torch.testing._internal.common_methods_invocations import op_db

    seen: set[str] = set()
    for info in op_db:
        if FULL not in info.supported_dtypes("cpu"):
            continue
        # A few of each: only what makes a view at all is followed further.
        for sample in itertools.islice(info.sample_inputs("cpu", FULL, requires_grad=False), 6):
            if isinstance(sample.input, Tensor) and sample.input.dtype is FULL and sample.input.numel():
                seen |= _compare(info, sample)
    assert seen >= {
        *("T", "as_strided", "chunk", "diagonal", "expand", "narrow", "permute", "select", "split", "squeeze", "t"),
        *("transpose", "unbind", "unfold", "unsqueeze", "view", "view_as", "movedim", "hsplit", "vsplit"),
    }


def _compare(info: Any, sample: Any) -> set[str]:
    weight = Parameter(sample.input.detach().clone())

    def views() -> list[Tensor]:
        found = tree_leaves(info.op(weight, *sample.args, **sample.kwargs))
        return [t for t in found if isinstance(t, Tensor) and t._base is weight and t.dtype is FULL and t.dim()]

    try:
        count = len(views())
    except Exception:  # whatever an op refuses of a leaf that requires grad, such as a write
        return set()
    for i in range(count):
        other = torch.randn(views()[i].shape[-1], 2)
        expected = torch.matmul(views()[i].to(BRAIN), other.to(BRAIN))
        mpamp.clear_cache()
        with region():
            found = torch.matmul(views()[i], other)
        scale = torch.randn(expected.shape)
        assert torch.allclose(found.float(), expected.float(), rtol=0.03, atol=0.03, equal_nan=True), info.name
        gradients = [torch.autograd.grad((y * scale).sum(), weight)[0] for y in (found, expected)]
        assert torch.allclose(*gradients, rtol=0.03, atol=0.1), info.name
    return {info.name} if count else set()


# -- How often -----------------------------------------------------------------------------------------


@OF_BOTH_KINDS
def test_a_generate_loop_casts_each_weight_once_ever(x: Tensor, requires_grad: bool) -> None:
    weights = [new_weight(requires_grad) for _ in range(4)]
    before = mpamp.cache_info().casts
    for _ in range(5):
        with torch.no_grad(), region(persistent=True):
            y = x
            for w in weights:
                y = y @ w.T
    assert mpamp.cache_info().casts - before == 4


def test_training_through_views_casts_once_a_step(x: Tensor) -> None:
    weight = new_weight()
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    before = mpamp.cache_info()
    for _ in range(4):
        with region(persistent=True):
            y = functional.linear(x @ weight.T, weight[:4])
            functional.linear(y, weight.chunk(2, 1)[0]).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    now = mpamp.cache_info()
    assert (now.casts - before.casts, now.recasts - before.recasts) == (5, 4)


@OF_BOTH_KINDS
@pytest.mark.parametrize("grad", [True, False])
def test_attention_s_packed_projection_is_cast_once(requires_grad: bool, grad: bool) -> None:
    attention = nn.MultiheadAttention(8, 2).requires_grad_(requires_grad)
    q, k, v = torch.randn(3, 5, 1, 8).requires_grad_(grad)
    with torch.set_grad_enabled(grad), WeightCastCounter(attention) as casts, region(persistent=True):
        for _ in range(3):
            attention(q, k, v, need_weights=False)
    assert casts.count == 4


def test_einsum_reaches_the_kept_cast(x: Tensor) -> None:
    weight = new_weight()
    with WeightCastCounter([weight]) as casts, region():
        for _ in range(3):
            found = torch.einsum("bi,oi->bo", x, weight)
    assert casts.count == 1
    assert torch.allclose(found.float(), (x @ weight.T).float(), rtol=0.02, atol=0.05)


def test_a_weight_and_its_views_share_a_cast(x: Tensor) -> None:
    weight = new_weight()
    with WeightCastCounter([weight]) as casts, region():
        functional.linear(x, weight) + x @ weight.T + functional.linear(x, weight.view(8, 8)) + x @ weight
    assert casts.count == 1


def test_views_of_a_leaf_that_requires_grad_share_a_cast() -> None:
    steps = torch.randn(4, 2, 8, requires_grad=True)
    weight = torch.randn(8, 8)
    with WeightCastCounter([steps]) as casts, region():
        for t in range(4):
            steps[t] @ weight
    assert casts.count == 1


def test_a_small_part_of_a_large_weight_is_cast_by_itself_unless_casts_last(x: Tensor) -> None:
    table, x = new_weight(True, 20000, 8), x.to(BRAIN)

    def cast_elements(persistent: bool) -> int:
        sizes: list[int] = []

        class Sizes(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.ops.aten._to_copy.default:
                    sizes.append(args[0].numel())
                return func(*args, **(kwargs or {}))

        with Sizes(), region(persistent):
            for _ in range(2):
                functional.linear(x, table[:4])
        return sum(sizes)

    assert cast_elements(persistent=False) == 2 * 32
    assert cast_elements(persistent=True) == 20000 * 8


def test_what_is_kept_already_serves_small_parts(x: Tensor) -> None:
    table = new_weight(True, 20000, 8)
    with WeightCastCounter([table]) as casts, region():
        functional.linear(x, table)
        functional.linear(x, table[:4])
    assert casts.count == 1


@pytest.mark.python_engine
def test_a_view_makes_no_copy(x: Tensor) -> None:
    weight = new_weight(False)
    x = x.to(BRAIN)
    with region(persistent=True):
        x @ weight.T
        with KernelCounter() as kernels:
            x @ weight.T
    assert kernels.counts["aten::_to_copy"] == 0
    assert kernels.counts["aten::as_strided"] == 1


# -- Gradients of the view itself ----------------------------------------------------------------------


def test_hooks_and_kept_gradients_of_a_view_work(x: Tensor) -> None:
    weight, seen = new_weight(), []
    with region():
        x @ weight
        view = weight[:4]
        view.retain_grad()
        view.register_hook(lambda g: (seen.append(g.dtype), g * 2)[1])
        functional.linear(x, view).float().sum().backward()
    once = x.to(BRAIN).float().sum(0).expand(4, 8)
    assert seen == [FULL]
    assert view.grad is not None
    assert torch.allclose(view.grad, 2 * once, rtol=0.02, atol=0.02)
    assert torch.equal(weight.grad, torch.cat([view.grad, torch.zeros(4, 8)]))  # type: ignore[arg-type]


def test_a_view_used_twice_adds_up(x: Tensor) -> None:
    weight = new_weight()
    with region():
        view = weight.T
        (torch.mm(x, view) + torch.mm(x, view)).float().sum().backward()
    once = x.to(BRAIN).float().sum(0)[None].expand(8, 8)
    assert torch.allclose(weight.grad, 2 * once, rtol=0.02, atol=0.02)  # type: ignore[arg-type]


@OF_BOTH_KINDS
def test_a_view_made_without_grad_has_the_graph_that_it_has_without_a_cast(x: Tensor, requires_grad: bool) -> None:
    weight = new_weight(requires_grad)
    with torch.no_grad():
        view = weight.T
    with region():
        assert torch.mm(x, view).requires_grad is torch.add(view, 1).requires_grad
        with torch.no_grad():
            assert not torch.mm(x, view).requires_grad
        assert torch.mm(x, weight.T).requires_grad is requires_grad


def test_a_view_that_autograd_forbids_by_now_can_be_used_without_grad(x: Tensor) -> None:
    weight = torch.zeros(8, 8, requires_grad=True) * 1
    with torch.no_grad():
        view = weight.T
    weight.add_(1)
    with torch.no_grad(), region():
        assert torch.equal(torch.mm(x, view), torch.mm(x.to(BRAIN), torch.ones(8, 8).to(BRAIN)))


def test_double_backward_goes_through_a_view(x: Tensor) -> None:
    def penalty(**options: Any) -> Tensor:
        weight = new_weight()
        with region(**options):
            loss = functional.linear(x, weight[2:]).float().pow(3).sum()
            (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        grad.square().sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected = penalty(enabled=False)
    assert torch.allclose(penalty(), expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


# -- Never stale ---------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Parameter], Any]] = {
    "in place": lambda w: w.add_(1),
    "by another view": lambda w: w[2].fill_(7),
    "by a detached view": lambda w: w.detach().T.mul_(3),
    "optimizer": lambda w: torch.optim.SGD([w], lr=0.5).step(),
    "fused optimizer": lambda w: torch.optim.SGD([w], lr=0.5, fused=True).step(),
    "load_state_dict": lambda w: nn.ParameterList([w]).load_state_dict({"0": torch.ones(8, 8)}),
    "other data": lambda w: setattr(w, "data", torch.ones(8, 8)),
    "data turned over": lambda w: setattr(w, "data", w.data.t()),
    "set_": lambda w: w.set_(torch.ones(8, 8)),
    "swapped": lambda w: torch.utils.swap_tensors(w, Parameter(torch.ones(8, 8))),
    "clear_cache": lambda w: (w.data.fill_(3), mpamp.clear_cache()),
    "in inference mode": lambda w: _in_inference_mode(w),
    "behind the counter": lambda w: _behind_the_counter(w),
}


def _in_inference_mode(weight: Tensor) -> None:
    with torch.inference_mode():
        weight.mul_(2)


def _behind_the_counter(weight: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(2)


@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("when", ["a view made before", "a view made after"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen_by_views(x: Tensor, write: str, when: str, requires_grad: bool, persistent: bool) -> None:
    weight = new_weight(requires_grad)
    weight.grad = torch.ones(8, 8)
    with torch.no_grad(), region(persistent):
        view = weight.T
        torch.mm(x, view)
        if write == "swapped":
            del view  # torch swaps no tensor that a view refers to
        WRITES[write](weight)
        if when == "a view made after" or write == "swapped":
            view = weight.T
        for _ in range(2):
            assert torch.equal(torch.mm(x, view), torch.mm(x.to(BRAIN), view.to(BRAIN)))


MOVES: dict[str, Callable[[Tensor], Any]] = {
    "other data": lambda v: setattr(v, "data", torch.ones(8, 8)),
    "set_": lambda v: v.set_(torch.ones(8, 8)),
    "as_strided_": lambda v: v.as_strided_((8, 8), (8, 1)),
    "t_": lambda v: v.t_(),
    "resize_": lambda v: v.resize_(8, 4),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_view_that_is_moved_is_followed(x: Tensor, move: str) -> None:
    weight = new_weight(False)
    with torch.no_grad(), region():
        view = weight.T
        torch.mm(x, view)
        MOVES[move](view)
        for _ in range(2):
            assert torch.equal(torch.mm(x, view), torch.mm(x.to(BRAIN), view.to(BRAIN)))


def test_weights_that_are_tied_and_untied(x: Tensor) -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    with torch.no_grad(), region(), WeightCastCounter(first) as casts:
        second(first(x)) @ second.weight.T
        assert casts.count == 1
        second.weight = Parameter(torch.ones(8, 8))
        assert torch.equal(x @ second.weight.T, x.to(BRAIN) @ torch.ones(8, 8).to(BRAIN))


# -- What is no view of a weight -----------------------------------------------------------------------


class Named(Tensor):
    """A class of tensors of somebody's own."""


def test_a_view_of_a_subclass_is_not_kept(x: Tensor) -> None:
    weight = torch.ones(8, 8).as_subclass(Named).requires_grad_()
    with region():
        assert torch.mm(x, weight.T).dtype is BRAIN
        assert mpamp.cache_info().entries == 0


class NamedParameter(Parameter):
    """A parameter with a class of its own."""


def test_views_of_a_parameter_of_another_class_are_kept(x: Tensor) -> None:
    weight = NamedParameter(torch.ones(8, 8))
    with WeightCastCounter([weight]) as casts, region():
        torch.mm(x, weight.T), torch.mm(x, weight.T)
    assert casts.count == 1


@pytest.mark.parametrize("make", ["plain", "part of larger", "double", "half", "computed"])
def test_views_of_what_is_no_weight_are_not_kept(x: Tensor, make: str) -> None:
    bases: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: torch.ones(8, 8),
        "part of larger": lambda: Parameter(torch.ones(9, 8)[:8]),
        "double": lambda: Parameter(torch.ones(8, 8).double()),
        "half": lambda: Parameter(torch.ones(8, 8).half()),
        "computed": lambda: new_weight() * 1,
    }
    base = bases[make]()
    with region():
        if make != "double":
            torch.mm(x, base.T)
        torch.mm(base.float().T, base.float())
    assert mpamp.cache_info().entries == 0


def test_a_base_that_is_not_dense_is_not_kept(x: Tensor) -> None:
    weight = Parameter(torch.ones(64).as_strided((8, 8), (1, 1)))
    weight.data = torch.ones(64).as_strided((8, 8), (2, 1))
    assert not is_viewable(weight)
    with region():
        assert torch.equal(torch.mm(x, weight.T), torch.mm(x.to(BRAIN), weight.T.to(BRAIN)))


def test_a_channels_last_weight_is_viewed_alike() -> None:
    weight = Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    image = torch.randn(1, 3, 4, 4)
    with region(), WeightCastCounter([weight]) as casts:
        functional.conv2d(image, weight)
        found = functional.conv2d(image, weight[1:3])
    assert casts.count == 1
    expected = functional.conv2d(image.to(BRAIN), weight[1:3].to(BRAIN))
    assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02)


# -- Forward mode, transforms, tracing, modes ----------------------------------------------------------


def test_forward_mode_keeps_the_tangent(x: Tensor) -> None:
    weight = new_weight()
    with region(), forward_ad.dual_level():
        torch.mm(x, weight.T)
        dual = forward_ad.make_dual(weight, torch.ones(8, 8))
        for view in (dual, dual.T):
            tangent = forward_ad.unpack_dual(torch.mm(x, view)).tangent
            assert torch.allclose(tangent.float(), torch.mm(x, torch.ones(8, 8)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "vmap of grad"])
def test_transforms_neither_use_nor_fill_the_cache(x: Tensor, transform: str) -> None:
    weight = new_weight()

    def loss(w: Tensor) -> Tensor:
        return torch.mm(x, w.T).float().square().sum() + torch.mm(x, weight.T).float().sum()

    stacked = torch.stack([weight.detach(), weight.detach()])
    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(loss)(weight),
        "vmap": lambda: torch.vmap(loss)(stacked),
        "jvp": lambda: torch.func.jvp(loss, (weight.detach(),), (torch.ones(8, 8),)),
        "vmap of grad": lambda: torch.vmap(torch.func.grad(loss))(stacked),
    }
    with region():
        torch.mm(x, weight.T)
        found = calls[transform]()
        assert mpamp.cache_info().entries == 1
    with region(cache_enabled=False):
        expected = calls[transform]()
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_records_the_cast_of_a_view(x: Tensor) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = new_weight()

        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, self.weight.T)

    module = Turned()
    with region():
        module(x)
        traced = torch.jit.trace(module, x, check_trace=False)
    with torch.no_grad():
        module.weight.fill_(2)
    assert torch.equal(traced(x), torch.mm(x.to(BRAIN), module.weight.T.to(BRAIN)))


SPOILING: dict[str, Callable[[Tensor], Any]] = {
    "hook": lambda low: low.requires_grad and low.register_hook(lambda g: g * 100) and None,
    "retain_grad": lambda low: low.requires_grad and low.retain_grad(),
    "write": lambda low: torch.autograd.graph.increment_version(low) or low.detach().zero_(),
}


@OF_BOTH_KINDS
@pytest.mark.parametrize("is_warm", [True, False], ids=["cast before", "cast inside"])
@pytest.mark.parametrize("act", SPOILING)
def test_what_a_mode_does_to_a_cast_reaches_no_use_outside(
    x: Tensor, act: str, is_warm: bool, requires_grad: bool
) -> None:
    weight = new_weight(requires_grad)
    expected = torch.mm(x.to(BRAIN), weight.detach().T.to(BRAIN))
    with region():
        with torch.no_grad():
            if is_warm:
                torch.mm(x, weight.T)
            with Spoils(SPOILING[act]):
                torch.mm(x, weight.T)
        y = torch.mm(x, weight.T)
    assert torch.equal(y, expected)
    assert y.requires_grad is requires_grad
    if requires_grad:
        y.float().sum().backward()
        once = x.to(BRAIN).float().sum(0)[None].expand(8, 8)
        assert torch.allclose(weight.grad, once, rtol=0.02, atol=0.02)  # type: ignore[arg-type]


def _save_casts(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "to_copy" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _save_casts)
    ),
}


@IN_BOTH_CACHES
@pytest.mark.parametrize("is_warm", [True, False], ids=["cast before", "cast inside"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_views_give_the_gradient_without(x: Tensor, kind: str, is_warm: bool, persistent: bool) -> None:
    def gradients(run: Callable[..., Any]) -> list[Tensor]:
        weight, inputs = new_weight(), x.clone().requires_grad_()

        def block(x: Tensor) -> Tensor:
            return torch.tanh(functional.linear(x @ weight.T, weight.chunk(1)[0]))

        with region(persistent):
            y = inputs @ weight.T if is_warm else inputs
            y = run(block, run(block, y)) @ weight.T
        y.float().square().sum().backward()
        assert weight.grad is not None
        assert inputs.grad is not None
        return [weight.grad, inputs.grad]

    expected = gradients(lambda f, x: f(x))
    for a, b in zip(gradients(CHECKPOINTS[kind]), expected, strict=True):
        assert torch.allclose(a, b, rtol=0.02, atol=0.01 * float(b.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_views_have_the_eager_dtypes(x: Tensor, backend: str) -> None:
    weight = new_weight()

    def run(x: Tensor) -> Tensor:
        with region():
            return x @ weight.T + functional.linear(x, weight[:8])

    with torch.no_grad():
        expected = run(x)
        compiled = torch.compile(run, backend=backend)
        for _ in range(2):
            assert torch.equal(compiled(x), run(x))
        weight.fill_(2)
        assert torch.equal(compiled(x), run(x))
    assert expected.dtype is BRAIN


# -- Sharding ------------------------------------------------------------------------------------------


def test_a_flat_parameter_is_none() -> None:
    flat_param = pytest.importorskip("torch.distributed.fsdp._flat_param")
    flat = flat_param.FlatParameter(torch.ones(4, 4), requires_grad=True)
    assert not is_viewable(flat)  # gathered anew, into the same memory, past its counter
    with region():
        torch.mm(torch.ones(4, 4), flat)
        torch.mm(torch.ones(4, 4), flat.T)
        flat.data.fill_(3)
        assert torch.mm(torch.ones(4, 4), flat.T)[0, 0] == 12


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rank'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _sharded(kind: str, module: nn.Module) -> nn.Module:
    if kind == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))  # type: ignore[return-value]
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, use_orig_params=kind == "original", device_id=torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@IN_BOTH_CACHES
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["fully_shard", "flat", "original"])
def test_shards_train_as_without_kept_casts(kind: str, fused: bool, persistent: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.linear = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x @ self.weight.T) @ self.linear.weight.T

    def losses(**options: Any) -> list[float]:
        module = _sharded(kind, Block())
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=fused)
        found = []
        with region(enabled=False):  # one outermost region: casts of regions last as well
            for _ in range(4):
                with region(persistent, **options):
                    loss = module(torch.linspace(-1, 1, 16).reshape(2, 8)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss))
        return found

    expected = losses(cache_enabled=False)
    assert losses() == pytest.approx(expected, rel=0.02)
    assert len(set(expected)) == 4
