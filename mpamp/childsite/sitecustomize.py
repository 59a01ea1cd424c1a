"""Runs in the Python processes that one with mpamp's names in torch's place starts; see ``mpamp/children.py``."""

import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def _follow(told: Any) -> None:
    """Do, once torch is imported, what the process that started this one has announced."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec: Any = spec_from_file_location("_mpamp_importing", os.path.join(os.path.dirname(HERE), "importing.py"))
    importing: Any = module_from_spec(spec)  # by its file: to import mpamp is to import torch
    spec.loader.exec_module(importing)
    importing.after_import("torch", lambda: _import_mpamp(told))
    importing.after_import("mpamp", lambda: _call(told["calls"]))
    if any(name.startswith("mpamp.apex") for name in told["calls"]):
        sys.meta_path.insert(0, _Apex())


def _import_mpamp(told: Any) -> None:
    """Import mpamp, whose import ends in ``_call``; where it is not installed, from where the other process has it."""
    from importlib.util import find_spec

    if "mpamp" in sys.modules:  # it is being imported, and has imported torch
        return
    if find_spec("mpamp") is None:
        if told["prefix"] != sys.prefix:
            _warn("it isn't installed for this Python, whose torch stays as it is, unlike its parent process's.")
            return
        sys.path.append(told["root"])
    __import__("mpamp")


def _call(calls: Any) -> None:
    from importlib import import_module

    for name, arguments in calls.items():
        module, _, function = name.partition(":")
        try:
            getattr(import_module(module), function)(**arguments)
        except Exception as error:  # the child's import of torch must not fail of it
            _warn("{} failed in a child process: {!r}".format(name, error))  # noqa: UP032


def _warn(text: str) -> None:
    import warnings

    warnings.warn("mpamp: " + text, RuntimeWarning, stacklevel=3)


class _Apex:
    """Has ``import apex`` before torch's import torch first: then mpamp's apex is there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "apex":
            return None
        from importlib.util import find_spec, spec_from_loader

        sys.meta_path.remove(self)
        __import__("torch")
        module: Any = sys.modules.get(name)
        if module is None:
            return find_spec(name)
        loader: Any = _Loaded(module)
        module.__spec__ = spec_from_loader(name, loader, is_package=hasattr(module, "__path__"))
        return module.__spec__  # Python goes by a module's own where that is there by now


class _Loaded:
    """Loads a module that is there."""

    def __init__(self, module: Any) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: Any) -> Any:
        return self.module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self.spec


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that this one stands in front of, if there is one, and take the folder off the path."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.path.realpath(HERE)]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


try:
    if os.environ.get("MPAMP_CHILDREN") and sys.version_info >= (3, 10):
        import json

        _follow(json.loads(os.environ["MPAMP_CHILDREN"]))
finally:
    _run_hidden()
