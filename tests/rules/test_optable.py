"""OpTable: construction, names, algebra, and the TOML file that it is."""

from __future__ import annotations

import pickle
import weakref
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
from mpamp.rules.eligibility import find_overload
from mpamp.rules.optable import Difference, Row
from mpamp.rules.rows import parse_dtype

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


def test_the_rules_that_kernels_read_do_not_change() -> None:
    table: Any = OpTable({"mm.default": "fp32"})
    rules = table.rules
    with pytest.raises(TypeError):
        rules[BRAIN]["aten::mm"] = CastPolicy.PROMOTE
    for change in (
        lambda: rules.__setitem__(BRAIN, {}),
        lambda: rules.__delitem__(BRAIN),
        lambda: rules.update({BRAIN: {}}),
        lambda: rules.pop(BRAIN),
        lambda: rules.setdefault(HALF, {}),
        rules.popitem,
        rules.clear,
    ):
        with pytest.raises(TypeError, match="never changes"):
            change()
    assert rules[BRAIN] == rules[HALF] == {"aten::mm": CastPolicy.FP32}


def test_rules_are_kept_for_dtypes_only() -> None:
    rules: Any = OpTable({"mm": "fp32"}).rules
    rules["anything"], rules[BRAIN]
    assert list(rules) == [BRAIN]


def test_is_not_made_anew_in_its_place() -> None:
    table: Any = OpTable({"mm.default": "fp32"}, name="mine")
    table.__init__({"exp": "promote"})
    assert (dict(table), table.name) == ({"aten::mm": Row(CastPolicy.FP32)}, "mine")
    with pytest.raises(AttributeError):
        del table.rules


def test_a_row_keeps_nothing_that_can_change() -> None:
    cells: Any = [("float16", "promote"), (BRAIN, "fp32")]
    policy: Any = "banned"
    row = Row(policy, cells)
    assert row == Row(CastPolicy.BANNED, ((BRAIN, CastPolicy.FP32), (HALF, CastPolicy.PROMOTE)))
    cells.clear()
    assert row.at(HALF) is CastPolicy.PROMOTE
    assert isinstance(hash(row), int)


def test_a_table_is_made_of_rows() -> None:
    rows: Any = {"aten::mm": "fp32"}
    with pytest.raises(OpTableError, match="made of rows"):
        OpTable.from_rows(rows, name="mine")


@pytest.mark.parametrize("name", ["half \ud800", 5, ["a"]])
def test_a_name_that_no_file_can_hold(name: Any) -> None:
    for arguments in ({"name": name}, {"device": name}):
        with pytest.raises(OpTableError, match="are text"):
            OpTable({}, **arguments)


def test_nothing_keeps_a_table_that_is_no_longer_used() -> None:
    made = [weakref.ref(OpTable({"mm": "fp32"}, name=str(i)).override({"exp": "fp32"})) for i in range(20)]
    made += [weakref.ref(OpTable.from_toml('device = "cpu"\nbase = "default"\n[ops]\nexp = "fp32"'))]
    made += [weakref.ref(pickle.loads(pickle.dumps(OpTable({"mm": {"float16": "fp32"}}))))]
    assert [table for table in made if table() is not None] == []


def test_named_tables_of_many_devices_are_not_all_kept() -> None:
    made = [weakref.ref(OpTable.named("uniform", f"device{i}")) for i in range(200)]
    assert sum(table() is not None for table in made) <= 64


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
        ("[ops]\nmm = 32", "unknown policy 32 for 'mm'"),
        ("[ops]\nmm = 1979-05-27", "unknown policy"),
        ("[ops]\nmm = nan", "unknown policy"),
        ("[ops]\nmm = { float16 = { a = 1 } }", "unknown policy {'a': 1}"),
        ('[ops]\nmm = { int8 = "fp32" }', "no region runs in torch.int8"),
        ('[ops]\nmm = { _inductor = "fp32" }', "unknown dtype '_inductor'"),
        ("[ops]\nmm = " + "{ b = " * 300 + "1" + "}" * 300, "unknown policy.{1,100}Policies are"),
        ("[ops]\nmm = " + "[\n" * 20_000, "not a TOML op table"),
        ("[ops]\nmm = 1" + "0" * 4_050, "unknown policy"),
        ("[ops]\nmm = 1" + "0" * 100_000, "line 2 has 100006 characters"),
        ("[ops]\n" + "a." * 100_000 + "a = 1", "line 2 has 200005 characters"),
        (f'[ops]\n"{"softmax" * 100_000}" = "fp32"', "line 2 has"),
        (f'[ops]\n"{"softmax" * 500}" = "fp32"', "^'softmax.{1,200}$"),
        (f'[ops]\nmm = "{"fp32" * 900}"', "^unknown policy .{1,300}$"),
        ('[ops]\n"a b" = "fp32"', "'a b' can't be an op's name"),
        ('torch = "1.0"\n[ops]\n"::." = "fp32"', "'::.' can't be an op's name"),
        ('torch = "1.0"\n[ops]\n"aten::x.y\\naten::mm" = "fp32"', "can't be an op's name"),
        ('[ops]\n"@nosuch" = "fp32"', "unknown family '@nosuch'"),
        ('[ops]\n"@fff" = "fp32"', "did you mean '@fft'"),
        ('torch = 2.13\n[ops]\nmm = "fp32"', "torch is a string, got 2.13"),
        ('device = 5\n[ops]\nmm = "fp32"', "device is a string, got 5"),
        ('device = { a = 1 }\n[ops]\nmm = "fp32"', "device is a string"),
        ('base = 5\ndevice = "cpu"\n[ops]', "base is a string, got 5"),
        ('name = ["x"]\n[ops]', "name is a string"),
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


@pytest.mark.parametrize(
    "content",
    [b"[ops]\nmm = 'fp32' # \xe9", "[ops]".encode("utf-16"), bytes(range(256)), b"\x00" * 10_000],
    ids=["latin-1", "utf-16", "binary", "zeros"],
)
def test_a_file_that_is_no_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(OpTableError, match=r"broken\.toml: "):
        OpTable.load(path)


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_bytes(b"\xef\xbb\xbf[ops]\nexp = 'fp32'")
    assert OpTable.load(path) == OpTable({"exp": "fp32"})


def test_error_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OpTable.load(tmp_path / "none.toml")


# -- Files of another torch ----------------------------------------------------------------------------


def test_ops_of_another_torch_are_kept() -> None:
    table = OpTable.from_toml('torch = "1.0"\n[ops]\n"aten::nosuch.x" = "fp32"\n"aten::mm.default" = "promote"\n')
    assert table.policy("aten::nosuch.x") is CastPolicy.FP32
    assert table.policy("mm") is CastPolicy.PROMOTE


def test_unknown_ops_cost_no_hint_and_leave_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand of them took minutes, and made as many namespaces of torch's."""

    def refuse(*_: object) -> str:
        raise AssertionError("looked for names like one that is kept")

    monkeypatch.setattr("mpamp.rules.eligibility.nearest", refuse)
    before = set(vars(torch.ops))
    rules = "\n".join(f'"mpamp_none{i}::b.c" = "fp32"' for i in range(20_000))
    table = OpTable.from_toml(f'torch = "1.0"\n[ops]\n{rules}')
    assert len(table) == 20_000
    assert set(vars(torch.ops)) == before
    assert len(OpTable.from_toml(table.to_toml())) == 20_000
    assert set(vars(torch.ops)) == before


@pytest.mark.parametrize("name", ["mpamp_none::op", "mpamp_none::op.overload", "import_module::x.y", "__class__::y.z"])
def test_an_unknown_op_leaves_no_namespace(name: str) -> None:
    before = set(vars(torch.ops))
    with pytest.raises(UnknownOpError):
        OpTable({name: "fp32"})
    assert find_overload(name) is None
    assert set(vars(torch.ops)) == before


def test_a_dtype_is_found_without_asking_torch_for_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append, raising=False)
    for name in ("_inductor", "_dynamo", "onnx", "_export", "nosuch"):
        with pytest.raises(OpTableError, match="unknown dtype"):
            parse_dtype(name)
    assert asked == []


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
