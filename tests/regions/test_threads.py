"""Regions on threads that their user doesn't start by hand."""

from __future__ import annotations

import asyncio
import functools
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


async def _coroutine(pause):
    before = dtypes()
    await asyncio.sleep(0)
    pause()
    return [before, dtypes()]


def _generator(pause):
    yield dtypes()
    pause()
    yield dtypes()


async def _async_generator(pause):
    yield dtypes()
    await asyncio.sleep(0)
    pause()
    yield dtypes()


async def _collected(items):
    return [item async for item in items]


class _Callers:
    """Methods of each kind, and an object that is called."""

    def plain(self, pause):
        return [dtypes()]

    async def coroutine(self, pause):
        return await _coroutine(pause)

    @classmethod
    def generator(cls, pause):
        yield from _generator(pause)

    @staticmethod
    async def async_generator(pause):
        async for item in _async_generator(pause):
            yield item

    async def __call__(self, pause):
        return await _coroutine(pause)


class _Made:
    """A class: its instances are made in the regions."""

    def __init__(self, pause):
        self.seen = [dtypes()]


class _Module(torch.nn.Module):
    """A module, whose own attributes aren't the wrapper's to change."""

    def forward(self, pause):
        return [dtypes()]


BODIES = {
    "async": (_coroutine, asyncio.run),
    "generator": (_generator, list),
    "async generator": (_async_generator, lambda items: asyncio.run(_collected(items))),
    "partial async": (functools.partial(_coroutine, bool), asyncio.run),
    "partial of partial": (functools.partial(functools.partial(_generator), bool), list),
    "method": (_Callers().plain, list),
    "async method": (_Callers().coroutine, asyncio.run),
    "class method that generates": (_Callers.generator, list),
    "static method that generates": (_Callers().async_generator, lambda items: asyncio.run(_collected(items))),
    "async object": (_Callers(), asyncio.run),
    "class": (_Made, lambda made: made.seen),
    "module": (_Module(), list),
}


@pytest.mark.parametrize("kind", BODIES)
def test_inherit_regions_of_every_kind_of_function(kind):
    body, use = BODIES[kind]
    with mpamp.autocast("cpu", HALF, ops={"softmax": "fallthrough"}):
        inherited = inherit_regions(body)
    arguments = () if kind.startswith("partial") else (bool,)

    def work():
        with mpamp.autocast("cpu", BF16):
            return use(inherited(*arguments)), dtypes()

    seen, here = run(work)
    assert set(seen) == {(HALF, HALF)}
    assert here == (BF16, BF16)


def test_inherited_regions_are_left_where_a_body_pauses():
    with mpamp.autocast("cpu", HALF):
        steps = inherit_regions(_generator)(bool)
        inside = inherit_regions(_coroutine)
    seen = []
    for _ in steps:
        seen.append(dtypes())

    async def main():
        async def beside():
            seen.append(dtypes())

        return (await asyncio.gather(inside(bool), beside()))[0]

    assert {each[0] for each in asyncio.run(main())} == {HALF}
    assert seen == [(FP32, FP32)] * 3


def test_inherit_regions_of_what_is_no_function():
    coroutine = _coroutine(bool)
    with mpamp.autocast("cpu", HALF), pytest.raises(TypeError, match="takes a function, got <coroutine object"):
        inherit_regions(coroutine)
    with pytest.raises(TypeError, match="takes a function, got 3"):
        inherit_regions(3)
    coroutine.close()


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
