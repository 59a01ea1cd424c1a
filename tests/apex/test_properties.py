"""Every row of the tables of options and overrides."""

from __future__ import annotations

import pytest
import torch

from mpamp.apex import amp
from mpamp.apex.errors import AmpUsageError
from mpamp.apex.properties import OPT_LEVELS, Properties, choose

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
PROCESS_WIDE, MODEL = ("O1", "O4"), ("O0", "O2", "O3", "O5")
TABLE = {
    "O0": (FP32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (HALF, False, True, True, "dynamic"),
    "O3": (HALF, False, False, False, 1.0),
    "O4": (None, True, None, None, 1.0),
    "O5": (BF16, False, True, True, 1.0),
}
NAMES = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")


def chosen(level, **overrides):
    amp._amp_state.verbosity = 0
    properties = Properties()
    choose(properties, level, overrides)
    return properties


@pytest.mark.parametrize("level", TABLE)
def test_what_each_level_sets(level):
    properties = chosen(level)
    assert tuple(getattr(properties, name) for name in NAMES) == TABLE[level]
    assert properties.enabled is True
    assert properties.opt_level == level


def test_defaults_before_a_level():
    assert list(Properties().options.items()) == [
        ("enabled", False),
        ("opt_level", None),
        ("cast_model_type", None),
        ("patch_torch_functions", False),
        ("patch_torch_functions_type", None),
        ("keep_batchnorm_fp32", None),
        ("master_weights", None),
        ("loss_scale", 1.0),
    ]


@pytest.mark.parametrize("level", ["01", "o1", "O6", "", None, 1])
def test_an_unknown_level(level):
    with pytest.raises(RuntimeError, match=r"letter O, not the digit zero") as caught:
        amp.initialize(torch.nn.Linear(1, 1), opt_level=level, verbosity=0)
    assert repr(level) in str(caught.value)
    assert not hasattr(amp._amp_state, "opt_properties")


ALLOWED = [
    *[(level, "cast_model_type", value, value) for level in MODEL for value in (False, FP32, HALF, BF16)],
    *[(level, "cast_model_type", value, value) for level in PROCESS_WIDE for value in (False, FP32)],
    *[(level, "patch_torch_functions", False, False) for level in TABLE],
    *[(level, "patch_torch_functions", True, True) for level in PROCESS_WIDE],
    *[
        (level, "keep_batchnorm_fp32", given, kept)
        for level in MODEL
        for given, kept in ((True, True), (False, False), ("True", True), ("False", False))
    ],
    *[(level, "master_weights", value, value) for level in MODEL for value in (True, False)],
    *[
        (level, "loss_scale", given, kept)
        for level in TABLE
        for given, kept in (("dynamic", "dynamic"), ("128.0", 128.0), (64, 64.0), (True, 1.0))
    ],
    ("O1", "patch_torch_functions_type", HALF, HALF),
    ("O4", "patch_torch_functions_type", BF16, BF16),
]
REFUSED = [
    *[(level, "cast_model_type", value, RuntimeError) for level in PROCESS_WIDE for value in (HALF, BF16)],
    *[(level, "cast_model_type", "half", TypeError) for level in MODEL],
    *[(level, "patch_torch_functions", True, RuntimeError) for level in MODEL],
    *[(level, "keep_batchnorm_fp32", value, RuntimeError) for level in PROCESS_WIDE for value in (True, False, "x")],
    *[(level, "keep_batchnorm_fp32", value, AssertionError) for level in MODEL for value in (1, "yes")],
    *[(level, "master_weights", value, RuntimeError) for level in PROCESS_WIDE for value in (True, False)],
    *[(level, "loss_scale", "big", ValueError) for level in TABLE],
    ("O1", "patch_torch_functions_type", BF16, RuntimeError),
    ("O4", "patch_torch_functions_type", HALF, RuntimeError),
    ("O2", "patch_torch_functions_type", HALF, RuntimeError),
]


@pytest.mark.parametrize(("level", "name", "given", "kept"), ALLOWED)
def test_allowed_overrides(level, name, given, kept):
    value = getattr(chosen(level, **{name: given}), name)
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(("level", "name", "given", "error"), REFUSED)
def test_refused_overrides_change_nothing(level, name, given, error):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(error):
        amp.initialize(model, opt_level=level, verbosity=0, **{name: given})
    assert model.weight.dtype is FP32
    assert not hasattr(amp._amp_state, "opt_properties")
    assert type(model) is torch.nn.Linear


def test_none_is_no_override():
    assert chosen("O2", keep_batchnorm_fp32=None).keep_batchnorm_fp32 is True


def test_hard_override_prints_instead(capsys):
    amp._amp_state.hard_override = True
    assert chosen("O1", master_weights=False).master_weights is False
    assert capsys.readouterr().out.startswith("Warning:  O1 leaves")


def test_an_option_that_does_not_exist():
    with pytest.raises(AttributeError, match="options are: enabled"):
        Properties().half = True
    with pytest.raises(AttributeError, match="no option 'half'"):
        _ = Properties().half


def test_what_is_printed(capsys):
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O2", loss_scale="128.0")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Selected optimization level O2")
    assert "Processing user overrides (additional kwargs that are not None)..." in lines
    first = lines.index("Defaults for this optimization level are:") + 1
    assert lines[first : first + 7] == [
        "enabled                : True",
        "opt_level              : O2",
        "cast_model_type        : torch.float16",
        "patch_torch_functions  : False",
        "keep_batchnorm_fp32    : True",
        "master_weights         : True",
        "loss_scale             : dynamic",
    ]
    assert lines[-1] == "loss_scale             : 128.0"
    assert lines[-8] == "After processing overrides, optimization options are:"


def test_verbosity_0_prints_nothing(capsys):
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O3", verbosity=0)
    assert capsys.readouterr().out == ""


def test_only_the_first_rank_prints(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O3")
    assert capsys.readouterr().out == ""


def test_errors_are_mpamps_too():
    with pytest.raises(AmpUsageError):
        chosen("O0", patch_torch_functions=True)


def test_levels_are_in_order():
    assert list(OPT_LEVELS) == ["O0", "O1", "O2", "O3", "O4", "O5"]
