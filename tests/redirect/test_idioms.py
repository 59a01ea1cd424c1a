"""Every way of naming a CUDA device that public scripts use, where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.redirect.idioms import REFUSED, SERVED

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here: its names mean what they say"),
]


@pytest.fixture(scope="module")
def outcomes():
    """What became of each program, in a process of its own: an empty string, or the error."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = processes.python("-m", "tests.redirect.idioms", cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("idiom", SERVED)
def test_an_idiom_is_served(outcomes, idiom):
    assert outcomes[idiom] == ""


@pytest.mark.parametrize("idiom", REFUSED)
def test_what_cannot_be_served_says_so_by_name(outcomes, idiom):
    kind, _, message = outcomes[idiom].partition(": ")
    assert kind == "RedirectError"
    assert message.startswith(f"{idiom} can't be sent to 'cpu'")
    assert message.count(". ") == 1  # what is wrong, and what to write


def test_there_are_enough_of_them():
    assert len(SERVED) >= 80
    assert not set(SERVED) & set(REFUSED)
