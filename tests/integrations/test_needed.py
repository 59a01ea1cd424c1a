"""The frameworks that ``MPAMP_TEST_FRAMEWORKS`` names, with spaces between, are there: no test of theirs is skipped."""

from __future__ import annotations

import os

import pytest

from tests.integrations.steps import missing

MODULES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "accelerate": ("accelerate",),
    "pytorch-ignite": ("ignite.engine",),
    "transformers": ("transformers.trainer",),
    "timm": ("timm", "torchvision"),
    "mmengine": ("mmengine.runner",),
    "tensorboard": ("torch.utils.tensorboard",),
}
"""What tests import of a distribution; timm goes by torchvision, which goes by one torch alone."""


@pytest.mark.skipif("MPAMP_TEST_FRAMEWORKS" not in os.environ, reason="MPAMP_TEST_FRAMEWORKS names no framework")
def test_what_was_installed_can_be_imported() -> None:
    named = os.environ["MPAMP_TEST_FRAMEWORKS"].split()
    assert [missing(*MODULES[name]) for name in named] == [""] * len(named)


def test_what_is_not_there_is_told() -> None:
    assert missing("no_such_framework").startswith("no_such_framework can't be imported: ModuleNotFoundError")
