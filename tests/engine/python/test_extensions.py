"""Ops of others: registered for autocast at any time, defined anew, taken away, imported later."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mpamp
from tests.torches import needs_torchs_kernels

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
NAMESPACE = "of_others"
ops = getattr(torch.ops, NAMESPACE)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    found = torch.library.Library(NAMESPACE, "FRAGMENT")
    yield found
    found._destroy()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2, 2)


def define(library: torch.library.Library, name: str) -> Any:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x + 0, "CPU")
    return lambda x: getattr(ops, name)(x)


def in_region(call: Any, x: torch.Tensor, dtype: torch.dtype = BRAIN, **options: Any) -> torch.dtype:
    with mpamp.autocast("cpu", dtype, **options):
        return call(x).dtype


def in_plain(call: Any, x: torch.Tensor) -> torch.dtype:
    with torch.autocast("cpu", BRAIN):
        return call(x).dtype


def by_register_autocast(library: torch.library.Library, name: str) -> None:
    torch.library.register_autocast(f"{NAMESPACE}::{name}", "cpu", HALF, lib=library)


def by_impl(library: torch.library.Library, name: str) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return getattr(ops, name)(x.half())

    library.impl(name, kernel, "AutocastCPU")


WAYS = [by_register_autocast, by_impl]


@pytest.mark.parametrize("register", WAYS)
def test_a_rule_registered_after_the_first_region_holds(register: Any, library: Any, x: torch.Tensor) -> None:
    call = define(library, "late")
    assert in_region(call, x) is FULL
    register(library, "late")
    assert in_plain(call, x) is HALF
    for options in ({}, {"ops": {"gelu": "fp32"}}, {"ops": mpamp.OpTable({"mm": "lower_precision_fp"})}, {}):
        assert in_region(call, x, **options) is HALF
    assert call(x).dtype is FULL


@pytest.mark.parametrize("register", WAYS)
def test_a_rule_registered_inside_of_a_region_holds(register: Any, library: Any, x: torch.Tensor) -> None:
    call = define(library, "inside")
    with mpamp.autocast("cpu", BRAIN):
        assert call(x).dtype is FULL
        register(library, "inside")
        assert call(x).dtype is HALF
    assert in_region(call, x) is HALF


@needs_torchs_kernels
@pytest.mark.parametrize("register", WAYS)
@pytest.mark.parametrize("is_first", [True, False])
def test_the_tables_rule_holds_in_regions_and_the_librarys_outside(
    register: Any, is_first: bool, library: Any, x: torch.Tensor
) -> None:
    call, rule = define(library, "both"), {f"{NAMESPACE}::both": "lower_precision_fp"}
    if is_first:
        register(library, "both")
    in_region(call, x, ops=rule)
    if not is_first:
        register(library, "both")
    assert in_region(call, x, ops=rule) is BRAIN
    assert in_plain(call, x) is HALF
    assert in_region(call, x) is HALF


def test_custom_ops_rules_hold(x: torch.Tensor) -> None:
    @torch.library.custom_op(f"{NAMESPACE}::custom", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    assert in_region(custom, x) is FULL
    custom.register_autocast("cpu", HALF)
    assert in_region(custom, x) is HALF


@needs_torchs_kernels
def test_a_library_that_goes_takes_its_rule_along(library: Any, x: torch.Tensor) -> None:
    call = define(library, "going")
    other = torch.library.Library(NAMESPACE, "IMPL")
    by_register_autocast(other, "going")
    assert in_region(call, x, ops={f"{NAMESPACE}::going": "fp32"}) is FULL
    assert in_plain(call, x) is HALF
    other._destroy()
    del other
    gc.collect()
    for _ in range(2):
        assert in_plain(call, x) is FULL
        assert in_region(call, x) is FULL
        assert in_region(call, x, ops={f"{NAMESPACE}::going": "lower_precision_fp"}) is BRAIN


@needs_torchs_kernels
def test_an_error_of_the_kernel_below_is_the_users(library: Any, x: torch.Tensor) -> None:
    call = define(library, "failing")

    def kernel(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    library.impl("failing", kernel, "AutocastCPU")
    in_region(lambda x: x, x, ops={f"{NAMESPACE}::failing": "fp32"})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mine"):
            in_plain(call, x)


def test_an_op_defined_anew_with_another_schema(x: torch.Tensor) -> None:
    """A cell of a notebook that is run again."""

    def cell(factor: float, *, is_scaled: bool) -> Any:
        if is_scaled:

            @torch.library.custom_op(f"{NAMESPACE}::cell", mutates_args=())
            def op(x: torch.Tensor, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
                return x * factor * scale + shift

        else:

            @torch.library.custom_op(f"{NAMESPACE}::cell", mutates_args=())
            def op(x: torch.Tensor) -> torch.Tensor:
                return x * factor

        mpamp.register_op(f"{NAMESPACE}::cell", "lower_precision_fp")
        return op

    for factor, is_scaled in ((2.0, False), (3.0, False), (5.0, True), (7.0, False)):
        op = cell(factor, is_scaled=is_scaled)
        args = (x, 2.0, 1.0) if is_scaled else (x,)
        expected = factor * 2 + 1 if is_scaled else factor
        with mpamp.autocast("cpu", BRAIN):
            found = op(*args)
            again = ops.cell(x)
        assert (found.dtype, found[0, 0].item()) == (BRAIN, expected)
        assert (again.dtype, again[0, 0].item()) == (BRAIN, factor)
        with torch.autocast("cpu", BRAIN):
            plain = op(*args)
        assert (plain.dtype, plain[0, 0].item()) == (FULL, expected)
    mpamp.unregister_op(f"{NAMESPACE}::cell")


def test_an_op_that_is_defined_later_has_its_row(library: Any, x: torch.Tensor) -> None:
    text = f'torch = "1.0"\n[ops]\n"{NAMESPACE}::coming.default" = "lower_precision_fp"'
    table = mpamp.get_op_table("cpu").override(mpamp.OpTable.from_toml(text))
    with mpamp.autocast("cpu", BRAIN, ops=table):
        pass
    call = define(library, "coming")
    assert in_region(call, x, ops=table) is BRAIN
    assert in_region(call, x) is FULL


@needs_torchs_kernels
def test_kernels_of_ours_are_nobodys_overrides(x: torch.Tensor) -> None:
    """torch refuses a second kernel from Python, unless told otherwise: it is told of no kernel of ours."""
    assert in_region(lambda x: x.mm(x), x) is BRAIN
    other = torch.library.Library("aten", "IMPL")
    other.impl("mm", lambda a, b: a.new_zeros(7), "AutocastCPU", allow_override=False)
    try:
        with torch.autocast("cpu", BRAIN):
            assert x.mm(x).shape == (7,)
    finally:
        other._destroy()
        mpamp.engine.python.kernels.withdraw(mpamp.devices.registry.device_state("cpu"))
    assert in_plain(lambda x: x.mm(x), x) is BRAIN
