"""Skips everything, with the reason, where torch can't have a device in pure Python."""

from __future__ import annotations

import pytest
from mpamp_npy.missing import missing_facility


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_facility()
    if reason:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))
