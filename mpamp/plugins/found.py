"""The plugins that are installed, by their entry points, and which of them the environment blocks."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["GROUP", "PACK_PREFIX", "EntryPoint", "PluginInfo", "entry_points", "find"]

EntryPoint = importlib.metadata.EntryPoint
GROUP = "mpamp"
PACK_PREFIX = "ops."
"""Entry points named ``ops.<anything>`` are loaded at the first region of any device."""
DISABLE, LOAD = "MPAMP_DISABLE_PLUGINS", "MPAMP_LOAD_PLUGINS"


@dataclass(slots=True)
class PluginInfo:
    """One plugin: where it comes from and what became of it."""

    name: str
    distribution: str
    version: str
    module: str
    status: str = "found"
    error: BaseException | None = None
    claims: tuple[str, ...] = ()
    """The device types that it brings, or claims in vain."""

    @property
    def key(self) -> str:
        """What the plugin is called in messages and as the source of rules."""
        return f"{self.distribution}:{self.name}"

    @property
    def is_pack(self) -> bool:
        """Whether it is loaded with any device, and not with the one that it is named after."""
        return self.name.startswith(PACK_PREFIX)


def entry_points() -> list[EntryPoint]:
    """Return the entry points of all distributions, but those whose metadata can't be read."""
    try:
        return list(importlib.metadata.entry_points(group=GROUP))
    except Exception:  # one distribution's file is broken: look at each by itself
        found = []
        for distribution in importlib.metadata.distributions():
            try:
                found += [point for point in distribution.entry_points if point.group == GROUP]
            except Exception:
                continue
        return found


def find(points: Iterable[EntryPoint]) -> dict[int, PluginInfo]:
    """Return what is known of each entry point before it is loaded."""
    infos = {number: _info(point) for number, point in enumerate(points)}
    if os.environ.get(DISABLE) or os.environ.get(LOAD):
        _block(infos.values())
    return infos


def _block(infos: Iterable[PluginInfo]) -> None:
    blocked, allowed = _names(DISABLE), _names(LOAD)
    for info in infos:
        names = _normalized((info.name, info.distribution))
        if names & blocked or "*" in blocked or (allowed and not names & allowed):
            info.status = "blocked"


def _info(point: EntryPoint) -> PluginInfo:
    dist = getattr(point, "dist", None)
    name, version = (dist.name, dist.version) if dist is not None else (None, None)
    return PluginInfo(point.name, name or "unknown", version or "?", point.value)


def _names(variable: str) -> set[str]:
    """Return the names of plugins and distributions in an environment variable."""
    return _normalized(n.strip() for n in os.environ.get(variable, "").split(",") if n.strip())


def _normalized(names: Iterable[str]) -> set[str]:
    """Return names as pip compares them."""
    from packaging.utils import canonicalize_name  # a tenth of a process's first region, which seldom needs it

    return {str(canonicalize_name(name)) for name in names}
