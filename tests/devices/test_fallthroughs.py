"""At a key without a fallback, ops without a kernel run as called, and a vendor's fallback may come at any time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import processes

SRC = Path(__file__).parents[2] / "examples" / "mpamp-npy" / "src"
sys.path.append(str(SRC / "mpamp_npy"))
from missing import missing_facility  # type: ignore[import-not-found]  # noqa: E402  # without the package

sys.path.pop()
pytestmark = pytest.mark.skipif(bool(missing_facility()), reason=missing_facility())

START = f"""
import sys, warnings
sys.path.insert(0, {str(SRC)!r})
import importlib.metadata, torch, mpamp
from mpamp import engine
from mpamp.devices import registry
from mpamp.plugins import manager
warnings.simplefilter("error")
point = importlib.metadata.EntryPoint("npy", "mpamp_npy", "mpamp")
manager._manager = manager.PluginManager([point])
key = torch._C.DispatchKey.AutocastPrivateUse1
def has_fallback(): return torch._C._dispatch_has_backend_fallback(key)
def vendor():
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return library
mpamp.get_backend("npy")
x = torch.rand(4, 4).to("npy")
def dtypes():
    with mpamp.autocast("npy"):
        y = x @ x
        return [t.dtype for t in (y, y.relu(), x.sin(), y.exp())]
CAST = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
"""


def run(code: str) -> None:
    done = processes.python("-c", START + code)
    assert done.returncode == 0, done.stderr


def test_a_vendor_may_register_its_fallback_at_any_time() -> None:
    """As torch_npu and torch_mlu do where C++ is loaded: were there one, that would end the process."""
    run(
        """
assert dtypes() == CAST and not has_fallback()
with mpamp.autocast("npy"):
    library = vendor()
    assert (x @ x).relu().dtype is torch.bfloat16
assert has_fallback() and dtypes() == CAST
new = torch.library.Library("later", "DEF")
new.define("f(Tensor x) -> Tensor")
new.impl("f", lambda x: x + 1, "CompositeExplicitAutograd")
with mpamp.autocast("npy"):
    torch.ops.later.f(x)
library._destroy()
assert dtypes() == CAST
"""
    )


def test_a_vendors_fallback_that_is_there_first_serves() -> None:
    run(
        """
library = vendor()
assert dtypes() == CAST
found = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastPrivateUse1")
assert sorted(found) == engine.installed("npy")
"""
    )


def test_ops_that_are_defined_later_run_as_called() -> None:
    """By Python, which says so, and as C++ does it, which tells nobody; inside of an open region too."""
    run(
        """
def f(x): return x + 1
libraries = [torch.library.Library(f"later{number}", "DEF") for number in range(3)]
def define(number, tells):
    library = libraries[number]
    (library if tells else library.m).define(*("f(Tensor x) -> Tensor", "")[: 1 if tells else 2])
    (library if tells else library.m).define(*("g.of(Tensor x) -> Tensor", "")[: 1 if tells else 2])
    for name in ("f", "g.of"):
        library.impl(name, f, "CompositeExplicitAutograd")
    space = getattr(torch.ops, f"later{number}")
    return [op(x).dtype for op in (space.f, space.f.default, space.g, space.g.of)]
dtypes()
assert set(define(0, True)) == {torch.float32}
with mpamp.autocast("npy"):
    assert set(define(1, True)) == {torch.float32}
    assert set(define(2, False)) == {torch.float32}
    torch.ops.later0.f(x)
"""
    )


def test_what_is_only_let_through_counts_as_no_kernel() -> None:
    run(
        """
dtypes()
state = registry.device_state("npy")
assert engine.native_ops(state) == set()
assert not engine.is_native(state, "aten::mm") and not engine.is_native(state, "aten::sin")
with torch.autocast("npy", torch.bfloat16):
    assert x.sin().dtype is torch.float32
library = torch.library.Library("aten", "IMPL")
library.impl("sin", lambda x: x.to("cpu").sin().half(), "AutocastPrivateUse1")
assert engine.is_native(state, "aten::sin") and engine.native_ops(state) == {"aten::sin"}
with mpamp.autocast("npy"):
    assert x.sin().dtype is torch.float16
engine.withdraw(state)
assert engine.installed("npy") == [] and engine.native_ops(state) == {"aten::sin"}
library._destroy()
assert engine.native_ops(state) == set() and dtypes() == CAST
"""
    )
