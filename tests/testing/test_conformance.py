"""The conformance kit: content with mpamp's own devices, and each planted fault is caught and named."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mpamp
from mpamp.backends.cpu import CpuBackend
from mpamp.plugins.backend import Backend
from mpamp.plugins.hookspecs import hookimpl
from mpamp.plugins.manager import manager
from mpamp.rules.optable import OpTable
from mpamp.rules.policy import CastPolicy
from mpamp.rules.rows import Row
from mpamp.scaler import kernels
from mpamp.testing import ConformanceError, Report, check_backend, conformance
from mpamp.testing.conformance_report import Inapplicable
from tests.parity.observe import is_here

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
UNMADE = "the kit can't make an argument of type "
"""How rows are skipped whose dimensions have names, which torch had until 2.12."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """The registered backend and its table are in force again after each test."""

    def here() -> Any:
        rows = mpamp.get_op_table("cpu").items()  # other tests may have registered kernels of ops of their own
        return mpamp.get_backend("cpu"), [row for row in rows if row[0].startswith("aten::")]

    before = here()
    yield
    assert here() == before


def failed(report: Report) -> dict[str, str]:
    return {check.name: check.detail for check in report.failures}


# -- Devices that keep it ------------------------------------------------------------------------------


def test_cpu() -> None:
    report = check_backend("cpu", default_dtype=BRAIN).raise_for_failures()
    assert len(report.passed) > 300
    unmade = {check.name for check in report.skipped if not check.detail.startswith(UNMADE)}
    assert all("quantized_" in name or "fbgemm_" in name for name in unmade)  # they take weights that are packed
    assert report.place == "this machine's"


@pytest.mark.parametrize(("place", "dtype"), [("fake cuda", HALF), ("fake xpu", BRAIN)])
def test_devices_that_are_not_here(place: str, dtype: torch.dtype) -> None:
    device = place.removeprefix("fake ")
    if not is_here(place):
        pytest.skip(f"no fake {device} tensors beside another card")
    if mpamp.get_backend(device).is_available():
        pytest.skip(f"there is a real {device} here")
    report = check_backend(device, default_dtype=dtype).raise_for_failures()
    assert report.place == "fake"
    assert len(report.passed) > 250
    reasons = {check.detail for check in report.skipped if not check.detail.startswith(UNMADE)}
    assert reasons <= {
        "needs the device itself: fake tensors have no values",
        "torch's own kernel needs the device itself",
        "can't be called here, with or without autocast",
    }


@pytest.mark.accelerator
def test_the_accelerator() -> None:
    card = torch.accelerator.current_accelerator(check_available=True)
    if card is None:
        pytest.skip("there is no accelerator on this machine")
    assert check_backend(card.type).raise_for_failures().place == "this machine's"


def test_every_row_of_the_table_is_checked() -> None:
    report = check_backend("cpu", sections=["table"])
    rows = [op for op, row in mpamp.get_op_table("cpu").items() if row.policies()]
    assert [check.name.partition(" ")[0] for check in report.checks] == rows


def test_the_processors_rules_of_the_moment_are_checked_too() -> None:
    mpamp.set_op_rules("cpu", {"linalg_inv": "lower_precision_fp"})
    try:
        assert [*failed(check_backend("cpu", sections=["table"]))] == ["aten::linalg_inv (lower_precision_fp)"]
    finally:
        mpamp.set_op_rules("cpu", None)


# -- Planted faults: what a backend says ---------------------------------------------------------------


@pytest.mark.parametrize("wrong", [FULL, torch.float64, torch.int8, torch.complex64])
def test_a_default_dtype_that_is_not_lower_precision(wrong: torch.dtype) -> None:
    backend = type("Wrong", (CpuBackend,), {"default_dtype": wrong})()
    found = failed(check_backend(backend, sections=["backend"]))
    assert str(wrong) in found["default_dtype is one that regions run in"]


def test_a_default_dtype_that_the_manual_does_not_promise() -> None:
    backend = type("Wrong", (CpuBackend,), {"default_dtype": HALF})()
    found = failed(check_backend(backend, default_dtype=BRAIN, sections=["backend"]))
    assert found == {"default_dtype is what is expected": "default_dtype is torch.float16, torch.bfloat16 was expected"}


@pytest.mark.parametrize("wrong", [(), (BRAIN, FULL), (BRAIN, torch.float64), (BRAIN, torch.int8)])
def test_lower_precision_dtypes_that_are_not(wrong: tuple[torch.dtype, ...]) -> None:
    table = OpTable.named("default", "cpu")
    backend = type("Wrong", (CpuBackend,), {"lower_precision_dtypes": wrong, "op_table": lambda self: table})()
    assert "lower_precision_dtypes are lower precision" in failed(check_backend(backend, sections=["backend"]))


@pytest.mark.parametrize(
    ("attribute", "value", "check"),
    [
        ("tensor_attribute", "is_cuda", "tensor_check knows the device's tensors"),
        ("autocast_key", "AutocastXPU", "autocast_key is the one that torch autocasts the device by"),
    ],
)
def test_wrong_attributes(attribute: str, value: str, check: str) -> None:
    backend = type("Wrong", (CpuBackend,), {attribute: value})()
    assert check in failed(check_backend(backend, sections=["backend"]))


class Unsteady(CpuBackend):
    """Its table is another each time."""

    calls = 0

    def op_table(self) -> OpTable:
        self.calls += 1
        return super().op_table().override({"relu": "fp32" if self.calls % 2 else "promote"})


def test_an_unsteady_table() -> None:
    found = failed(check_backend(Unsteady(), sections=["backend"]))
    assert "aten::relu" in found["op_table is the device's, and the same each time"]


def test_a_table_of_another_device() -> None:
    backend = type("Wrong", (CpuBackend,), {"op_table": lambda self: OpTable.named("default", "xpu")})()
    found = failed(check_backend(backend, sections=["backend"]))
    assert found["op_table is the device's, and the same each time"] == "it is for 'xpu'"


def test_a_table_that_cannot_be_made() -> None:
    backend = type("Wrong", (CpuBackend,), {"op_table": lambda self: OpTable({"sofmax": "fp32"})})()
    assert "UnknownOpError: unknown op 'sofmax'" in failed(check_backend(backend))["op_table can be made"]


def test_a_backend_that_raises() -> None:
    def tensor_check(self: Backend) -> Any:
        raise RuntimeError("no driver\nat line 3")

    backend = type("Wrong", (CpuBackend,), {"tensor_check": tensor_check})()
    found = failed(check_backend(backend, sections=["backend"]))
    assert found["tensor_check can be made"] == "RuntimeError: no driver"


# -- Planted faults: rows that lie ---------------------------------------------------------------------


class Rows(CpuBackend):
    """The processor with other rows, which nothing checks."""

    rows: dict[str, Row]

    def op_table(self) -> OpTable:
        table = super().op_table()
        return OpTable.from_rows({**table, **self.rows}, name="lying", device=self.device_type)


@pytest.mark.parametrize(
    ("op", "policy", "word"),
    [
        ("aten::linalg_inv", CastPolicy.LOWER_PRECISION_FP, "can't run it so"),
        ("aten::fft_fft", CastPolicy.LOWER_PRECISION_FP, "can't run it so"),
        ("aten::mm", CastPolicy.FP32_SET_OPT_DTYPE, "aten::mm has none"),
        ("aten::relu_", CastPolicy.FP32, "writes in place"),
        ("aten::softmax.int", CastPolicy.FP32_APPEND_DTYPE, "not to aten::softmax.int"),
    ],
)
def test_a_row_that_lies(op: str, policy: CastPolicy, word: str) -> None:
    backend = type("Lying", (Rows,), {"rows": {op: Row(policy)}})()
    found = failed(check_backend(backend, sections=["table"]))
    assert [*found] == [f"{op} ({policy})"]
    assert word in found[f"{op} ({policy})"]


def test_a_row_that_the_vendors_own_kernel_does_not_keep() -> None:
    """The kernel is put on top of what is there, as a vendor's library does when it is imported late."""
    with mpamp.autocast("cpu"):
        pass

    def mse_loss(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.ops.aten.mse_loss(x.bfloat16(), y.bfloat16(), reduction)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mse_loss", mse_loss, "AutocastCPU", allow_override=True)
    try:
        found = failed(check_backend("cpu", sections=["table"]))
    finally:
        library._destroy()
    assert [*found] == ["aten::mse_loss (fp32)"]
    assert "fp32 means aten.mse_loss.default(float32, float32)" in found["aten::mse_loss (fp32)"]
    assert "it was aten.mse_loss.default(bfloat16, bfloat16)" in found["aten::mse_loss (fp32)"]


# -- Planted faults: scalers ---------------------------------------------------------------------------


class Ignoring(torch.amp.GradScaler):
    """Steps whatever the gradients are."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


class Forgetful(torch.amp.GradScaler):
    """Saves no growth tracker."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "_growth_tracker": 0}


class Stubborn(torch.amp.GradScaler):
    """Never moves its scale."""

    def update(self, new_scale: Any = None) -> None:
        super().update(self.get_scale())


def test_a_scaler_that_ignores_inf() -> None:
    found = failed(check_backend("cpu", make_scaler=Ignoring, sections=["scaler"]))
    assert len(found) == 6
    assert "inf is ignored" in found["inf skips the step and lowers the scale"]
    assert "NaN skips the step and lowers the scale" in found
    assert "an inf in one of several gradients skips all" in found


class Raw(mpamp.GradScaler):
    """Steps with scaled gradients."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer.step()
        return super().step(optimizer, *args, **kwargs)


class Patient(mpamp.GradScaler):
    """Lets a call be made twice."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._per_optimizer_states.pop(id(optimizer), None)
        super().unscale_(optimizer)


class Fixed(mpamp.GradScaler):
    """Goes by factors of its own, and is always on."""

    def __init__(self, device: str, **settings: Any) -> None:
        super().__init__(device, **{**settings, "growth_factor": 2.0, "backoff_factor": 0.5, "enabled": True})


@pytest.mark.parametrize(
    ("scaler", "checks"),
    [
        (Raw, {"step applies the unscaled gradients"}),
        (Patient, {"unscale_ and step are refused the second time"}),
        (Fixed, {"growth_factor and backoff_factor are obeyed", "a disabled scaler leaves everything as it is"}),
        (Forgetful, {"state_dict and load_state_dict"}),
        (Stubborn, {"good steps raise the scale", "inf skips the step and lowers the scale"}),
    ],
)
def test_scalers_with_other_faults(scaler: Any, checks: set[str]) -> None:
    assert checks <= failed(check_backend("cpu", make_scaler=scaler, sections=["scaler"])).keys()


def test_a_plugins_scaler_is_the_one_that_is_checked() -> None:
    class Plugin:
        @hookimpl
        def mpamp_make_scaler(self, device_type: str, config: Any) -> Any:
            options = {k: getattr(config, k) for k in ("init_scale", "growth_interval")}
            return Ignoring(device_type, **options)

    plugin = Plugin()
    manager()._pm.register(plugin)
    try:
        assert "inf skips the step and lowers the scale" in failed(check_backend("cpu", sections=["scaler"]))
    finally:
        manager()._pm.unregister(plugin)


def test_a_kernel_that_does_not_look_for_inf(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscale_bucket_(bucket: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        for grad in bucket.tensors:
            grad.mul_(inv_scale)

    monkeypatch.setattr(kernels, "unscale_bucket_", unscale_bucket_)
    found = failed(check_backend("cpu", sections=["scaler"]))
    assert str(math.inf) in found["inf skips the step and lowers the scale"]


@pytest.mark.parametrize(
    ("method", "answer", "detail"),
    [
        ("is_emulated", "yes", "is_emulated(torch.bfloat16) is 'yes'"),
        ("is_emulated", OSError("no driver"), "OSError: no driver"),
        ("is_available", 1, "is_available() is 1"),
    ],
)
def test_answers_that_are_no_bool(method: str, answer: Any, detail: str) -> None:
    def reply(self: Backend, *dtype: torch.dtype) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = failed(check_backend(type("Vague", (CpuBackend,), {method: reply})(), sections=["backend"]))
    assert list(found) == ["is_available and is_emulated give a bool"]
    assert detail in found["is_available and is_emulated give a bool"]


@pytest.mark.parametrize("policy", [CastPolicy.BANNED, CastPolicy.FP32, None])
def test_a_table_that_runs_nothing_in_lower_precision(policy: CastPolicy | None) -> None:
    rows = {op: Row(policy) for op in CpuBackend().op_table()}
    table = OpTable.from_rows(rows, name="useless", device="cpu")
    useless = type("Useless", (CpuBackend,), {"op_table": lambda self: table})()
    found = failed(check_backend(useless, sections=["backend"]))
    assert found == {
        "op_table has something run in lower precision": "no row is lower_precision_fp in a torch.bfloat16 region: "
        "it makes nothing faster"
    }


# -- Planted faults: regions ---------------------------------------------------------------------------


def test_a_cache_that_keeps_nothing() -> None:
    forgetful = type("Forgetful", (CpuBackend,), {"capture_check": lambda self: lambda: True})()
    found = failed(check_backend(forgetful, sections=["cache"]))
    assert found == {"a weight is cast once in a region": "two uses made 2 casts, not 1"}


def test_nothing_that_a_faulty_backend_allowed_is_allowed_afterwards() -> None:
    members = {"lower_precision_dtypes": (BRAIN, torch.float64), "op_table": lambda self: CpuBackend().op_table()}
    lax = type("Lax", (CpuBackend,), members)()
    assert "other dtypes are refused" in failed(check_backend(lax, sections=["backend"]))
    with pytest.raises(mpamp.UnsupportedDtypeError, match="float64 was asked for"):
        mpamp.autocast("cpu", torch.float64)


@pytest.mark.parametrize("dtypes", [("bfloat16",), (None,)])
def test_dtypes_that_are_none_are_refused_before_a_region_is_entered(dtypes: Any) -> None:
    wrong = type(
        "Wrong", (CpuBackend,), {"lower_precision_dtypes": dtypes, "op_table": lambda s: CpuBackend().op_table()}
    )
    found = failed(check_backend(wrong(), sections=["backend"]))
    assert found == {"dtypes are dtypes": f"{dtypes[0]!r} is no torch.dtype"}
    assert not torch.is_autocast_enabled("cpu")
    assert check_backend("cpu", sections=["backend"]).failures == []


# -- The report ----------------------------------------------------------------------------------------


def test_the_report_is_readable() -> None:
    backend = type("Wrong", (CpuBackend,), {"default_dtype": FULL})()
    report = check_backend(backend, sections=["backend", "nesting"])
    lines = str(report).splitlines()
    assert lines[0].startswith("<Wrong 'cpu'> on this machine's tensors: ")
    assert "    FAILED default_dtype is one that regions run in: " in str(report)
    assert any(line.startswith("  nesting: ") for line in lines)
    assert json.loads(json.dumps(report.to_dict()))["device_type"] == "cpu"
    with pytest.raises(ConformanceError, match="FAILED default_dtype"):
        report.raise_for_failures()


def test_sections() -> None:
    report = check_backend("cpu", sections=["nesting"])
    assert {check.section for check in report.checks} == {"nesting"}
    assert report.raise_for_failures() is report
    with pytest.raises(ValueError, match=r"no section tables; there are: backend, table, "):
        check_backend("cpu", sections=["tables"])


def test_an_unknown_device() -> None:
    with pytest.raises(mpamp.UnknownDeviceError):
        check_backend("npv")


# -- Backends that raise ---------------------------------------------------------------------------------


class OwnExit(BaseException):
    """What no ``except Exception`` catches."""


METHODS = [n for n, m in vars(Backend).items() if inspect.isfunction(m) and (n == "__repr__" or n[0] != "_")]


@pytest.mark.parametrize("error", [ValueError, SystemExit, OwnExit])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_raises_is_reported(name: str, error: type[BaseException]) -> None:
    def fail(*args: Any) -> Any:
        raise error("boo")

    backend = type("Wrong", (CpuBackend,), {name: fail})()
    report = check_backend(backend, sections=["backend", "scaler"] if name == "has_kernel" else ["backend"])
    assert [detail for detail in failed(report).values() if f"{error.__name__}: boo" in detail]


def test_the_global_random_numbers_stay_as_they_were() -> None:
    before = torch.get_rng_state()
    check_backend("cpu", sections=["cache", "checkpoint"]).raise_for_failures()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_that_says_it_is_not_here() -> None:
    backend = type("Wrong", (CpuBackend,), {"is_available": lambda self: False})()
    found = failed(check_backend(backend, sections=["backend"]))
    assert "is_available is true where the device's tensors can be made" in found


def test_a_read_later_that_gives_something_else() -> None:
    backend = type("Wrong", (CpuBackend,), {"read_later": lambda self, tensor: lambda: tensor * 2})()
    assert "read_later gives the values" in failed(check_backend(backend, sections=["backend"]))


@pytest.mark.parametrize("dtypes", [(3,), None, ("bfloat16",)])
def test_dtypes_that_are_none(dtypes: Any) -> None:
    backend = type("Wrong", (CpuBackend,), {"lower_precision_dtypes": dtypes})()
    assert "dtypes are dtypes" in failed(check_backend(backend, sections=["backend"]))


# -- Where nothing can be checked ------------------------------------------------------------------------


def test_a_kit_that_ran_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "is_fakeable", lambda device_type: False)
    backend = type("Away", (CpuBackend,), {"is_available": lambda self: False})()
    report = check_backend(backend)
    assert (len(report.passed), len(report.skipped)) == (0, 7)
    with pytest.raises(ConformanceError, match=r"nothing was checked: run the kit where there is a 'cpu' device"):
        report.raise_for_failures()


def test_a_kit_whose_checks_all_need_the_device_fails() -> None:
    def skip() -> None:
        raise Inapplicable("needs the device itself")

    tests = {"cache": lambda subject: [("one", skip), ("two", skip)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "SECTIONS", tests)
        assert [*failed(check_backend("cpu"))] == ["something is checked"]


def test_a_backend_of_a_device_that_torch_does_not_know() -> None:
    backend = type("Npv", (Backend,), {"device_type": "npv", "autocast_key": "AutocastPrivateUse1"})()
    with pytest.raises(
        mpamp.UnknownDeviceError, match=r"torch knows no device 'npv', though .*\.rename_privateuse1_backend"
    ):
        check_backend(backend)
