"""Runs in the Python processes that one with mpamp's names in torch's place starts; see ``mpamp/children.py``."""

import os
import sys


def _follow():
    """Do, once torch is imported, what the process that started this one has announced."""
    import importlib.util
    import json

    here = os.path.dirname(os.path.abspath(__file__))
    text = os.environ.get("MPAMP_CHILDREN")
    if not text or sys.version_info < (3, 10):
        return
    spec = importlib.util.spec_from_file_location("_mpamp_importing", os.path.join(os.path.dirname(here), "importing.py"))
    importing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(importing)
    told = json.loads(text)
    importing.after_import("torch", lambda: _import_mpamp(told))
    importing.after_import("mpamp", lambda: _call(told["calls"]))
    if any(name.startswith("mpamp.apex") for name in told["calls"]):
        sys.meta_path.insert(0, _Apex())


def _import_mpamp(told):
    """Import mpamp, whose import ends in ``_call``; where it is not installed, from where the other process has it."""
    import importlib.util
    import warnings

    if "mpamp" in sys.modules:  # it is being imported, and has imported torch
        return
    if importlib.util.find_spec("mpamp") is None:
        if told["prefix"] != sys.prefix:
            text = "mpamp is not installed for this Python: its torch stays as it is, though a process started it that has mpamp's names in torch's place."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        sys.path.append(told["root"])
    import mpamp  # noqa: F401


def _call(calls):
    import importlib
    import warnings

    for name, arguments in calls.items():
        module, _, function = name.partition(":")
        try:
            getattr(importlib.import_module(module), function)(**arguments)
        except Exception as error:  # the child's import of torch must not fail of it
            warnings.warn(f"mpamp: {name} failed in a child process: {error!r}", RuntimeWarning, stacklevel=2)


class _Apex:
    """Has ``import apex`` before torch's import torch first: then mpamp's apex is there."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] != "apex":
            return None
        sys.meta_path.remove(self)
        import importlib.util

        import torch  # noqa: F401

        module = sys.modules.get(name)
        if module is None:
            return importlib.util.find_spec(name)
        return importlib.util.spec_from_loader(name, _Loaded(module), is_package=hasattr(module, "__path__"))


class _Loaded:
    """Loads a module that is there."""

    def __init__(self, module):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.spec


def _run_hidden():
    """Run the ``sitecustomize`` that this one stands in front of, if there is one, and take the folder off the path."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.realpath(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _follow()
finally:
    _run_hidden()
