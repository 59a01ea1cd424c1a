"""The cast cache: how often weights are cast, that a kept cast is never stale, and that it keeps nothing alive."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mpamp
from mpamp.engine.casts.cache import PERSISTENT_CACHE, REGION_CACHE, is_weight
from mpamp.oplists import lower_precision_ops
from mpamp.testing import WeightCastCounter
from tests.engine.casts.standins import Spoils
from tests.torches import GIVES_KERNELS

HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
Parameter, Tensor = torch.nn.Parameter, torch.Tensor


@pytest.fixture(autouse=True)
def cache_is_left_empty() -> Iterator[None]:
    yield
    entries = mpamp.cache_info().entries
    mpamp.clear_cache()
    assert entries == 0


@pytest.fixture
def weight() -> Parameter:
    return Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(0, 1, 8).reshape(2, 4)


def region(**options: Any) -> mpamp.Region:
    return mpamp.autocast("cpu", **options)


def uncached(x: Tensor, weight: Tensor, dtype: torch.dtype = BRAIN) -> Tensor:
    """Return what ``linear`` gives in a region for the weight as it is now."""
    with torch.no_grad(), region(enabled=False):
        return functional.linear(x.to(dtype), weight.to(dtype))


def assert_is_current(x: Tensor, weight: Tensor, dtype: torch.dtype = BRAIN) -> None:
    """Check that the open region uses the weight's present value."""
    found = functional.linear(x, weight)
    assert found.dtype is dtype
    assert torch.equal(found, uncached(x, weight, dtype))


# -- How often -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("keeps_graph", [True, False], ids=["live graph", "no graph"])
def test_a_parameter_is_cast_once_in_six_uses(
    weight: Parameter, x: Tensor, requires_grad: bool, keeps_graph: bool
) -> None:
    weight.requires_grad_(requires_grad)
    kept = []
    with WeightCastCounter([weight]) as casts, region():
        for _ in range(6):
            y = functional.linear(x, weight)
            if keeps_graph:
                kept.append(y)
    assert casts.count == 1


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_a_parameter_is_cast_once_without_grad(weight: Parameter, x: Tensor, without_grad: Any) -> None:
    with WeightCastCounter([weight]) as casts, without_grad(), region():
        for _ in range(6):
            functional.linear(x, weight)
    assert casts.count == 1


def test_backward_between_uses_casts_nothing_anew(weight: Parameter, x: Tensor) -> None:
    with WeightCastCounter([weight]) as casts, region():
        for _ in range(3):
            functional.linear(x, weight).sum().backward()
    assert casts.count == 1


def test_a_leaf_that_requires_grad_is_a_weight(x: Tensor) -> None:
    leaf = torch.ones(4, 4, requires_grad=True)
    with WeightCastCounter([leaf]) as casts, region():
        functional.linear(functional.linear(x, leaf), leaf)
    assert casts.count == 1


def test_a_plain_tensor_is_cast_at_each_use(x: Tensor) -> None:
    plain = torch.ones(4, 4)
    with WeightCastCounter([plain]) as casts, region():
        functional.linear(functional.linear(x, plain), plain)
    assert casts.count == 2


def test_a_result_that_requires_grad_is_cast_at_each_use(weight: Parameter, x: Tensor) -> None:
    result = weight * 1
    with WeightCastCounter([result]) as casts, region():
        functional.linear(functional.linear(x, result), result)
    assert casts.count == 2


def test_weight_and_bias_are_each_cast_once(x: Tensor) -> None:
    layer = torch.nn.Linear(4, 4)
    with WeightCastCounter(layer) as casts, region():
        layer(layer(layer(x)))
    assert casts.count == 2


@pytest.mark.parametrize("op", ["linear", "mm", "matmul", "addmm", "bmm", "conv1d", "conv2d", "prelu", "baddbmm"])
@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
def test_every_lower_precision_op_uses_the_cache(op: str, requires_grad: bool) -> None:
    weight = Parameter(torch.ones(4, 4, 4), requires_grad=requires_grad)
    flat, cube = Parameter(torch.ones(4, 4), requires_grad=requires_grad), torch.ones(4, 4, 4)
    square, slope = torch.ones(4, 4), Parameter(torch.ones(1), requires_grad=requires_grad)
    image = Parameter(torch.ones(4, 4, 1, 1), requires_grad=requires_grad)
    calls: dict[str, tuple[Parameter, Callable[[], Tensor]]] = {
        "linear": (flat, lambda: functional.linear(square, flat)),
        "mm": (flat, lambda: torch.mm(square, flat)),
        "matmul": (flat, lambda: square @ flat),
        "addmm": (flat, lambda: torch.addmm(flat, square, square)),
        "bmm": (weight, lambda: torch.bmm(cube, weight)),
        "conv1d": (weight, lambda: functional.conv1d(cube, weight)),
        "conv2d": (image, lambda: functional.conv2d(torch.ones(1, 4, 2, 2), image)),
        "prelu": (slope, lambda: functional.prelu(square, slope)),
        "baddbmm": (weight, lambda: torch.baddbmm(weight, cube, cube)),
    }
    watched, call = calls[op]
    with WeightCastCounter([watched]) as casts, region():
        assert [call().dtype for _ in range(3)] == [BRAIN] * 3
    assert casts.count == 1


def test_cache_enabled_false_casts_at_each_use(weight: Parameter, x: Tensor) -> None:
    with WeightCastCounter([weight]) as casts, region(cache_enabled=False):
        for _ in range(6):
            functional.linear(x, weight)
    assert casts.count == 6


def test_an_inner_region_without_cache_leaves_the_outer_one_s(weight: Parameter, x: Tensor) -> None:
    with WeightCastCounter([weight]) as casts, region():
        functional.linear(x, weight)
        with region(cache_enabled=False):
            functional.linear(x, weight)
        functional.linear(x, weight)
    assert casts.count == 2


def test_each_outermost_region_casts_anew(weight: Parameter, x: Tensor) -> None:
    with WeightCastCounter([weight]) as casts:
        for _ in range(3):
            with region():
                functional.linear(x, weight)
    assert casts.count == 3


def test_inner_regions_share_the_outermost_one_s_cache(weight: Parameter, x: Tensor) -> None:
    with WeightCastCounter([weight]) as casts, region(dtype=HALF):
        for _ in range(3):
            with region(ops={"softmax": "fp32"}), region():
                functional.linear(x, weight)
    assert casts.count == 1


def test_the_cache_empties_where_the_outermost_region_is_disabled(weight: Parameter, x: Tensor) -> None:
    with region(enabled=False), region():
        functional.linear(x, weight)
    entries = mpamp.cache_info().entries
    mpamp.clear_cache()
    assert entries == 0


def test_nested_dtypes_keep_a_cast_each(weight: Parameter, x: Tensor) -> None:
    with WeightCastCounter([weight]) as casts, region(dtype=BRAIN):
        for _ in range(3):
            assert_is_current(x, weight, BRAIN)
            with region(dtype=HALF):
                assert_is_current(x, weight, HALF)
            with region(dtype=FULL):
                assert_is_current(x, weight, FULL)
    assert casts.count == 2 + 6  # each check casts the weight once itself


def test_a_tied_weight_is_cast_once(x: Tensor) -> None:
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    with WeightCastCounter(first) as casts, region():
        second(first(x)).sum().backward()
    assert casts.count == 1


def test_cache_info_counts_casts_and_entries(weight: Parameter, x: Tensor) -> None:
    before = mpamp.cache_info().casts
    with region():
        for _ in range(3):
            functional.linear(x, weight)
        assert mpamp.cache_info().entries == 1
    assert mpamp.cache_info() == mpamp.CacheInfo(before + 1, 0)


# -- Never stale ---------------------------------------------------------------------------------------


OPTIMIZERS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
MODES: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}
}  # fmt: skip


@pytest.mark.parametrize("persistent", [False, True], ids=["region", "persistent"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_step_in_the_region_is_seen(
    weight: Parameter, x: Tensor, name: str, mode: str, persistent: bool
) -> None:
    optimizer: Any = OPTIMIZERS[name]([weight], lr=0.5, **MODES[mode])
    with region(persistent_cache=persistent):
        for _ in range(3):
            functional.linear(x, weight).sum().backward()
            before = weight.detach().clone()
            optimizer.step()
            assert not torch.equal(before, weight)
            assert_is_current(x, weight)
    mpamp.clear_cache()


def test_an_optimizer_step_costs_one_cast(weight: Parameter, x: Tensor) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    with WeightCastCounter([weight]) as casts, region():
        for _ in range(4):
            functional.linear(functional.linear(x, weight), weight).sum().backward()
            optimizer.step()
    assert casts.count == 4


def test_an_optimizer_step_keeps_the_casts_of_frozen_weights(weight: Parameter, x: Tensor) -> None:
    frozen = Parameter(torch.ones(4, 4), requires_grad=False)
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    with WeightCastCounter([frozen]) as casts, region():
        for _ in range(4):
            functional.linear(functional.linear(x, weight), frozen).sum().backward()
            optimizer.step()
    assert casts.count == 1


def test_a_step_of_a_frozen_weight_is_seen(weight: Parameter, x: Tensor) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    weight.grad = torch.ones(4, 4)
    weight.requires_grad_(False)
    with region():
        functional.linear(x, weight)
        optimizer.step()
        assert_is_current(x, weight)


def test_a_step_on_another_thread_is_seen(weight: Parameter, x: Tensor) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    with region():
        functional.linear(x, weight).sum().backward()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(optimizer.step).result()
        assert_is_current(x, weight)


def test_a_step_inside_backward_is_seen(weight: Parameter, x: Tensor) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with region():
        for _ in range(2):
            functional.linear(x, weight).sum().backward()
            assert_is_current(x, weight)


def _load(weight: Parameter, new: Tensor) -> None:
    module = torch.nn.Module()
    module.w = weight
    module.load_state_dict({"w": new})


def _swap_tensors(weight: Parameter, new: Tensor) -> None:
    torch.utils.swap_tensors(weight, Parameter(new))


def _resize_storage(weight: Parameter, new: Tensor) -> None:
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(size)
    with torch.no_grad():
        weight.copy_(new)


CHANGES: dict[str, Callable[[Parameter, Tensor], Any]] = {
    "copy_": lambda w, new: w.copy_(new),
    "mul_": lambda w, new: w.mul_(2),
    "set_": lambda w, new: w.set_(new),
    "item": lambda w, new: w.__setitem__(0, 7.0),
    "view": lambda w, new: w.view(16)[3:].zero_(),
    "detach": lambda w, new: w.detach().copy_(new),
    "init": lambda w, new: torch.nn.init.constant_(w, 0.3),
    "load_state_dict": _load,
    "data": lambda w, new: setattr(w, "data", new),
    "data of another shape of storage": lambda w, new: setattr(w, "data", torch.cat([new, new])[4:]),
    "transposed data": lambda w, new: setattr(w, "data", w.data.t()),
    "resized storage": _resize_storage,
    "vector_to_parameters": lambda w, new: torch.nn.utils.vector_to_parameters(new.reshape(-1), [w]),
    "foreach": lambda w, new: torch._foreach_mul_([w], 2),
    "clear_cache": lambda w, new: (w.data.copy_(new), mpamp.clear_cache()),
}


@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_region_is_seen(weight: Parameter, x: Tensor, change: str, requires_grad: bool) -> None:
    weight.requires_grad_(requires_grad)
    new = torch.arange(16.0).reshape(4, 4)
    with region():
        before = functional.linear(x, weight).detach().clone()
        with torch.no_grad():
            CHANGES[change](weight, new)
        assert_is_current(x, weight)
        assert not torch.equal(functional.linear(x, weight), before)


@pytest.mark.parametrize("persistent", [False, True], ids=["region", "persistent"])
def test_swap_tensors_works_and_is_seen(weight: Parameter, x: Tensor, persistent: bool) -> None:
    with region(persistent_cache=persistent):
        functional.linear(x, weight)
        try:
            _swap_tensors(weight, torch.ones(4, 4))
            assert_is_current(x, weight)
        finally:
            mpamp.clear_cache()


def test_data_swapped_there_and_back_is_seen(weight: Parameter, x: Tensor) -> None:
    first, second = weight.data, torch.ones(4, 4)
    with region():
        for data in (first, second, first, second, second, first):
            weight.data = data
            assert_is_current(x, weight)


def test_data_moved_within_its_storage_is_seen(weight: Parameter, x: Tensor) -> None:
    both = torch.linspace(-1, 1, 32).reshape(8, 4)
    with region():
        for data in (both[:4], both[4:], both[:4]):
            weight.data = data
            assert_is_current(x, weight)


def test_data_swapped_to_memory_that_was_freed_is_seen(weight: Parameter, x: Tensor) -> None:
    with region():
        for value in range(50):
            weight.data = torch.full((4, 4), float(value))
            assert_is_current(x, weight)


def test_a_new_parameter_is_never_taken_for_a_dead_one(x: Tensor) -> None:
    with region():
        for value in range(200):
            assert_is_current(x, Parameter(torch.full((4, 4), float(value)), requires_grad=value % 2 == 0))


def test_a_module_s_replaced_parameter_is_seen(x: Tensor) -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    with region():
        layer(x)
        layer.load_state_dict({"weight": torch.ones(4, 4)}, assign=True)
        assert torch.equal(layer(x), uncached(x, torch.ones(4, 4)))


def test_a_parametrized_weight_is_computed_anew(x: Tensor) -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4, bias=False))
    with region():
        layer(x)
        with torch.no_grad():
            layer.parametrizations.weight.original0.mul_(2)
        assert torch.equal(layer(x), uncached(x, layer.weight))


def test_functional_call_uses_the_tensors_it_is_given(x: Tensor) -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    with region():
        layer(x)
        for value in (1.0, 2.0):
            other = Parameter(torch.full((4, 4), value))
            assert torch.equal(torch.func.functional_call(layer, {"weight": other}, x), uncached(x, other))


def test_a_kept_cast_cannot_be_changed_through_a_result(weight: Parameter, x: Tensor) -> None:
    with torch.no_grad(), region(ops={"dropout": "lower_precision_fp"}):
        functional.linear(x, weight)
        functional.dropout(weight, 0.5, training=False).zero_()
        assert_is_current(x, weight)


@pytest.mark.parametrize("call", ["einsum", "multi_dot", "chain_matmul"])
def test_a_kept_cast_cannot_be_changed_through_a_product_s_result(weight: Parameter, x: Tensor, call: str) -> None:
    calls: dict[str, Callable[[], Tensor]] = {
        "einsum": lambda: torch.einsum("ij->ji", weight),
        "multi_dot": lambda: torch.ops.aten.linalg_multi_dot([weight, torch.eye(4)]),
        "chain_matmul": lambda: torch.ops.aten.chain_matmul([weight]),
    }
    with torch.no_grad(), region(ops=mpamp.OpTable.named("uniform", "cpu")):
        functional.linear(x, weight)
        calls[call]().zero_()
        assert_is_current(x, weight)


OTHERS_ACTS: dict[str, Callable[[Tensor], Any]] = {
    "returns it": lambda low: low,
    "returns a view": lambda low: low.t(),
    "writes": lambda low: low.mul_(100),
    "writes into its data": lambda low: low.data.mul_(100),
    "writes into its storage": lambda low: low.untyped_storage().fill_(0),
    "hooks": lambda low: low.requires_grad and low.register_hook(lambda grad: grad * 100),
    "hooks the node": lambda low: low.grad_fn and low.grad_fn.register_prehook(lambda g: (g[0] * 100,)),
    "retains its gradient": lambda low: low.requires_grad and low.retain_grad(),
    "detaches": lambda low: low.detach_(),
}


@pytest.fixture(params=["CompositeImplicitAutograd", "CompositeExplicitAutograd", "CPU"])
def others_op(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[Tensor], Any]], Any]]:
    """Yield what makes an op of another library act; its schema says that it returns a new tensor."""
    library = torch.library.Library("mpamp_others", "FRAGMENT")
    acts: list[Callable[[Tensor], Any]] = []

    def run(x: Tensor) -> Tensor:
        found = acts[-1](x)
        return found if isinstance(found, Tensor) else x.clone()

    library.define("act(Tensor x) -> Tensor")
    library.impl("act", run, request.param)
    mpamp.register_op("mpamp_others::act", "lower_precision_fp")
    yield lambda act: (acts.append(act), torch.ops.mpamp_others.act)[1]
    mpamp.unregister_op("mpamp_others::act")
    library._destroy()


@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("act", OTHERS_ACTS)
def test_what_an_op_of_others_does_to_its_arguments_reaches_no_other_use(
    weight: Parameter, x: Tensor, others_op: Any, act: str, requires_grad: bool
) -> None:
    weight.requires_grad_(requires_grad)
    x.requires_grad_()
    with region():
        before = torch.mm(x, weight)
        with torch.set_grad_enabled("write" not in act):
            found = others_op(OTHERS_ACTS[act])(weight)
        assert found.dtype is BRAIN
        with torch.no_grad():
            found.detach().zero_()
        after = torch.mm(x, weight)
    assert torch.equal(before, after)
    (before.float().sum() + after.float().sum()).backward()
    if weight.grad is not None:
        once = x.detach().to(BRAIN).sum(0)[:, None].expand(4, 4).float()
        assert torch.allclose(weight.grad, 2 * once, rtol=0.02)
    assert (weight.grad is not None) is requires_grad


def _hook(low: Tensor) -> None:
    if low.requires_grad:
        low.register_hook(lambda grad: grad * 100)


SPOILING: dict[str, Callable[[Tensor], Any]] = {
    "hook": _hook,
    "retain_grad": lambda low: low.requires_grad and low.retain_grad(),
    "detach_": lambda low: low._is_view() or low.detach_(),
    "requires_grad_": lambda low: low.requires_grad or low.requires_grad_(),
    "write": lambda low: torch.autograd.graph.increment_version(low) or low.detach().zero_(),
}


@pytest.mark.parametrize("is_warm", [True, False], ids=["cast before", "cast inside"])
@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("act", SPOILING)
def test_what_a_dispatch_mode_does_to_a_cast_reaches_no_use_outside(
    weight: Parameter, x: Tensor, act: str, requires_grad: bool, is_warm: bool
) -> None:
    weight.requires_grad_(requires_grad)
    x = x.requires_grad_()
    # What an earlier graph has saved is the mode's to write into: autograd says so in backward.
    grad = torch.no_grad if act == "write" else nullcontext
    with region():
        with grad():
            uses = [torch.mm(x, weight)] if is_warm else []
        with grad(), Spoils(SPOILING[act]):
            torch.mm(x.detach(), weight)
        uses += [torch.mm(x, weight), torch.mm(x, weight)]
    expected = torch.mm(x.detach().to(BRAIN), weight.detach().to(BRAIN))
    assert all(torch.equal(y, expected) for y in uses)
    uses = [y for y in uses if y.requires_grad]
    sum(y.float().sum() for y in uses).backward()  # type: ignore[union-attr]
    assert (weight.grad is not None) is requires_grad
    if weight.grad is not None:
        once = x.detach().to(BRAIN).sum(0)[:, None].expand(4, 4).float()
        assert torch.allclose(weight.grad, len(uses) * once, rtol=0.02)
    assert x.grad is not None


# -- Gradients -----------------------------------------------------------------------------------------


def gradient(x: Tensor, weight: Parameter, forward: Callable[[Tensor, Parameter], Tensor], **options: Any) -> Tensor:
    """Return the weight's gradient of a loss computed in a region."""
    weight.grad = None
    with region(**options):
        loss = forward(x, weight)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype is weight.dtype
    return weight.grad.clone()


def torchs_gradient(x: Tensor, weight: Parameter, forward: Callable[[Tensor, Parameter], Tensor]) -> Tensor:
    """Return the same in a region of torch's, whose cache has gradients summed up in lower precision, too."""
    weight.grad = None
    with torch.autocast("cpu", dtype=BRAIN):
        loss = forward(x, weight)
    loss.backward()
    assert weight.grad is not None
    return weight.grad.clone()


def assert_torchs_gradient(
    found: Tensor | None, x: Tensor, weight: Parameter, forward: Callable[[Tensor, Parameter], Tensor]
) -> None:
    expected = torchs_gradient(x, weight, forward)
    assert found is not None
    if GIVES_KERNELS:
        assert torch.equal(found, expected)
    else:  # torch's regions cast at each use by now, and sum up in float32
        assert torch.allclose(found, expected, rtol=0.01)


def two_layers(x: Tensor, weight: Parameter) -> Tensor:
    return functional.linear(functional.linear(x, weight), weight).square().sum()


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_a_first_use_without_grad_keeps_gradients(weight: Parameter, x: Tensor, without_grad: Any) -> None:
    def forward(x: Tensor, weight: Parameter) -> Tensor:
        with without_grad():
            functional.linear(x, weight)
        return two_layers(x, weight)

    assert_torchs_gradient(gradient(x, weight, forward), x, weight, two_layers)


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_a_use_without_grad_after_one_with_grad_has_no_graph(weight: Parameter, x: Tensor, without_grad: Any) -> None:
    with region():
        functional.linear(x, weight)
        with without_grad():
            assert not functional.linear(x, weight).requires_grad
        assert functional.linear(x, weight).requires_grad


def test_switching_requires_grad_in_the_region_is_seen(weight: Parameter, x: Tensor) -> None:
    with region():
        for requires_grad in (False, True, False, True):
            weight.requires_grad_(requires_grad)
            assert functional.linear(x, weight).requires_grad is requires_grad


def test_weight_used_with_live_and_dead_graphs_gives_the_reference_gradient(weight: Parameter, x: Tensor) -> None:
    def forward(x: Tensor, weight: Parameter) -> Tensor:
        functional.linear(x, weight)  # its graph dies at once
        kept = functional.linear(x, weight)
        return two_layers(x, weight) + kept.square().sum()

    assert_torchs_gradient(gradient(x, weight, forward), x, weight, forward)


@pytest.mark.parametrize("retain_graph", [True, False])
def test_two_losses_through_one_kept_cast_add_up(weight: Parameter, x: Tensor, retain_graph: bool) -> None:
    with region():
        first, second = functional.linear(x, weight).sum(), functional.linear(x + 1, weight).square().sum()
    first.backward(retain_graph=retain_graph)
    second.backward()
    reference = gradient(x, copy.deepcopy(weight), lambda x, w: functional.linear(x, w).sum(), cache_enabled=False)
    other = gradient(
        x, copy.deepcopy(weight), lambda x, w: functional.linear(x + 1, w).square().sum(), cache_enabled=False
    )
    assert torch.allclose(weight.grad, reference + other, rtol=1e-6)  # type: ignore[arg-type]


def test_backward_twice_through_a_retained_graph_doubles_the_gradient(weight: Parameter, x: Tensor) -> None:
    with region():
        loss = two_layers(x, weight)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)  # type: ignore[arg-type]


@pytest.mark.parametrize("first_use", [nullcontext, torch.no_grad])
def test_double_backward_follows_the_float_reference(
    weight: Parameter, x: Tensor, first_use: Callable[[], AbstractContextManager[Any]]
) -> None:
    def penalty(weight: Parameter, **options: Any) -> Tensor:
        weight.grad = None
        with region(**options):
            with first_use():
                functional.linear(x, weight)
            loss = functional.linear(x, weight).float().pow(3).sum()
            (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
            grad.square().sum().backward()
        assert weight.grad is not None
        return weight.grad

    found, reference = penalty(weight).clone(), penalty(weight, enabled=False)
    assert torch.allclose(found, reference, rtol=0.05, atol=0.05 * float(reference.abs().max()))


def test_gradients_accumulate_over_uses_in_one_region(weight: Parameter, x: Tensor) -> None:
    def accumulate(**options: Any) -> Tensor:
        weight.grad = None
        with region(**options):
            for step in range(4):
                functional.linear(x + step, weight).float().square().mean().backward()
        assert weight.grad is not None
        return weight.grad

    found, reference = accumulate().clone(), accumulate(enabled=False)
    assert torch.allclose(found, reference, rtol=0.02, atol=0.02 * float(reference.abs().max()))


def test_gradients_accumulate_over_persistent_regions(weight: Parameter, x: Tensor) -> None:
    for step in range(4):
        with region(persistent_cache=True):
            loss = functional.linear(x + step, weight).float().square().mean()
        loss.backward()
    found = weight.grad
    weight.grad = None
    for step in range(4):
        functional.linear(x + step, weight).square().mean().backward()
    mpamp.clear_cache()
    assert found is not None
    assert weight.grad is not None
    assert torch.allclose(found, weight.grad, rtol=0.02, atol=0.02 * float(weight.grad.abs().max()))


def test_hooks_of_a_weight_run_once_a_backward(weight: Parameter, x: Tensor) -> None:
    seen: list[torch.dtype] = []
    weight.register_hook(lambda grad: seen.append(grad.dtype))
    with region():
        with torch.no_grad():
            functional.linear(x, weight)
        two_layers(x, weight).backward()
    assert seen == [FULL]


def test_gradient_of_a_channels_last_weight_is_the_uncached_one() -> None:
    weight = Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    image = torch.randn(1, 3, 8, 8)

    def forward(x: Tensor, w: Parameter) -> Tensor:
        with torch.no_grad():
            functional.conv2d(x, w)
        return functional.conv2d(x, w).square().sum()

    found = gradient(image, weight, forward)
    reference = gradient(image, weight, forward, cache_enabled=False)
    assert torch.equal(found, reference)
    assert found.stride() == reference.stride()


def test_a_tied_weight_s_gradient_is_the_uncached_one(weight: Parameter, x: Tensor) -> None:
    ids = torch.tensor([[0, 1], [2, 3]])

    def forward(x: Tensor, weight: Parameter) -> Tensor:
        return functional.linear(functional.embedding(ids, weight), weight).square().sum()

    assert torch.equal(gradient(x, weight, forward), gradient(x, weight, forward, cache_enabled=False))


# -- Nothing kept alive --------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True], ids=["region", "persistent"])
@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
def test_a_dropped_weight_is_freed_in_the_region(x: Tensor, requires_grad: bool, persistent: bool) -> None:
    weight = Parameter(torch.ones(4, 4), requires_grad=requires_grad)
    dead = weakref.ref(weight)
    with region(persistent_cache=persistent):
        y = functional.linear(functional.linear(x, weight), weight)
        if requires_grad:
            y.sum().backward()
        del weight, y
        gc.collect()
        assert dead() is None
        assert mpamp.cache_info().entries == 0


def test_a_weight_dropped_after_uses_with_dead_graphs_is_freed(x: Tensor) -> None:
    weight = Parameter(torch.ones(4, 4))
    dead = weakref.ref(weight)
    with region():
        for _ in range(3):
            functional.linear(x, weight)
        del weight
        gc.collect()
        assert dead() is None


def test_a_dropped_weight_s_storage_is_freed(x: Tensor) -> None:
    weight = Parameter(torch.ones(4, 4))
    storage = torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage())
    with region():
        functional.linear(x, weight)
        del weight
        gc.collect()
        assert storage.expired()


def _live(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    gc.collect()
    found = (o for o in gc.get_objects() if issubclass(type(o), Tensor))
    return sum(tuple(t.shape) == shape and t.dtype is dtype for t in found)


@pytest.mark.slow
def test_live_casts_do_not_pile_up_in_a_region(x: Tensor) -> None:
    weight = Parameter(torch.ones(7, 4))
    counts = []
    with region():
        for _ in range(8):
            with torch.no_grad():
                weight.mul_(1.5)
            functional.linear(x, weight).sum().backward()
            counts.append(_live((7, 4), BRAIN))
    assert max(counts) == counts[0] <= 2


@pytest.mark.parametrize("fails", [False, True])
def test_no_cast_outlives_the_outermost_region(x: Tensor, fails: bool) -> None:
    weight = Parameter(torch.ones(7, 4))
    try:
        with region(), region():
            functional.linear(x, weight)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert mpamp.cache_info().entries == 0
    assert _live((7, 4), BRAIN) == 0


@pytest.mark.parametrize("leave", ["other data", "to meta", "to float64", "freed in place", "swapped"])
def test_casts_that_can_never_be_served_again_go(x: Tensor, leave: str) -> None:
    layer = torch.nn.Linear(4, 7, bias=False).requires_grad_(False)
    ways: dict[str, Callable[[], Any]] = {
        "other data": lambda: setattr(layer.weight, "data", torch.ones(7, 4)),
        "to meta": lambda: layer.to("meta"),
        "to float64": lambda: layer.double(),
        "freed in place": lambda: layer.weight.untyped_storage().resize_(0),
        "swapped": lambda: torch.utils.swap_tensors(layer.weight, Parameter(torch.ones(7, 4))),
    }
    with region(persistent_cache=True):
        layer(x)
    assert mpamp.cache_info().entries == 1
    ways[leave]()
    assert mpamp.cache_info().entries == 0
    assert _live((7, 4), BRAIN) == 0


def test_entries_of_weights_over_one_memory_do_not_pile_up(x: Tensor) -> None:
    data = torch.ones(7, 4)
    alive = []
    with region(persistent_cache=True):
        for _ in range(20):
            alive.append(Parameter(data, requires_grad=False))
            functional.linear(x, alive[-1])
    assert mpamp.cache_info().entries == 1
    mpamp.clear_cache()


@pytest.mark.python_engine
def test_nothing_piles_up_over_changes_of_data(x: Tensor) -> None:
    weight, alive = Parameter(torch.ones(7, 4), requires_grad=False), []
    with region(persistent_cache=True):
        for _ in range(20):
            alive.append(weight.data)
            weight.data = torch.ones(7, 4)
            functional.linear(x, weight)
    entries = PERSISTENT_CACHE.entries
    assert (len(entries), len(entries.keys_of)) == (1, 1)
    mpamp.clear_cache()
    assert (len(entries), len(entries.keys_of)) == (0, 0)


# -- Threads -------------------------------------------------------------------------------------------


def test_the_casts_of_a_thread_that_has_ended_are_freed_without_a_collection(x: Tensor) -> None:
    weight = Parameter(torch.ones(7, 4), requires_grad=False)

    def work() -> None:
        with region(persistent_cache=True):
            functional.linear(x, weight)

    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        found = (o for o in gc.get_objects() if type(o) is Tensor)
        assert sum(tuple(t.shape) == (7, 4) and t.dtype is BRAIN for t in found) <= 1  # the last may be ending
    finally:
        gc.enable()


def test_another_thread_s_exit_changes_nothing(weight: Parameter, x: Tensor) -> None:
    def other() -> None:
        with region():
            functional.linear(x, weight)

    with WeightCastCounter([weight]) as casts, region():
        functional.linear(x, weight)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other).result()
        functional.linear(x, weight)
    assert casts.count == 1


def test_each_thread_has_casts_of_its_own(weight: Parameter, x: Tensor) -> None:
    def casts_there() -> int:
        with region(), WeightCastCounter([weight]) as casts:
            for _ in range(3):
                functional.linear(x, weight)
        return casts.count

    with region():
        functional.linear(x, weight)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(casts_there).result() == 1


def test_threads_that_change_one_weight_and_use_it_get_its_values(x: Tensor) -> None:
    weights = [Parameter(torch.full((4, 4), float(i))) for i in range(4)]
    stop = threading.Event()

    def clear() -> None:
        while not stop.is_set():
            mpamp.clear_cache()
            stop.wait(0.0002)

    def work(number: int) -> bool:
        with region():
            return all(
                torch.equal(functional.linear(x, w), uncached(x, w)) for _ in range(50) for w in weights[number % 2 :]
            )

    with ThreadPoolExecutor(4) as pool:
        clearing = pool.submit(clear)
        try:
            assert all(pool.map(work, range(3)))
        finally:
            stop.set()
        clearing.result()


def test_clear_cache_reaches_other_threads(weight: Parameter, x: Tensor) -> None:
    filled, cleared = threading.Event(), threading.Event()

    def other() -> int:
        with region():
            functional.linear(x, weight)
            filled.set()
            cleared.wait(10)
            return mpamp.cache_info().entries

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(other)
        filled.wait(10)
        mpamp.clear_cache()
        cleared.set()
        assert found.result() == 0


# -- persistent_cache ----------------------------------------------------------------------------------


@pytest.fixture
def persistent() -> Iterator[Callable[[], mpamp.Region]]:
    yield lambda: region(persistent_cache=True)
    mpamp.clear_cache()


@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
def test_persistent_casts_last_over_regions(
    weight: Parameter, x: Tensor, persistent: Callable[[], mpamp.Region], requires_grad: bool
) -> None:
    weight.requires_grad_(requires_grad)
    with WeightCastCounter([weight]) as casts:
        for _ in range(5):
            with persistent():
                functional.linear(x, weight)
                functional.linear(x, weight)
    assert casts.count == 1


def test_persistent_casts_follow_the_optimizer(
    weight: Parameter, x: Tensor, persistent: Callable[[], mpamp.Region]
) -> None:
    optimizer = torch.optim.Adam([weight], lr=0.5, fused=True)
    for _ in range(3):
        with persistent():
            assert_is_current(x, weight)
            loss = functional.linear(x, weight).sum()
        loss.backward()
        optimizer.step()


def test_persistent_casts_follow_load_state_dict(
    weight: Parameter, x: Tensor, persistent: Callable[[], mpamp.Region]
) -> None:
    with persistent():
        functional.linear(x, weight)
    _load(weight, torch.ones(4, 4))
    with persistent():
        assert_is_current(x, weight)


def test_persistent_casts_die_with_their_parameter(x: Tensor, persistent: Callable[[], mpamp.Region]) -> None:
    weight = Parameter(torch.ones(7, 4))
    with persistent():
        functional.linear(x, weight)
    assert mpamp.cache_info().entries == 1
    del weight
    gc.collect()
    assert mpamp.cache_info().entries == 0
    assert _live((7, 4), BRAIN) == 0


def test_persistent_casts_outlive_other_regions(
    weight: Parameter, x: Tensor, persistent: Callable[[], mpamp.Region]
) -> None:
    with WeightCastCounter([weight]) as casts:
        with persistent():
            functional.linear(x, weight)
        with region():
            pass
        with persistent():
            functional.linear(x, weight)
    assert casts.count == 1


def test_persistent_casts_go_with_clear_cache(
    weight: Parameter, x: Tensor, persistent: Callable[[], mpamp.Region]
) -> None:
    with persistent():
        functional.linear(x, weight)
    weight.data.fill_(3)
    mpamp.clear_cache()
    with persistent():
        assert_is_current(x, weight)


def test_persistent_casts_made_in_inference_mode_can_be_trained_through(
    weight: Parameter, x: Tensor, persistent: Callable[[], mpamp.Region]
) -> None:
    with torch.inference_mode(), persistent():
        functional.linear(x, weight)
    with persistent():
        two_layers(x, weight).backward()
    assert_torchs_gradient(weight.grad, x, weight, two_layers)


# -- No cache while tracing ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_records_the_cast_of_a_cached_weight(x: Tensor) -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    with region():
        layer(x)
        traced = torch.jit.trace(layer, x, check_trace=False)
        with torch.no_grad():
            layer.weight.fill_(2)
    assert torch.equal(traced(x), uncached(x, layer.weight))


def test_make_fx_records_the_cast_of_a_cached_weight(weight: Parameter, x: Tensor) -> None:
    with region():
        functional.linear(x, weight)
        graph = make_fx(lambda x, w: functional.linear(x, w))(x, weight)
    assert sum(n.target is torch.ops.aten._to_copy.default for n in graph.graph.nodes) == 2


def test_make_fx_reads_the_weight_each_time(weight: Parameter, x: Tensor) -> None:
    with region():
        functional.linear(x, weight)
        graph = make_fx(lambda x: functional.linear(x, weight))(x)
    with torch.no_grad():
        weight.fill_(2)
    assert torch.equal(graph(x), uncached(x, weight))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "vmap of grad"])
def test_functorch_transforms_neither_use_nor_fill_the_cache(weight: Parameter, x: Tensor, transform: str) -> None:
    def loss(w: Tensor) -> Tensor:
        return functional.linear(x, w).float().square().sum()

    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(loss)(weight),
        "vmap": lambda: torch.vmap(loss)(torch.stack([weight.detach(), weight.detach()])),
        "jvp": lambda: torch.func.jvp(loss, (weight.detach(),), (torch.ones(4, 4),)),
        "vmap of grad": lambda: torch.vmap(torch.func.grad(loss))(torch.stack([weight.detach(), weight.detach()])),
    }
    with region():
        functional.linear(x, weight)
        found = calls[transform]()
        assert mpamp.cache_info().entries == 1
    with region(cache_enabled=False):
        reference = calls[transform]()
    for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, reference)), strict=True):
        assert torch.equal(a, b)


def test_a_captured_weight_inside_a_transform_is_not_kept(weight: Parameter, x: Tensor) -> None:
    with region():
        torch.func.grad(lambda x: functional.linear(x, weight).float().sum())(x)
        assert mpamp.cache_info().entries == 0


def test_fake_weights_are_not_kept() -> None:
    with FakeTensorMode(), region():
        weight = Parameter(torch.empty(4, 4))
        assert functional.linear(torch.empty(2, 4), weight).dtype is BRAIN
        assert mpamp.cache_info().entries == 0


def test_a_real_weight_under_fake_mode_does_not_get_its_real_cast(weight: Parameter, x: Tensor) -> None:
    with region():
        functional.linear(x, weight)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = functional.linear(torch.empty(2, 4), weight)
        assert type(fake).__name__ == "FakeTensor"
        assert_is_current(x, weight)


# -- Checkpointing -------------------------------------------------------------------------------------


def _save_casts_and_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = "to_copy" in str(op) or "mm" in str(op)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _save_casts(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "to_copy" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


POLICIES = {"casts and products": _save_casts_and_products, "casts": _save_casts, "nothing": _recompute_all}


def _selective(policy: str) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, POLICIES[policy])
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _checkpoints() -> dict[str, Callable[..., Any]]:
    plain = {str(r): partial(checkpoint, use_reentrant=r) for r in (True, False)}
    return {**{f"reentrant {r}": c for r, c in plain.items()}, **{f"saves {p}": _selective(p) for p in POLICIES}}


@pytest.mark.parametrize("is_warm", [True, False], ids=["cast before", "cast inside"])
@pytest.mark.parametrize("kind", _checkpoints())
def test_checkpointed_blocks_that_share_a_weight_give_the_gradient_without(kind: str, is_warm: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return torch.tanh(layer(x))

    def gradients(run: Callable[..., Any]) -> list[Tensor]:
        layer.zero_grad()
        x.grad = None
        with region():
            y = layer(x) if is_warm else x
            y = run(block, run(block, y))
            y = y + layer(x)
        y.float().square().sum().backward()
        return [layer.weight.grad.clone(), layer.bias.grad.clone(), x.grad.clone()]  # type: ignore[union-attr]

    reference, found = gradients(lambda f, x: f(x)), gradients(_checkpoints()[kind])
    for a, b in zip(found, reference, strict=True):
        assert torch.allclose(a, b, rtol=0.02, atol=0.01 * float(b.abs().max()))


# -- What is a weight ----------------------------------------------------------------------------------


class Named(Parameter):
    """A parameter with a class of its own."""


def test_a_parameter_subclass_is_cast_once(x: Tensor) -> None:
    weight = Named(torch.ones(4, 4))
    with WeightCastCounter([weight]) as casts, region():
        for _ in range(3):
            assert functional.linear(x, weight).dtype is BRAIN
    assert casts.count == 1


def test_a_parameter_subclass_gets_its_gradient(x: Tensor) -> None:
    weight, plain = Named(torch.ones(4, 4)), Parameter(torch.ones(4, 4))
    assert torch.equal(gradient(x, weight, two_layers), gradient(x, plain, two_layers))


class Wrapped(Tensor):
    """A tensor that runs its ops itself, on another that it holds."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].inner)
        inner = torch.utils._pytree.tree_map(lambda t: t.inner if isinstance(t, Wrapped) else t, args)
        return func(*inner, **(kwargs or {}))


def test_a_tensor_that_runs_its_own_ops_is_not_kept(x: Tensor) -> None:
    weight = Parameter(Wrapped(torch.ones(4, 4)), requires_grad=False)
    with region():
        assert functional.linear(x, weight).dtype is BRAIN
        assert mpamp.cache_info().entries == 0


@pytest.mark.parametrize("dtype", [DOUBLE, torch.complex64, HALF, BRAIN])
def test_parameters_of_other_dtypes_are_not_kept(dtype: torch.dtype) -> None:
    weight = Parameter(torch.ones(4, 4, dtype=dtype))
    with WeightCastCounter([weight]) as casts, region():
        found = torch.mm(weight, weight).dtype
    assert found is (BRAIN if dtype is HALF else dtype)
    assert casts.count == 0
    assert not is_weight(weight)


def test_a_sparse_parameter_is_not_kept() -> None:
    weight = Parameter(torch.eye(4).to_sparse())
    with region():
        assert torch.sparse.mm(weight, torch.ones(4, 4)).sum() == 16
        assert mpamp.cache_info().entries == 0


def test_a_lazy_parameter_can_be_materialized_in_a_region(x: Tensor) -> None:
    layer = torch.nn.LazyLinear(4)
    with region():
        assert layer(x).dtype is BRAIN
        assert torch.equal(layer(x), layer(x))


def test_a_parameter_made_in_inference_mode_can_be_used(x: Tensor) -> None:
    with torch.inference_mode():
        weight = Parameter(torch.ones(4, 4), requires_grad=False)
        with region():
            assert functional.linear(x, weight).dtype is BRAIN
            weight.fill_(2)
            assert functional.linear(x, weight)[0, 0] == 2 * x[0].to(BRAIN).sum()


def test_aliases_of_one_storage_are_apart(x: Tensor) -> None:
    data = torch.linspace(0, 1, 32).reshape(8, 4)
    first, second = Parameter(data[:4]), Parameter(data[4:])
    with region():
        for _ in range(2):
            assert_is_current(x, first)
            assert_is_current(x, second)


def test_a_step_of_a_flat_parameter_is_seen_by_its_views(x: Tensor) -> None:
    flat = Parameter(torch.linspace(0, 1, 32))
    view = Parameter(flat.data[:16].view(4, 4))
    optimizer = torch.optim.SGD([flat], lr=0.5)
    with region():
        functional.linear(x, view)
        flat.grad = torch.ones(32)
        optimizer.step()
        assert_is_current(x, view)


# -- Torch's own ops -----------------------------------------------------------------------------------


@pytest.mark.python_engine
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_op_that_is_given_kept_casts_returns_one() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    names = {name.removeprefix("aten::").partition(".")[0] for name in lower_precision_ops()}
    infos = [info for info in op_db if info.aten_name in names and FULL in info.supported_dtypes("cpu")]
    calls = 0
    for info in infos:
        for sample in info.sample_inputs("cpu", FULL):
            with torch.no_grad(), region(ops=mpamp.OpTable.named("uniform", "cpu")):
                args, kwargs = tree_map(_as_weight, ((sample.input, *sample.args), sample.kwargs))
                found = [t for t in tree_leaves(info.op(*args, **kwargs)) if isinstance(t, Tensor)]
                kept = [entry.low for entry in REGION_CACHE.entries.values()]
                assert not any(torch._C._is_alias_of(t, low) for t in found for low in kept), info.name
                calls += len(kept) > 0
    assert calls > 100


def _as_weight(value: Any) -> Any:
    is_floating = isinstance(value, Tensor) and value.dtype is FULL
    return Parameter(value.clone(), requires_grad=False) if is_floating else value
