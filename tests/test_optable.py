"""OpTable: construction, names, algebra, and the TOML file that it is."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mpamp
from mpamp import CastPolicy, OpTable, OpTableError, UnknownOpError, UnknownPolicyError
from mpamp.oplists import table_names
from mpamp.optable import Difference, Row, parse_dtype

BRAIN, HALF = torch.bfloat16, torch.float16
DEVICES = ("cpu", "cuda", "xpu")
HERE = ".".join(torch.__version__.split(".")[:2])
NAMED = [(name, device) for device in DEVICES for name in table_names(device)]

OPS = ["mm", "bmm", "exp", "softmax.int", "pow.Scalar", "pow.Tensor_Scalar", "cat", "linear", "layer_norm", "fft_fft"]
PLAIN = [p.value for p in CastPolicy if not p.value.startswith("fp32_")]
_policies = st.sampled_from(PLAIN)
_by_dtype = st.dictionaries(st.sampled_from(["bfloat16", "float16", "default"]), _policies, min_size=1)
_rules = st.dictionaries(st.sampled_from(OPS), _policies | _by_dtype)
_names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]))


def _table(rules: Mapping[str, Any]) -> OpTable:
    return OpTable(rules, device="cpu")


tables = st.builds(_table, _rules)


# -- Construction --------------------------------------------------------------------------------------


def test_a_name_means_all_out_of_place_overloads() -> None:
    assert list(OpTable({"pow": "fp32"})) == ["aten::pow.Scalar", "aten::pow.Tensor_Scalar", "aten::pow.Tensor_Tensor"]


@pytest.mark.parametrize("rules", [{"pow": "fp32", "pow.Scalar": "promote"}, {"pow.Scalar": "promote", "pow": "fp32"}])
def test_an_exact_name_wins_over_its_family_in_any_order(rules: dict[str, str]) -> None:
    table = OpTable(rules)
    assert table.policy("pow.Scalar") is CastPolicy.PROMOTE
    assert table.policy("pow.Tensor_Scalar") is CastPolicy.FP32


def test_looked_up_with_and_without_namespace() -> None:
    table = OpTable({"softmax": "fp32"})
    assert table["softmax.int"] is table["aten::softmax.int"]
    assert "softmax.int" in table
    assert "softmax" not in table
    assert table.policy("softmax") is table.policy("bmm") is table.get("bmm") is None
    with pytest.raises(KeyError):
        table["bmm"]


def test_looked_up_by_the_name_of_the_rule() -> None:
    assert OpTable({"mm.default": "fp32"}).policy("mm.default") is CastPolicy.FP32


def test_rules_of_another_namespace() -> None:
    library = torch.library.Library("mpamp_test_optable", "DEF")
    library.define("gelu(Tensor x) -> Tensor")
    try:
        table = OpTable({"mpamp_test_optable::gelu": "fp32", "gelu": "promote"})
        assert table.policy("mpamp_test_optable::gelu") is CastPolicy.FP32
        assert table.policy("gelu") is CastPolicy.PROMOTE
    finally:
        library._destroy()


@pytest.mark.parametrize("key", ["float16", "torch.float16", "half", HALF])
def test_policy_by_dtype(key: Any) -> None:
    table = OpTable({"mm": {key: "fp32", "default": "promote"}})
    assert table.policy("mm", HALF) is CastPolicy.FP32
    assert table.policy("mm", BRAIN) is table.policy("mm") is CastPolicy.PROMOTE


def test_policy_by_dtype_without_default_is_absent_elsewhere() -> None:
    table = OpTable({"mm": {"float16": "fp32"}})
    assert table.policy("mm", HALF) is CastPolicy.FP32
    assert table.policy("mm", BRAIN) is None
    assert "aten::mm" not in table.rules[BRAIN]
    assert table.rules[HALF] == {"aten::mm": CastPolicy.FP32, "aten::mm.dtype": CastPolicy.FP32}


def test_order_of_dtypes_does_not_matter() -> None:
    one = OpTable({"mm": {"float16": "fp32", "bfloat16": "promote"}})
    other = OpTable({"mm": {"bfloat16": "promote", "float16": "fp32"}})
    assert one == other
    assert one.fingerprint == other.fingerprint


def test_in_place_overload_takes_promote_and_fallthrough() -> None:
    assert list(OpTable({"relu_": "fallthrough", "add_.Tensor": "promote"})) == ["aten::add_.Tensor", "aten::relu_"]


def test_source_and_name_are_kept_and_do_not_make_a_difference() -> None:
    table = OpTable({"mm.default": "fp32"}, name="mine", source="me")
    assert (table.name, table["mm"].source) == ("mine", "me")
    assert table == OpTable({"mm.default": "fp32"})
    assert "mine" in repr(table)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"sofmax": "fp32"}, UnknownOpError, "did you mean 'softmax'"),
        ({"softmax.nit": "fp32"}, UnknownOpError, "did you mean 'int'"),
        ({"mm.out": "fp32"}, UnknownOpError, "out= variant"),
        ({1: "fp32"}, UnknownOpError, "named by a string"),
        ({"mm": "fp23"}, UnknownPolicyError, "did you mean 'fp32'"),
        ({"mm": None}, UnknownPolicyError, "Policies are"),
        ({"mm": {"float16": "half"}}, UnknownPolicyError, "unknown policy 'half'"),
        ({"mm": {"float17": "fp32"}}, OpTableError, "unknown dtype 'float17'"),
        ({"add_.Tensor": "fp32"}, OpTableError, "writes in place"),
        ({"mm": "fp32_set_opt_dtype"}, OpTableError, "aten::mm has none"),
        ({"mm": {"float16": "fp32_set_opt_dtype"}}, OpTableError, "aten::mm has none"),
        ({"mm": "fp32_append_dtype"}, OpTableError, "aten::norm.Scalar"),
        ([("mm", "fp32")], OpTableError, "mapping from op to policy"),
        ("mm", OpTableError, "mapping from op to policy"),
    ],
)
def test_rules_that_are_wrong(rules: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OpTable(rules)


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool", "complex64"])
def test_dtype_that_no_region_has(dtype: str) -> None:
    with pytest.raises(OpTableError):
        OpTable({"mm": {dtype: "fp32"}})


def test_policy_by_no_dtype() -> None:
    with pytest.raises(OpTableError):
        OpTable({"mm": {}})


def test_a_row_without_a_policy_is_not_written() -> None:
    """Kernels of torch's or a vendor's that no table lists have such rows."""
    table = OpTable.from_rows({"aten::mm": Row(None)}, name="mine")
    assert dict(OpTable.from_toml(table.to_toml())) == {}


def test_one_overload_named_twice() -> None:
    with pytest.raises(OpTableError):
        OpTable({"mm.default": "fp32", "aten::mm.default": "promote"})


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", BRAIN), ("torch.float16", HALF), (HALF, HALF)])
def test_parse_dtype(name: Any, dtype: torch.dtype) -> None:
    assert parse_dtype(name) is dtype


@pytest.mark.parametrize("name", ["float17", "nn", "", 16])
def test_parse_dtype_of_no_dtype(name: Any) -> None:
    with pytest.raises(OpTableError, match="unknown dtype"):
        parse_dtype(name)


# -- Immutability --------------------------------------------------------------------------------------


def test_does_not_change_with_the_rules_it_was_made_of() -> None:
    rules: dict[str, Any] = {"mm": {"float16": "fp32"}}
    table = OpTable(rules)
    before = table.fingerprint, dict(table)
    rules["mm"]["float16"] = "promote"
    rules["bmm"] = "fp32"
    assert (table.fingerprint, dict(table)) == before


def test_takes_no_items() -> None:
    table: Any = OpTable({"mm": "fp32"})
    with pytest.raises(TypeError):
        table["mm"] = table["mm"]
    with pytest.raises(TypeError):
        del table["mm"]
    with pytest.raises(AttributeError):
        table["mm"].policy = CastPolicy.PROMOTE


@pytest.mark.parametrize("attribute", ["name", "device", "fingerprint", "rules"])
def test_takes_no_attributes(attribute: str) -> None:
    table = OpTable({"mm": "fp32"})
    with pytest.raises(AttributeError):
        setattr(table, attribute, None)


def test_override_leaves_both_tables_alone() -> None:
    base, extra = OpTable({"mm": "fp32"}), OpTable({"mm": "promote", "exp": "fp32"})
    prints = base.fingerprint, extra.fingerprint
    assert base.override(extra) == extra
    assert (base.fingerprint, extra.fingerprint) == prints


# -- Algebra -------------------------------------------------------------------------------------------


@given(tables, tables, tables)
def test_override_is_associative(a: OpTable, b: OpTable, c: OpTable) -> None:
    assert a.override(b).override(c) == a.override(b.override(c))


@given(tables, tables)
def test_override_is_idempotent_and_right_biased(a: OpTable, b: OpTable) -> None:
    both = a.override(b)
    assert both.override(b) == both
    assert set(both) == {*a, *b}
    for op in both:
        for dtype in (None, BRAIN, HALF):  # a dtype that the upper table leaves open stays the lower one's
            assert both.policy(op, dtype) is (b.policy(op, dtype) or a.policy(op, dtype))


@given(tables)
def test_the_empty_table_is_neutral(a: OpTable) -> None:
    empty = OpTable(device="cpu")
    assert a.override(empty) == a
    assert empty.override(a) == a
    assert len(empty) == 0


@given(_rules, _rules)
def test_overriding_by_rules_is_overriding_by_their_table(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert _table(a).override(b) == _table(a).override(_table(b))


@given(tables, tables)
def test_diff_is_empty_iff_equal(a: OpTable, b: OpTable) -> None:
    assert a.diff(a) == []
    assert (a.diff(b) == []) == (a == b) == (a.fingerprint == b.fingerprint)


@given(tables, tables)
def test_diff_is_all_it_takes_to_get_from_one_to_the_other(a: OpTable, b: OpTable) -> None:
    rows = {**a, **{d.op: d.right for d in a.diff(b)}}
    assert {op: row for op, row in rows.items() if row is not None} == dict(b)
    assert [(d.op, d.right, d.left) for d in b.diff(a)] == [(d.op, d.left, d.right) for d in a.diff(b)]


def test_diff_is_readable() -> None:
    left = OpTable({"exp": "fp32", "mm.default": {"float16": "fp32", "default": "promote"}})
    right = OpTable({"exp": "fp32", "mm.default": "promote", "bmm.default": "banned"})
    assert [str(d) for d in left.diff(right)] == [
        "aten::bmm: - -> banned",
        "aten::mm: {float16: fp32, else: promote} -> promote",
    ]
    assert left.diff(right)[0] == Difference("aten::bmm", None, Row(CastPolicy.BANNED))


@given(tables, tables)
def test_hash_and_fingerprint_follow_equality(a: OpTable, b: OpTable) -> None:
    if a == b:
        assert hash(a) == hash(b)
    assert (a == b) == (dict(a) == dict(b))


def test_equality_minds_the_device() -> None:
    assert OpTable({"mm": "fp32"}, device="cpu") != OpTable({"mm": "fp32"}, device="xpu")
    assert OpTable({"mm": "fp32"}) != {"aten::mm": "fp32"}


@given(tables)
def test_rules_agree_with_policy(table: OpTable) -> None:
    for dtype in (BRAIN, HALF, torch.float32):
        listed = {op: table.policy(op, dtype) for op in table if table.policy(op, dtype) is not None}
        assert table.rules[dtype] == listed


@given(tables)
def test_pickles(table: OpTable) -> None:
    copy = pickle.loads(pickle.dumps(table))
    assert copy == table
    assert (copy.name, copy.fingerprint) == (table.name, table.fingerprint)


def test_fingerprint_is_the_same_in_every_process() -> None:
    """Compiled code on disk is found by it."""
    table = OpTable({"mm.default": "fp32", "exp.default": {"float16": "fp32", "default": "promote"}})
    assert table.fingerprint == "a1b723c5ee5a9b04"


# -- TOML ----------------------------------------------------------------------------------------------


@given(tables)
def test_toml_round_trip(table: OpTable) -> None:
    back = OpTable.from_toml(table.to_toml())
    assert back == table
    assert back.fingerprint == table.fingerprint


@given(_names, _names)
def test_toml_keeps_name_and_device(name: str, device: str) -> None:
    back = OpTable.from_toml(OpTable({"mm": "fp32"}, name=name, device=device).to_toml())
    assert (back.name, back.device) == (name, device)


def test_toml_keeps_a_name_of_two_lines() -> None:
    assert OpTable.from_toml(OpTable(name="two\nlines").to_toml()).name == "two\nlines"


def _can_be_read(op: str, policy: str) -> bool:
    try:
        OpTable({op if "." in op else f"{op}.default": policy})
    except OpTableError:
        return False
    return True


@pytest.mark.parametrize(("name", "device"), NAMED)
def test_named_tables_round_trip(name: str, device: str) -> None:
    table = OpTable.named(name, device)
    back = OpTable.from_toml(table.to_toml())
    assert back == table
    assert back.diff(table) == []


def test_file_round_trip(tmp_path: Path) -> None:
    table = OpTable({"softmax": "fp32", "mm": {"float16": "fp32"}}, name="mine", device="xpu")
    table.save(tmp_path / "table.toml")
    back = OpTable.load(tmp_path / "table.toml")
    assert (back, back.name) == (table, "mine")
    assert back["mm"].source == str(tmp_path / "table.toml")


def test_one_overload_does_not_grow_into_its_family() -> None:
    """A row of the default overload is written so that it means no other on the way back."""
    table = OpTable({"mm.default": "fp32"})
    assert list(OpTable.from_toml(table.to_toml())) == ["aten::mm"]


def test_rules_go_on_top_of_the_base() -> None:
    table = OpTable.from_toml('device = "cuda"\nbase = "native"\n[ops]\nexp = "fallthrough"\n')
    assert [d.op for d in OpTable.named("native", "cuda").diff(table)] == ["aten::exp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "not a TOML op table"),
        ('[ops]\nmm = "fp32"\nmm = "promote"', "not a TOML op table"),
        ("", "and an \\[ops\\] section; got \\[\\]"),
        ('name = "x"', "an \\[ops\\] section"),
        ('ops = "fp32"', "an \\[ops\\] section"),
        ('nam = "x"\n[ops]\nmm = "fp32"', "got \\['nam', 'ops'\\]"),
        ("[ops]\nmm = 32", "unknown policy 32"),
        ('[ops]\nmm = ["fp32"]', "unknown policy"),
        ('[ops]\nsofmax = "fp32"', "did you mean 'softmax'"),
        ('[ops]\n"mm" = { float17 = "fp32" }', "unknown dtype 'float17'"),
        ('device = "cuda"\nbase = "nativ"\n[ops]', "did you mean 'native'"),
        ('base = "native"\n[ops]', "no table 'native' for device 'any'"),
        (f'torch = "{HERE}"\n[ops]\n"aten::nosuch" = "fp32"', "no operator aten::nosuch"),
    ],
)
def test_toml_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(OpTableError, match=message):
        OpTable.from_toml(text)


def test_an_overload_without_quotes_is_not_a_rule_by_dtype() -> None:
    try:
        table = OpTable.from_toml('[ops]\nsoftmax.int = "fp32"')
    except OpTableError:
        return
    assert table.policy("softmax.int") is CastPolicy.FP32


def test_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text('[ops]\nsofmax = "fp32"\n')
    with pytest.raises(UnknownOpError, match=r"broken\.toml: unknown op 'sofmax'"):
        OpTable.load(path)


def test_error_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OpTable.load(tmp_path / "none.toml")


# -- Files of another torch ----------------------------------------------------------------------------


def test_ops_of_another_torch_are_kept() -> None:
    table = OpTable.from_toml('torch = "1.0"\n[ops]\n"aten::nosuch.x" = "fp32"\n"aten::mm.default" = "promote"\n')
    assert table.policy("aten::nosuch.x") is CastPolicy.FP32
    assert table.policy("mm") is CastPolicy.PROMOTE


def test_policies_of_another_torch_are_checked() -> None:
    with pytest.raises(UnknownPolicyError):
        OpTable.from_toml('torch = "1.0"\n[ops]\n"aten::nosuch" = "fp23"\n')


@pytest.mark.parametrize("name", ["softmax", "aten::softmax", "softmax.int", "mm"])
def test_names_in_a_file_of_another_torch_mean_the_same(name: str) -> None:
    rule = f'[ops]\n"{name}" = "fp32"\n'
    assert OpTable.from_toml(f'torch = "1.0"\n{rule}') == OpTable.from_toml(rule)


def test_a_table_with_ops_that_torch_lacks_serves_a_region() -> None:
    table = OpTable.from_toml('torch = "1.0"\n[ops]\n"aten::nosuch.x" = "fp32"\n"aten::exp" = "lower_precision_fp"\n')
    with mpamp.autocast("cpu", BRAIN, ops=table):
        assert torch.ones(2).exp().dtype is BRAIN


# -- Named tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "device"), NAMED)
def test_named(name: str, device: str) -> None:
    table = OpTable.named(name, device)
    assert (table.name, table.device) == (name, device)
    assert len(table) > 100


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("nativ", "cpu", "did you mean 'native'"),
        ("intel-xpu", "cpu", "no table 'intel-xpu' for device 'cpu'.*Tables there: .*default, native"),
        ("native", "tpu", "no table 'native' for device 'tpu'"),
    ],
)
def test_no_such_table(name: str, device: str, message: str) -> None:
    with pytest.raises(OpTableError, match=message):
        OpTable.named(name, device)


@pytest.mark.parametrize("name", ["default", "torch-2.8"])
def test_no_such_table_for_any_device(name: str) -> None:
    with pytest.raises(OpTableError):
        OpTable.named(name, "any")


def test_table_of_another_device_is_refused_by_a_region() -> None:
    with pytest.raises(OpTableError, match="is for device 'xpu', the region for 'cpu'"):
        mpamp.autocast("cpu", ops=OpTable.named("native", "xpu"))


def test_table_of_any_device_is_taken_by_every_region() -> None:
    for device in DEVICES:
        assert mpamp.autocast(device, ops=OpTable({"mm": "fp32"})).device_type == device


def test_a_whole_table_replaces_the_default() -> None:
    with mpamp.autocast("cpu", BRAIN, ops=OpTable({"exp": "lower_precision_fp"})):
        assert torch.ones(2).exp().dtype is BRAIN
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.parametrize("ops", [["mm"], "mm", 3, {"sofmax": "fp32"}])
def test_ops_of_a_region_that_are_wrong(ops: Any) -> None:
    with pytest.raises(OpTableError):
        mpamp.autocast("cpu", ops=ops)
