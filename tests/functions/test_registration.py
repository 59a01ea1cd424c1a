"""Functions and ops that get a policy from outside: registered on modules, classes and objects, or by op name."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import math
import pickle
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mpamp
from mpamp.functions import registration
from mpamp.functions.registration import (
    register_float_function,
    register_lower_precision_function,
    register_op,
    register_promote_function,
    unregister_float_function,
    unregister_lower_precision_function,
    unregister_op,
    unregister_promote_function,
)

HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
Tensor = torch.Tensor


def tensor(dtype: torch.dtype = FULL, **options: Any) -> Tensor:
    return torch.ones(2, 2, dtype=dtype, **options)


def dtypes(*values: Any) -> list[torch.dtype]:
    return [v.dtype for v in values]


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
    from mpamp.devices.registry import _registered, unregister_rules

    for device_type, rules in list(_registered.items()):
        unregister_rules(device_type, list(rules))
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
    from mpamp.devices import registry

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


# -- Copies of an object that a function is registered on ------------------------------------------------------


def _deepcopied(module: Any) -> Any:
    return copy.deepcopy(module)


def _pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def _saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _averaged(module: Any) -> Any:
    return torch.optim.swa_utils.AveragedModel(module).module


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("duplicate", [_deepcopied, _pickled, _saved, _averaged])
def test_a_copy_runs_its_own_weights(duplicate: Any, inner: bool) -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    register_float_function(layer, "forward")
    module = torch.nn.Sequential(layer) if inner else layer
    other = duplicate(module)
    (mine,), (its,) = module.parameters(), other.parameters()
    with torch.no_grad():
        mine.fill_(1.0)
        its.fill_(2.0)
    x = torch.ones(1, 2, dtype=BRAIN)
    with mpamp.autocast("cpu", dtype=BRAIN):
        assert (module(x).tolist(), other(x).tolist()) == ([[2.0, 2.0]], [[4.0, 4.0]])
        assert (module(x).dtype, other(x).dtype) == (FULL, FULL)
    copied = other[0] if inner else other
    unregister_float_function(copied, "forward")
    with mpamp.autocast("cpu", dtype=BRAIN):
        assert (module(x).dtype, other(x).dtype) == (FULL, BRAIN)


def test_an_object_is_freed_with_its_registration() -> None:
    layer = torch.nn.Linear(2, 2)
    register_float_function(layer, "forward")
    reference = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert reference() is None
    finally:
        gc.enable()


def test_a_registered_method_shows_what_it_was() -> None:
    layer = torch.nn.Linear(2, 2)
    before = inspect.signature(layer.forward)
    register_float_function(layer, "forward")
    assert inspect.signature(layer.forward) == before
    assert (layer.forward.__name__, layer.forward.__self__) == ("forward", layer)


def test_a_compiled_module_with_a_registered_forward() -> None:
    layer = torch.nn.Linear(2, 2)
    register_float_function(layer, "forward")
    x = torch.ones(1, 2, dtype=BRAIN)
    with mpamp.autocast("cpu", dtype=BRAIN):
        assert torch.compile(layer, backend="eager")(x).dtype is FULL
