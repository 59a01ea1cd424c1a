"""Kept casts whose weight was written past its version counter are found; those that won't be used are none."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import mpamp
from mpamp.engine.casts.cache import kept
from tests import processes
from tests.paths import search_path

ROOT = Path(__file__).parents[3]
LOW = torch.bfloat16
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _empty() -> None:
    mpamp.clear_cache()


def write(weight: torch.Tensor) -> None:
    """Write by the weight's address, as a kernel of somebody else's does: no counter shows it."""
    ctypes.memset(weight.data_ptr(), 1, weight.nbytes)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))


def test_only_the_weight_that_nothing_saw_being_written() -> None:
    model = make_model()
    with mpamp.autocast("cpu", dtype=LOW):
        model(X)
        assert len(list(kept())) == 3
        assert mpamp.verify_cache(model) == []
        write(model[0].weight)
        (stale,) = mpamp.verify_cache(model)
        assert (stale.name, stale.shape, stale.dtype) == ("0.weight", (4, 4), LOW)
        assert stale.device == torch.device("cpu")
        assert str(stale) == "'0.weight' of shape (4, 4) on cpu, cast to torch.bfloat16"
        assert torch.equal(model[0](X), model[0](X))
        mpamp.clear_cache()
        model(X)
        assert mpamp.verify_cache(model) == []


def test_without_a_model_it_has_no_name() -> None:
    model = make_model()
    with mpamp.autocast("cpu", dtype=LOW):
        model(X)
        write(model[1].weight)
        (stale,) = mpamp.verify_cache()
        (other,) = mpamp.verify_cache(nn.Linear(4, 4))
    assert stale.name is other.name is None
    assert str(stale) == "a weight of shape (4, 4) on cpu, cast to torch.bfloat16"


def test_two_nameless_ones_of_one_shape_are_two() -> None:
    model = make_model()
    with mpamp.autocast("cpu", dtype=LOW):
        model(X)
        for layer in model:
            write(layer.weight)
        assert len(mpamp.verify_cache()) == 2


def test_a_weight_whose_memory_was_moved_is_passed_over() -> None:
    model = make_model()
    with mpamp.autocast("cpu", dtype=LOW), mpamp.trace():  # with either engine, a cast that Python keeps
        model(X)
        model[0].weight.share_memory_()
        assert mpamp.verify_cache(model) == []
        assert torch.equal(model[0](X), model[0](X))


def test_writes_that_are_seen_are_none() -> None:
    model = make_model()
    with mpamp.autocast("cpu", dtype=LOW):
        model(X)
        with torch.no_grad():
            model[0].weight.mul_(2)
        former = model[1].weight.detach()  # else the cast goes with its memory
        model[1].weight.data = torch.zeros(4, 4)
        former.zero_()
        assert len(list(kept())) == 3
        assert mpamp.verify_cache(model) == []
        assert mpamp.verify_cache() == []


def test_a_cast_of_a_weight_that_is_gone_is_none() -> None:
    model = make_model()
    memory = model[0].weight.detach()
    with mpamp.autocast("cpu", dtype=LOW):
        model(X)
        del model
        gc.collect()
        memory.zero_()
        assert mpamp.verify_cache() == []


def test_a_cast_that_was_written_into_is_none() -> None:
    model = make_model()
    with mpamp.autocast("cpu", dtype=LOW):
        model(X)
        for cast in list(kept()):
            cast.low.add_(1)
        assert list(kept()) == []
        assert mpamp.verify_cache(model) == []


def test_a_nan_is_itself() -> None:
    model = make_model()
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    with mpamp.autocast("cpu", dtype=LOW):
        model(X)
        assert mpamp.verify_cache(model) == []


def test_strides_and_persistent_casts() -> None:
    model = make_model()
    model[0].weight = nn.Parameter(torch.randn(4, 4).t())
    with mpamp.autocast("cpu", dtype=LOW, persistent_cache=True), torch.no_grad():
        model(X)
    assert mpamp.verify_cache(model) == []
    write(model[0].weight)
    assert [stale.name for stale in mpamp.verify_cache(model)] == ["0.weight"]


def test_casts_of_other_threads() -> None:
    model = make_model()
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        with mpamp.autocast("cpu", dtype=LOW):
            model(X)
            ready.set()
            done.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(30)
        write(model[0].bias)
        assert [stale.name for stale in mpamp.verify_cache(model)] == ["0.bias"]
        assert list(kept(of_all_threads=False)) == []
    finally:
        done.set()
        thread.join()


def test_it_is_seen_by_no_mode_and_changes_nothing() -> None:
    model = make_model()
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    with mpamp.autocast("cpu", dtype=LOW):
        model(X)
        write(model[0].weight)
        casts = mpamp.cache_info()
        with Watch(), torch.inference_mode():
            assert len(mpamp.verify_cache(model)) == 1
        assert mpamp.cache_info() == casts
    assert seen == []


SCRIPT = """
import ctypes, json, sys
import torch, mpamp
from mpamp.errors import StaleCastError
layer = torch.nn.Linear(4, 4)
x = torch.ones(2, 4)
report = {"messages": []}
def enter(**options):
    try:
        with mpamp.autocast("cpu", dtype=torch.bfloat16, **options):
            layer(x)
    except StaleCastError as error:
        report["messages"].append(str(error))
with torch.no_grad():
    enter(persistent_cache=True)
    enter(persistent_cache=True)
    ctypes.memset(layer.weight.data_ptr(), 0, 64)
    enter(persistent_cache=True)
    report["is_on"] = torch.is_autocast_enabled("cpu")
    mpamp.clear_cache()
    enter(persistent_cache=True)
    with mpamp.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
        ctypes.memset(layer.weight.data_ptr(), 1, 64)
        enter()
enter = mpamp.Region.__enter__  # the compiled engine's has no code
code = getattr(enter, "__code__", None)
report["enter"] = type(mpamp.Region).__name__, enter.__name__ if code is None else code.co_name
print(json.dumps(report))
"""


@pytest.mark.parametrize("value", ["1", "0", None])
def test_the_variable_has_every_region_check(value: str | None) -> None:
    environment = {name: v for name, v in os.environ.items() if name != "MPAMP_CHECK_CACHE"}
    environment |= {"PYTHONPATH": search_path(ROOT), "OMP_NUM_THREADS": "1"} | (
        {} if value is None else {"MPAMP_CHECK_CACHE": value}
    )
    done = processes.python("-c", SCRIPT, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["is_on"] is False
    if value != "1":
        assert report["messages"] == []
        assert report["enter"][1] == "__enter__"
        return
    first, second = report["messages"]
    assert "a weight of shape (4, 4) on cpu, cast to torch.bfloat16" in first
    assert "mpamp.clear_cache()" in first
    assert second.count("a weight") == 1
