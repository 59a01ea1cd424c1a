"""Kernels: which ops need one, installing, withdrawing, and staying on top."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref

import pytest
import torch

import mpamp
from mpamp.devices.registry import device_state
from mpamp.engine.casts.cache import clear_cache
from mpamp.engine.python import kernels
from mpamp.engine.python.codegen import kernel_source
from mpamp.rules.rows import Row

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def cpu():
    state = device_state("cpu")
    yield state
    clear_cache()


def test_rows_that_torch_serves_get_no_kernel_of_ours(cpu):
    needed = set(kernels.needs_kernel(cpu, cpu.table, BF16))
    assert "aten::mse_loss" not in needed
    assert "aten::scaled_dot_product_attention" not in needed


def test_rows_that_keep_casts_promote_or_fill_a_gap_get_one(cpu):
    needed = set(kernels.needs_kernel(cpu, cpu.table, BF16))
    assert {"aten::linear", "aten::cat", "aten::fft_hfft2", "aten::linalg_det"} <= needed


def test_rows_of_one_dtype_get_kernels_only_for_it(cpu):
    assert "aten::exp" in kernels.needs_kernel(cpu, cpu.table, HALF)
    assert "aten::exp" not in kernels.needs_kernel(cpu, cpu.table, BF16)


def test_a_table_from_scratch_takes_every_op_of_torchs_out(cpu):
    needed = set(kernels.needs_kernel(cpu, mpamp.OpTable({"mm": "lower_precision_fp"}), BF16))
    assert {"aten::mm", "aten::mse_loss", "aten::linear"} <= needed


def test_an_op_outside_a_table_from_scratch_runs_as_if_unlisted():
    table = mpamp.OpTable({"mm": "lower_precision_fp"})
    a = torch.ones(2, 2)
    with mpamp.autocast("cpu", BF16, ops=table):
        assert torch.mm(a, a).dtype is BF16
        assert torch.bmm(a[None], a[None]).dtype is FP32
        assert torch.nn.functional.mse_loss(a.bfloat16(), a.bfloat16()).dtype is BF16


def test_withdraw_gives_torch_its_kernels_back(cpu):
    a = torch.ones(2, 2)
    with mpamp.autocast("cpu", BF16, ops={"mm": "fp32"}):
        assert torch.mm(a, a).dtype is FP32
    kernels.withdraw(cpu)
    cpu.invalidate()
    assert kernels.installed("cpu") == []
    with torch.autocast("cpu", BF16):
        assert torch.mm(a, a).dtype is BF16
    with mpamp.autocast("cpu", BF16, ops={"mm": "fp32"}):
        assert torch.mm(a, a).dtype is FP32


def test_an_op_withdrawn_by_name_comes_back_when_a_region_needs_it(cpu):
    a = torch.ones(2, 2)
    region = mpamp.autocast("cpu", BF16, ops={"mm": "fp32"})
    with region:
        assert torch.mm(a, a).dtype is FP32
    kernels.withdraw(cpu, ["aten::mm"])
    assert "aten::mm" not in kernels.installed("cpu")
    with region:
        assert torch.mm(a, a).dtype is FP32


def test_tidy_takes_out_what_only_rules_of_regions_asked_for(cpu):
    with mpamp.autocast("cpu", BF16, ops={"mul": "fp32"}):
        pass
    assert "aten::mul.Tensor" in kernels.installed("cpu")
    kernels.tidy(cpu)
    assert "aten::mul.Tensor" not in kernels.installed("cpu")
    assert "aten::linear" in kernels.installed("cpu")
    with mpamp.autocast("cpu", BF16, ops={"mul": "fp32"}):
        assert (torch.ones(2, dtype=BF16) * torch.ones(2, dtype=BF16)).dtype is FP32
    kernels.tidy(cpu)


def test_installing_twice_adds_nothing(cpu):
    kernels.install(cpu, cpu.table, BF16)
    before = kernels.installed("cpu")
    kernels.install(cpu, cpu.table, BF16)
    assert kernels.installed("cpu") == before


def test_no_table_is_kept_by_the_kernels_that_it_asked_for() -> None:
    def used(policy: str) -> weakref.ref[mpamp.OpTable]:
        table = mpamp.OpTable({"gelu": policy, "cosh": "fp32"}, name=policy)
        for dtype in (torch.bfloat16, torch.float16):
            kernels.install(device_state("cpu"), table, dtype)
        return weakref.ref(table)

    tables = [used(policy) for policy in ("fp32", "lower_precision_fp", "promote")]
    gc.collect()
    assert [table() for table in tables] == [None] * 3


def test_a_vendor_module_may_be_imported_where_no_kernel_is_planned(cpu, monkeypatch):
    region = mpamp.autocast("cpu", BF16)
    with region:
        pass
    kernels.tidy(cpu)  # forgets which tables the kernels are there for
    monkeypatch.setattr(cpu, "has_vendor_kernels", False)
    monkeypatch.setattr(cpu, "unseen_modules", (*cpu.unseen_modules, "json"))
    cpu.invalidate()
    with region:
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is BF16
    kernels.withdraw(cpu)


def test_a_vendor_module_imported_later_does_not_stay_on_top(cpu, tmp_path, monkeypatch):
    """Intel's extension registers Autocast kernels of its own when it is imported."""
    (tmp_path / "vendor_of_kernels.py").write_text(
        textwrap.dedent("""
            import torch
            calls = []
            def bmm(a, b):
                calls.append(1)
                return a.new_zeros(1)
            library = torch.library.Library("aten", "IMPL")
            library.impl("bmm", bmm, "AutocastCPU", allow_override=True)
            """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cpu, "has_vendor_kernels", False)
    monkeypatch.setattr(cpu, "unseen_modules", (*cpu.unseen_modules, "vendor_of_kernels"))
    a = torch.ones(1, 2, 2)
    region = mpamp.autocast("cpu", BF16)
    with region:
        assert torch.bmm(a, a).shape == (1, 2, 2)
    import vendor_of_kernels

    try:
        with region:
            assert torch.bmm(a, a).shape == (1, 2, 2)
        assert vendor_of_kernels.calls == []
    finally:
        kernels.withdraw(cpu)
        vendor_of_kernels.library._destroy()
        cpu.invalidate()
        del sys.modules["vendor_of_kernels"]


def test_compiler_cache_key_follows_the_tables():
    import torch.compiler.config as config

    with mpamp.autocast("cpu"):
        pass
    before = config.cache_key_tag
    with mpamp.autocast("cpu", ops={"relu": "fp32"}):
        pass
    changed = config.cache_key_tag
    with mpamp.autocast("cpu", ops={"relu": "fp32"}):
        pass
    assert before.startswith("mpamp-")
    assert before != changed == config.cache_key_tag


def test_a_users_cache_key_is_kept(monkeypatch):
    import torch.compiler.config as config

    before = config.cache_key_tag
    config.cache_key_tag = "mine"
    try:
        kernels.tag_compiler_caches()
        kernels.tag_compiler_caches()
        assert config.cache_key_tag.startswith("minempamp-")
        assert config.cache_key_tag.count("mpamp-") == 1
    finally:
        config.cache_key_tag = before


def test_an_argument_named_like_a_local_of_the_kernel_keeps_its_value():
    """cumsum and softmax have an argument called dtype."""
    mask = torch.ones(3, dtype=torch.bool)
    with mpamp.autocast("cpu", HALF):
        pass
    with mpamp.autocast("cpu", BF16):
        assert mask.cumsum(0).dtype is torch.int64
        assert torch.ones(3).softmax(0, dtype=torch.float64).dtype is torch.float64


def test_every_schema_with_a_tensor_compiles():
    """Any op may be named in a rule, so any schema must give a kernel."""
    from mpamp.rules.eligibility import find_overload, is_out_of_place

    names = torch._C._dispatch_get_all_op_names()
    found = [op for n in names if n.startswith("aten::") and (op := find_overload(n)) and is_out_of_place(op)]
    for op in found:
        compile(kernel_source(op), str(op), "exec")
    assert len(found) > 1000


def test_optional_lists_of_tensors_may_be_left_out():
    x = torch.ones(4)
    with mpamp.autocast("cpu", BF16):
        got = torch.zeros(4).index_put((torch.arange(4),), x.bfloat16())
    assert got.dtype is FP32
    with mpamp.autocast("cpu", BF16, ops={"index_put_": "promote"}):
        b = torch.zeros(2, 2)
        b[:, torch.tensor([0])] = torch.ones(2, 1, dtype=BF16)
    assert torch.equal(b, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))


def test_a_row_of_torch_s_table_that_this_torch_has_no_kernel_for_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rms_norm's, in torch 2.11: it was left to a kernel that isn't there, and ran as called."""
    device, name = device_state("cpu"), "aten::celu"
    native = {**kernels._native_policies("cpu"), name: Row(mpamp.CastPolicy.FP32)}
    monkeypatch.setattr(kernels, "_native_policies", lambda device_type: native)
    if name in kernels.installed("cpu"):
        kernels.withdraw(device, [name])
    with mpamp.autocast("cpu", torch.bfloat16, ops={"celu": "fp32"}):
        assert torch.celu(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32
    kernels.withdraw(device, [name])  # it was made for a table that isn't torch's
