"""The kernels' source: any schema, any argument's name, any dtype asked for, and layers that write statistics."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

import mpamp
from mpamp.devices.registry import device_state
from mpamp.engine.python import building, codegen
from mpamp.engine.python.codegen import kernel_source
from mpamp.rules.eligibility import find_overload, is_out_of_place
from mpamp.testing import KernelCounter
from tests.parity.observe import tensors_at

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32


def test_every_schema_with_a_tensor_compiles() -> None:
    """Any op may be named in a rule, so any schema must give a kernel."""
    names = torch._C._dispatch_get_all_op_names()
    found = [op for n in names if n.startswith("aten::") and (op := find_overload(n)) and is_out_of_place(op)]
    for op, is_observed_and_wraps in itertools.product(found, (False, True)):
        source = kernel_source(op, wraps=is_observed_and_wraps, observed=is_observed_and_wraps)
        compile(source, str(op), "exec")
    assert len(found) > 1000


# -- Names of arguments ------------------------------------------------------------------------------


def _own_names() -> set[str]:
    device, op = device_state("cpu"), torch.ops.aten.mm.default
    given = {*building._constants(device, op), *building._functions(device, op, op._op)}
    given |= building._telling(device, op, op._op).keys()
    code = compile(kernel_source(op, observed=True), "kernel", "exec")
    return {n for n in {*given, *code.co_consts[0].co_names, *code.co_consts[0].co_varnames} if n.startswith("_")}


OTHERS = "self keyset keys args kwargs op device dtype kernel isinstance a0 a1 cast call lambda from None_ scope"
NAMES = sorted({*_own_names(), *(n.lstrip("_") for n in _own_names()), *OTHERS.split(" ")} - {"_1", "0", "1"})


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    found = torch.library.Library("names_of_arguments", "FRAGMENT")
    yield found
    mpamp.clear_cache()
    found._destroy()


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_may_be_called_anything(name: str, library: torch.library.Library) -> None:
    op = f"f{NAMES.index(name)}"
    library.define(f"{op}(Tensor x, *, int {name}=3, Tensor? other=None) -> Tensor")
    library.impl(op, lambda x, **given: x * given.get(name, 3), "CPU")
    call = getattr(torch.ops.names_of_arguments, op)
    x = torch.ones(2)
    for policy in ("lower_precision_fp", "fp32", "promote", "fallthrough"):
        with mpamp.autocast("cpu", BRAIN, ops={f"names_of_arguments::{op}": policy}):
            found = [call(x, **{name: 5}), call(x)]
            assert torch.func.vmap(lambda x: call(x, **{name: 5}))(x).tolist() == [5.0, 5.0]
        assert [t.tolist() for t in found] == [[5.0, 5.0], [3.0, 3.0]]
        assert {t.dtype for t in found} == {BRAIN if policy == "lower_precision_fp" else FULL}
        with torch.autocast("cpu", BRAIN):
            plain = call(x, **{name: 7})
        assert (plain.tolist(), plain.dtype) == ([7.0, 7.0], FULL)


# -- Rules on what casts are made of -----------------------------------------------------------------


@pytest.mark.parametrize("op", ["to", "_to_copy"])
def test_a_rule_on_a_cast_does_not_call_itself(op: str) -> None:
    x = torch.ones(2, 2)
    for policy in ("lower_precision_fp", "fp32", "promote", "fallthrough"):
        with mpamp.autocast("cpu", BRAIN, ops={op: policy}):
            assert x.to(BRAIN).dtype is BRAIN
            assert x.mm(x).dtype is BRAIN
        with torch.autocast("cpu", BRAIN):
            assert x.to(HALF).dtype is HALF
            assert x.mm(x).dtype is BRAIN


def test_what_kernels_in_cpp_call_has_the_dtypes_that_they_ask_for() -> None:
    """``unique`` reads what ``sort`` gives it as its own input's dtype."""
    x = torch.tensor([[2.0, 1.0], [2.0, 1.0]])
    for policy, dtype in (("lower_precision_fp", FULL), ("fp32", BRAIN)):
        with mpamp.autocast("cpu", BRAIN, ops={"sort": policy}):
            found = x.to(dtype).unique()
            rows = x.to(dtype).unique(dim=0)
            assert x.to(dtype).sort().values.dtype is {FULL: BRAIN, BRAIN: FULL}[dtype]
        assert (found.tolist(), found.dtype) == ([1.0, 2.0], dtype)
        assert rows.tolist() == [[2.0, 1.0]]


# -- A dtype that the call asks for ------------------------------------------------------------------

WITH_DTYPE: dict[str, Any] = {
    "linalg_matrix_norm": torch.linalg.matrix_norm,
    "linalg_vector_norm": torch.linalg.vector_norm,
    "sum": torch.sum,
    "prod": torch.prod,
    "mean": torch.mean,
    "cumsum": lambda x, **options: torch.cumsum(x, 0, **options),
    "softmax": lambda x, **options: torch.softmax(x, 0, **options),
    "log_softmax": lambda x, **options: torch.log_softmax(x, 0, **options),
}


@pytest.mark.parametrize("policy", ["fp32", "lower_precision_fp", "promote"])
@pytest.mark.parametrize("op", WITH_DTYPE)
def test_a_call_that_asks_for_a_dtype_gets_it(op: str, policy: str) -> None:
    x = torch.rand(4, 4).to(BRAIN)
    for dtype in (BRAIN, FULL, torch.float64):
        expected = WITH_DTYPE[op](x, dtype=dtype)
        with mpamp.autocast("cpu", BRAIN, ops={op: policy}):
            found = WITH_DTYPE[op](x, dtype=dtype)
        assert found.dtype is dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("op", ["_safe_softmax", "softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"])
def test_a_dtype_that_is_set_has_a_backward_pass(op: str, dtype: torch.dtype) -> None:
    x = torch.rand(2, 3).to(dtype).requires_grad_()
    args = () if op in ("sum", "prod") else (-1,)
    with mpamp.autocast("cpu", dtype, ops={op: "fp32_set_opt_dtype"}):
        found = getattr(torch.ops.aten, op)(x, *args)
    found.sum().backward()
    assert found.dtype is FULL
    assert x.grad is not None
    assert x.grad.dtype is dtype


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("op", ["sum", "prod", "cumsum", "cumprod", "softmax", "log_softmax", "linalg_vector_norm"])
def test_fp32_asks_a_kernel_that_takes_a_dtype_for_float32(op: str, dtype: torch.dtype) -> None:
    x = torch.rand(2, 3).to(dtype)
    function = getattr(torch.ops.aten, op)
    args = (-1,) if op in ("cumsum", "cumprod", "softmax", "log_softmax") else ()
    with mpamp.autocast("cpu", dtype, ops={op: "fp32"}):
        found = function(x.requires_grad_(), *args)
        counted = torch.ones(2, 3, dtype=torch.int64).sum()
    found.sum().backward()
    torch.testing.assert_close(found, function(x.detach().float(), *args))
    assert x.grad is not None
    assert x.grad.dtype is dtype
    assert counted.dtype is torch.int64


@pytest.mark.place("fake cuda")
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "sum", "prod"])
def test_fp32_makes_no_copy_where_the_kernel_needs_none(op: str) -> None:
    args = (-1,) if "softmax" in op else ()
    with tensors_at("fake cuda"), KernelCounter() as kernels, mpamp.autocast("cuda", HALF, ops={op: "fp32"}):
        found = getattr(torch.ops.aten, op)(torch.rand(2, 3, dtype=HALF, device="cuda"), *args)
    assert found.dtype is FULL
    assert kernels.counts["aten::_to_copy"] == 0


def test_a_default_region_lets_matrix_norm_have_its_dtype() -> None:
    x = torch.rand(4, 4).to(BRAIN)
    with mpamp.autocast("cpu", BRAIN):
        assert torch.linalg.matrix_norm(x, dtype=BRAIN).dtype is BRAIN
        assert torch.linalg.matrix_norm(x).dtype is FULL


# -- Layers that write running statistics ------------------------------------------------------------


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("policy", ["fp32", "lower_precision_fp", "promote"])
@pytest.mark.parametrize("module_dtype", [FULL, BRAIN], ids=str)
@pytest.mark.parametrize("dtype", [FULL, BRAIN], ids=str)
@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d])
def test_normalization_runs_in_any_mix_of_dtypes(
    layer: Any, dtype: torch.dtype, module_dtype: torch.dtype, policy: str, is_training: bool
) -> None:
    options = {"affine": True, "track_running_stats": True}
    module, reference = layer(3, **options).to(module_dtype), layer(3, **options)
    for m in (module, reference):
        m.train(is_training)
        torch.nn.init.constant_(m.running_var, 2.0)
    x = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0))
    rules = dict.fromkeys(("batch_norm", "instance_norm"), policy)
    with mpamp.autocast("cpu", BRAIN, ops=rules):
        found = module(x.to(dtype).requires_grad_())
    found.float().sum().backward()
    expected = reference(x.to(dtype).float())
    widest = FULL if FULL in (dtype, module_dtype) else BRAIN
    assert found.dtype is {"fp32": FULL, "lower_precision_fp": BRAIN, "promote": widest}[policy]
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    assert module.running_mean.dtype is module_dtype
    tolerance = {"rtol": 0.02, "atol": 0.02} if BRAIN in (dtype, module_dtype) or "lower" in policy else {}
    torch.testing.assert_close(module.running_mean.float(), reference.running_mean, **tolerance)
    torch.testing.assert_close(module.running_var.float(), reference.running_var, **tolerance)
    assert is_training == bool(module.running_mean.any())


def test_normalizations_are_found_by_what_they_write() -> None:
    names = torch._C._dispatch_get_all_op_names()
    found = {n for n in names if n.startswith("aten::") and (o := find_overload(n)) and codegen.is_normalization(o)}
    assert {"aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm"} <= found
    assert "aten::layer_norm" not in found


def test_functional_batch_norm_without_parameters() -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    with mpamp.autocast("cpu", BRAIN, ops={"batch_norm": "lower_precision_fp"}):
        found = functional.batch_norm(torch.ones(4, 3), mean, var, training=True)
        assert functional.batch_norm(torch.rand(4, 3), None, None, training=True).dtype is BRAIN
    assert found.dtype is BRAIN
    assert torch.allclose(mean, torch.full((3,), 0.1))
