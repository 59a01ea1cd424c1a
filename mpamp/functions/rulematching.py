"""Module rules as people write them: which modules a key means, and what a value says."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..errors import ModuleRuleError, OpTableError, nearest
from ..rules import tablefile
from ..rules.optable import OpTable
from ..rules.policy import CASTABLE
from ..rules.rows import parse_dtype, shown
from .modulerule import SOURCE, ModuleRule

__all__ = ["decide", "read"]

_ALLOWED = '"fp32", a dtype, False, or a mapping from op to policy'
_NOT_CALLED = nn.Module.forward


# -- Values --------------------------------------------------------------------------------------------


def parse(key: Any, value: Any) -> ModuleRule:
    """Return the rule that a value means.

    Raises:
        ModuleRuleError: It means none.
        OpTableError: A rule of an op in it is wrong.

    Example:
        >>> parse("head", "fp32"), parse("head", False)
        (ModuleRule(dtype=torch.float32, ops=None), ModuleRule(dtype=None, ops=None))
    """
    if value is False:
        return ModuleRule()
    if isinstance(value, str | torch.dtype):
        return ModuleRule(_dtype(key, value))
    if isinstance(value, Mapping) and value:
        try:
            return ModuleRule(None, value if isinstance(value, OpTable) else OpTable(value, source=SOURCE))
        except OpTableError as error:
            raise type(error)(f"module rule {_named(key)}: {error}") from error
    raise ModuleRuleError(f"module rule {_named(key)} is {_ALLOWED}; got {shown(value)}.")


def _dtype(key: Any, value: str | torch.dtype) -> torch.dtype:
    try:
        dtype = torch.float32 if value == "fp32" else parse_dtype(value)
    except OpTableError as error:
        raise ModuleRuleError(f"module rule {_named(key)} is {_ALLOWED}; got {shown(value)}.") from error
    if dtype not in CASTABLE:
        raise ModuleRuleError(f"module rule {_named(key)}: no region runs in {dtype}.")
    return dtype


def _named(key: Any) -> str:
    return key.__qualname__ if isinstance(key, type) else shown(key)


# -- Keys ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Claim:
    """One key that means a module."""

    rank: tuple[int, int]
    """The highest decides: exact names, then patterns, then classes, the nearest base class first."""
    key: Any
    rule: ModuleRule


def decide(model: nn.Module, rules: Mapping[Any, Any]) -> list[tuple[str, nn.Module, ModuleRule]]:
    """Return every module that has a rule, by its first name.

    Raises:
        ModuleRuleError: A key means no module, two contradict each other, or a module can't have a rule.
        OpTableError: A rule of an op is wrong.
    """
    if not isinstance(rules, Mapping):
        raise ModuleRuleError(f"module rules are a mapping from a module's name to its rule, got {shown(rules)}.")
    modules = list(_walk(model, "", ()))
    claims: dict[int, list[_Claim]] = {}
    for key, value in rules.items():
        rule = parse(key, value)
        for rank, module in _meant(key, modules):
            claims.setdefault(id(module), []).append(_Claim(rank, key, rule))
    first = {id(module): name for name, module in reversed(modules)}
    named = {first[id(module)]: module for _, module in modules}
    return [(n, m, _decided(n, m, claims[id(m)])) for n, m in named.items() if id(m) in claims]


def _walk(module: nn.Module, name: str, around: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with all of their names: one may be in several places, or hold one that it is in."""
    yield name, module
    around = (*around, id(module))
    for child_name, child in module._modules.items():
        if child is not None and id(child) not in around:
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, around)


def _meant(key: Any, modules: list[tuple[str, nn.Module]]) -> list[tuple[tuple[int, int], nn.Module]]:
    """Return the modules that a key means, each with the rank of that."""
    callable_ = [(name, module) for name, module in modules if _is_called(module)]
    if isinstance(key, type) and issubclass(key, nn.Module):
        found = [((1, -type(m).__mro__.index(key)), m) for _, m in callable_ if key in type(m).__mro__]
        if not found:
            raise ModuleRuleError(f"the model has no {key.__qualname__} that a rule could be for.")
        return found
    if not isinstance(key, str):
        raise ModuleRuleError(
            f"a module rule is for a module's name, a pattern or a class of modules, got {shown(key)}."
        )
    exact = next((module for name, module in modules if name == key), None)
    if exact is not None:
        if not _is_called(exact):
            raise ModuleRuleError(
                f"{shown(key)} is a {type(exact).__qualname__}, which is never called: name its modules, "
                f"{shown(f'{key}.*')}."
            )
        return [((3, 0), exact)]
    matched = [((2, 0), module) for name, module in callable_ if name and fnmatchcase(name, key)]
    if not matched:
        names = [name for name, _ in callable_ if name]
        raise ModuleRuleError(f"no module of the model that is called is named {shown(key)}{nearest(key, names)}")
    return matched


def _is_called(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or inspect.getattr_static(type(module), "forward") is not _NOT_CALLED


def _decided(name: str, module: nn.Module, claims: list[_Claim]) -> ModuleRule:
    if isinstance(module, torch.jit.ScriptModule):
        raise ModuleRuleError(f"module {shown(name)} is a script module: its forward can't be given a rule.")
    rank = max(claim.rank for claim in claims)
    first, *others = [claim for claim in claims if claim.rank == rank]
    for other in others:
        if other.rule != first.rule:
            raise ModuleRuleError(
                f"{_named(first.key)} and {_named(other.key)} both mean module {shown(name)}, and give it different "
                "rules: name it exactly."
            )
    return first.rule


# -- Files ---------------------------------------------------------------------------------------------


def read(model: nn.Module, source: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the rules for a model that TOML holds: text with a section, or a file's name.

    Raises:
        ModuleRuleError: It isn't TOML, or no module rules.
        OSError: The file can't be read.
    """
    is_text = isinstance(source, str) and "[" in source
    try:
        data = tablefile.loads(str(source) if is_text else tablefile.read(source))
    except OpTableError as error:
        where = "" if is_text else f"{source}: "
        raise ModuleRuleError(f"{where}{error}") from error
    if not data or set(data) - {"modules", "classes"} or not all(isinstance(v, dict) for v in data.values()):
        raise ModuleRuleError(
            f"module rules in TOML have the sections [modules] and [classes]; got {shown(sorted(data))}."
        )
    modules = list(_walk(model, "", ()))
    for key, value in data.get("modules", {}).items():
        _refuse_dotted(key, value, {name for name, _ in modules})
    known = {cls for _, module in modules for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    return {**data.get("modules", {}), **{_class(k, known): v for k, v in data.get("classes", {}).items()}}


def _refuse_dotted(key: str, value: Any, names: set[str]) -> None:
    """Refuse a name that TOML has taken apart at its dots, where it would mean a module and an op."""
    dotted = next((f"{key}.{op}" for op in value if f"{key}.{op}" in names), None) if isinstance(value, dict) else None
    if dotted is not None:
        raise ModuleRuleError(
            f'{dotted} is a module: a name with dots is written in quotes in TOML, "{dotted}" = ...; the op of that '
            f'name, in module {key}, is "aten::{dotted.rpartition(".")[2]}".'
        )


def _class(name: str, known: set[type]) -> type:
    """Return the class of that name, bare or with a module that it can be imported from, among the model's own."""
    path, _, bare = name.rpartition(".")
    found = {c for c in known if c.__name__ == bare and (not path or _is_at(c, path))}
    if len(found) == 1:
        return found.pop()
    if not found:
        raise ModuleRuleError(
            f"the model has no module of class {shown(name)}{nearest(bare, [c.__name__ for c in known])}"
        )
    raise ModuleRuleError(
        f"{shown(name)} is {' and '.join(sorted(f'{c.__module__}.{bare}' for c in found))}: say which."
    )


def _is_at(cls: type, path: str) -> bool:
    return cls.__module__ == path or getattr(sys.modules.get(path), cls.__name__, None) is cls
