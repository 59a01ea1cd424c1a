"""Which modules a key means, which of several keys decides, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpamp
from mpamp.errors import ModuleRuleError, OpTableError, UnknownOpError, UnknownPolicyError
from mpamp.functions.rulematching import decide, read


class Norm(nn.LayerNorm):
    pass


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList([Block(nn.LayerNorm(4)), Block(Norm(4))])
        self.head = Block(nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.decoder:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def decided(rules: Any, model: nn.Module | None = None) -> dict[str, str]:
    return {name: str(rule) for name, _, rule in decide(model or Model(), rules)}


# -- Which modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ({"head": "fp32"}, {"head": "fp32"}),
        ({"": False}, {"": "False"}),
        ({"decoder.*.norm": "bfloat16"}, {"decoder.0.norm": "bfloat16", "decoder.1.norm": "bfloat16"}),
        ({"*norm": "fp32"}, {"decoder.0.norm": "fp32", "decoder.1.norm": "fp32", "head.norm": "fp32"}),
        ({"decoder.[1-9]": "fp32"}, {"decoder.1": "fp32"}),
        ({nn.LayerNorm: "fp32"}, {"decoder.0.norm": "fp32", "decoder.1.norm": "fp32"}),
        ({Norm: "fp32"}, {"decoder.1.norm": "fp32"}),
        ({"head": {"aten::softmax.int": "fp32"}}, {"head": "{aten::softmax.int: fp32}"}),
    ],
)
def test_what_a_key_means(rules: Any, wanted: dict[str, str]) -> None:
    assert decided(rules) == wanted


def test_a_star_means_every_module_that_is_called_but_not_the_model() -> None:
    found = decided({"*": "fp32"})
    assert "" not in found
    assert "decoder" not in found
    assert len(found) == 9


def test_a_name_goes_before_a_pattern_before_a_class_before_its_base() -> None:
    rules = {
        nn.Module: False,
        nn.LayerNorm: "float16",
        Norm: "bfloat16",
        "decoder.?": {"gelu": "fp32"},
        "decoder.1": "fp32",
        "head.*": "fp32",
    }
    found = decided(rules)
    assert found[""] == found["head"] == found["decoder.0.lin"] == "False"
    assert (found["decoder.0.norm"], found["decoder.1.norm"]) == ("float16", "bfloat16")
    assert (found["decoder.0"], found["decoder.1"]) == ("{aten::gelu: fp32}", "fp32")
    assert found["head.norm"] == "fp32"


def test_two_patterns_of_one_rule_agree() -> None:
    assert decided({"head.*": "fp32", "*.lin": torch.float32})["head.lin"] == "fp32"
    assert decided({"head.*": {"gelu": "fp32"}, "*.lin": {"aten::gelu": "fp32"}})["head.lin"] == "{aten::gelu: fp32}"


def test_two_patterns_that_differ_are_an_error() -> None:
    with pytest.raises(ModuleRuleError, match=r"'head\.\*' and '\*\.lin' both mean module 'head\.lin'.*exactly"):
        decide(Model(), {"head.*": "fp32", "*.lin": False})
    assert decided({"head.*": "fp32", "*.lin": False, "head.lin": "float16"})["head.lin"] == "float16"


def test_a_module_with_two_names() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert decided({"2": "fp32"}, model) == {"0": "fp32"}
    with pytest.raises(ModuleRuleError, match="'0' and '2' both mean"):
        decide(model, {"0": "fp32", "2": False})


def test_a_module_that_holds_its_parent() -> None:
    model = Model()
    model.head.parent = model
    assert decided({"*.lin": "fp32"}, model).keys() == {"decoder.0.lin", "decoder.1.lin", "head.lin"}


# -- What is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"haed": "fp32"}, "named 'haed'; did you mean 'head'"),
        ({"encoder.*": "fp32"}, "no module of the model that is called is named 'encoder.*'"),
        ({"decoder": "fp32"}, r"'decoder' is a ModuleList, which is never called: name its modules, 'decoder\.\*'"),
        ({nn.Conv2d: "fp32"}, "the model has no Conv2d"),
        ({nn.ModuleList: "fp32"}, "the model has no ModuleList that a rule could be for"),
        ({int: "fp32"}, "name, a pattern or a class of modules"),
        ({3: "fp32"}, "name, a pattern or a class of modules"),
        ({"head": True}, "'head' is \"fp32\", a dtype, False, or a mapping.*got True"),
        ({"head": None}, "got None"),
        ({"head": {}}, "got {}"),
        ({"head": "fp23"}, "got 'fp23'"),
        ({"head": torch.int8}, "no region runs in torch.int8"),
        ({"head": torch.float64}, "no region runs in torch.float64"),
        (["head"], "are a mapping from a module's name"),
    ],
)
def test_what_is_no_rule(rules: Any, message: str) -> None:
    with pytest.raises(ModuleRuleError, match=message):
        decide(Model(), rules)


def test_wrong_op_rules_say_for_which_module() -> None:
    with pytest.raises(UnknownOpError, match=r"module rule 'head': .*softmx"):
        decide(Model(), {"head": {"softmx": "fp32"}})
    with pytest.raises(UnknownPolicyError, match="module rule LayerNorm: "):
        decide(Model(), {nn.LayerNorm: {"softmax": "fp23"}})


def test_a_script_module_can_have_none() -> None:
    model = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(2)))
    with pytest.raises(ModuleRuleError, match="module '0' is a script module"):
        decide(model, {"0": "fp32"})


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = Model()
    with pytest.raises(ModuleRuleError):
        mpamp.module_rules(model, {"head": "fp32", "nothing": "fp32"})
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(TypeError, match="got list"):
        mpamp.module_rules([model], {"head": "fp32"})  # type: ignore[arg-type]


# -- TOML ----------------------------------------------------------------------------------------------

TEXT = """
[modules]
"decoder.*.norm" = "fp32"
"decoder.0" = false
head = { softmax = "fp32", gelu = { float16 = "fp32" } }

[classes]
"torch.nn.Linear" = "bfloat16"
Norm = "float16"
"""


def test_text_and_files(tmp_path: Path) -> None:
    model = Model()
    file = tmp_path / "rules.toml"
    file.write_text(TEXT, encoding="utf-8")
    rules = read(model, TEXT)
    assert rules == read(model, file) == read(model, str(file))
    assert rules == {
        "decoder.*.norm": "fp32",
        "decoder.0": False,
        "head": {"softmax": "fp32", "gelu": {"float16": "fp32"}},
        nn.Linear: "bfloat16",
        Norm: "float16",
    }
    handle = mpamp.module_rules(model, file)
    assert str(handle.rules["decoder.0"]) == "False"
    assert handle.rules["head.lin"].dtype is torch.bfloat16
    assert handle.rules["decoder.1.norm"].dtype is torch.float32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modules", "not a TOML"),
        ("[ops]\nsoftmax = 'fp32'", r"sections \[modules\] and \[classes\]; got \['ops'\]"),
        ("# [nothing]", "sections"),
        ("modules = 3 # [", "sections"),
        ("[modules]\nhead.norm = 'fp32'", r'head\.norm is a module.*"head\.norm" = .*"aten::norm"'),
        ("[classes]\nLayreNorm = 'fp32'", "no module of class 'LayreNorm'; did you mean 'LayerNorm'"),
        ("[classes]\n'torch.Linear' = 'fp32'", "no module of class 'torch.Linear'"),
    ],
)
def test_what_is_no_file_of_rules(text: str, message: str) -> None:
    with pytest.raises(ModuleRuleError, match=message):
        read(Model(), text)


def test_two_classes_of_one_name() -> None:
    other = type("Norm", (nn.LayerNorm,), {"__module__": "elsewhere"})
    model = nn.Sequential(Norm(4), other(4))
    with pytest.raises(ModuleRuleError, match=r"'Norm' is .*Norm and .*Norm: say which"):
        read(model, "[classes]\nNorm = 'fp32'")
    assert read(model, "[classes]\n'elsewhere.Norm' = 'fp32'") == {other: "fp32"}


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text("[modules", encoding="utf-8")
    with pytest.raises(ModuleRuleError, match=r"rules\.toml: not a TOML"):
        read(Model(), file)
    with pytest.raises(OSError, match="absent"):
        read(Model(), "absent.toml")


def test_errors_are_the_projects_own() -> None:
    assert issubclass(ModuleRuleError, mpamp.MpampError)
    assert issubclass(OpTableError, mpamp.MpampError)
