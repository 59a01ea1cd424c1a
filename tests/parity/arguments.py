"""The calls of ``mpamp.testing``'s kit, read from its file: what torch does is observed before mpamp is imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).parents[2] / "mpamp" / "testing" / "conformance_arguments.py"
_spec = importlib.util.spec_from_file_location("conformance_arguments", _FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module  # dataclasses look themselves up there
_spec.loader.exec_module(_module)

Call, Maker, arguments, call = _module.Call, _module.Maker, _module.arguments, _module.call

__all__ = ["Call", "Maker", "arguments", "call"]
