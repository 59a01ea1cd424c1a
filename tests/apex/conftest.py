"""Every test of the drop-in starts and ends with nothing initialized."""

from __future__ import annotations

import pytest

from mpamp.apex import ambient, amp


@pytest.fixture(autouse=True)
def clean():
    state = amp._amp_state
    state.hard_override = state.allow_incoming_model_not_fp32 = False
    state.verbosity = 1
    yield
    state.hard_override = state.allow_incoming_model_not_fp32 = False
    amp.shutdown()
    assert ambient.installed() == []
