"""module_rules: what single modules of a model run in, from outside of its code."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any

from torch import nn

from ..locks import turn
from .modulerule import ModuleRule
from .ruledforward import RuledForward, put_rule, take_rules
from .rulematching import decide, read

__all__ = ["ModuleRules", "module_rules"]


class ModuleRules:
    """The rules that one call of ``module_rules`` put on a model, to be taken away again."""

    __slots__ = ("_forwards", "_key", "rules")

    def __init__(self, key: str, rules: dict[str, ModuleRule], forwards: list[RuledForward]) -> None:
        self._key, self._forwards = key, forwards
        self.rules = MappingProxyType(rules)
        """What each module was given, by its name."""

    def remove(self, model: nn.Module | None = None) -> None:
        """Take the rules away; rules that the modules had before hold again. More than once is once.

        Args:
            model: A copy of the model to take them from, which has them too. None is the model itself.
        """
        with turn():
            forwards = self._forwards if model is None else _forwards(model)
            for forward in forwards:
                take_rules(forward, self._key)

    def __enter__(self) -> ModuleRules:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<ModuleRules of {len(self.rules)} modules>"


def module_rules(model: nn.Module, rules: Mapping[Any, Any] | str | os.PathLike[str]) -> ModuleRules:
    """Have modules of a model run in another dtype, without autocast, or with op rules of their own.

    It takes effect inside of mpamp's regions, on the devices of these, for the time of the module's ``forward``.
    Of modules inside each other the inner one's rule holds. Copies, replicas and pickles of the model have the rules
    too; its classes and the keys of its ``state_dict`` stay what they are.

    Args:
        model: The model.
        rules: Keys: a module's name (``""`` is the model itself), a pattern as in ``fnmatch`` (whose ``*`` matches dots
            too), or a class of modules. A name goes before a pattern, a pattern before a class, a class before its
            bases. Values:

            * ``"fp32"`` or ``torch.float32``: lower-precision ops run in float32, and what is passed to the module in
              16 bits, also in nested containers, is cast to float32. What it returns stays float32.
            * another dtype or its name: they run in that.
            * False: autocast is off.
            * a mapping from op to policy, or an ``OpTable``: these rules on top of the surrounding region's.

            Or TOML with the sections ``[modules]`` and ``[classes]``: text, or the name of a file.

    Returns:
        A handle with ``remove()``, which is a context manager too.

    Raises:
        ModuleRuleError: A name, pattern or class that means no module; two patterns that give one module different
            rules; a value that is no rule. The model hasn't changed then.
        OpTableError: A rule of an op is wrong.
        TypeError: ``model`` is no module.

    Example:
        >>> import torch, mpamp
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> with mpamp.module_rules(model, {"1": "fp32"}), mpamp.autocast("cpu"):
        ...     model[0](torch.ones(4)).dtype, model(torch.ones(4)).dtype
        (torch.bfloat16, torch.float32)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"module_rules takes a torch.nn.Module, got {type(model).__name__}.")
    with turn():
        found = decide(model, read(model, rules) if isinstance(rules, str | os.PathLike) else rules)
        key = uuid.uuid4().hex  # copies in other processes have it too
        forwards = [put_rule(module, key, rule) for _, module, rule in found]
    return ModuleRules(key, {name: rule for name, _, rule in found}, forwards)


def _forwards(model: nn.Module) -> list[RuledForward]:
    found = [module.__dict__.get("forward") for module in model.modules()]
    return [forward for forward in found if isinstance(forward, RuledForward)]
