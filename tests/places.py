"""Where each test runs: which places MPAMP_TEST_DEVICES picks, and what became of each at the end.

A place is a device (``cpu``, ``cuda``, ``xpu``, ...), its fake tensors (``fake-cuda``), or ``plugin``. A test says its
own by a parameter called ``place``, by ``pytest.mark.place("xpu")``, or by ``pytest.mark.accelerator``, which means
the accelerator of this machine; tests of plugins are known by their folder, and the rest is for ``cpu``.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from typing import Any

import pytest
import torch

VARIABLE = "MPAMP_TEST_DEVICES"
ANY = "accelerator"
"""The place of tests for the machine's accelerator where there is none."""
_FAKE = "fake "


def picked() -> list[str]:
    """Return the places that MPAMP_TEST_DEVICES names, in its order; none means all.

    Raises:
        pytest.UsageError: It names one that there can't be.
    """
    from mpamp.plugins.manager import manager

    names = [n.strip().replace("-", " ") for n in os.environ.get(VARIABLE, "").split(",") if n.strip()]
    devices = manager().known_devices()
    known = [*devices, *(f"{_FAKE}{d}" for d in devices if d != "cpu"), "plugin"]
    unknown = [n for n in names if n not in known]
    if unknown:
        listed = ", ".join(n.replace(" ", "-") for n in known)
        raise pytest.UsageError(f"{VARIABLE} names {', '.join(unknown)}; there are: {listed}")
    return names


def place_of(item: pytest.Item) -> str:
    """Return the place of one test."""
    from mpamp.plugins.manager import is_device_type

    marker = item.get_closest_marker("place")
    if marker is not None:
        return str(marker.args[0])
    callspec: Any = getattr(item, "callspec", None)
    place = callspec.params.get("place") if callspec is not None else None
    if isinstance(place, str) and is_device_type(place.removeprefix(_FAKE)):
        return place
    if item.get_closest_marker("accelerator") is not None:
        here = torch.accelerator.current_accelerator(check_available=True)
        return ANY if here is None else here.type
    folders = item.nodeid.split("/")[:-1]  # from the root folder on
    return (
        "plugin"
        if folders[:1] == ["examples"] or folders[1:2] in (["plugins"], ["plugins_host"], ["examples"])
        else "cpu"
    )


@functools.cache
def absence(place: str) -> str:
    """Return why nothing can run at a place; empty if it can."""
    device = place.removeprefix(_FAKE)
    if place == ANY:
        return "there is no accelerator on this machine"
    if place in ("cpu", "plugin"):
        return ""
    if place != device:
        card = torch.accelerator.current_accelerator(check_available=True)
        is_other = card is not None and card.type != device
        return f"beside another card, {device} tensors can't be faked" if is_other else ""
    module = getattr(torch, device, None)
    return "" if module is not None and module.is_available() else f"there is no {device} device on this machine"


def pick(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the picked places, with a skip where the place is absent."""
    wanted, kept, dropped = picked(), [], []
    real = [n for n in wanted if n not in ("cpu", "plugin") and not n.startswith(_FAKE)]
    for item in items:
        place = place_of(item)
        if wanted and place not in wanted and not (place == ANY and real):
            dropped.append(item)
            continue
        kept.append(item)
        item.user_properties.append(("place", place))
        if absence(place):
            item.add_marker(pytest.mark.skip(reason=absence(place)), append=False)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def summarize(reporter: Any) -> None:
    """Write how many tests ran and were skipped at each place, the absent ones that were picked too."""
    ran: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for outcome in ("passed", "failed", "skipped", "xfailed", "xpassed"):
        for report in reporter.stats.get(outcome, ()):
            place = dict(getattr(report, "user_properties", ())).get("place")
            if place is not None:
                (skipped if outcome == "skipped" else ran)[place] += 1
    places = [*picked(), *sorted({*ran, *skipped} - set(picked()))]
    if not places:
        return
    reporter.section("devices")
    for place in places:
        reason = absence(place)
        line = f"{place}: {ran[place]} ran, {skipped[place]} skipped" + (f" ({reason})" if reason else "")
        reporter.line(line, yellow=bool(reason))
