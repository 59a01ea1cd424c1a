"""The options of ``initialize``: what each opt_level sets, and which overrides it allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import AmpAssertionError, AmpAttributeError, AmpTypeError, AmpUsageError
from .state import say_on_first_rank, warn_or_raise

__all__ = ["OPT_LEVELS", "OptLevel", "Properties", "choose"]

DEFAULTS: dict[str, Any] = {
    "enabled": False,
    "opt_level": None,
    "cast_model_type": None,
    "patch_torch_functions": False,
    "patch_torch_functions_type": None,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": 1.0,
}
"""Every option, in the order in which they are printed and overridden, as it is before an opt_level applies."""


@dataclass(frozen=True, slots=True)
class OptLevel:
    """One opt_level: what it is in a few words, and the options that it sets."""

    name: str
    brief: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_process_wide: bool = False
    """Whether it casts the arguments of functions, process-wide, and leaves models as they are."""
    more: str = ""
    """apex's longer text; docs/migrating-from-apex.md has it."""

    def __call__(self, properties: Properties) -> Properties:
        """Set the options, and return what they were set in."""
        properties.apply(self)
        return properties


def _level(name: str, brief: str, model: Any, *, patch: Any = None, masters: Any, bn: Any, scale: Any) -> OptLevel:
    options = {
        "enabled": True,
        "opt_level": name,
        "cast_model_type": model,
        "patch_torch_functions": patch is not None,
        "patch_torch_functions_type": patch,
        "keep_batchnorm_fp32": bn,
        "master_weights": masters,
        "loss_scale": scale,
    }
    return OptLevel(name, f"{name}:  {brief}", options, patch is not None)


_HALF, _BRAIN = torch.float16, torch.bfloat16
OPT_LEVELS: dict[str, OptLevel] = {
    level.name: level
    for level in (
        _level("O0", "float32 throughout.", torch.float32, masters=False, bn=None, scale=1.0),
        _level("O1", "float16 per function.", None, patch=_HALF, masters=None, bn=None, scale="dynamic"),
        _level("O2", "float16 model, float32 batch norm and masters.", _HALF, masters=True, bn=True, scale="dynamic"),
        _level("O3", "float16 throughout.", _HALF, masters=False, bn=False, scale=1.0),
        _level("O4", "bfloat16 per function.", None, patch=_BRAIN, masters=None, bn=None, scale=1.0),
        _level("O5", "bfloat16 model, float32 batch norm and masters.", _BRAIN, masters=True, bn=True, scale=1.0),
    )
}
"""O0 to O3 as NVIDIA's apex has them, O4 and O5 as ROCm's."""


class Properties:
    """The options in force; setting one checks it against the opt_level.

    Example:
        >>> options = Properties()
        >>> options.apply(OPT_LEVELS["O2"])
        >>> options.keep_batchnorm_fp32, options.loss_scale
        (True, 'dynamic')
        >>> options.loss_scale = "128.0"
        >>> options.loss_scale
        128.0
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        self.__dict__["options"] = dict(DEFAULTS)

    def apply(self, level: OptLevel) -> None:
        """Take over an opt_level's options, unchecked."""
        self.options.update(level.options)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["options"][name]
        except KeyError:
            raise AmpAttributeError(f"amp has no option {name!r}; options are: {', '.join(DEFAULTS)}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise AmpAttributeError(f"amp has no option {name!r}; options are: {', '.join(DEFAULTS)}.")
        rule = _RULES.get(name)
        self.options[name] = value if rule is None else rule(self, value)

    def is_process_wide(self) -> bool:
        """Tell whether the opt_level is one that casts per function."""
        level = OPT_LEVELS.get(self.opt_level)
        return level is not None and level.is_process_wide

    def table(self) -> list[str]:
        """Return the lines that ``initialize`` prints."""
        shown = {k: v for k, v in self.options.items() if k != "patch_torch_functions_type"}
        if self.options["patch_torch_functions_type"] is torch.bfloat16:
            shown = self.options
        return [f"{name:22} : {value}" for name, value in shown.items()]


def _cast_model_type(properties: Properties, value: Any) -> Any:
    if properties.is_process_wide() and value is not False and value is not torch.float32:
        warn_or_raise(
            f"{properties.opt_level} casts the inputs of functions, so its model stays in float32: cast_model_type "
            f"may be False or torch.float32 there, got {value!r}. For a {value} model use O2, O3 or O5."
        )
    if value is not False and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise AmpTypeError(f"cast_model_type is a floating dtype such as torch.float16, or False; got {value!r}.")
    return value


def _patch_torch_functions(properties: Properties, value: Any) -> Any:
    if value and not properties.is_process_wide():
        warn_or_raise(
            f"patch_torch_functions=True goes with O1 and O4 only, and the opt_level is {properties.opt_level}: "
            "elsewhere the model itself is cast."
        )
    return value


def _patch_torch_functions_type(properties: Properties, value: Any) -> Any:
    level = OPT_LEVELS.get(properties.opt_level)
    allowed = None if level is None else level.options["patch_torch_functions_type"]
    if value is not allowed:
        warn_or_raise(
            f"patch_torch_functions_type is float16 with O1, bfloat16 with O4 and None elsewhere; "
            f"got {value!r} with {properties.opt_level}."
        )
    return value


def _keep_batchnorm_fp32(properties: Properties, value: Any) -> Any:
    if properties.is_process_wide():
        warn_or_raise(
            f"{properties.opt_level} leaves the model in float32, batch norm included, so keep_batchnorm_fp32 has no "
            f"meaning there; got {value!r}. Leave it out."
        )
    value = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
    if value is not None and not isinstance(value, bool):
        raise AmpAssertionError(f"keep_batchnorm_fp32 is a bool, or 'True' or 'False'; got {value!r}.")
    return value


def _master_weights(properties: Properties, value: Any) -> Any:
    if properties.is_process_wide():
        warn_or_raise(
            f"{properties.opt_level} leaves the model's weights in float32, so they need no masters; "
            f"got master_weights={value!r}. Leave it out."
        )
    return value


def _loss_scale(properties: Properties, value: Any) -> Any:
    return value if value == "dynamic" else float(value)


_RULES = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch_torch_functions,
    "patch_torch_functions_type": _patch_torch_functions_type,
    "keep_batchnorm_fp32": _keep_batchnorm_fp32,
    "master_weights": _master_weights,
    "loss_scale": _loss_scale,
}


def choose(properties: Properties, opt_level: Any, overrides: Mapping[str, Any]) -> None:
    """Set an opt_level's options and the overrides that are not None, and print both.

    Raises:
        RuntimeError: There is no such opt_level, or it doesn't allow an override.
        AssertionError: ``keep_batchnorm_fp32`` isn't a bool.
        ValueError: ``loss_scale`` is neither "dynamic" nor a number.
    """
    if opt_level not in OPT_LEVELS:
        raise AmpUsageError(
            f"unexpected optimization level {opt_level!r}: it is one of {', '.join(map(repr, OPT_LEVELS))}, "
            "with the letter O, not the digit zero."
        )
    level = OPT_LEVELS[opt_level]
    properties.apply(level)
    say_on_first_rank(f"Selected optimization level {level.brief}\n")
    say_on_first_rank("\n".join(["Defaults for this optimization level are:", *properties.table()]))
    say_on_first_rank("Processing user overrides (additional kwargs that are not None)...")
    for name in DEFAULTS:
        if overrides.get(name) is not None:
            setattr(properties, name, overrides[name])
    say_on_first_rank("\n".join(["After processing overrides, optimization options are:", *properties.table()]))
