"""Whose names the tests go by: torch's as they are, and with mpamp's behind them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mpamp


@pytest.fixture(params=["torch", "installed"])
def whose(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test twice: on torch, and on mpamp by torch's names."""
    if request.param == "torch":
        yield "torch"
    else:
        with mpamp.install():
            yield "installed"


@pytest.fixture
def installed() -> Iterator[None]:
    with mpamp.install():
        yield
