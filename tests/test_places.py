"""Where tests run: a place is known by its device, and a test is skipped only where that device is absent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpamp.plugins.manager import is_device_type
from tests.places import absence, place_of


def item(
    nodeid: str = "tests/test_x.py::test", markers: dict[str, tuple[Any, ...]] | None = None, **params: Any
) -> Any:
    """Return what a collected test looks like to ``place_of``."""
    marks = {name: SimpleNamespace(args=args) for name, args in (markers or {}).items()}
    return SimpleNamespace(
        nodeid=nodeid, get_closest_marker=marks.get, callspec=SimpleNamespace(params=params) if params else None
    )


@pytest.mark.parametrize("name", ["cpu", "cuda", "xpu", "fake cuda", "fake xpu"])
def test_a_parameter_or_a_mark_names_the_place(name: str) -> None:
    assert place_of(item(place=name)) == name
    assert place_of(item(markers={"place": (name,)})) == name


@pytest.mark.parametrize("other", ["inside", "around", "none", "first gradient", 3, None])
def test_a_place_that_is_no_device_is_somebody_s_own_parameter(other: Any) -> None:
    assert place_of(item(place=other)) == "cpu"


@pytest.mark.parametrize(
    "folder", ["tests/plugins", "tests/plugins_host", "tests/examples", "examples/mpamp-npy/tests"]
)
def test_tests_of_plugins_are_known_by_their_folder(folder: str) -> None:
    assert place_of(item(f"{folder}/test_x.py::test")) == "plugin"


def test_accelerator_means_the_machine_s() -> None:
    here = torch.accelerator.current_accelerator(check_available=True)
    assert place_of(item(markers={"accelerator": ()})) == ("accelerator" if here is None else here.type)


def test_absence_has_a_reason() -> None:
    assert absence("cpu") == absence("plugin") == ""
    for device in ("cuda", "xpu"):
        is_there = getattr(torch, device).is_available()
        assert absence(device) == ("" if is_there else f"there is no {device} device on this machine")
    assert [is_device_type(name) for name in ("cpu", "xpu", "inside")] == [True, True, False]
