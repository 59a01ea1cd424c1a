"""The lists as data: families that don't overlap, and native tables that say what torch does."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from mpamp import CastPolicy, OpTable, OpTableError
from mpamp.oplists import families, load_table, refused, table_names
from mpamp.rules.eligibility import find_overload, full_name, is_out_of_place
from mpamp.rules.rows import APPEND_DTYPE
from tests.parity.arguments import Maker, arguments
from tests.parity.observe import (
    FAKE,
    Recorder,
    is_here,
    none,
    observe,
    overload,
    place_of,
    rows,
    stand_ins,
    tensors_at,
    torchs,
)

BRAIN, HALF = torch.bfloat16, torch.float16
DEVICES = ("cpu", "cuda", "xpu")
HERE = "torch-" + ".".join(torch.__version__.split(".")[:2])
HISTORIC = {
    "cumprod.dimname",
    "cumsum.dimname",
    "index_copy.dimname",
    "log_softmax.Dimname",
    "norm.names_ScalarOpt_dim",
    "prod.dim_Dimname",
    "softmax.Dimname",
    "sum.dim_DimnameList",
}
"""Overloads by dimension name, which torch had until 2.12."""
OF_SOME = {"cholesky", "qr", "linalg_matrix_sqrth", "linalg_polar"}
"""What torch had until 2.13, or has from 2.14 on."""
OF_LATER = {"_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa.vec"}
"""What torch has from 2.12 or 2.13 on."""
FFTS = [
    "fft",
    "ifft",
    "fft2",
    "ifft2",
    "fftn",
    "ifftn",
    "rfft",
    "irfft",
    "rfft2",
    "irfft2",
    "rfftn",
    "irfftn",
    "hfft",
    "ihfft",
]


FLOAT32_ANYWHERE = ["fft", "fft_hermitian", "linalg", "linalg_more", "quantile", "losses", "losses_ctc"]


def _table_of_here(device: str) -> OpTable:
    return load_table(HERE if HERE in table_names(device) else "native", device)


# -- Families ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families())
def test_family(family: str) -> None:
    ops = families()[family]
    assert ops
    assert len(set(ops)) == len(ops)
    assert not any(op.startswith("aten::") for op in ops)


def test_every_op_is_in_one_family() -> None:
    """But for a family that says that it has another's."""
    contained = {"matmul_in_place", "index_copy_in_place"}
    counts = Counter(op for name, ops in families().items() if name not in contained for op in ops)
    assert [op for op, count in counts.items() if count > 1] == []


def test_every_op_exists_or_did() -> None:
    missing = {op for ops in families().values() for op in ops if find_overload(full_name(op)) is None}
    assert missing <= HISTORIC | OF_SOME | OF_LATER


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["default", "native", "uniform"])
def test_every_row_is_out_of_place(name: str, device: str) -> None:
    found = [(op, find_overload(op)) for op in load_table(name, device)]
    wrong = [name for name, op in found if op is not None and not is_out_of_place(op)]
    assert wrong == (["aten::index_copy_"] if name == "default" else [])  # of torch.nn.AdaptiveLogSoftmaxWithLoss


def test_families_can_not_be_changed_by_their_readers() -> None:
    families().clear()
    assert len(families()) > 50


def test_the_fourteen_ffts() -> None:
    assert sorted(families()["fft"]) == sorted(f"fft_{name}" for name in FFTS)


# -- Named tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_names(device: str) -> None:
    assert {"default", "native", "torch-2.13", "torch-2.8", "uniform"} <= set(table_names(device))
    assert ("intel-xpu" in table_names(device)) == (device == "xpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["default", "native", "uniform"])
def test_rows_can_be_served(name: str, device: str) -> None:
    """Every row is an op that exists, with a policy that its schema can take."""
    for op, row in load_table(name, device).items():
        if op.removeprefix("aten::") in HISTORIC:
            continue  # torch alone serves them: named tensors can't be passed to a kernel in Python
        found = find_overload(op)
        assert found is not None
        has_dtype = any(a.name == "dtype" for a in found._schema.arguments)
        assert CastPolicy.FP32_SET_OPT_DTYPE not in row.policies() or has_dtype
        assert CastPolicy.FP32_APPEND_DTYPE not in row.policies() or op in APPEND_DTYPE


@pytest.mark.parametrize("device", DEVICES)
def test_default_keeps_every_native_row_but_a_few(device: str) -> None:
    """Intel has two otherwise; and a matrix norm raises on 16-bit input, whatever dtype it is asked for."""
    changes = {d.op for d in load_table("native", device).diff(load_table("default", device)) if d.left is not None}
    norms = {"aten::linalg_matrix_norm", "aten::linalg_matrix_norm.str_ord"}
    intel = {"aten::binary_cross_entropy", "aten::log_softmax.int"}
    assert changes == {"cpu": set(), "cuda": norms, "xpu": norms | intel}[device]


@pytest.mark.parametrize("device", DEVICES)
def test_default_adds_in_float32_or_by_promotion_only(device: str) -> None:
    """But for products that torch runs in lower precision once it has taken them apart, and a grouped one."""
    safe = {CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE, CastPolicy.PROMOTE}
    added = [d for d in load_table("native", device).diff(load_table("default", device)) if d.left is None]
    unsafe = {d.op for d in added if d.right is not None and not d.right.policies() <= safe}
    names = ("matmul_chain", "matmul_grouped", "tensordot", "transformer_fused")
    products = {op for name in names for op in families()[name]}
    assert unsafe <= {f"aten::{op}" for op in products}


@pytest.mark.parametrize(
    "family", ["fft", "fft_hermitian", "linalg", "linalg_more", "quantile", "losses", "losses_ctc"]
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["default", "uniform"])
def test_families_in_float32_on_every_device(name: str, device: str, family: str) -> None:
    table = load_table(name, device)
    wrong = {op for op in families()[family] if table.policy(op, BRAIN) is not CastPolicy.FP32}
    assert wrong == {op for op in wrong & OF_SOME if find_overload(full_name(op)) is None}


def test_uniform_is_the_same_on_every_device() -> None:
    tables = [load_table("uniform", device) for device in DEVICES]
    assert len({table.fingerprint for table in tables}) == 1


def test_float16_on_the_cpu_has_the_float32_rows_of_a_gpu() -> None:
    """What overflows in float16 does so wherever it runs."""
    cpu, cuda = load_table("default", "cpu"), load_table("native", "cuda")
    fp32 = {op for op, row in cuda.items() if row.policy in (CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE)}
    assert {op for op in fp32 if cpu.policy(op, HALF) in (None, CastPolicy.LOWER_PRECISION_FP)} == set()
    assert cpu.policy("exp", BRAIN) is None


def test_intel_list() -> None:
    table = load_table("intel-xpu", "xpu")
    lower = ["conv1d", "conv2d", "conv3d", "bmm", "baddbmm", "addmm", "linear", "matmul", "_convolution", "convolution"]
    fp32 = ["log_softmax.int", "nll_loss", "nll_loss_nd", "cross_entropy_loss", "binary_cross_entropy"]
    expected = dict.fromkeys(lower, "lower_precision_fp") | dict.fromkeys(fp32, "fp32")
    expected |= dict.fromkeys((f"fft_{name}" for name in FFTS), "fp32") | dict.fromkeys(["cat", "stack"], "promote")
    assert {op: str(table.policy(op)) for op in expected} == expected


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_is_made_once(device: str) -> None:
    assert load_table("default", device) is load_table("default", device)


def test_no_such_table_lists_those_there_are() -> None:
    with pytest.raises(OpTableError, match="Tables there: " + ", ".join(table_names("cuda"))):
        load_table("intel-xpu", "cuda")


# -- The native tables against the running torch -------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_native_rows_are_what_torch_registers(device: str) -> None:
    """Other versions than those with a table of their own have rows that no table has, or lack some."""
    listed, registered = {op for op in _table_of_here(device) if find_overload(op)}, _registered(device)
    only_with_cuda = {"aten::_cudnn_rnn"}
    if HERE in table_names(device):
        assert listed - only_with_cuda == registered - only_with_cuda
    else:
        later = {f"aten::{op}" for op in OF_SOME}  # in the default table
        assert {op for op in registered - later if "imname" not in op} <= set(load_table("native", device))


def _registered(device: str) -> set[str]:
    """Return what torch itself has registered: without the kernels of ours that other tests left there."""
    from mpamp.devices.registry import device_state
    from mpamp.engine.python.kernels import native_ops

    return {op for op in native_ops(device_state(device)) if op.startswith("aten::")}


NATIVE = [(place_of(device), op) for device in DEVICES for op in rows(place_of(device))]
PROBED = [
    pytest.param(place, op, id=f"{place}: {op}")
    for place, op in NATIVE
    if is_here(place) and op in load_table("native", place.removeprefix(FAKE))
]


@pytest.mark.parametrize(("place", "op"), PROBED)
def test_native_policy_is_what_torch_does(place: str, op: str) -> None:
    with stand_ins(place):
        assert _probe(op, place) is load_table("native", place.removeprefix(FAKE)).policy(op)


def _probe(name: str, place: str) -> CastPolicy:
    """Return the policy that torch's autocast follows for an op, by what it does to the op's arguments."""
    op = overload(name)
    single, low, mixed = (observe(op, place, BRAIN, form, torchs) for form in ("float32", "lower", "lower, float32"))
    if "unsafe to" in low["reason"]:
        return CastPolicy.BANNED
    if _has(single, "bfloat16"):
        return CastPolicy.LOWER_PRECISION_FP
    if any(a.name == "dtype" for a in op._schema.arguments):
        return CastPolicy.FP32 if _casts_before(op, place) else CastPolicy.FP32_SET_OPT_DTYPE
    if not _has(low, "bfloat16"):
        return CastPolicy.FP32
    if low["out"] == "-> float32" and observe(op, place, BRAIN, "lower", none)["out"] == "-> bfloat16":
        return CastPolicy.FP32_APPEND_DTYPE
    assert not _has(mixed, "bfloat16"), f"no policy explains {name}: {single}, {low}, {mixed}"
    return CastPolicy.PROMOTE


def _has(observation: dict[str, Any], dtype: str) -> bool:
    return any(f"{dtype}," in called or f"{dtype})" in called for called in observation["ops"])


def _casts_before(op: Any, place: str) -> bool:
    """Tell whether an input in bfloat16 is cast to float32 where the call itself asks for float64."""
    with tensors_at(place):
        args, kwargs = arguments(op, Maker(place.removeprefix(FAKE), [BRAIN]))
        with torchs(place.removeprefix(FAKE), BRAIN), Recorder(moves=True) as recorder:
            op(*args, **kwargs, dtype=torch.float64)
    return _has({"ops": recorder.ops}, "float32")


VIEWS_WITH_RULES = {
    *("to.device", "to.dtype", "to.dtype_layout", "to.other", "contiguous", "pin_memory", "coalesce", "positive"),
    *("conj", "_conj", "resolve_conj", "resolve_neg", "real", "imag", "view_as_real", "view_as_complex"),
    *("_values", "values", "_indices", "indices", "crow_indices", "col_indices", "ccol_indices", "row_indices"),
    *("_autocast_to_full_precision", "_autocast_to_reduced_precision", "_sparse_broadcast_to"),
    "_test_autograd_multiple_dispatch_view",
}
"""Ops that may return a view, and that cast, or read numbers of their own."""


def test_every_view_is_refused_or_known() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    ops = {n: op for n in names if (op := find_overload(n)) is not None and is_out_of_place(op)}
    views = {n for n, op in ops.items() if any(r.alias_info is not None for r in op._schema.returns)}
    views = {n for n in views if not re.search("name|align_to", n)}  # tensors had names until torch 2.12
    known = {f"aten::{name}" for name in VIEWS_WITH_RULES}
    assert not known & refused().keys()
    assert views - refused().keys() - known == set()
    assert refused().keys() <= ops.keys()


@pytest.mark.parametrize("policy", [p.value for p in CastPolicy])
def test_a_refused_op_is_named_with_the_reason(policy: str) -> None:
    for name in ("as_strided", "detach", "empty_like", "aten::view.dtype"):
        with pytest.raises(OpTableError, match=r"no rule may name aten::.*: it|torch "):
            OpTable({name: policy})


def test_no_table_has_a_refused_op() -> None:
    for device in ("cpu", "cuda", "xpu"):
        for name in table_names(device):
            assert not load_table(name, device).keys() & refused().keys()
