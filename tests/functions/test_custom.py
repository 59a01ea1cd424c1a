"""custom_fwd and custom_bwd: backward runs in the autocast state of its forward, and inputs are cast as asked."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp.devices.registry import device_state
from mpamp.engine.marks import NO_MARK
from mpamp.engine.python import kernels
from mpamp.engine.resolving import mark_here
from mpamp.engine.scope import THREAD
from mpamp.functions import setuplink
from mpamp.functions.custom import custom_bwd, custom_fwd
from mpamp.testing import WeightCastCounter
from tests import processes
from tests.paths import search_path

ROOT = Path(__file__).parents[2]
HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
Tensor = torch.Tensor
Function = torch.autograd.Function
REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "torch bf16": lambda: torch.autocast("cpu", dtype=BRAIN),
    "torch fp16": lambda: torch.autocast("cpu", dtype=HALF),
    "bf16": lambda: mpamp.autocast("cpu", dtype=BRAIN),
    "fp16": lambda: mpamp.autocast("cpu", dtype=HALF),
    "mm to fp32": lambda: mpamp.autocast("cpu", ops={"mm": "fp32"}),
    "no cache": lambda: mpamp.autocast("cpu", cache_enabled=False),
    "persistent": lambda: mpamp.autocast("cpu", persistent_cache=True, ops={"mm": {"float16": "fp32"}}),
    "disabled": lambda: mpamp.autocast("cpu", enabled=False),
}
MM_DTYPE = {
    "none": FULL,
    "torch bf16": BRAIN,
    "torch fp16": HALF,
    "bf16": BRAIN,
    "fp16": HALF,
    "mm to fp32": FULL,
    "no cache": BRAIN,
    "persistent": BRAIN,
    "disabled": FULL,
}


def x_of(*shape: int, **options: Any) -> Tensor:
    return torch.ones(*(shape or (4, 4)), requires_grad=True, **options)


def make(fwd: Any = custom_fwd, bwd: Any = custom_bwd) -> Any:
    """Return a Function of each style whose ``seen`` lists the dtypes of a product in forward and in backward."""

    class WithContext(Function):
        seen: ClassVar[list[torch.dtype]] = []

        @staticmethod
        @fwd
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            WithContext.seen.append(x.mm(x).dtype)
            return x.clone()

        @staticmethod
        @bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            WithContext.seen.append(x.mm(x).dtype)
            return grad

    return WithContext


def make_setup(fwd: Any = custom_fwd, bwd: Any = custom_bwd) -> Any:
    class WithSetup(Function):
        seen: ClassVar[list[torch.dtype]] = []

        @staticmethod
        @fwd
        def forward(x: Tensor, unused: Any = None) -> Tensor:
            WithSetup.seen.append(x.mm(x).dtype)
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0])

        @staticmethod
        @bwd
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            WithSetup.seen.append(x.mm(x).dtype)
            return grad, None

    return WithSetup


MAKERS = pytest.mark.parametrize("maker", [make, make_setup])


def state() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        mark_here(),
        len(THREAD.state.entries),
        [s for s in THREAD.state.scopes if s is not None],
    )


# -- Backward follows forward ------------------------------------------------------------------------


@MAKERS
@pytest.mark.parametrize(("forward", "backward"), list(itertools.product(REGIONS, REGIONS)))
def test_backward_has_the_state_of_its_forward(maker: Any, forward: str, backward: str) -> None:
    function = maker()
    with REGIONS[forward]():
        y = function.apply(x_of())
    before = state()
    with REGIONS[backward]():
        inside = state()
        y.sum().backward()
        assert state() == inside
    assert state() == before
    assert function.seen == [MM_DTYPE[forward]] * 2


@MAKERS
@pytest.mark.parametrize("forward", REGIONS)
@pytest.mark.parametrize("backward", ["none", "fp16"])
def test_backward_on_another_thread_has_the_state_of_its_forward(maker: Any, forward: str, backward: str) -> None:
    function = maker()
    with REGIONS[forward]():
        y = function.apply(x_of())

    def work() -> None:
        with REGIONS[backward]():
            y.sum().backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert function.seen == [MM_DTYPE[forward]] * 2


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="autograd starts threads for accelerators only")
@MAKERS
def test_backward_on_an_accelerators_autograd_thread(maker: Any) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    for options, dtype in (({"dtype": BRAIN}, BRAIN), ({"dtype": HALF}, HALF), ({"ops": {"mm": "fp32"}}, FULL)):
        function = maker()
        with mpamp.autocast(device, **options):  # type: ignore[arg-type]
            y = function.apply(x_of(device=device))
        y.sum().backward()
        assert function.seen == [dtype] * 2


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(getattr(torch._C, "_acc", None), "create_empty_tensor"),
    reason="this torch has no devices in pure Python",
)
def test_backward_on_a_devices_own_autograd_thread() -> None:
    script = ROOT / "tests" / "npy_backward_thread.py"
    environment = {**os.environ, "PYTHONPATH": search_path(ROOT)}
    done = processes.python(str(script), env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["other", "other", "other", "same"]


def test_backward_keeps_forwards_table_when_the_rules_change() -> None:
    function = make()
    with mpamp.autocast("cpu"):
        y = function.apply(x_of())
    mpamp.set_op_rules("cpu", {"mm": "fp32"})
    try:
        y.sum().backward()
    finally:
        mpamp.set_op_rules("cpu", None)
    assert function.seen == [BRAIN, BRAIN]


def test_backward_of_torchs_region_runs_torchs_kernels() -> None:
    seen: list[torch.dtype] = []

    class F(Function):
        @staticmethod
        @custom_fwd
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(torch.nn.functional.gelu(grad.bfloat16()).dtype)
            return grad

    mpamp.set_op_rules("cpu", {"gelu": "fp32"})
    try:
        for ops in (None, {"silu": "fp32"}):
            with torch.autocast("cpu", dtype=BRAIN):
                y = F.apply(x_of())
            with mpamp.autocast("cpu", ops=ops):
                y.sum().backward()
    finally:
        mpamp.set_op_rules("cpu", None)
    assert seen == [BRAIN, BRAIN]


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [({}, 1, 1), ({"cache_enabled": False}, 2, 2), ({"persistent_cache": True}, 1, 0)],
    ids=str,
)
def test_casts_of_weights_are_kept_as_in_forward(options: dict[str, bool], forward: int, backward: int) -> None:
    class F(Function):
        @staticmethod
        @custom_fwd
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.mm(weight).mm(weight)

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.mm(weight).mm(weight).float()

    weight = torch.nn.Parameter(torch.ones(4, 4))
    with WeightCastCounter([weight]) as casts:
        with mpamp.autocast("cpu", **options):  # type: ignore[arg-type]
            y = F.apply(x_of())
        assert casts.count == forward
        y.float().sum().backward()
        assert casts.count == forward + backward
    mpamp.clear_cache()


def test_state_is_restored_after_an_error_in_backward() -> None:
    class F(Function):
        @staticmethod
        @custom_fwd
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("mine")

    for forward, backward in itertools.product(REGIONS, REGIONS):
        with REGIONS[forward]():
            y = F.apply(x_of())
        before = state()
        with REGIONS[backward](), pytest.raises(RuntimeError, match="mine"):
            y.sum().backward()
        assert state() == before
    assert mark_here() is NO_MARK


def test_double_backward_follows_forward_too() -> None:
    class Square(Function):
        seen: ClassVar[list[torch.dtype]] = []

        @staticmethod
        @custom_fwd
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            Square.seen.append(x.mm(x).dtype)
            return x**3

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            Square.seen.append(x.mm(x).dtype)
            return 3 * Triple.apply(x) * grad

    Triple = make()
    x = x_of()
    with mpamp.autocast("cpu", dtype=HALF):
        y = Square.apply(x).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    assert Square.seen == [HALF, HALF]
    assert Triple.seen == [HALF]
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert Triple.seen == [HALF, HALF]
    assert torch.equal(second, torch.full_like(x, 3.0))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("options", [{"dtype": HALF}, {"ops": {"mm": "fp32"}}])
@MAKERS
def test_recompute_in_checkpointing(maker: Any, options: dict[str, Any], use_reentrant: bool) -> None:
    function = maker()
    with mpamp.autocast("cpu", **options):
        y = checkpoint(function.apply, x_of(), use_reentrant=use_reentrant)
    y.sum().backward()
    assert function.seen == [HALF if "dtype" in options else FULL] * 3  # forward, recompute, backward


def test_several_devices_each_keep_theirs() -> None:
    states: list[Any] = []

    class F(Function):
        @staticmethod
        @custom_fwd
        def forward(ctx: Any, x: Tensor, scalar: Tensor) -> Tensor:
            states.append(ctx._mpamp_autocast)
            states.append((ctx._fwd_used_autocast, ctx._dtype))
            return x.clone()

        backward = None  # type: ignore[assignment]

    with FakeTensorMode(), mpamp.autocast("cuda", dtype=BRAIN):
        F.apply(torch.ones(2, device="cuda"), torch.ones(()))
        F.apply(torch.ones(()), torch.ones(2, device="cuda"))
    first, torchs, second, torchs_too = states
    assert [(s.device_type, s.enabled) for s in first] == [("cuda", True), ("cpu", False)]
    assert [(s.device_type, s.enabled) for s in second] == [("cpu", False), ("cuda", True)]
    assert torchs == torchs_too == (True, BRAIN)


def test_one_device_of_several_can_be_picked() -> None:
    def cast_to(**options: Any) -> list[torch.dtype]:
        class F(Function):
            @staticmethod
            @custom_fwd(cast_inputs=HALF, **options)
            def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
                seen.extend([x.dtype, y.dtype])
                return x.clone()

        seen: ClassVar[list[torch.dtype]] = []
        with FakeTensorMode(), mpamp.autocast("cuda"), mpamp.autocast("cpu"):
            F.apply(torch.ones(2, device="cuda"), torch.ones(2))
        return seen

    assert cast_to() == [HALF, HALF]
    assert cast_to(device_type="cuda") == [HALF, FULL]
    assert cast_to(device_type="cpu") == [FULL, HALF]


def test_backward_can_restore_one_device_of_several() -> None:
    @custom_fwd
    def forward(ctx: Any, x: Tensor, y: Tensor) -> None:
        pass

    def backward(ctx: Any) -> list[bool]:
        return [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]

    ctx = SimpleNamespace()
    with FakeTensorMode():
        with mpamp.autocast("cuda"), mpamp.autocast("cpu"):
            forward(ctx, torch.ones(2), torch.ones(2, device="cuda"))
        assert custom_bwd(backward)(ctx) == [True, True]
        assert custom_bwd(backward, device_type="cuda")(ctx) == [False, True]
        assert custom_bwd(backward, device_type="cpu")(ctx) == [True, False]


def test_inputs_that_no_region_can_cover_are_fine() -> None:
    function = make()
    y = function.apply(torch.ones(2, 2, device="meta", requires_grad=True))
    y.sum().backward()
    assert function.seen == [FULL, FULL]


# -- Functions with a setup_context ------------------------------------------------------------------


def test_nothing_is_written_on_the_users_tensors() -> None:
    x = x_of()
    with mpamp.autocast("cpu"):
        make_setup().apply(x)
    assert vars(x) == {}


def test_subclasses_made_later_are_found() -> None:
    base = make_setup()
    base.apply(x_of())

    class Sub(base):  # type: ignore[misc,valid-type]
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0] * 2)

    with mpamp.autocast("cpu", dtype=HALF):
        y = Sub.apply(x_of())
    base.seen.clear()
    y.sum().backward()
    assert base.seen == [HALF]


def test_a_subclass_with_its_own_forward_has_its_own_rule() -> None:
    base = make_setup()
    base.apply(x_of())

    class Sub(base):  # type: ignore[misc,valid-type]
        @staticmethod
        @custom_fwd(cast_inputs=HALF)
        def forward(x: Tensor, unused: Any = None) -> Tensor:
            return x.clone()

    with mpamp.autocast("cpu"):
        y = Sub.apply(x_of())
    base.seen.clear()
    y.float().sum().backward()
    assert y.dtype is HALF
    assert base.seen == [HALF]  # the saved input is the cast one, and autocast is off


def test_a_decorator_above_ours_hides_nothing() -> None:
    import functools

    def outer(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any) -> Any:
            return function(*args)

        return inner

    function = make_setup(fwd=lambda f: outer(custom_fwd(f)))
    with mpamp.autocast("cpu", dtype=HALF):
        y = function.apply(x_of())
    y.sum().backward()
    assert function.seen == [HALF, HALF]


def test_keyword_arguments_and_defaults() -> None:
    class F(Function):
        @staticmethod
        @custom_fwd(cast_inputs=HALF)
        def forward(x: Tensor, scale: float = 2.0, *, other: Tensor | None = None) -> Tensor:
            assert other is not None
            assert other.dtype is HALF
            return x * scale

    seen = F.forward(torch.ones(2), other=torch.ones(2, dtype=HALF))
    assert seen.dtype is FULL  # no region
    with mpamp.autocast("cpu"):
        assert F.forward(torch.ones(2), scale=3.0, other=torch.ones(2)).dtype is HALF


def test_functorch_transforms() -> None:
    class Cube(Function):
        generate_vmap_rule = True
        seen: ClassVar[list[torch.dtype]] = []

        @staticmethod
        @custom_fwd
        def forward(x: Tensor) -> Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            Cube.seen.append(torch.ones(2, 2).mm(torch.ones(2, 2)).dtype)
            return 3 * x**2 * grad

    kernels.tidy(device_state("cpu"))  # functorch can't pass plain numbers to a kernel on mul, if a test left one
    x = torch.arange(3.0)
    for options, dtype in (({"dtype": HALF}, HALF), ({"ops": {"mm": "fp32"}}, FULL)):
        with mpamp.autocast("cpu", **options):  # type: ignore[arg-type]
            grad = torch.func.vmap(torch.func.grad(Cube.apply))(x)
            jacobian = torch.func.jacrev(lambda x: Cube.apply(x).sum())(x)
        assert torch.equal(grad, 3 * x**2)
        assert torch.equal(jacobian, 3 * x**2)
        assert set(Cube.seen) == {dtype}
        Cube.seen.clear()


# -- cast_inputs -------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


class Items(list):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass
class Record:
    value: Tensor


def call(value: Any, region: Any = None, **options: Any) -> Any:
    """Return ``value`` as the forward of a Function that casts inputs gets it."""
    got: list[Any] = []

    class F(Function):
        @staticmethod
        @custom_fwd(cast_inputs=HALF, **options)
        def forward(ctx: Any, value: Any) -> Tensor:
            got.append(value)
            assert not torch.is_autocast_enabled("cpu") or region is not None
            return torch.ones(1)

    with mpamp.autocast("cpu") if region is None else region:
        F.apply(value)
    return got[0]


def test_eligible_inputs_are_cast() -> None:
    def cast(tensor: Tensor) -> torch.dtype:
        return call(tensor, device_type="cpu").dtype  # type: ignore[no-any-return]

    dtypes = {d: cast(torch.ones(2).to(d)) for d in (FULL, BRAIN, HALF, DOUBLE, torch.int64, torch.bool)}
    assert dtypes == {
        FULL: HALF,
        BRAIN: HALF,
        HALF: HALF,
        DOUBLE: DOUBLE,
        torch.int64: torch.int64,
        torch.bool: torch.bool,
    }
    assert cast(torch.ones(2, dtype=torch.complex64)) is torch.complex64
    assert cast(torch.ones(2, device="meta")) is FULL


@pytest.mark.parametrize(
    "value",
    [
        [torch.ones(1)],
        (torch.ones(1), "a"),
        Pair(torch.ones(1), 2),
        Items([torch.ones(1)]),
        {"a": torch.ones(1)},
        collections.OrderedDict(b=torch.ones(1), a=torch.ones(1)),
        collections.defaultdict(list, a=torch.ones(1)),
        torch.max(torch.ones(2, 2), 0),
        torch.nn.utils.rnn.PackedSequence(torch.ones(2), torch.ones(2, dtype=torch.int64)),
        {"deep": [Pair({"x": torch.ones(1)}, (torch.ones(1),))]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_keep_their_class(value: Any) -> None:
    from mpamp.functions.containers import tensors_in

    got = call(value)
    assert type(got) is type(value)
    assert [t.dtype for t in tensors_in(got) if t.is_floating_point()] == [
        HALF for t in tensors_in(value) if t.is_floating_point()
    ]
    assert all(t.dtype is not HALF for t in tensors_in(value)), "the caller's own were changed"
    if isinstance(value, collections.OrderedDict | collections.defaultdict):
        assert list(got) == list(value)
    if isinstance(value, collections.defaultdict):
        assert got.default_factory is list


def test_what_has_nothing_to_cast_is_passed_as_it_is() -> None:
    import numpy

    array = numpy.ones(2)
    for value in ([1, torch.ones(1, dtype=torch.int64)], {"a": 1}, Record(torch.ones(1)), "text", b"b", array, None):
        assert call(value, device_type="cpu") is value
    for value in ({1, 2}, iter([torch.ones(1)]), (i for i in range(2)), range(3), torch.Size([2])):
        assert call(value, device_type="cpu") is value


def test_keys_stay() -> None:
    key = torch.ones(1)
    assert next(iter(call({key: torch.ones(1)}))) is key


@pytest.mark.parametrize("region", ["none", "disabled"])
def test_outside_of_regions_nothing_is_cast(region: str) -> None:
    value = [torch.ones(1)]
    assert call(value, REGIONS[region]()) is value


@MAKERS
@pytest.mark.parametrize("region", ["bf16", "torch bf16", "mm to fp32"])
def test_forward_and_backward_run_with_autocast_off(maker: Any, region: str) -> None:
    function = maker(fwd=custom_fwd(cast_inputs=HALF))
    with REGIONS[region]():
        y = function.apply(x_of())
        y.float().sum().backward()
    assert function.seen == [HALF, HALF]


# -- As torch's own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cast_inputs", [None, FULL, HALF])
@pytest.mark.parametrize("dtype", [FULL, BRAIN, HALF, DOUBLE])
@pytest.mark.parametrize(
    ("forward", "backward"), list(itertools.product(["none", "torch bf16", "torch fp16"], repeat=2))
)
def test_same_as_torch(cast_inputs: Any, dtype: torch.dtype, forward: str, backward: str) -> None:
    def run(fwd: Any, bwd: Any) -> Any:
        function = make(fwd(device_type="cpu", cast_inputs=cast_inputs), bwd(device_type="cpu"))
        x = x_of(dtype=dtype)
        with REGIONS[forward]():
            y = function.apply(x)
        with REGIONS[backward]():
            y.sum().backward()
        return y.dtype, x.grad.dtype if x.grad is not None else None, function.seen

    assert run(custom_fwd, custom_bwd) == run(torch.amp.custom_fwd, torch.amp.custom_bwd)


@pytest.mark.parametrize("region", ["torch fp16", "fp16", "disabled", "none"])
@pytest.mark.parametrize("cast_inputs", [None, HALF])
def test_either_half_may_be_torchs(region: str, cast_inputs: Any) -> None:
    torch_fwd = torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
    torch_bwd = torch.amp.custom_bwd(device_type="cpu")
    for fwd, bwd in (
        (torch_fwd, custom_bwd),
        (torch_fwd, custom_bwd(device_type="cpu")),
        (custom_fwd(cast_inputs=cast_inputs), torch_bwd),
    ):
        function = make(fwd, bwd)
        with REGIONS[region]():
            y = function.apply(x_of())
        with mpamp.autocast("cpu", dtype=BRAIN):
            y.float().sum().backward()
        assert function.seen == [MM_DTYPE[region]] * 2


def test_forward_called_by_hand_takes_any_object_as_context() -> None:
    function = make()
    ctx = SimpleNamespace(save_for_backward=lambda *tensors: None, saved_tensors=(torch.ones(2, 2),))
    with mpamp.autocast("cpu", dtype=HALF):
        function.forward(ctx, torch.ones(2, 2))
    function.backward(ctx, torch.ones(2, 2))
    with mpamp.autocast("cpu"):
        function.backward(ctx, torch.ones(2, 2))
    assert function.seen == [HALF] * 3


@pytest.mark.parametrize("forward", REGIONS)
@pytest.mark.parametrize("backward", ["bf16", "mm to fp32", "torch fp16"])
def test_backward_called_by_hand_leaves_the_region_as_it_was(forward: str, backward: str) -> None:
    function = make()
    ctx = SimpleNamespace(save_for_backward=lambda *tensors: None, saved_tensors=(torch.ones(2, 2),))
    with REGIONS[forward]():
        function.forward(ctx, torch.ones(2, 2))
    with REGIONS[backward]():
        before = state()
        function.backward(ctx, torch.ones(2, 2))
        assert state() == before
    assert function.seen == [MM_DTYPE[forward]] * 2


def test_names_and_docs_are_kept() -> None:
    @custom_fwd
    def forward(ctx: Any) -> None:
        """Do it."""

    assert (forward.__name__, forward.__doc__) == ("forward", "Do it.")
    assert custom_bwd(forward).__name__ == "forward"


# -- Errors ------------------------------------------------------------------------------------------


def test_a_forward_without_its_decorator_is_an_error() -> None:
    function = make(fwd=lambda f: f)
    y = function.apply(x_of())
    with pytest.raises(mpamp.RegionError, match="decorate this Function's forward too"):
        y.sum().backward()


@pytest.mark.parametrize("decorator", [custom_fwd, custom_bwd])
def test_wrong_arguments(decorator: Any) -> None:
    with pytest.raises(ValueError, match="device_type is a str or None, got int"):
        decorator(device_type=3)
    with pytest.raises(ValueError, match="device_type is a str"):
        decorator(device_type=torch.device("cpu"))
    with pytest.raises(TypeError, match="go by keyword"):
        decorator("cpu")


def test_wrong_cast_inputs() -> None:
    with pytest.raises(TypeError, match=r"cast_inputs is a torch\.dtype or None, got 16"):
        custom_fwd(cast_inputs=16)  # type: ignore[call-overload]


def test_a_device_that_nothing_covers() -> None:
    function = make(fwd=custom_fwd(device_type="meta"))
    with pytest.raises(mpamp.UnknownDeviceError, match="meta"):
        function.apply(x_of())


# -- torch.compile -----------------------------------------------------------------------------------


def compiled_probe(style: str, **options: Any) -> Any:
    """Return a Function whose gradient tells the dtype of a product in its backward: 2 bf16, 3 fp16, 5 fp32."""

    def gradient(x: Tensor) -> Tensor:
        code = {BRAIN: 2.0, HALF: 3.0, FULL: 5.0}[x.mm(x).dtype]
        return torch.full_like(x, code, dtype=FULL)

    class WithContext(Function):
        @staticmethod
        @custom_fwd(**options)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.mm(x)

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return gradient(ctx.saved_tensors[0])

    class WithSetup(Function):
        @staticmethod
        @custom_fwd(**options)
        def forward(x: Tensor) -> Tensor:
            return x.mm(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return gradient(ctx.saved_tensors[0])

    return {"context": WithContext, "setup": WithSetup}[style]


# Dynamo makes an instance of Function where it traces one.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("style", ["context", "setup"])
@pytest.mark.parametrize(
    ("backend", "options"), [("aot_eager", {}), ("aot_eager", {"cast_inputs": HALF}), ("eager", {})], ids=str
)
@pytest.mark.parametrize("region", ["torch bf16", "fp16", "mm to fp32", "disabled"])
@pytest.mark.parametrize("place", ["inside", "around"])
def test_compiled_as_eager(style: str, options: Any, region: str, place: str, backend: str) -> None:
    def run(function: Any, compiled: Callable[[Any], Any]) -> tuple[torch.dtype, float]:
        def inside(x: Tensor) -> Tensor:
            with REGIONS[region]():
                return function.apply(x)  # type: ignore[no-any-return]

        x = x_of()
        if place == "inside":
            y = compiled(inside)(x)
        else:
            with REGIONS[region]():
                y = compiled(lambda x: function.apply(x))(x)
        y.float().sum().backward()
        assert x.grad is not None
        return y.dtype, x.grad[0, 0].item()

    def compiled(f: Any) -> Any:
        return torch.compile(f, fullgraph=True, backend=backend)

    torch._dynamo.reset()
    function = compiled_probe(style, **options)
    assert run(function, compiled) == run(function, lambda f: f)  # compiled before its first eager call
    torch._dynamo.reset()
    assert run(function, compiled) == run(function, lambda f: f)


@pytest.mark.skipif(setuplink.FUNCTION_APPLY is None, reason="no frame tells which Function a forward is of")
def test_the_cost_of_a_call_does_not_depend_on_the_number_of_functions() -> None:

    class F(Function):
        @staticmethod
        @custom_fwd(cast_inputs=HALF)
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.seen = inputs[0].dtype

    def calls() -> int:
        counted: list[str] = []
        with mpamp.autocast("cpu"):
            F.apply(torch.ones(1))
            sys.setprofile(lambda frame, event, argument: counted.append(event))
            try:
                F.apply(torch.ones(1))
            finally:
                sys.setprofile(None)
        return len(counted)

    before = calls()
    others = [type(f"F{n}", (Function,), {}) for n in range(500)]
    derived = [type(f"D{n}", (F,), {}) for n in range(500)]
    assert calls() == before
    assert len(others) == len(derived)


@pytest.mark.parametrize("device_type", ["cpu", None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_backward_of_cast_inputs_has_the_dtype_of_its_forward(dtype: torch.dtype, device_type: str | None) -> None:
    """It is off there, and says what torch's says, in whatever region backward is called."""
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        @mpamp.custom_fwd(device_type=device_type, cast_inputs=torch.float32)
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            return a * 2

        @staticmethod
        @mpamp.custom_bwd(device_type=device_type)
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return grads[0] * 2

    x, other = torch.ones(2, requires_grad=True), torch.bfloat16 if dtype is torch.float16 else torch.float16
    with mpamp.autocast("cpu", dtype=dtype):
        y = Product.apply(x)
    y.sum().backward(retain_graph=True)
    with mpamp.autocast("cpu", dtype=other):
        y.sum().backward()
        assert torch.get_autocast_dtype("cpu") is other
    assert seen == [(False, dtype)] * 2
