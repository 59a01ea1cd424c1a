"""Functions and ops that autocast can't see: decorated, registered on modules, classes and objects, or by op name."""

from __future__ import annotations

import collections
import functools
import gc
import math
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp import registration
from mpamp.functions import casting, float_function, lower_precision_function, promote_function
from mpamp.registration import (
    register_float_function,
    register_lower_precision_function,
    register_op,
    register_promote_function,
    unregister_float_function,
    unregister_lower_precision_function,
    unregister_op,
    unregister_promote_function,
)
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


# -- Casts of weights are kept -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "casts"),
    [
        (lambda: mpamp.autocast("cpu", dtype=HALF), 1),
        (lambda: mpamp.autocast("cpu", dtype=HALF, persistent_cache=True), 1),
        (lambda: mpamp.autocast("cpu", dtype=HALF, cache_enabled=False), 3),
        (lambda: torch.autocast("cpu", dtype=HALF), 3),
    ],
    ids=["region", "persistent", "no cache", "torch"],
)
def test_a_weight_is_cast_once_a_region(region: Any, casts: int) -> None:
    weight = torch.nn.Parameter(tensor())
    function = lower_precision_function(lambda x, w: x @ w)
    with WeightCastCounter([weight]) as counter, region():
        for _ in range(3):
            function(tensor(HALF), weight)
    assert counter.count == casts
    mpamp.clear_cache()


def test_a_kept_cast_is_shared_with_ops() -> None:
    weight = torch.nn.Parameter(tensor())
    with WeightCastCounter([weight]) as counter, mpamp.autocast("cpu", dtype=HALF):
        torch.mm(tensor(), weight)
        lower_precision_function(torch.mm)(tensor(), weight)
    assert counter.count == 1


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
        from mpamp.containers import tensors_in

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


# -- Registering -------------------------------------------------------------------------------------

REGISTER = {
    "lower_precision_fp": (register_lower_precision_function, unregister_lower_precision_function),
    "fp32": (register_float_function, unregister_float_function),
    "promote": (register_promote_function, unregister_promote_function),
}


def module() -> Any:
    made = types.ModuleType("extension")
    made.fused = lambda *args: dtypes(*args)  # type: ignore[attr-defined]
    made.constant = 3  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("policy", "got"), [("lower_precision_fp", [HALF, HALF]), ("fp32", [FULL, FULL]), ("promote", [FULL, FULL])]
)
def test_functions_of_a_module(policy: str, got: list[torch.dtype]) -> None:
    register, unregister = REGISTER[policy]
    extension = module()
    original = extension.fused
    register(extension, "fused")
    with mpamp.autocast("cpu", dtype=HALF):
        assert extension.fused(tensor(), tensor(HALF)) == got
    assert extension.fused(tensor(), tensor(HALF)) == [FULL, HALF]
    unregister(extension, "fused")
    assert extension.fused is original


def test_registering_again_is_once() -> None:
    extension = module()
    original = extension.fused
    register_float_function(extension, "fused")
    registered = extension.fused
    register_float_function(extension, "fused")
    assert extension.fused is registered
    unregister_float_function(extension, "fused")
    assert extension.fused is original


def test_the_latest_policy_holds() -> None:
    extension = module()
    original = extension.fused
    register_float_function(extension, "fused")
    register_lower_precision_function(extension, "fused")
    with mpamp.autocast("cpu", dtype=HALF):
        assert extension.fused(tensor()) == [HALF]
    with pytest.raises(ValueError, match="isn't registered as fp32 but as lower_precision_fp"):
        unregister_float_function(extension, "fused")
    unregister_lower_precision_function(extension, "fused")
    assert extension.fused is original


class Base:
    def plain(self, x: Tensor) -> torch.dtype:
        assert isinstance(self, Base)
        return x.dtype

    @staticmethod
    def static(x: Tensor) -> torch.dtype:
        return x.dtype

    @classmethod
    def of_class(cls, x: Tensor) -> torch.dtype:
        assert issubclass(cls, Base)
        return x.dtype

    builtin = torch.sin
    partial = functools.partial(Tensor.sin)


class Sub(Base):
    pass


def call(owner: Any, name: str) -> torch.dtype:
    found = getattr(owner, name)(tensor())
    return found.dtype if isinstance(found, Tensor) else found


@pytest.mark.parametrize("name", ["plain", "static", "of_class", "builtin", "partial"])
@pytest.mark.parametrize("cls", [Base, Sub])
def test_methods_of_a_class(cls: type, name: str) -> None:
    before = dict(vars(cls))
    register_lower_precision_function(cls, name)
    try:
        with mpamp.autocast("cpu", dtype=HALF):
            assert call(cls(), name) is HALF
            assert call(Base(), name) is (HALF if cls is Base else FULL)
            if name != "plain":
                assert call(cls, name) is HALF
    finally:
        unregister_lower_precision_function(cls, name)
    assert dict(vars(cls)) == before
    assert all(vars(cls)[key] is value for key, value in before.items())


def test_a_method_registered_on_a_class_and_on_its_subclass() -> None:
    register_lower_precision_function(Base, "plain")
    register_float_function(Sub, "plain")
    with mpamp.autocast("cpu", dtype=HALF):
        assert [Base().plain(tensor(BRAIN)), Sub().plain(tensor(BRAIN))] == [HALF, FULL]
    unregister_float_function(Sub, "plain")
    unregister_lower_precision_function(Base, "plain")
    with mpamp.autocast("cpu", dtype=HALF):
        assert [Base().plain(tensor(BRAIN)), Sub().plain(tensor(BRAIN))] == [BRAIN, BRAIN]


@pytest.mark.parametrize("name", ["plain", "static", "of_class"])
def test_methods_of_one_object(name: str) -> None:
    one, other = Sub(), Sub()
    register_lower_precision_function(one, name)
    with mpamp.autocast("cpu", dtype=HALF):
        assert [call(one, name), call(other, name)] == [HALF, FULL]
    unregister_lower_precision_function(one, name)
    assert vars(one) == {}
    with mpamp.autocast("cpu", dtype=HALF):
        assert call(one, name) is FULL


def test_a_modules_forward() -> None:
    net = torch.nn.Sequential(torch.nn.ReLU())
    register_lower_precision_function(net[0], "forward")
    with mpamp.autocast("cpu", dtype=HALF):
        assert net(tensor()).dtype is HALF
    unregister_lower_precision_function(net[0], "forward")
    with mpamp.autocast("cpu", dtype=HALF):
        assert net(tensor()).dtype is FULL
    with pytest.raises(TypeError, match="'0' of a Sequential is a module: register its 'forward'"):
        register_lower_precision_function(net, "0")


def test_functions_of_torch() -> None:
    original = torch.nn.functional.silu
    register_float_function(torch.nn.functional, "silu")
    try:
        with mpamp.autocast("cpu"):
            assert torch.nn.SiLU()(tensor(BRAIN)).dtype is FULL
    finally:
        unregister_float_function(torch.nn.functional, "silu")
    assert torch.nn.functional.silu is original


def test_methods_of_tensor() -> None:
    register_float_function(torch.Tensor, "sinc")
    try:
        with mpamp.autocast("cpu"):
            assert tensor(BRAIN).sinc().dtype is FULL
    finally:
        unregister_float_function(torch.Tensor, "sinc")
    assert "sinc" not in vars(torch.Tensor)


def test_names_that_a_module_makes_when_asked() -> None:
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: dtypes  # type: ignore[method-assign]
    register_lower_precision_function(lazy, "fused")
    with mpamp.autocast("cpu", dtype=HALF):
        assert lazy.fused(tensor()) == [HALF]
    unregister_lower_precision_function(lazy, "fused")
    assert "fused" not in vars(lazy)


@pytest.mark.parametrize("register", [pair[0] for pair in REGISTER.values()])
def test_a_missing_function_is_named(register: Any) -> None:
    with pytest.raises(ValueError, match="no function named 'fusde' in module extension; did you mean 'fused'"):
        register(module(), "fusde")
    with pytest.raises(ValueError, match=r"no function named 'forwards' in torch\.nn|in Linear"):
        register(torch.nn.Linear, "forwards")
    with pytest.raises(ValueError, match="no function named 'x' in a Base"):
        register(Base(), "x")


def test_what_isnt_a_function_cant_be_registered() -> None:
    with pytest.raises(TypeError, match="'constant' of module extension can't be registered: this decorates functions"):
        register_float_function(module(), "constant")
    with pytest.raises(TypeError, match=r"'Linear' of module torch\.nn can't be registered"):
        register_float_function(torch.nn, "Linear")


@pytest.mark.parametrize("unregister", [pair[1] for pair in REGISTER.values()])
def test_unregistering_what_isnt_registered(unregister: Any) -> None:
    with pytest.raises(ValueError, match="function 'fused' of module extension isn't registered"):
        unregister(module(), "fused")


def test_what_was_put_on_top_since_isnt_thrown_away() -> None:
    extension = module()
    original = extension.fused
    register_float_function(extension, "fused")
    registered = extension.fused
    on_top = extension.fused = functools.wraps(extension.fused)(lambda *args: registered(*args))
    with pytest.raises(ValueError, match="something that has replaced it since"):
        unregister_float_function(extension, "fused")
    assert extension.fused is on_top
    extension.fused = registered
    unregister_float_function(extension, "fused")
    assert extension.fused is original


def test_a_reference_in_another_module_is_another_function() -> None:
    extension, other = module(), types.ModuleType("other")
    register_float_function(extension, "fused")
    other.fused = extension.fused  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="of module other isn't registered"):
        unregister_float_function(other, "fused")
    unregister_float_function(extension, "fused")


def test_the_apex_names_can_be_made_of_the_core() -> None:
    extension = module()
    registration.register(extension, "fused", mpamp.CastPolicy.BANNED)
    with mpamp.autocast("cpu"), pytest.raises(mpamp.BannedOpError):
        extension.fused(tensor(HALF))
    registration.unregister(extension, "fused", mpamp.CastPolicy.BANNED)


# -- Custom ops --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    made = torch.library.Library("mpamp_test_functions", "DEF")
    made.define("double(Tensor x, Tensor? y=None) -> Tensor")
    made.define("double.scale(Tensor x, float scale) -> Tensor")
    made.define("write(Tensor(a!) x) -> ()")
    made.impl("double", lambda x, y=None: x * 2, "CompositeExplicitAutograd")
    made.impl("double.scale", lambda x, scale: x * scale, "CompositeExplicitAutograd")
    yield torch.ops.mpamp_test_functions
    made._destroy()


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    from mpamp.registry import _registered, set_registered_rules

    for device_type in list(_registered):
        set_registered_rules(device_type, {})
    mpamp.set_op_rules("cpu", None)


NAME = "mpamp_test_functions::double"


@pytest.mark.usefixtures("clean")
def test_an_op_gets_its_policy_in_every_region(library: Any) -> None:
    with mpamp.autocast("cpu", dtype=HALF):
        assert library.double(tensor()).dtype is FULL
    register_op(NAME, "lower_precision_fp")
    with mpamp.autocast("cpu", dtype=HALF):
        assert library.double(tensor()).dtype is HALF
        assert library.double(tensor(), tensor(DOUBLE)).dtype is FULL
        assert library.double.scale(tensor(), 3.0).dtype is HALF
    with torch.autocast("cpu", dtype=HALF):
        assert library.double(tensor()).dtype is FULL
    unregister_op(NAME)
    with mpamp.autocast("cpu", dtype=HALF):
        assert library.double(tensor()).dtype is FULL


@pytest.mark.usefixtures("clean")
def test_a_python_custom_op() -> None:
    @torch.library.custom_op("mpamp_test_functions::triple", mutates_args=())
    def triple(x: Tensor) -> Tensor:
        return x * 3

    triple.register_autograd(lambda ctx, grad: grad * 3)
    register_op(triple, "lower_precision_fp")
    x = tensor(requires_grad=True)
    with mpamp.autocast("cpu", dtype=HALF):
        y = triple(x)
    y.float().sum().backward()
    assert y.dtype is HALF
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 2), 3.0))


@pytest.mark.usefixtures("clean")
def test_single_overloads_and_ops_themselves(library: Any) -> None:
    register_op(f"{NAME}.scale", "lower_precision_fp")
    register_op(library.double.default, "fp32")
    table = mpamp.get_op_table("cpu")
    assert str(table[f"{NAME}.scale"]) == "lower_precision_fp"
    assert str(table[NAME]) == "fp32"
    unregister_op(library.double.default)
    assert [o for o in mpamp.get_op_table("cpu") if o.startswith(NAME)] == [f"{NAME}.scale"]
    register_op(library.double, "promote")
    assert str(mpamp.get_op_table("cpu")[f"{NAME}.scale"]) == "promote"
    unregister_op(library.double)
    assert not [o for o in mpamp.get_op_table("cpu") if o.startswith(NAME)]


@pytest.mark.usefixtures("clean", "library")
def test_every_device_or_one() -> None:
    register_op(NAME, "fp32", device="cpu")
    assert NAME in mpamp.get_op_table("cpu")
    assert NAME not in mpamp.get_op_table("cuda")
    register_op(NAME, {"float16": "promote"})
    assert str(mpamp.get_op_table("cuda").policy(NAME, HALF)) == "promote"
    assert str(mpamp.get_op_table("cpu").policy(NAME, HALF)) == "fp32"  # the one for the device
    unregister_op(NAME, torch.device("cpu", 0))
    assert str(mpamp.get_op_table("cpu").policy(NAME, HALF)) == "promote"
    with pytest.raises(mpamp.OpTableError, match="isn't registered for cpu"):
        unregister_op(NAME, "cpu")


@pytest.mark.usefixtures("clean", "library")
def test_devices_that_are_first_used_later() -> None:
    from mpamp import registry

    register_op(NAME, "fp32")
    kept = registry._devices.pop("mps", None)
    try:
        assert str(mpamp.get_op_table("mps")[NAME]) == "fp32"
    finally:
        registry._devices.pop("mps")
        if kept is not None:
            registry._devices["mps"] = kept


@pytest.mark.usefixtures("clean", "library")
def test_the_users_rules_stay_and_win() -> None:
    mpamp.set_op_rules("cpu", {"gelu": "fp32", NAME: "promote"})
    register_op(NAME, "fp32")
    register_op("aten::silu", "fp32")
    assert [str(mpamp.get_op_table("cpu")[o]) for o in ("gelu", NAME, "silu")] == ["fp32", "promote", "fp32"]
    mpamp.set_op_rules("cpu", None)
    assert "gelu" not in mpamp.get_op_table("cpu")
    assert [str(mpamp.get_op_table("cpu")[o]) for o in (NAME, "silu")] == ["fp32", "fp32"]


@pytest.mark.usefixtures("clean")
def test_regions_made_before_follow_and_open_ones_dont(library: Any) -> None:
    region = mpamp.autocast("cpu", dtype=HALF)
    with region:
        register_op(NAME, "lower_precision_fp")
        assert library.double(tensor()).dtype is FULL
    with region:
        assert library.double(tensor()).dtype is HALF
    register_op(NAME, "fp32")
    with region:
        assert library.double(tensor(HALF)).dtype is FULL


@pytest.mark.usefixtures("clean", "library")
def test_wrong_ops_policies_and_devices() -> None:
    with pytest.raises(mpamp.UnknownOpError, match="did you mean 'double'"):
        register_op("mpamp_test_functions::duoble", "fp32")
    with pytest.raises(mpamp.UnknownOpError, match="write into an argument"):
        register_op("mpamp_test_functions::write", "fp32")
    with pytest.raises(mpamp.UnknownPolicyError, match="fp23"):
        register_op(NAME, "fp23")
    with pytest.raises(mpamp.UnknownDeviceError, match="nosuch"):
        register_op(NAME, "fp32", "nosuch")
    with pytest.raises(TypeError, match="an op is named by a string"):
        register_op(math.sin, "fp32")
    with pytest.raises(mpamp.OpTableError, match="isn't registered for every device"):
        unregister_op(NAME)
    assert NAME not in mpamp.get_op_table("cpu")


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
