"""Runs a piece of a test in a forked child, so that what it leaves in the process is gone with it."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fork_server import wait

SECONDS = 60.0
"""How long a child may take; it is killed then, and the test fails. Far longer than any takes."""


def in_child(function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns in a child, as JSON takes it.

    It is skipped where there is a card.

    Raises:
        AssertionError: It raised, or the child hung.
    """
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        pytest.skip("torch's autograd has threads for the card, and doesn't run in a child that is forked then")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            result = json.dumps(function())
            os.write(writer, result.encode())
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    ended = wait(child, SECONDS)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert ended == 0, text or f"the child ended with {ended}"
    return json.loads(text)
