"""The region: every rule of how it is made, entered, nested, shared, left and used as a decorator."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import os
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import mpamp
from mpamp.testing import WeightCastCounter
from tests import processes
from tests.paths import search_path

ROOT = Path(__file__).parents[2]
HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICES = ("cpu", "cuda", "xpu", "hpu", "xla", "mps", "mtia", "maia", "ipu")

needs_torchs_kernels = pytest.mark.xfail(
    not hasattr(torch.library, "get_kernel"),
    reason="this torch doesn't give out its own kernels: those that mpamp replaced don't run outside of its regions",
    strict=True,
)


def autocast_state(devices: tuple[str, ...] = DEVICES) -> dict[str, Any]:
    """Return what torch keeps about autocast for the calling thread."""
    state: dict[str, Any] = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices}
    return {**state, "cache": torch.is_autocast_cache_enabled()}


def mm_dtype(device: str = "cpu") -> torch.dtype:
    """Return the dtype that a lower-precision op gives here for float32 arguments."""
    ones = torch.ones(2, 2, device=device)
    return torch.mm(ones, ones).dtype


def softmax_dtype() -> torch.dtype:
    """Return the dtype that softmax gives for a bfloat16 argument: the default CPU table doesn't list it."""
    return torch.ones(2, 2, dtype=BRAIN).softmax(0).dtype


def run_python(code: str, **environment: str) -> str:
    """Run a program in a fresh process and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": search_path(ROOT), **environment}
    process = processes.python("-c", code, cwd=ROOT, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


def on_a_thread(work: Callable[[], Any]) -> Any:
    """Run work on a thread of its own, so that autocast state that it leaves behind reaches no other test."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.fixture(autouse=True)
def state_is_left_alone() -> Iterator[None]:
    before = autocast_state(DEVICES[:6])
    yield
    assert autocast_state(DEVICES[:6]) == before


@pytest.fixture
def set_rules() -> Iterator[Callable[..., mpamp.OpTable]]:
    """Give ``set_op_rules``, and take its rules away after the test."""
    yield mpamp.set_op_rules
    mpamp.set_op_rules("cpu", None)


# -- Signature, devices, dtypes ------------------------------------------------------------------------


def test_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(mpamp.autocast).parameters
    positional = [(p.name, p.default) for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [("device", None), ("dtype", None), ("enabled", True), ("cache_enabled", True)]
    assert parameters["ops"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["ops"].default is None


def test_the_call_of_the_readme_works_with_keywords() -> None:
    with mpamp.autocast(device="cpu", dtype=torch.bfloat16, enabled=True, cache_enabled=True, ops={}):
        assert mm_dtype() is BRAIN


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0), None])
def test_device_may_be_given_in_any_form(device: Any) -> None:
    with mpamp.autocast(device) as region:
        assert mm_dtype(region.device_type) is region.dtype
    here = torch.accelerator.current_accelerator(check_available=True)
    assert region.device_type == ("cpu" if device is not None or here is None else here.type)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", BRAIN), ("xpu", BRAIN), ("cuda", HALF), ("xpu:1", BRAIN), ("cuda:0", HALF)]
)
def test_default_dtype_is_the_devices(device: str, dtype: torch.dtype) -> None:
    assert mpamp.autocast(device).dtype is dtype


def test_none_is_the_current_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    mpamp.autocast()  # what an earlier region decided must not stick
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *a, **k: torch.device("xpu"))
    assert mpamp.autocast().device_type == "xpu"


def test_default_dtype_is_not_inherited_from_the_region_around() -> None:
    with mpamp.autocast("cpu", HALF), mpamp.autocast("cpu"):
        assert mm_dtype() is BRAIN


@pytest.mark.parametrize("device", ["cuda", "xpu"])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, None])
def test_region_of_another_device_casts_its_tensors_only(device: str, dtype: torch.dtype | None) -> None:
    with FakeTensorMode(), mpamp.autocast(device, dtype) as region:
        assert mm_dtype(device) is region.dtype
        assert mm_dtype("cpu") is FULL


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL])
def test_region_tells_its_device_and_dtype(dtype: torch.dtype) -> None:
    region = mpamp.autocast("cpu", dtype)
    assert (region.device_type, region.dtype, region.enabled) == ("cpu", dtype, True)
    assert str(dtype) in repr(region)


def test_disabled_region_tells_that_it_is() -> None:
    region = mpamp.autocast("cpu", enabled=False)
    assert not region.enabled
    assert "disabled" in repr(region)


def test_enter_returns_the_region() -> None:
    region = mpamp.autocast("cpu")
    with region as entered:
        assert entered is region


def test_unknown_device_lists_the_known_ones_and_how_to_add_one() -> None:
    with pytest.raises(mpamp.UnknownDeviceError) as caught:
        mpamp.autocast("npu")
    message = str(caught.value)
    assert "'npu'" in message
    assert all(device in message for device in ("cpu", "cuda", "xpu"))
    assert "pip install" in message
    assert "entry point" in message


@pytest.mark.parametrize("device", ["", ":0", "CPU", "cpu "])
def test_a_misspelt_device_is_unknown(device: str) -> None:
    with pytest.raises(mpamp.UnknownDeviceError):
        mpamp.autocast(device)


@pytest.mark.parametrize("device", [0, 1.5, ["cpu"], b"cpu", torch.float16])
def test_device_of_another_type_is_a_type_error(device: Any) -> None:
    with pytest.raises(TypeError):
        mpamp.autocast(device)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_dtype_that_the_backend_cannot_run_lists_those_it_can(dtype: torch.dtype) -> None:
    with pytest.raises(mpamp.UnsupportedDtypeError) as caught:
        mpamp.autocast("cpu", dtype)
    message = str(caught.value)
    assert str(dtype) in message
    assert all(str(each) in message for each in (BRAIN, HALF, FULL))


@pytest.mark.parametrize("dtype", [16, "int8", torch.ones(1)])
def test_dtype_of_another_type_is_refused(dtype: Any) -> None:
    with pytest.raises((mpamp.UnsupportedDtypeError, TypeError)):
        mpamp.autocast("cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, HALF, None])
def test_disabled_region_is_silent_for_any_dtype(dtype: torch.dtype | None) -> None:
    with mpamp.autocast("cpu", dtype, enabled=False):
        assert mm_dtype() is FULL


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_disabled_region_of_an_absent_device_is_silent(device: str) -> None:
    assert run_python(f"import mpamp\nwith mpamp.autocast({device!r}, enabled=False): print('in')") == "in\n"


# -- Devices that are absent, or that no backend covers ------------------------------------------------


ABSENT = """
import warnings, torch, mpamp
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for device in ("xpu", "xpu:1", "xpu"):
        with mpamp.autocast(device):
            pass
        with mpamp.autocast("xpu", torch.float16, ops={"softmax": "fp32"}):
            print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype, torch.is_autocast_enabled("xpu"))
print([w.category.__name__ for w in caught], "xpu" in str(caught[0].message), caught[0].filename)
"""


@pytest.mark.skipif(torch.xpu.is_available(), reason="the device is here")
def test_absent_device_warns_once_and_does_nothing() -> None:
    lines = run_python(ABSENT).splitlines()
    assert lines[:3] == ["torch.float32 False"] * 3
    assert lines[3].startswith("['MpampWarning'] True")


@pytest.mark.skipif(torch.xpu.is_available(), reason="the device is here")
def test_warning_of_an_absent_device_points_at_the_region() -> None:
    assert run_python(ABSENT).splitlines()[3].endswith("<string>")


@pytest.mark.skipif(torch.cuda.is_available() or torch.xpu.is_available(), reason="the devices are here")
def test_each_absent_device_has_a_warning_of_its_own() -> None:
    code = ABSENT.replace('"xpu:1"', '"cuda"')
    assert run_python(code).splitlines()[3].startswith("['MpampWarning', 'MpampWarning']")


@pytest.mark.skipif(torch.xpu.is_available(), reason="the device is here")
def test_region_of_an_absent_device_leaves_an_open_one_alone() -> None:
    code = """
import warnings, torch, mpamp
warnings.simplefilter("ignore")
mm = lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
with mpamp.autocast("cpu", torch.float16):
    with mpamp.autocast("xpu"):
        print(mm())
    print(mm())
print(mm())
"""
    assert run_python(code).split() == ["torch.float16", "torch.float16", "torch.float32"]


@pytest.mark.parametrize("device", ["mps", "hpu"])
def test_device_without_a_backend_takes_torchs_default_dtype(device: str) -> None:
    with mpamp.autocast("cpu"):
        assert mpamp.autocast(device).dtype is torch.get_autocast_dtype(device)


@pytest.mark.parametrize("op", ["mm", "softmax", "exp"])
def test_device_without_a_backend_behaves_natively(op: str) -> None:
    def run(region: Any) -> torch.dtype:
        with FakeTensorMode(), region:
            x = torch.ones(2, 2, device="mps")
            low = torch.ones(2, 2, device="mps", dtype=HALF)
            return {"mm": lambda: x.mm(x), "softmax": lambda: low.softmax(0), "exp": lambda: low.exp()}[op]().dtype

    assert run(mpamp.autocast("mps", HALF)) is run(torch.autocast("mps", HALF))


# -- Nesting -------------------------------------------------------------------------------------------


def test_region_casts_and_leaves_nothing_on() -> None:
    with mpamp.autocast("cpu"):
        assert mm_dtype() is BRAIN
    assert mm_dtype() is FULL


@pytest.mark.parametrize("inner", [HALF, BRAIN, FULL])
@pytest.mark.parametrize("outer", [HALF, BRAIN, FULL])
def test_inner_region_runs_in_its_own_dtype(outer: torch.dtype, inner: torch.dtype) -> None:
    with mpamp.autocast("cpu", outer):
        with mpamp.autocast("cpu", inner):
            assert mm_dtype() is inner
        assert mm_dtype() is outer
    assert mm_dtype() is FULL


def test_what_says_whether_it_is_enabled_need_be_no_bool_and_does_not_stay() -> None:
    from mpamp.regions import region

    flags = [torch.tensor(number % 2 == 0) for number in range(2_000)]
    found = [mpamp.autocast("cpu", enabled=flag).enabled for flag in flags]  # type: ignore[arg-type]
    assert found == [True, False] * 1_000
    assert len(region._regions) + len(region._plain) < 1_000


def test_disabled_region_switches_off_and_back_on() -> None:
    with mpamp.autocast("cpu"):
        with mpamp.autocast("cpu", enabled=False):
            assert mm_dtype() is FULL
            with mpamp.autocast("cpu", HALF):
                assert mm_dtype() is HALF
            assert mm_dtype() is FULL
        assert mm_dtype() is BRAIN


def test_disabled_region_runs_ops_in_the_dtype_they_are_called_with() -> None:
    low = torch.ones(2, 2, dtype=BRAIN)
    with mpamp.autocast("cpu"), mpamp.autocast("cpu", enabled=False):
        assert torch.mm(low, low).dtype is BRAIN


def test_float32_region_runs_lower_precision_ops_in_float32() -> None:
    low = torch.ones(2, 2, dtype=BRAIN)
    with mpamp.autocast("cpu", FULL):
        assert torch.mm(low, low).dtype is FULL


def test_float32_region_keeps_float64() -> None:
    double = torch.ones(2, 2, dtype=DOUBLE)
    with mpamp.autocast("cpu", FULL):
        assert torch.mm(double, double).dtype is DOUBLE


def test_mixed_16_bit_inputs_run_in_the_inner_region_s_dtype() -> None:
    with mpamp.autocast("cpu", HALF), mpamp.autocast("cpu", BRAIN):
        assert torch.mm(torch.ones(2, 2, dtype=HALF), torch.ones(2, 2)).dtype is BRAIN


def test_regions_of_two_devices_hold_at_once() -> None:
    with FakeTensorMode(), mpamp.autocast("xpu", HALF), mpamp.autocast("cpu", BRAIN):
        assert (mm_dtype("xpu"), mm_dtype("cpu")) == (HALF, BRAIN)


def test_disabled_region_of_one_device_leaves_another_on() -> None:
    with FakeTensorMode(), mpamp.autocast("xpu"), mpamp.autocast("cpu"), mpamp.autocast("xpu", enabled=False):
        assert (mm_dtype("xpu"), mm_dtype("cpu")) == (FULL, BRAIN)


def test_float64_is_left_alone_with_the_whole_call() -> None:
    with mpamp.autocast("cpu"), pytest.raises(RuntimeError, match=r"(?i)double"):
        torch.mm(torch.ones(2, 2, dtype=DOUBLE), torch.ones(2, 2))


def test_in_place_and_out_calls_run_uncast() -> None:
    ones, out = torch.ones(2, 2), torch.zeros(2, 2)
    with mpamp.autocast("cpu"):
        assert torch.mm(ones, ones, out=out).dtype is FULL
        assert torch.zeros(2, 2).addmm_(ones, ones).dtype is FULL


# -- Entered again, from threads, with exceptions ------------------------------------------------------


def test_one_object_may_be_entered_while_open() -> None:
    region = mpamp.autocast("cpu")
    with region:
        with region:
            assert mm_dtype() is BRAIN
        assert mm_dtype() is BRAIN
    assert mm_dtype() is FULL


def test_one_object_may_be_entered_again_under_another() -> None:
    brain, half = mpamp.autocast("cpu", BRAIN), mpamp.autocast("cpu", HALF)
    with brain, half, brain:
        assert mm_dtype() is BRAIN
    assert mm_dtype() is FULL


def test_disabled_object_may_be_entered_while_open() -> None:
    off = mpamp.autocast("cpu", enabled=False)
    with mpamp.autocast("cpu"):
        with off, off:
            assert mm_dtype() is FULL
        assert mm_dtype() is BRAIN


def test_decorated_function_may_recurse() -> None:
    @mpamp.autocast("cpu")
    def descend(depth: int) -> list[torch.dtype]:
        deeper = descend(depth - 1) if depth else []
        return [mm_dtype(), *deeper]

    assert descend(3) == [BRAIN] * 4
    assert mm_dtype() is FULL


def test_two_threads_share_one_object() -> None:
    region, barrier = mpamp.autocast("cpu"), threading.Barrier(2)

    def work(_: int) -> list[torch.dtype]:
        seen = []
        for _step in range(20):
            barrier.wait()
            with region:
                barrier.wait()
                seen.append(mm_dtype())
            seen.append(mm_dtype())
        return seen

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[BRAIN, FULL] * 20] * 2


def test_a_new_thread_is_in_no_region() -> None:
    with mpamp.autocast("cpu"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(mm_dtype).result() is FULL


def test_threads_have_tables_of_their_own() -> None:
    barrier = threading.Barrier(2)

    def work(policy: str) -> torch.dtype:
        with mpamp.autocast("cpu", ops={"softmax": policy}):
            barrier.wait()
            found = softmax_dtype()
            barrier.wait()
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, ["fp32", "lower_precision_fp"])) == [FULL, BRAIN]


def test_exception_passes_and_the_state_comes_back() -> None:
    with pytest.raises(ZeroDivisionError), mpamp.autocast("cpu", ops={"softmax": "fp32"}):
        raise ZeroDivisionError
    assert mm_dtype() is FULL


def test_exception_in_an_inner_region_brings_back_the_outer_one() -> None:
    with mpamp.autocast("cpu", HALF):
        with pytest.raises(ZeroDivisionError), mpamp.autocast("cpu", BRAIN):
            raise ZeroDivisionError
        assert mm_dtype() is HALF


def test_exception_of_a_kernel_leaves_the_region_on() -> None:
    with mpamp.autocast("cpu"):
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        assert mm_dtype() is BRAIN


def test_exit_on_another_thread_is_refused() -> None:
    region = mpamp.autocast("cpu")
    with region, ThreadPoolExecutor(1) as pool:
        failed = pool.submit(region.__exit__, None, None, None).exception()
        assert mm_dtype() is BRAIN
    assert isinstance(failed, mpamp.RegionError)
    assert "thread" in str(failed)
    assert mm_dtype() is FULL


def test_exit_without_enter_is_refused() -> None:
    with pytest.raises(mpamp.RegionError):
        mpamp.autocast("cpu").__exit__(None, None, None)


def _cross(first: mpamp.Region, second: mpamp.Region) -> tuple[dict[str, Any], dict[str, Any], torch.dtype]:
    """Leave two regions in the order they were entered in; return the state before and after, mm's dtype between."""
    before = autocast_state()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    between = mm_dtype()
    second.__exit__(None, None, None)
    return before, autocast_state(), between


@pytest.mark.parametrize("first", [{}, {"enabled": False}, {"ops": {"softmax": "fp32"}}])
@pytest.mark.parametrize("second", [{"dtype": HALF}, {"enabled": False}, {"dtype": FULL}])
def test_regions_left_out_of_order_leave_nothing_on(first: dict[str, Any], second: dict[str, Any]) -> None:
    before, after, _ = on_a_thread(lambda: _cross(mpamp.autocast("cpu", **first), mpamp.autocast("cpu", **second)))
    assert after == before


def test_a_disabled_region_left_early_leaves_the_one_inside_on() -> None:
    *_, between = on_a_thread(lambda: _cross(mpamp.autocast("cpu", enabled=False), mpamp.autocast("cpu", HALF)))
    assert between is HALF


class _Nothing(TorchFunctionMode):
    pass


@pytest.mark.parametrize("options", [{}, {"enabled": False}, {"ops": {"softmax": "fp32"}}])
def test_a_region_is_left_under_a_function_mode_that_came_on_inside(options: dict[str, Any]) -> None:
    def inside_and_after() -> list[Any]:
        found: list[Any] = [autocast_state()]
        region, mode = mpamp.autocast("cpu", **options).__enter__(), _Nothing()
        found.append(mm_dtype())
        with mode:
            region.__exit__(None, None, None)
        with mode, region:
            pass
        return [*found, autocast_state()]

    before, dtype, after = on_a_thread(inside_and_after)
    assert after == before
    assert dtype is (FULL if options.get("enabled") is False else BRAIN)


def test_a_disabled_region_can_be_entered_in_a_backward_pass() -> None:
    seen = []

    def hook(grad: torch.Tensor) -> None:
        with mpamp.autocast("cpu"):
            with mpamp.autocast("cpu", enabled=False):
                seen.append(mm_dtype())
            seen.append(mm_dtype())

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    with mpamp.autocast("cpu", HALF):
        x.sum().backward()
    assert seen == [FULL, BRAIN]


def test_a_disabled_region_that_is_outermost_drops_the_casts_kept_inside() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def kept() -> tuple[int, int]:
        with mpamp.autocast("cpu", enabled=False):
            with mpamp.autocast("cpu"):
                weight @ weight
            inside = mpamp.cache_info().entries
        return inside, mpamp.cache_info().entries

    assert on_a_thread(kept) == (1, 0)


@pytest.mark.parametrize(
    "second",
    [
        {"dtype": HALF},
        {"enabled": False},
    ],
)
def test_a_region_stays_on_until_its_own_exit(second: dict[str, Any]) -> None:
    *_, between = on_a_thread(lambda: _cross(mpamp.autocast("cpu"), mpamp.autocast("cpu", **second)))
    assert between is second.get("dtype", FULL)


def test_a_table_is_gone_after_an_exit_out_of_order() -> None:
    def softmax_afterwards() -> torch.dtype:
        _cross(mpamp.autocast("cpu", ops={"softmax": "fp32"}), mpamp.autocast("cpu", HALF))
        with torch.autocast("cpu", BRAIN):
            return softmax_dtype()

    assert on_a_thread(softmax_afterwards) is BRAIN


@pytest.mark.parametrize("policy", ["fp32", "lower_precision_fp", "promote", "fallthrough"])
def test_torch_s_whole_state_comes_back(policy: str) -> None:
    def states() -> tuple[dict[str, Any], dict[str, Any]]:
        before = autocast_state()
        with mpamp.autocast("cpu", ops={"softmax": policy}):
            pass
        return before, autocast_state()

    before, after = on_a_thread(states)
    assert after == before


# -- As a decorator ------------------------------------------------------------------------------------


def test_decorated_function_runs_in_the_region() -> None:
    assert mpamp.autocast("cpu")(mm_dtype)() is BRAIN
    assert mm_dtype() is FULL


def test_decorator_passes_arguments_and_result() -> None:
    @mpamp.autocast("cpu")
    def both(a: int, *rest: int, b: int = 0, **named: int) -> tuple[Any, ...]:
        return a, rest, b, named

    assert both(1, 2, b=3, c=4) == (1, (2,), 3, {"c": 4})


def test_decorated_function_keeps_its_name_and_signature() -> None:
    def named(a: int) -> None:
        """Doc."""

    wrapped = mpamp.autocast("cpu")(named)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == ("named", "Doc.", named)
    assert inspect.signature(wrapped) == inspect.signature(named)


def test_decorator_keeps_ops() -> None:
    assert mpamp.autocast("cpu", ops={"softmax": "fp32"})(softmax_dtype)() is FULL


def test_decorator_restores_after_an_exception() -> None:
    @mpamp.autocast("cpu")
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert mm_dtype() is FULL


class Methods:
    @mpamp.autocast("cpu")
    def method(self) -> tuple[Any, torch.dtype]:
        return self, mm_dtype()

    @mpamp.autocast("cpu")
    @staticmethod
    def static() -> torch.dtype:
        return mm_dtype()

    @mpamp.autocast("cpu")
    @classmethod
    def of_class(cls) -> tuple[Any, torch.dtype]:
        return cls, mm_dtype()

    @staticmethod
    @mpamp.autocast("cpu")
    def static_outside() -> torch.dtype:
        return mm_dtype()

    @property
    @mpamp.autocast("cpu")
    def prop(self) -> torch.dtype:
        return mm_dtype()


def test_method_runs_in_the_region() -> None:
    methods = Methods()
    assert methods.method() == (methods, BRAIN)


def test_staticmethod_and_classmethod_run_in_the_region() -> None:
    assert Methods.static() is Methods().static() is BRAIN
    assert Methods.of_class() == (Methods, BRAIN)
    assert Methods.static_outside() is Methods().prop is BRAIN


def test_module_forward_runs_in_the_region() -> None:
    class Net(torch.nn.Linear):
        @mpamp.autocast("cpu")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    assert Net(2, 2)(torch.ones(1, 2)).dtype is BRAIN


def test_bound_method_and_callable_object_run_in_the_region() -> None:
    module = torch.nn.Linear(2, 2)
    assert mpamp.autocast("cpu")(module.forward)(torch.ones(1, 2)).dtype is BRAIN
    assert mpamp.autocast("cpu")(module)(torch.ones(1, 2)).dtype is BRAIN


@pytest.mark.parametrize("thing", [3, "name", None])
def test_decorating_what_cannot_be_called_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match="decorates functions"):
        mpamp.autocast("cpu")(thing)


def test_decorating_a_class_is_a_type_error_that_says_what_to_do() -> None:
    with pytest.raises(TypeError, match="decorate the methods"):
        mpamp.autocast("cpu")(torch.nn.Linear)


def test_decorating_without_parentheses_is_a_type_error_that_says_so() -> None:
    with pytest.raises(TypeError, match=r"@mpamp\.autocast\(\) with parentheses"):

        @mpamp.autocast
        def function() -> None: ...


def test_decorating_a_class_without_parentheses_is_a_type_error() -> None:
    with pytest.raises(TypeError):

        @mpamp.autocast
        class Thing: ...


# -- Generators ----------------------------------------------------------------------------------------


@mpamp.autocast("cpu")
def echo() -> Generator[Any, Any, str]:
    """Yield the dtype in force and whatever was sent or thrown, until told to stop."""
    got: Any = None
    while got != "stop":
        try:
            got = yield mm_dtype(), got
        except ValueError as error:
            got = error
    return "done"


def test_generator_body_runs_in_the_region_and_its_consumer_does_not() -> None:
    generator = echo()
    assert next(generator)[0] is BRAIN
    assert mm_dtype() is FULL
    assert next(generator)[0] is BRAIN


def test_generator_receives_what_is_sent() -> None:
    generator = echo()
    next(generator)
    assert generator.send("hello") == (BRAIN, "hello")


def test_generator_receives_what_is_thrown() -> None:
    generator, error = echo(), ValueError("thrown")
    next(generator)
    assert generator.throw(error) == (BRAIN, error)
    assert mm_dtype() is FULL


def test_generator_returns_its_value() -> None:
    generator = echo()
    next(generator)
    with pytest.raises(StopIteration) as stop:
        generator.send("stop")
    assert stop.value.value == "done"


def test_generator_that_raises_leaves_nothing_on() -> None:
    @mpamp.autocast("cpu")
    def fail() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(fail())
    assert mm_dtype() is FULL


def test_closing_a_generator_runs_its_cleanup_in_the_region() -> None:
    seen = []

    @mpamp.autocast("cpu")
    def clean_up() -> Iterator[int]:
        try:
            yield 1
        finally:
            seen.append(mm_dtype())

    generator = clean_up()
    next(generator)
    generator.close()
    assert seen == [BRAIN]
    assert mm_dtype() is FULL


def test_generators_may_be_interleaved() -> None:
    def dtypes() -> Iterator[torch.dtype]:
        while True:
            yield mm_dtype()

    brain, half = mpamp.autocast("cpu", BRAIN)(dtypes)(), mpamp.autocast("cpu", HALF)(dtypes)()
    seen = [next(g) for _ in range(3) for g in (brain, half)]
    brain.close()
    assert seen == [BRAIN, HALF] * 3
    assert next(half) is HALF
    assert mm_dtype() is FULL


def test_generator_resumes_in_its_region_inside_another() -> None:
    generator = echo()
    next(generator)
    with mpamp.autocast("cpu", HALF):
        assert next(generator)[0] is BRAIN
        assert mm_dtype() is HALF


def test_decorated_generator_stays_a_generator_function() -> None:
    assert inspect.isgeneratorfunction(echo)


# -- Async ---------------------------------------------------------------------------------------------


async def dtypes_over_time(steps: int) -> list[torch.dtype]:
    seen = []
    for _ in range(steps):
        seen.append(mm_dtype())
        await asyncio.sleep(0)
    return seen


def test_async_function_runs_in_the_region_on_both_sides_of_an_await() -> None:
    assert asyncio.run(mpamp.autocast("cpu")(dtypes_over_time)(3)) == [BRAIN] * 3
    assert mm_dtype() is FULL


def test_tasks_do_not_leak_their_regions_into_each_other() -> None:
    async def main() -> list[list[torch.dtype]]:
        brain = mpamp.autocast("cpu", BRAIN)(dtypes_over_time)
        half = mpamp.autocast("cpu", HALF)(dtypes_over_time)
        return await asyncio.gather(brain(4), half(3), dtypes_over_time(5), brain(2))

    assert asyncio.run(main()) == [[BRAIN] * 4, [HALF] * 3, [FULL] * 5, [BRAIN] * 2]


def test_tasks_keep_their_tables_apart() -> None:
    async def softmax_over_time() -> list[torch.dtype]:
        seen = []
        for _ in range(3):
            seen.append(softmax_dtype())
            await asyncio.sleep(0)
        return seen

    async def main() -> list[list[torch.dtype]]:
        full = mpamp.autocast("cpu", ops={"softmax": "fp32"})(softmax_over_time)
        return await asyncio.gather(full(), mpamp.autocast("cpu")(softmax_over_time)(), softmax_over_time())

    assert asyncio.run(main()) == [[FULL] * 3, [BRAIN] * 3, [BRAIN] * 3]


def test_async_function_passes_exceptions_both_ways() -> None:
    @mpamp.autocast("cpu")
    async def wait() -> torch.dtype:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return mm_dtype()
        return FULL

    async def main() -> torch.dtype:
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(main()) is BRAIN
    assert mm_dtype() is FULL


def test_async_function_that_raises_leaves_nothing_on() -> None:
    @mpamp.autocast("cpu")
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fail())
    assert mm_dtype() is FULL


def test_decorated_async_functions_stay_what_they_are() -> None:
    assert inspect.iscoroutinefunction(mpamp.autocast("cpu")(dtypes_over_time))
    assert inspect.isasyncgenfunction(mpamp.autocast("cpu")(async_echo))


async def async_echo() -> AsyncIterator[Any]:
    got: Any = None
    while got != "stop":
        try:
            got = yield mm_dtype(), got
        except ValueError as error:
            got = error
        await asyncio.sleep(0)


def test_async_generator_runs_in_the_region_and_its_consumer_does_not() -> None:
    async def main() -> list[torch.dtype]:
        seen = []
        async for dtype, _ in mpamp.autocast("cpu")(async_echo)():
            seen += [dtype, mm_dtype()]
            if len(seen) == 6:
                break
        return seen

    assert asyncio.run(main()) == [BRAIN, FULL] * 3


def test_async_generator_receives_what_is_sent_and_thrown() -> None:
    async def main() -> list[Any]:
        generator: Any = mpamp.autocast("cpu")(async_echo)()
        error = ValueError("thrown")
        seen = [await generator.asend(None), await generator.asend("hello")]
        seen.append(await generator.athrow(error))
        with pytest.raises(StopAsyncIteration):
            await generator.asend("stop")
        return [*seen, error]

    first, sent, thrown, error = asyncio.run(main())
    assert (first, sent, thrown) == ((BRAIN, None), (BRAIN, "hello"), (BRAIN, error))


def test_closing_an_async_generator_runs_its_cleanup_in_the_region() -> None:
    seen = []

    @mpamp.autocast("cpu")
    async def clean_up() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            seen.append(mm_dtype())

    async def main() -> None:
        generator: Any = clean_up()
        await generator.asend(None)
        await generator.aclose()

    asyncio.run(main())
    assert seen == [BRAIN]
    assert mm_dtype() is FULL


# -- Copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"dtype": HALF}, {"enabled": False}, {"ops": {"softmax": "fp32"}}])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copied_region_does_the_same(options: dict[str, Any], copied: Any) -> None:
    def dtypes(region: mpamp.Region) -> tuple[torch.dtype, torch.dtype]:
        with region:
            return mm_dtype(), softmax_dtype()

    region = mpamp.autocast("cpu", **options)
    assert dtypes(copied(region)) == dtypes(region)


def test_a_region_with_a_whole_table_can_be_pickled() -> None:
    region = mpamp.autocast("cpu", ops=mpamp.OpTable({"softmax": "fp32"}))
    with pickle.loads(pickle.dumps(region)):
        assert (mm_dtype(), softmax_dtype()) == (FULL, FULL)


def test_an_open_region_can_be_copied() -> None:
    with mpamp.autocast("cpu") as region, copy.deepcopy(region):
        assert mm_dtype() is BRAIN
    assert mm_dtype() is FULL


def test_a_module_that_holds_a_region_can_be_copied() -> None:
    module = torch.nn.Linear(2, 2)
    module.region = mpamp.autocast("cpu", HALF)  # type: ignore[assignment]
    assert copy.deepcopy(module).region.dtype is HALF


# -- ops= of one region --------------------------------------------------------------------------------


def test_ops_hold_in_the_region_only() -> None:
    with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
        assert softmax_dtype() is FULL
    with mpamp.autocast("cpu"):
        assert softmax_dtype() is BRAIN


def test_ops_are_not_inherited_by_a_nested_region() -> None:
    with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
        with mpamp.autocast("cpu"):
            assert softmax_dtype() is BRAIN
        assert softmax_dtype() is FULL


def test_a_nested_region_s_ops_end_with_it() -> None:
    with mpamp.autocast("cpu"):
        with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
            assert softmax_dtype() is FULL
        assert softmax_dtype() is BRAIN


def test_ops_go_on_top_of_the_default_table() -> None:
    with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
        assert mm_dtype() is BRAIN


def test_fallthrough_takes_an_op_out_of_the_table() -> None:
    with mpamp.autocast("cpu", ops={"mm": "fallthrough"}):
        assert mm_dtype() is FULL
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is BRAIN


def test_policy_may_depend_on_the_region_s_dtype() -> None:
    ops = {"softmax": {"float16": "fp32", "default": "lower_precision_fp"}}
    low = torch.ones(2, 2, dtype=HALF)
    with mpamp.autocast("cpu", HALF, ops=ops):
        assert low.softmax(0).dtype is FULL
    with mpamp.autocast("cpu", BRAIN, ops=ops):
        assert low.softmax(0).dtype is BRAIN


def test_policy_for_one_dtype_leaves_the_op_unlisted_in_others() -> None:
    ops = {"softmax": {"float16": "fp32"}}
    with mpamp.autocast("cpu", BRAIN, ops=ops):
        assert softmax_dtype() is BRAIN


@pytest.mark.parametrize(
    "op", ["index_put", "scatter", "einsum", "sum", "norm", "stft", "pad", "lstm", "native_dropout"]
)
def test_a_rule_may_name_any_op(op: str) -> None:
    with mpamp.autocast("cpu", ops={op: "fp32"}):
        assert mm_dtype() is BRAIN


def test_a_single_overload_may_be_named() -> None:
    low = torch.ones(2, 2, dtype=BRAIN)
    with mpamp.autocast("cpu", ops={"pow.Tensor_Scalar": "fp32"}):
        assert low.pow(2).dtype is FULL
        assert low.pow(low).dtype is BRAIN


def test_policies_may_be_given_as_enum_members() -> None:
    with mpamp.autocast("cpu", ops={"aten::softmax": mpamp.CastPolicy.FP32}):
        assert softmax_dtype() is FULL


def test_a_whole_table_replaces_the_default() -> None:
    with mpamp.autocast("cpu", ops=mpamp.OpTable({"softmax": "fp32"})):
        assert (mm_dtype(), softmax_dtype()) == (FULL, FULL)


def test_an_empty_table_casts_nothing() -> None:
    with mpamp.autocast("cpu", ops=mpamp.OpTable({})):
        assert mm_dtype() is FULL
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is FULL


def test_a_named_table_may_be_used() -> None:
    with mpamp.autocast("cpu", ops=mpamp.OpTable.named("uniform", "cpu")):
        assert torch.ones(2, dtype=BRAIN).exp().dtype is FULL


def test_a_table_for_another_device_is_refused() -> None:
    with pytest.raises(mpamp.OpTableError, match=r"'xpu'.*'cpu'"):
        mpamp.autocast("cpu", ops=mpamp.OpTable.named("default", "xpu"))


def test_an_unknown_op_gets_the_nearest_names() -> None:
    with pytest.raises(mpamp.UnknownOpError, match=r"sofmax.*'softmax'"):
        mpamp.autocast("cpu", ops={"sofmax": "fp32"})


def test_an_unknown_policy_gets_the_known_ones() -> None:
    with pytest.raises(mpamp.UnknownPolicyError) as caught:
        mpamp.autocast("cpu", ops={"softmax": "fp23"})
    assert all(policy.value in str(caught.value) for policy in mpamp.CastPolicy)


@pytest.mark.parametrize("ops", [["softmax"], "softmax", {1: "fp32"}, {"softmax": 1}, {"softmax": {"floaty": "fp32"}}])
def test_ops_of_another_kind_are_refused(ops: Any) -> None:
    with pytest.raises(mpamp.OpTableError):
        mpamp.autocast("cpu", ops=ops)


def test_banned_op_refuses_lower_precision_only() -> None:
    with mpamp.autocast("cpu", ops={"softmax": "banned"}):
        assert torch.ones(2).softmax(0).dtype is FULL
        with pytest.raises(mpamp.BannedOpError, match=r"aten::softmax.*fp32"):
            softmax_dtype()
        assert mm_dtype() is BRAIN


def test_in_place_rule_casts_the_values_to_the_tensor_written_to() -> None:
    buffer, index, low = torch.zeros(3, 2), torch.tensor([0, 2]), torch.full((2, 2), 1.5, dtype=BRAIN)
    with mpamp.autocast("cpu", ops={"index_put_": "promote"}):
        buffer[index] = low
    assert buffer.dtype is FULL
    assert buffer.sum() == 6


def test_without_an_in_place_rule_the_write_fails_as_in_torch() -> None:
    buffer, index, low = torch.zeros(3, 2), torch.tensor([0, 2]), torch.ones(2, 2, dtype=BRAIN)
    with mpamp.autocast("cpu", ops=mpamp.OpTable({})), pytest.raises(RuntimeError, match="dtype"):
        buffer[index] = low


def test_in_place_op_takes_no_policy_that_would_change_its_dtype() -> None:
    with pytest.raises(mpamp.OpTableError, match="in place"):
        mpamp.autocast("cpu", ops={"index_put_": "fp32"})


def test_changing_the_mapping_later_changes_nothing() -> None:
    rules = {"softmax": "fp32"}
    decorated = mpamp.autocast("cpu", ops=rules)(softmax_dtype)
    rules["softmax"] = "fallthrough"
    assert decorated() is FULL


def test_changing_the_mapping_later_does_not_reach_other_regions(set_rules: Any) -> None:
    rules = {"softmax": "fp32"}
    mpamp.autocast("cpu", ops=rules)
    rules["softmax"] = "fallthrough"
    set_rules("cpu", {"gelu": "fp32"})
    with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
        assert softmax_dtype() is FULL


def test_many_different_tables_may_be_used() -> None:
    code = """
import itertools, torch, mpamp
ops = [op if "." in op.partition("::")[2] else op + ".default" for op in mpamp.get_op_table("cpu")][:50]
for pair in itertools.islice(itertools.combinations(ops, 2), 1000):
    region = mpamp.autocast("cpu", ops=dict.fromkeys(pair, "fallthrough") | {"softmax.int": "fp32"})
with region:
    print(torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype)
"""
    assert run_python(code).strip() == "torch.float32"


# -- set_op_rules --------------------------------------------------------------------------------------


def test_process_wide_rules_hold_in_regions_made_later(set_rules: Any) -> None:
    set_rules("cpu", {"softmax": "fp32"})
    with mpamp.autocast("cpu"):
        assert (softmax_dtype(), mm_dtype()) == (FULL, BRAIN)


def test_process_wide_rules_hold_in_regions_used_before(set_rules: Any) -> None:
    region = mpamp.autocast("cpu")
    with region:
        assert softmax_dtype() is BRAIN
    set_rules("cpu", {"softmax": "fp32"})
    with region:
        assert softmax_dtype() is FULL


def test_process_wide_rules_hold_in_decorated_functions(set_rules: Any) -> None:
    decorated = mpamp.autocast("cpu")(softmax_dtype)
    decorated()
    set_rules("cpu", {"softmax": "fp32"})
    assert decorated() is FULL


def test_process_wide_rules_hold_on_other_threads(set_rules: Any) -> None:
    set_rules("cpu", {"softmax": "fp32"})
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(mpamp.autocast("cpu")(softmax_dtype)).result() is FULL


def test_none_restores_the_default_table(set_rules: Any) -> None:
    before = mpamp.get_op_table("cpu")
    set_rules("cpu", {"softmax": "fp32"})
    assert set_rules("cpu", None) == before
    with mpamp.autocast("cpu"):
        assert softmax_dtype() is BRAIN


def test_rules_replace_the_rules_set_before(set_rules: Any) -> None:
    set_rules("cpu", {"softmax": "fp32"})
    set_rules("cpu", {"mm": "fp32"})
    with mpamp.autocast("cpu"):
        assert (softmax_dtype(), mm_dtype()) == (BRAIN, FULL)


def test_the_table_in_force_is_returned_and_shown(set_rules: Any) -> None:
    table = set_rules("cpu", {"softmax": "fp32"})
    assert table.policy("softmax.int") is mpamp.CastPolicy.FP32
    assert mpamp.get_op_table("cpu") == table


@pytest.mark.parametrize("rules", [{"mm": "fp32", "sofmax": "fp32"}, {"mm": "fp32", "softmax": "fp23"}, ["mm"]])
def test_a_wrong_rule_changes_nothing(set_rules: Any, rules: Any) -> None:
    before = set_rules("cpu", {"softmax": "fp32"})
    with pytest.raises(mpamp.OpTableError):
        set_rules("cpu", rules)
    assert mpamp.get_op_table("cpu") == before
    with mpamp.autocast("cpu"):
        assert (softmax_dtype(), mm_dtype()) == (FULL, BRAIN)


def test_an_open_region_keeps_its_table(set_rules: Any) -> None:
    with mpamp.autocast("cpu"):
        set_rules("cpu", {"softmax": "fp32"})
        assert softmax_dtype() is BRAIN
    with mpamp.autocast("cpu"):
        assert softmax_dtype() is FULL


def test_ops_go_on_top_of_process_wide_rules(set_rules: Any) -> None:
    set_rules("cpu", {"softmax": "fp32", "mm": "fp32"})
    with mpamp.autocast("cpu", ops={"softmax": "fallthrough"}):
        assert (softmax_dtype(), mm_dtype()) == (BRAIN, FULL)


def test_a_region_with_ops_used_before_follows_process_wide_rules(set_rules: Any) -> None:
    region = mpamp.autocast("cpu", ops={"gelu": "fp32"})
    with region:
        assert softmax_dtype() is BRAIN
    set_rules("cpu", {"softmax": "fp32"})
    with region:
        assert softmax_dtype() is FULL


def test_rules_of_one_device_leave_the_others_alone(set_rules: Any) -> None:
    before = mpamp.get_op_table("xpu")
    set_rules("cpu", {"softmax": "fp32"})
    assert mpamp.get_op_table("xpu") == before


def test_rules_do_not_reach_plain_torch_autocast(set_rules: Any) -> None:
    set_rules("cpu", {"softmax": "fp32", "mm": "fp32"})
    with mpamp.autocast("cpu"):
        assert mm_dtype() is FULL
    with torch.autocast("cpu", BRAIN):
        assert (softmax_dtype(), mm_dtype()) == (BRAIN, BRAIN)


def test_device_may_be_a_torch_device_in_set_op_rules(set_rules: Any) -> None:
    set_rules(torch.device("cpu", 0), {"softmax": "fp32"})
    assert mpamp.get_op_table("cpu:0").policy("softmax.int") is mpamp.CastPolicy.FP32


def test_a_whole_table_may_be_set(set_rules: Any) -> None:
    set_rules("cpu", mpamp.OpTable({"softmax": "fp32"}))
    with mpamp.autocast("cpu"):
        assert (softmax_dtype(), mm_dtype()) == (FULL, BRAIN)


# -- Beside torch.autocast -----------------------------------------------------------------------------


def test_region_tells_torch_that_it_is_on() -> None:
    with mpamp.autocast("cpu", HALF):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is HALF
        with mpamp.autocast("cpu", enabled=False):
            assert not torch.is_autocast_enabled("cpu")


def test_torch_autocast_inside_a_region_sets_the_dtype_and_keeps_the_table() -> None:
    with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
        with torch.autocast("cpu", HALF):
            assert (mm_dtype(), softmax_dtype()) == (HALF, FULL)
        assert (mm_dtype(), softmax_dtype()) == (BRAIN, FULL)


def test_disabled_torch_autocast_inside_a_region_switches_off() -> None:
    with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
        with torch.autocast("cpu", enabled=False):
            assert (mm_dtype(), softmax_dtype()) == (FULL, BRAIN)
        assert mm_dtype() is BRAIN


def test_region_inside_torch_autocast_wins_and_gives_it_back() -> None:
    with torch.autocast("cpu", HALF):
        with mpamp.autocast("cpu", BRAIN, ops={"softmax": "fp32"}):
            assert (mm_dtype(), softmax_dtype()) == (BRAIN, FULL)
        assert (mm_dtype(), softmax_dtype()) == (HALF, BRAIN)
        with mpamp.autocast("cpu", enabled=False):
            assert mm_dtype() is FULL
        assert mm_dtype() is HALF


@needs_torchs_kernels
def test_torch_s_cache_works_again_after_a_region_inside() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with WeightCastCounter([weight]) as casts, torch.autocast("cpu", BRAIN):
        with mpamp.autocast("cpu"):
            pass
        for _ in range(3):
            torch.mm(weight, weight)
    assert casts.count == 1


SPREAD = Path(__file__).parents[1] / "native_spread.py"


@pytest.fixture(scope="module")
def spread() -> dict[str, dict[str, Any]]:
    """Return what plain torch.autocast does to a spread of calls, without mpamp and after its kernels are in."""
    return json.loads(run_python(f"import runpy; runpy.run_path({str(SPREAD)!r}, run_name='__main__')"))  # type: ignore[no-any-return]


def test_the_spread_runs_with_kernels_of_ours_installed(spread: dict[str, Any]) -> None:
    assert spread["kernels"] > 100
    assert len(spread["before"]) > 150


@needs_torchs_kernels
def test_plain_torch_autocast_gives_the_same_results_as_without_mpamp(spread: dict[str, Any]) -> None:
    before, after = spread["before"], spread["after"]
    assert {call: (before[call], after[call]) for call in before if before[call] != after[call]} == {}


@needs_torchs_kernels
def test_plain_torch_autocast_casts_weights_as_often_as_without_mpamp(spread: dict[str, Any]) -> None:
    assert spread["casts_after"] == spread["casts_before"]
    assert spread["casts_before"] == {"trainable": 1, "frozen": 6, "uncached": 6, "two regions": 2}


class _AsyncCall:
    async def __call__(self, x: torch.Tensor) -> torch.dtype:
        return (x @ x).dtype


class _GeneratorCall:
    def __call__(self, x: torch.Tensor):
        yield (x @ x).dtype


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial])
def test_objects_whose_call_is_async_or_a_generator_run_in_the_region(wrap):
    import asyncio

    region = mpamp.autocast("cpu", dtype=torch.bfloat16)
    x = torch.ones(2, 2)
    assert asyncio.run(region(wrap(_AsyncCall()))(x)) is torch.bfloat16
    assert list(region(wrap(_GeneratorCall()))(x)) == [torch.bfloat16]
