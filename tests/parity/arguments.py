"""The calls of ``mpamp.testing``'s kit, read from its file: what torch does is observed before mpamp is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

_MPAMP = Path(__file__).parents[2] / "mpamp"
for _name, _folder in (("_kit", _MPAMP), ("_kit.testing", _MPAMP / "testing")):  # mpamp, with nothing imported
    _package = ModuleType(_name)
    _package.__path__ = [str(_folder)]
    sys.modules[_name] = _package
_module = importlib.import_module("_kit.testing.conformance_arguments")

Call, Maker, arguments, call = _module.Call, _module.Maker, _module.arguments, _module.call

__all__ = ["Call", "Maker", "arguments", "call"]
