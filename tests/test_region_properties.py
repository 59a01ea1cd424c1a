"""Random nestings of regions and plain torch.autocast, with exceptions and threads, against a model of a few lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import mpamp

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LISTED = getattr(
    torch._C, "_autocast_supported_devices", lambda: ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "mps")
)
DEVICES = tuple(d for d in LISTED() if d != "privateuseone")
CARRIERS = ("ipu", "maia", "mtia")
DEFAULT_DTYPE = {"cpu": BRAIN, "xpu": BRAIN}
NATIVE_SOFTMAX = {"cpu": BRAIN, "xpu": FULL}
"""What torch's own table makes of softmax(bfloat16): the CPU's doesn't list it."""

settings.register_profile("mpamp", deadline=None, max_examples=60, derandomize=True)


def autocast_state() -> dict[str, Any]:
    """Return everything that torch keeps about autocast for the calling thread."""
    state: dict[str, Any] = {d: torch.is_autocast_enabled(d) for d in DEVICES}
    dtypes = {f"{d} dtype": torch.get_autocast_dtype(d) for d in DEVICES}
    return {**state, **dtypes, "cache": torch.is_autocast_cache_enabled()}


def without_idle_dtypes(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out the dtypes of the device types that carry mpamp's own state while they are off."""
    return {key: value for key, value in state.items() if key not in {f"{c} dtype" for c in CARRIERS}}


# -- The model -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class On:
    """What holds for one device: whether autocast is on, its dtype, and the rules of the innermost region of ours."""

    enabled: bool
    dtype: torch.dtype
    rules: tuple[tuple[str, str], ...] | None = None
    """None: in no region of ours, so torch's own table holds."""


Model = dict[str, On]
OUTSIDE: Model = {"cpu": On(False, BRAIN), "xpu": On(False, HALF)}


def expected_mm(on: On) -> torch.dtype:
    """Predict the dtype of mm on float32."""
    policy = dict(on.rules or ()).get("mm", "lower_precision_fp")
    return on.dtype if on.enabled and policy == "lower_precision_fp" else FULL


def expected_softmax(device: str, on: On) -> torch.dtype:
    """Predict the dtype of softmax on bfloat16."""
    if not on.enabled:
        return BRAIN
    if on.rules is None:
        return NATIVE_SOFTMAX[device]
    policy = dict(on.rules).get("softmax")
    if policy is None:
        policy = str(mpamp.get_op_table(device).policy("softmax.int", on.dtype))
    return FULL if policy.startswith("fp32") else BRAIN


class Boom(Exception):
    """Raised at random points."""


# -- Programs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    device: str

    def run(self, model: Model) -> None:
        if self.device == "xpu" and not _is_fake():
            return
        full, low = torch.ones(2, 2, device=self.device), torch.ones(2, 2, device=self.device, dtype=BRAIN)
        assert torch.mm(full, full).dtype is expected_mm(model[self.device])
        assert low.softmax(0).dtype is expected_softmax(self.device, model[self.device])


@dataclass(frozen=True)
class Raise:
    def run(self, model: Model) -> None:
        raise Boom


@dataclass(frozen=True)
class Ours:
    device: str
    dtype: torch.dtype | None
    enabled: bool
    rules: tuple[tuple[str, str], ...]
    as_decorator: bool
    catches: bool
    body: tuple[Any, ...]

    def run(self, model: Model) -> None:
        if self.device == "xpu" and not _is_fake():
            return
        region = mpamp.autocast(self.device, self.dtype, self.enabled, ops=dict(self.rules) if self.rules else None)
        inner = {**model, self.device: self._inside(model[self.device])}
        if self.enabled:  # in a region of ours, torch.autocast of any device follows our tables
            inner = {d: replace(on, rules=on.rules or ()) for d, on in inner.items()}
        with contextlib.suppress(Boom) if self.catches else contextlib.nullcontext():
            if self.as_decorator:
                region(execute)(self.body, inner)
            else:
                with region:
                    execute(self.body, inner)
        Probe(self.device).run(model)

    def _inside(self, on: On) -> On:
        if not self.enabled:
            return replace(on, enabled=False)
        return On(True, self.dtype or DEFAULT_DTYPE[self.device], self.rules)


@dataclass(frozen=True)
class Torchs:
    device: str
    dtype: torch.dtype
    enabled: bool
    catches: bool
    body: tuple[Any, ...]

    def run(self, model: Model) -> None:
        inner = {**model, self.device: replace(model[self.device], enabled=self.enabled, dtype=self.dtype)}
        catching = contextlib.suppress(Boom) if self.catches else contextlib.nullcontext()
        with catching, torch.autocast(self.device, self.dtype, enabled=self.enabled):
            execute(self.body, inner)
        Probe(self.device).run(model)


def execute(body: tuple[Any, ...], model: Model) -> None:
    for step in body:
        step.run(model)


def _is_fake() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


devices = st.sampled_from(["cpu", "cpu", "xpu"])
rules = st.sampled_from(
    [(), (), (("mm", "fp32"),), (("softmax", "fp32"),), (("softmax", "fallthrough"), ("mm", "fp32"))]
)
leaves = st.one_of(st.builds(Probe, devices), st.builds(Probe, devices), st.builds(Raise))


def _blocks(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, min_size=1, max_size=4).map(tuple)
    dtypes = st.sampled_from([HALF, BRAIN])
    ours = st.builds(
        Ours, devices, st.sampled_from([HALF, BRAIN, FULL, None]), st.sampled_from([True, True, False]), rules,
        st.booleans(), st.booleans(), body,
    )  # fmt: skip
    return st.one_of(ours, ours, st.builds(Torchs, devices, dtypes, st.booleans(), st.booleans(), body))


programs = st.lists(st.recursive(leaves, _blocks, max_leaves=12), min_size=1, max_size=4).map(tuple)


def run_program(program: tuple[Any, ...], is_fake: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run one program on the calling thread; return torch's autocast state before and after it."""
    with FakeTensorMode() if is_fake else contextlib.nullcontext():
        before = autocast_state()
        with contextlib.suppress(Boom):
            execute(program, OUTSIDE)
        after = autocast_state()
        execute((Probe("cpu"), Probe("xpu")), OUTSIDE)
    return before, after


def on_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run calls at once, each on a fresh thread."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result() for f in [pool.submit(call) for call in calls]]


# -- Properties ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_fake", [False, True])
@settings(settings.get_profile("mpamp"))
@given(program=programs)
def test_ops_run_as_the_model_says_and_the_state_comes_back(is_fake: bool, program: tuple[Any, ...]) -> None:
    before, after = on_threads([lambda: run_program(program, is_fake)])[0]
    assert without_idle_dtypes(after) == without_idle_dtypes(before)


@settings(settings.get_profile("mpamp"))
@given(program=programs)
def test_every_device_s_dtype_comes_back(program: tuple[Any, ...]) -> None:
    before, after = on_threads([lambda: run_program(program)])[0]
    assert after == before


@settings(settings.get_profile("mpamp"))
@given(program=st.lists(programs, min_size=2, max_size=3))
def test_threads_do_not_see_each_other(program: list[tuple[Any, ...]]) -> None:
    states = on_threads([lambda each=each: run_program(each) for each in program])  # type: ignore[misc]
    assert all(without_idle_dtypes(after) == without_idle_dtypes(before) for before, after in states)


@settings(settings.get_profile("mpamp"))
@given(inside=programs, outer=st.sampled_from([HALF, BRAIN]), outer_rules=rules)
def test_a_program_inside_an_open_region_brings_it_back(
    inside: tuple[Any, ...], outer: torch.dtype, outer_rules: tuple[tuple[str, str], ...]
) -> None:
    def work() -> tuple[dict[str, Any], dict[str, Any]]:
        with mpamp.autocast("cpu", outer, ops=dict(outer_rules) or None):
            model = {**OUTSIDE, "cpu": On(True, outer, outer_rules)}
            before = autocast_state()
            with contextlib.suppress(Boom):
                execute(inside, model)
            Probe("cpu").run(model)
            return before, autocast_state()

    before, after = on_threads([work])[0]
    assert without_idle_dtypes(after) == without_idle_dtypes(before)


def test_the_model_can_be_wrong() -> None:
    wrong = {**OUTSIDE, "cpu": On(True, BRAIN, ())}
    with pytest.raises(AssertionError):
        Probe("cpu").run(wrong)
