"""Regions on threads that their user doesn't start by hand."""

from __future__ import annotations

import threading

import pytest
import torch

import mpamp
from mpamp.regions.threads import carried_apply, inherit_regions

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32


def run(function, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    return results[0]


def dtypes():
    a = torch.ones(2, 2)
    return (a @ a).dtype, (a @ a).softmax(0).dtype


def test_a_new_thread_starts_outside_every_region():
    with mpamp.autocast("cpu", BF16):
        assert run(dtypes) == (FP32, FP32)


def test_inherit_regions_carries_dtype_and_table():
    with mpamp.autocast("cpu", HALF, ops={"softmax": "fallthrough"}):
        assert run(inherit_regions(dtypes)) == (HALF, HALF)


def test_inherit_regions_carries_nested_and_disabled_regions():
    with mpamp.autocast("cpu", BF16), mpamp.autocast("cpu", enabled=False):
        disabled = inherit_regions(dtypes)
    with mpamp.autocast("cpu", BF16), mpamp.autocast("cpu", HALF):
        nested = inherit_regions(dtypes)
    assert run(disabled) == (FP32, FP32)
    assert run(nested)[0] is HALF


def test_inherit_regions_leaves_the_other_thread_as_it_was():
    with mpamp.autocast("cpu", BF16):
        inside = inherit_regions(dtypes)
    assert run(lambda: (inside(), dtypes())) == ((BF16, BF16), (FP32, FP32))


def threaded_apply(modules, inputs):
    """What torch's parallel_apply does: a thread a module, autocast by the enabled flag alone."""

    def work(module, value):
        with torch.amp.autocast("cpu", enabled=True):
            return module(*value)

    return [run(work, module, value) for module, value in zip(modules, inputs, strict=True)]


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_data_parallel_threads_keep_dtype_and_table(dtype):
    linear = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with mpamp.autocast("cpu", dtype, ops={"linear": {"float16": "fp32"}}):
        results = carried_apply(threaded_apply)([linear, linear], [(x,), (x,)])
    assert {r.dtype for r in results} == {BF16 if dtype is BF16 else FP32}


def test_data_parallel_outside_regions_is_torchs_own():
    linear = torch.nn.Linear(2, 2)
    seen = []
    carried_apply(lambda modules, inputs: seen.extend(modules))([linear], [()])
    assert seen == [linear]


def test_torchs_data_parallel_calls_the_carrying_one():
    import torch.nn.parallel as parallel

    with mpamp.autocast("cpu"):
        pass
    used = parallel.DataParallel.parallel_apply.__globals__["parallel_apply"]
    assert used is parallel.parallel_apply
    assert used.__wrapped__ is not used


@pytest.mark.accelerator
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_data_parallel_on_two_cards_keeps_dtype_and_table():
    model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(1)).cuda())
    x = torch.ones(8, 4, device="cuda")
    with mpamp.autocast("cuda", BF16, ops={"softmax": "fallthrough"}):
        assert model(x).dtype is BF16
