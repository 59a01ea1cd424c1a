"""The wheels, built once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins.environments import Environment, build_wheels, can_build


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of wheels."""
    if not can_build():
        pytest.skip("building wheels offline needs setuptools 70.1 or later, or wheel")
    shared = tmp_path_factory.getbasetemp()
    return build_wheels(shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared)


@pytest.fixture
def environment(tmp_path: Path, wheels: Path) -> Callable[..., Environment]:
    """Return what makes an environment with some distributions."""
    return lambda *distributions: Environment.make(tmp_path / "env", wheels, *distributions)
