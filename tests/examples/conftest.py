"""The fixtures of tests/plugins serve the examples too."""

from __future__ import annotations

from tests.plugins.conftest import environment, wheels

__all__ = ["environment", "wheels"]
