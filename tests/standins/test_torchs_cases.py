"""What torch documents of autocast and GradScaler holds as well with mpamp behind the names: each case runs on both."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import pickle
import threading
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.checkpoint import checkpoint

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = [
    pytest.mark.usefixtures("whose"),
    pytest.mark.skipif(
        torch.__version__ < torch.torch_version.TorchVersion("2.13"), reason="older torch does some of it otherwise"
    ),
]


def product(dtype: torch.dtype = FP32) -> torch.dtype:
    return (torch.ones(2, 2, dtype=dtype) @ torch.ones(2, 2, dtype=dtype)).dtype


# -- autocast: arguments -------------------------------------------------------------------------------


def test_attributes() -> None:
    region = torch.autocast("cpu", dtype=FP16, enabled=True, cache_enabled=False)
    assert (region.device, region.fast_dtype, region._enabled, region._cache_enabled) == ("cpu", FP16, True, False)
    assert region.custom_backend_name == torch._C._get_privateuse1_backend_name()
    assert torch.autocast("cpu").fast_dtype is BF16
    assert torch.autocast("cpu").device == "cpu"
    assert torch.autocast("cpu")._cache_enabled is True


def test_positional_order() -> None:
    region = torch.amp.autocast("cpu", FP16, False, False)
    assert (region.device, region.fast_dtype, region._enabled, region._cache_enabled) == ("cpu", FP16, False, False)
    assert list(inspect.signature(torch.autocast).parameters) == ["device_type", "dtype", "enabled", "cache_enabled"]
    assert inspect.signature(torch.autocast).parameters["cache_enabled"].default is None


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_forms_for_one_device(name: str) -> None:
    form: Any = getattr(torch, name).amp.autocast
    with pytest.warns(FutureWarning, match=rf"`torch\.{name}\.amp\.autocast\(args\.\.\.\)` is deprecated") as caught:
        region = form(False, BF16, False)
    assert [w.filename for w in caught] == [__file__]
    assert (region.device, region.fast_dtype, region._enabled, region._cache_enabled) == (name, BF16, False, False)
    assert isinstance(region, torch.autocast)
    assert list(inspect.signature(form).parameters) == ["enabled", "dtype", "cache_enabled"]


def test_a_form_for_one_device_casts() -> None:
    with pytest.warns(FutureWarning), torch.cpu.amp.autocast():
        assert product() is BF16


def test_device_type_is_a_string() -> None:
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        torch.autocast(torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="nonesuch"):
        torch.autocast("nonesuch")
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.autocast("meta")
    with pytest.raises(TypeError):
        torch.autocast()  # type: ignore[call-arg]


def test_a_dtype_that_the_processor_has_not() -> None:
    with pytest.warns(UserWarning, match="In CPU autocast, but the target dtype is not supported") as caught:
        region = torch.autocast("cpu", dtype=FP32)
    assert [w.filename for w in caught] == [__file__]
    with region:
        assert not torch.is_autocast_enabled("cpu")
        assert product() is FP32


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        region = torch.autocast("cuda")
    with region:
        assert not torch.is_autocast_enabled("cuda")
        assert product() is FP32


# -- autocast: state -----------------------------------------------------------------------------------


def test_state_inside_and_after() -> None:
    before = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", dtype=FP16) as entered:
        assert isinstance(entered, torch.autocast)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is FP16
        assert torch.is_autocast_cache_enabled()
        assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is before
    assert torch.is_autocast_cache_enabled()


def test_state_without_a_cache() -> None:
    with torch.autocast("cpu", cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()
        with torch.autocast("cpu", cache_enabled=True):
            assert torch.is_autocast_cache_enabled()
        assert not torch.is_autocast_cache_enabled()
        assert torch.autocast("cpu")._cache_enabled is False
    assert torch.is_autocast_cache_enabled()


def test_cache_flag_put_off_and_back() -> None:
    with torch.autocast("cpu"):
        kept = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_cache_enabled(kept)
        assert torch.is_autocast_cache_enabled()
        assert product() is BF16
    assert torch.is_autocast_cache_enabled()


def test_nesting() -> None:
    with torch.autocast("cpu", dtype=BF16):
        assert product() is BF16
        with torch.autocast("cpu", dtype=FP16):
            assert product() is FP16
            with torch.autocast("cpu", enabled=False):
                assert torch.get_autocast_dtype("cpu") is FP16
                assert product() is FP32
                with torch.autocast("cpu"):
                    assert product() is FP16
            assert product() is FP16
        assert product() is BF16
    assert product() is FP32


def test_a_disabled_region_has_its_dtype() -> None:
    before = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", dtype=FP16, enabled=False):
        assert torch.get_autocast_dtype("cpu") is FP16
        assert product() is FP32
        with torch.autocast("cpu"):
            assert product() is FP16
    assert torch.get_autocast_dtype("cpu") is before


def test_one_object_after_another() -> None:
    region = torch.autocast("cpu")
    for _ in range(3):
        with region:
            assert product() is BF16
        assert product() is FP32


def test_an_exception_leaves_the_state_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), torch.autocast("cpu", dtype=FP16):
        _ = 1 / 0
    assert product() is FP32
    assert torch.get_autocast_dtype("cpu") is BF16


def test_exit_stacks_and_hands() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu"))
        assert product() is BF16
    region = torch.autocast("cpu")
    assert region.__enter__() is region
    assert product() is BF16
    assert not region.__exit__(None, None, None)
    assert product() is FP32


def test_state_is_the_threads() -> None:
    seen: list[Any] = []
    with torch.autocast("cpu"):
        thread = threading.Thread(target=lambda: seen.append((torch.is_autocast_enabled("cpu"), product())))
        thread.start()
        thread.join()
    assert seen == [(False, FP32)]


# -- autocast: as a decorator, class, value ------------------------------------------------------------


def test_decorator() -> None:
    @torch.autocast("cpu", dtype=FP16)
    def function(x: torch.Tensor, *, times: int = 1) -> Any:
        """Text."""
        return (x @ x).dtype, times

    assert function(torch.ones(2, 2), times=3) == (FP16, 3)
    assert (function.__name__, function.__doc__) == ("function", "Text.")
    assert str(inspect.signature(function)) == "(x: 'torch.Tensor', *, times: 'int' = 1) -> 'Any'"
    assert product() is FP32

    class Model(torch.nn.Linear):
        @torch.autocast("cpu")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    assert Model(2, 2)(torch.ones(1, 2)).dtype is BF16
    with pytest.raises(TypeError, match="requires a callable"):
        torch.autocast("cpu")(3)  # type: ignore[call-arg]


def test_decorated_partials_and_objects() -> None:
    function = functools.wraps(product)(functools.partial(product))
    assert torch.autocast("cpu")(function)() is BF16


class Logging(torch.autocast):
    """As libraries derive from it: a fixed device, and more to do on the way."""

    def __init__(self, enabled: bool = True) -> None:
        super().__init__("cpu", enabled=enabled, dtype=FP16, cache_enabled=True)
        self.log: list[str] = []

    def __enter__(self) -> Any:
        self.log.append("in")
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.log.append("out")
        return super().__exit__(*error)


def test_subclass() -> None:
    region = Logging()
    assert isinstance(region, torch.autocast)
    assert issubclass(Logging, torch.amp.autocast)
    with region as entered:
        assert entered is region
        assert product() is FP16
    assert region.log == ["in", "out"]
    with Logging(enabled=False):
        assert product() is FP32
    assert torch.autocast.__enter__ is not Logging.__enter__
    assert region(product)() is FP16
    assert region.log == ["in", "out"] * 2


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("make", [lambda: torch.autocast("cpu", dtype=FP16), Logging])
def test_copies_and_pickles(make: Any, again: Any) -> None:
    region = again(make())
    assert type(region) is type(make())
    assert vars(region) == vars(make())
    with region:
        assert product() is FP16


def test_names_are_one_class() -> None:
    assert torch.autocast is torch.amp.autocast is torch.amp.autocast_mode.autocast
    assert issubclass(torch.cuda.amp.autocast, torch.autocast)
    assert issubclass(torch.cpu.amp.autocast, torch.autocast)
    assert torch.autocast.__name__ == "autocast"
    assert torch.autocast.__module__ == "torch.amp.autocast_mode"


# -- autocast: what it does ----------------------------------------------------------------------------


def test_training_and_weights_that_change() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu"):
            loss = model(torch.ones(4, 2)).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is FP32
    assert losses == [4.0, 1.0, 0.25]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_recomputes_in_the_forwards_region(use_reentrant: bool) -> None:
    seen: list[Any] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(((x.detach() @ x.detach()).dtype, torch.is_autocast_enabled("cpu")))
        return x @ x

    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=FP16):
        y = checkpoint(block, x, use_reentrant=use_reentrant)
    y.float().sum().backward()
    assert seen == [(FP16, True)] * 2
    assert x.grad is not None


def test_gradients_have_the_dtypes_of_their_tensors() -> None:
    x, w = torch.ones(2, 2, requires_grad=True), torch.nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu"):
        y = torch.nn.functional.linear(x, w)
    assert y.dtype is BF16
    y.sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (FP32, FP32)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traced_functions_and_scripts() -> None:
    with torch.autocast("cpu", cache_enabled=False):
        traced = torch.jit.trace(lambda x: x @ x, torch.ones(2, 2))
    assert traced(torch.ones(2, 2)).dtype is BF16

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    assert torch.jit.script(function)(torch.ones(2, 2)).dtype is BF16


# -- custom_fwd and custom_bwd -------------------------------------------------------------------------


def _function(cast_inputs: torch.dtype | None = None) -> Any:
    class Product(torch.autograd.Function):
        seen: ClassVar[list[Any]] = []

        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            Product.seen.append((a.dtype, torch.is_autocast_enabled("cpu")))
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            Product.seen.append((a.dtype, torch.is_autocast_enabled("cpu")))
            return grad @ b.T, a.T @ grad

    return Product


@pytest.mark.parametrize(
    ("cast_inputs", "inside", "out"),
    [(None, (FP32, True), BF16), (FP32, (FP32, False), FP32), (FP16, (FP16, False), FP16)],
)
def test_custom_functions(cast_inputs: Any, inside: Any, out: torch.dtype) -> None:
    function = _function(cast_inputs)
    a, b = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu"):
        y = function.apply(a, b)
    assert y.dtype is out
    y.sum().backward()
    assert function.seen == [inside] * 2
    assert a.grad is not None
    function.seen.clear()
    function.apply(a, b).sum().backward()
    assert function.seen == [(FP32, False)] * 2


def test_custom_functions_are_called_as_torchs() -> None:
    for decorator in (torch.amp.custom_fwd, torch.amp.custom_bwd):
        with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
            decorator(product, device_type=torch.device("cpu"))  # type: ignore[arg-type, operator]
        with pytest.raises(TypeError):
            decorator(product)  # type: ignore[call-arg, operator]
        assert decorator(product, device_type="cpu").__name__ == "product"  # type: ignore[operator]
        assert decorator.__name__.startswith("custom_")
    assert torch.amp.custom_fwd is torch.amp.autocast_mode.custom_fwd
    with pytest.warns(FutureWarning, match=r"`torch\.cuda\.amp\.custom_fwd\(args\.\.\.\)` is deprecated"):
        torch.cuda.amp.custom_fwd(product)
    with pytest.warns(FutureWarning, match=r"`torch\.cuda\.amp\.custom_bwd\(args\.\.\.\)` is deprecated"):
        torch.cuda.amp.custom_bwd(product)


# -- GradScaler ----------------------------------------------------------------------------------------


def weights(n: int = 1, lr: float = 1.0) -> tuple[torch.nn.Parameter, Any]:
    weight = torch.nn.Parameter(torch.ones(n))
    return weight, torch.optim.SGD([weight], lr=lr)


def test_scaler_arguments() -> None:
    scaler = torch.amp.GradScaler("cpu", 8.0, 4.0, 0.25, 3, True)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (8.0, 4.0, 0.25)
    assert (scaler.get_growth_interval(), scaler.is_enabled()) == (3, True)
    names = ["device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"]
    assert list(inspect.signature(torch.amp.GradScaler).parameters) == names
    assert inspect.signature(torch.amp.GradScaler).parameters["device"].default == "cuda"
    for form in (torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler):  # type: ignore[attr-defined]
        assert list(inspect.signature(form).parameters) == names[1:]


def test_scaler_forms_for_one_device() -> None:
    form: Any = torch.cpu.amp.GradScaler  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match=r"`torch\.cpu\.amp\.GradScaler\(args\.\.\.\)` is deprecated") as caught:
        scaler = form(4.0, 3.0, enabled=True)
    assert [w.filename for w in caught] == [__file__]
    assert isinstance(scaler, form)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert type(scaler).__name__ == "GradScaler"
    assert (scaler._device, scaler.get_scale(), scaler.get_growth_factor()) == ("cpu", 4.0, 3.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_scaler_for_cuda_where_there_is_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.amp.GradScaler()
        older: Any = torch.cuda.amp.GradScaler()
    assert not scaler.is_enabled()
    assert not older.is_enabled()
    assert scaler._device == older._device == "cuda"
    loss = torch.ones(())
    assert scaler.scale(loss) is loss


def test_scale_step_update() -> None:
    weight, optimizer = weights()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = scaler.scale((weight * 3).sum())
    assert loss.item() == 12.0
    loss.backward()
    assert weight.grad.tolist() == [12.0]  # type: ignore[union-attr]
    scaler.step(optimizer)
    assert weight.tolist() == [-2.0]
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_scale_of_containers() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled = scaler.scale([torch.ones(()), (torch.ones(2), torch.ones(1))])
    assert scaled[0].item() == 4.0
    assert scaled[1][0].tolist() == [4.0, 4.0]
    assert type(scaled[1]) is tuple
    with pytest.raises(ValueError, match="iterable of Tensors"):
        scaler.scale(3)  # type: ignore[call-overload]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_overflow_skips_and_backs_off(value: float) -> None:
    weight, optimizer = weights(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, backoff_factor=0.25)
    scaler.scale((weight * torch.tensor([1.0, value])).sum()).backward()
    assert scaler.step(optimizer) is None
    assert weight.tolist() == [1.0, 1.0]
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_growth_after_the_interval() -> None:
    weight, optimizer = weights()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_factor=4.0, growth_interval=2)
    scales = []
    for factor in (1.0, 1.0, 1.0, math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0, 8.0, 8.0, 4.0, 4.0, 16.0]


def test_unscale_and_clip() -> None:
    weight, optimizer = weights(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [3.0, 4.0]  # type: ignore[union-attr]
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0).item() == 5.0
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([0.4, 0.2]))


def test_what_must_not_be_called_twice() -> None:
    weight, optimizer = weights()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    scaler.update()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)


def test_before_the_first_scale() -> None:
    weight, optimizer = weights()
    weight.grad = torch.ones(1)
    scaler = torch.amp.GradScaler("cpu")
    for call in (lambda: scaler.step(optimizer), lambda: scaler.unscale_(optimizer), scaler.update):
        with pytest.raises(AssertionError, match="but _scale is None"):
            call()
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


def test_float16_gradients_are_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=FP16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


def test_two_optimizers_step_by_themselves() -> None:
    (one, first), (two, second) = weights(), weights()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((one * math.inf).sum()).backward()
    scaler.scale((two * 2.0).sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (one.tolist(), two.tolist(), scaler.get_scale()) == ([1.0], [-1.0], 2.0)


def test_accumulation() -> None:
    weight, optimizer = weights()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(4):
        scaler.scale((weight / 4).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0]


def test_a_new_scale() -> None:
    weight, optimizer = weights()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update(torch.tensor(32.0))
    assert scaler.get_scale() == 32.0


def test_disabled_scaler() -> None:
    weight, optimizer = weights()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0]
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    scaler.load_state_dict({"anything": 1})


def test_state_dict_there_and_back() -> None:
    weight, optimizer = weights()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_factor=3.0, backoff_factor=0.1, growth_interval=5)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = scaler.state_dict()
    assert state == {
        "scale": 4.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.1,
        "growth_interval": 5,
        "_growth_tracker": 2,
    }
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(state)
    assert other.state_dict() == state
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        other.load_state_dict({})


def test_setters() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.set_growth_factor(5.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (5.0, 0.125, 7)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_scaler_copies_and_pickles(again: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    weight, optimizer = weights()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        again(scaler)
    scaler.update()
    other = again(scaler)
    assert type(other) is type(scaler)
    assert other.state_dict() == scaler.state_dict()
    other.scale(weight.sum()).backward()
    other.step(optimizer)
    other.update()
    assert (other.get_scale(), scaler.get_scale()) == (16.0, 8.0)


class Counting(torch.amp.GradScaler):
    """As trainers derive from it."""

    def __init__(self, *args: Any, name: str = "mine", **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)
        self.name, self.steps, self.inner = name, 0, 0

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().step(optimizer, *args, **kwargs)

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
        self.inner += 1
        return super()._maybe_opt_step(*args, **kwargs)


def test_scaler_subclass() -> None:
    weight, optimizer = weights()
    scaler = Counting(4.0, name="other", growth_interval=1)
    assert isinstance(scaler, Counting)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert (type(scaler).__name__, type(scaler).__module__, scaler.name) == ("Counting", __name__, "other")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.steps, scaler.inner, scaler.get_scale(), weight.tolist()) == (1, 1, 8.0, [0.0])
    other = pickle.loads(pickle.dumps(scaler))
    assert isinstance(other, Counting)
    assert (other.name, other.steps, other.get_scale()) == ("other", 1, 8.0)


def test_fused_optimizers_and_closures() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.5, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(weight.detach(), torch.zeros(2), atol=1e-5, rtol=0)


def test_a_whole_loop() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True).sign()
    losses = []
    for _ in range(30):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=FP16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < 0.35 < 0.8 < losses[0]
