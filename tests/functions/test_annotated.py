"""Functions that autocast can't see: what the decorators do with their arguments."""

from __future__ import annotations

import collections
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp.functions.annotated import casting, float_function, lower_precision_function, promote_function
from mpamp.testing import WeightCastCounter

HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
Tensor = torch.Tensor
REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "mpamp": lambda: mpamp.autocast("cpu", dtype=HALF),
    "torch": lambda: torch.autocast("cpu", dtype=HALF),
}
IN_REGIONS = pytest.mark.parametrize("region", REGIONS)


def tensor(dtype: torch.dtype = FULL, **options: Any) -> Tensor:
    return torch.ones(2, 2, dtype=dtype, **options)


def dtypes(*values: Any) -> list[torch.dtype]:
    return [v.dtype for v in values]


# -- What the decorators do --------------------------------------------------------------------------


@IN_REGIONS
@pytest.mark.parametrize(
    ("decorator", "given", "got"),
    [
        (lower_precision_function, [FULL, HALF, BRAIN], [HALF, HALF, HALF]),
        (lower_precision_function, [FULL, torch.int64, torch.bool], [HALF, torch.int64, torch.bool]),
        (lower_precision_function, [FULL, torch.complex64], [HALF, torch.complex64]),
        (lower_precision_function, [FULL, DOUBLE, HALF], [FULL, DOUBLE, HALF]),
        (float_function, [FULL, HALF, BRAIN], [FULL, FULL, FULL]),
        (float_function, [HALF, DOUBLE], [HALF, DOUBLE]),
        (promote_function, [FULL, HALF], [FULL, FULL]),
        (promote_function, [BRAIN, BRAIN], [BRAIN, BRAIN]),
        (promote_function, [BRAIN, HALF], [FULL, FULL]),
        (promote_function, [BRAIN, torch.int64], [BRAIN, torch.int64]),
        (promote_function, [FULL, DOUBLE, HALF], [FULL, DOUBLE, HALF]),
    ],
)
def test_arguments_are_cast(region: str, decorator: Any, given: list[torch.dtype], got: list[torch.dtype]) -> None:
    arguments = [torch.ones(2).to(d) for d in given]
    with REGIONS[region]():
        assert decorator(dtypes)(*arguments) == got
    assert decorator(dtypes)(*arguments) == given


@pytest.mark.parametrize("decorator", [lower_precision_function, float_function, promote_function])
@pytest.mark.parametrize(
    "region",
    [nullcontext, lambda: mpamp.autocast("cpu", enabled=False), lambda: torch.autocast("cpu", enabled=False)],
    ids=["none", "mpamp", "torch"],
)
def test_outside_of_regions_the_call_passes_through(decorator: Any, region: Any) -> None:
    value = [tensor(HALF), tensor()]
    with region():
        assert decorator(lambda v: v)(value) is value


def test_other_devices_regions_dont_count() -> None:
    with FakeTensorMode(), mpamp.autocast("cuda", dtype=HALF):
        arguments = torch.ones(2), torch.ones(2, device="cuda")
        assert lower_precision_function(dtypes)(arguments[0]) == [FULL]
        assert lower_precision_function(dtypes)(*arguments) == [FULL, HALF]


def test_each_device_has_its_regions_dtype() -> None:
    with FakeTensorMode(), mpamp.autocast("cuda", dtype=HALF), mpamp.autocast("cpu", dtype=BRAIN):
        assert lower_precision_function(dtypes)(torch.ones(2), torch.ones(2, device="cuda")) == [BRAIN, HALF]


def test_a_float32_region_casts_to_float32() -> None:
    with mpamp.autocast("cpu", dtype=FULL):
        assert lower_precision_function(dtypes)(tensor(BRAIN)) == [FULL]


@IN_REGIONS
@pytest.mark.parametrize("decorator", [lower_precision_function, float_function, promote_function])
def test_inside_autocast_is_off_and_outside_restored(region: str, decorator: Any) -> None:
    @decorator
    def inside(x: Tensor) -> torch.dtype:
        assert not torch.is_autocast_enabled("cpu")
        return torch.ones(2, 2).mm(torch.ones(2, 2)).dtype

    @decorator
    def fails(x: Tensor) -> None:
        raise KeyError("mine")

    with REGIONS[region]():
        assert inside(tensor()) is FULL
        with pytest.raises(KeyError, match="mine"):
            fails(tensor())
        assert torch.is_autocast_enabled("cpu")
        assert tensor().mm(tensor()).dtype is HALF
    assert not torch.is_autocast_enabled("cpu")


def test_a_region_inside_the_function_works() -> None:
    @float_function
    def inside(x: Tensor) -> torch.dtype:
        with mpamp.autocast("cpu", dtype=BRAIN):
            return x.mm(x).dtype

    with mpamp.autocast("cpu", dtype=HALF):
        assert inside(tensor()) is BRAIN


def test_nested_containers_and_keywords() -> None:
    Pair = collections.namedtuple("Pair", "left right")

    @lower_precision_function
    def function(first: Any, *, second: Any) -> None:
        assert type(first) is Pair
        assert dtypes(first.left[0], first.right["a"]) == [HALF, HALF]
        assert list(second) == ["b", "a"]
        assert type(second) is collections.OrderedDict
        assert second["a"].dtype is HALF

    with mpamp.autocast("cpu", dtype=HALF):
        function(Pair([tensor()], {"a": tensor()}), second=collections.OrderedDict(b=1, a=tensor()))


@IN_REGIONS
def test_gradients_reach_the_arguments(region: str) -> None:
    function = lower_precision_function(lambda x, w: x @ w)
    x, w = tensor(requires_grad=True), torch.nn.Parameter(tensor())
    with REGIONS[region]():
        y = function(x, w)
    y.float().sum().backward()
    assert y.dtype is HALF
    for t in (x, w):
        assert t.grad is not None
        assert t.grad.dtype is FULL
        assert torch.equal(t.grad, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_in_checkpointing(use_reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    @lower_precision_function
    def function(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x.sin()

    with mpamp.autocast("cpu", dtype=HALF):
        y = checkpoint(function, tensor(requires_grad=True), use_reentrant=use_reentrant)
    y.sum().backward()
    assert seen == [HALF, HALF]


def test_banned() -> None:
    function = casting(dtypes, "banned")
    with mpamp.autocast("cpu"):
        assert function(tensor()) == [FULL]
        with pytest.raises(mpamp.BannedOpError, match="dtypes is unsafe"):
            function(tensor(HALF))
    assert function(tensor(HALF)) == [HALF]


# -- What can be decorated ---------------------------------------------------------------------------


def test_names_and_docs_are_kept() -> None:
    @lower_precision_function
    def mine(x: int = 3) -> int:
        """Do it."""
        return x

    assert (mine.__name__, mine.__doc__, mine()) == ("mine", "Do it.", 3)


def test_methods_of_every_kind() -> None:
    class A:
        @lower_precision_function
        def plain(self, x: Tensor) -> torch.dtype:
            return x.dtype

        @lower_precision_function
        @staticmethod
        def static(x: Tensor) -> torch.dtype:
            return x.dtype

        @classmethod
        @lower_precision_function
        def of_class(cls, x: Tensor) -> torch.dtype:
            assert cls is A
            return x.dtype

        @lower_precision_function
        @classmethod
        def of_class_too(cls, x: Tensor) -> torch.dtype:
            assert cls is A
            return x.dtype

    with mpamp.autocast("cpu", dtype=HALF):
        found = [A().plain(tensor()), A.static(tensor()), A().of_class(tensor()), A().of_class_too(tensor())]
    assert found == [HALF] * 4


def test_callables_that_arent_functions() -> None:
    with mpamp.autocast("cpu", dtype=HALF):
        assert lower_precision_function(torch.sin)(tensor()).dtype is HALF
        assert lower_precision_function(torch.ops.aten.sin)(tensor()).dtype is HALF
        assert lower_precision_function(functools.partial(torch.mul, tensor(HALF)))(tensor()).dtype is HALF
        assert lower_precision_function(torch.nn.ReLU())(tensor()).dtype is HALF


@pytest.mark.parametrize("kind", ["generator", "coroutine", "async generator"])
def test_functions_whose_body_runs_later_are_refused(kind: str) -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None:
        pass

    async def async_generator() -> Any:
        yield 1

    function = {"generator": generator, "coroutine": coroutine, "async generator": async_generator}[kind]
    with pytest.raises(TypeError, match=f"{function.__name__} is a generator or async function"):
        lower_precision_function(function)


@pytest.mark.parametrize("value", [3, None, "relu", torch.nn.Linear])
def test_what_isnt_a_function_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="this decorates functions, got"):
        promote_function(value)


def test_policies_for_ops_only_are_refused() -> None:
    with pytest.raises(ValueError, match="fp32_set_opt_dtype is for ops only"):
        casting(dtypes, "fp32_set_opt_dtype")
    with pytest.raises(mpamp.UnknownPolicyError, match="lower_precision_fp"):
        casting(dtypes, "lower_precision")


# -- Its arguments are its own -----------------------------------------------------------------------


CACHES: dict[str, Any] = {
    "region": lambda: mpamp.autocast("cpu", dtype=HALF),
    "persistent": lambda: mpamp.autocast("cpu", dtype=HALF, persistent_cache=True),
    "no cache": lambda: mpamp.autocast("cpu", dtype=HALF, cache_enabled=False),
    "torch": lambda: torch.autocast("cpu", dtype=HALF),
}


@pytest.mark.parametrize("cache", CACHES)
def test_each_call_casts_weights_for_itself_alone(cache: str) -> None:
    weight = torch.nn.Parameter(tensor())
    function = lower_precision_function(lambda x, w: x @ w)
    with WeightCastCounter([weight]) as counter, CACHES[cache]():
        for _ in range(3):
            function(tensor(HALF), weight)
        assert mpamp.cache_info().entries == 0
    assert counter.count == 3


def _detach(w: Tensor) -> None:
    w.detach_()


def _hook(w: Tensor) -> None:
    if w.requires_grad:
        w.register_hook(lambda grad: grad * 100)


def _node_hook(w: Tensor) -> None:
    if w.grad_fn is not None:
        w.grad_fn.register_prehook(lambda grads: (grads[0] * 100,))


SPOIL: dict[str, Any] = {
    "hook": _hook,
    "hook of the node": _node_hook,
    "retain_grad": lambda w: w.requires_grad and w.retain_grad(),
    "detach_": _detach,
    "write": lambda w: w.mul_(100),
    "write into an alias": lambda w: w.detach().mul_(100),
    "write into the data": lambda w: w.data.mul_(100),
    "write into the storage": lambda w: w.untyped_storage().fill_(0),
    "free the storage": lambda w: w.untyped_storage().resize_(0),
    "other data": lambda w: setattr(w, "data", torch.zeros(1, dtype=w.dtype)),
    "set_": lambda w: w.detach().set_(torch.zeros(1, dtype=w.dtype)),
}


@pytest.mark.parametrize("persistent", [False, True], ids=["region", "persistent"])
@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("act", SPOIL)
def test_what_a_function_does_to_its_arguments_reaches_no_other_use(
    act: str, requires_grad: bool, persistent: bool
) -> None:
    weight = torch.nn.Parameter(tensor(), requires_grad=requires_grad)
    function = lower_precision_function(lambda w: SPOIL[act](w))
    x = tensor().requires_grad_()
    with mpamp.autocast("cpu", dtype=HALF, persistent_cache=persistent):
        before = torch.mm(x, weight)
        function(weight)
        after = torch.mm(x, weight)
    assert torch.equal(after, before)
    (before.float().sum() + after.float().sum()).backward()
    if requires_grad:
        assert weight.grad.unique().tolist() == [4.0]
    mpamp.clear_cache()


def test_a_changed_weight_is_cast_anew() -> None:
    weight = torch.nn.Parameter(tensor())
    function = lower_precision_function(lambda w: (w * 1).sum().item())
    with mpamp.autocast("cpu", dtype=HALF):
        assert function(weight) == 4
        with torch.no_grad():
            weight.mul_(2)
        assert function(weight) == 8


@pytest.mark.parametrize("grad", [True, False])
def test_a_function_that_writes_into_a_weights_cast_spoils_nothing(grad: bool) -> None:
    weight = torch.nn.Parameter(tensor(), requires_grad=grad)

    @lower_precision_function
    def writes(w: Tensor) -> float:
        return w.mul_(2).sum().item()

    @lower_precision_function
    def writes_and_fails(w: Tensor) -> None:
        w.mul_(2)
        raise KeyError

    with mpamp.autocast("cpu", dtype=HALF):
        assert [writes(weight), writes(weight)] == [8, 8]
        with pytest.raises(KeyError):
            writes_and_fails(weight)
        assert weight.mm(tensor())[0, 0].item() == 2
        with torch.no_grad():
            assert writes(weight) == 8
            assert writes(weight) == 8


@pytest.mark.parametrize("output", [lambda w: w, lambda w: {"a": [w.t()]}, lambda w: (w.detach()[0],)])
def test_a_function_that_returns_a_weights_cast_spoils_nothing(output: Any) -> None:
    weight = torch.nn.Parameter(tensor(), requires_grad=False)
    with mpamp.autocast("cpu", dtype=HALF):
        from mpamp.functions.containers import tensors_in

        (got,) = tensors_in(lower_precision_function(output)(weight))
        got.zero_()
        assert weight.mm(tensor())[0, 0].item() == 2


def test_nothing_is_kept_alive() -> None:
    weight = torch.nn.Parameter(tensor())
    function = lower_precision_function(lambda w: w.sum().item())
    with mpamp.autocast("cpu"):
        function(weight)
        alive = weakref.ref(weight)
        del weight
        gc.collect()
        assert alive() is None


# -- torch.compile, torch.func and jit.trace ---------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("decorator", [lower_precision_function, float_function, promote_function])
@pytest.mark.parametrize("place", ["inside", "around", "none"])
def test_compiled_as_eager(decorator: Any, place: str, backend: str) -> None:
    torch._dynamo.reset()

    @decorator
    def function(x: Tensor, options: dict[str, Tensor]) -> Tensor:
        return x @ torch.ones(2, 2, dtype=x.dtype) + options["y"]

    def outer(x: Tensor, y: Tensor) -> Tensor:
        with mpamp.autocast("cpu", dtype=HALF) if place == "inside" else nullcontext():
            return function(x, {"y": y})

    def run(outer: Any) -> tuple[torch.dtype, Tensor | None]:
        x = tensor(requires_grad=True)
        with mpamp.autocast("cpu", dtype=HALF) if place == "around" else nullcontext():
            y = outer(x, tensor())
        y.float().sum().backward()
        return y.dtype, x.grad

    (dtype, grad), (wanted, wanted_grad) = run(torch.compile(outer, fullgraph=True, backend=backend)), run(outer)
    assert dtype is wanted
    assert torch.equal(grad, wanted_grad)  # type: ignore[arg-type]


def test_functorch_transforms() -> None:
    seen: list[torch.dtype] = []

    @lower_precision_function
    def function(x: Tensor, w: Tensor) -> Tensor:
        seen.append(x.dtype)
        return (x * w).sum()

    weight = torch.nn.Parameter(torch.ones(2))
    with mpamp.autocast("cpu", dtype=HALF):
        grad = torch.func.vmap(torch.func.grad(function), (0, None))(torch.ones(3, 2), weight)
        jacobian = torch.func.jacrev(function, argnums=1)(torch.ones(2), weight)
    assert set(seen) == {HALF}
    assert torch.equal(grad, torch.ones(3, 2))
    assert torch.equal(jacobian, torch.ones(2))


def test_traced() -> None:
    function = lower_precision_function(lambda x, w: x @ w)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(tensor())

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.weight)

    net = Net()
    with mpamp.autocast("cpu", dtype=HALF):
        net(tensor())  # keeps the weight's cast
        traced = torch.jit.trace(net, (tensor(),))
    with torch.no_grad():
        net.weight.zero_()
    assert torch.equal(traced(tensor()), torch.zeros(2, 2, dtype=HALF))
