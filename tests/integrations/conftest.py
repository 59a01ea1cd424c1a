"""The tests here run against the frameworks themselves, where they are installed."""

from __future__ import annotations

import pytest

_WHAT_LIGHTNING_WARNS_OF = (
    r"ignore:.*does not have many workers.*",
    r"ignore:.*GPU available but not used.*",
    r"ignore:.*number of training batches .* is smaller than the logging interval.*",
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"ignore:Checkpoint directory .* exists and is not empty",
    r"ignore:.*defined a `validation_step` but have no `val_dataloader`.*",
    r"ignore:.*You are trying to `self.log\(\)` but the `self.trainer` reference.*",
    r"ignore:.*does not have a callback that.*",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integrations" in item.path.parts:
            for line in _WHAT_LIGHTNING_WARNS_OF:
                item.add_marker(pytest.mark.filterwarnings(line))
