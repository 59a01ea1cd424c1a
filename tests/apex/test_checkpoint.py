"""Save at step k, resume, go on: the same bits as without the stop."""

from __future__ import annotations

import io

import pytest
import torch

from mpamp.apex import amp
from tests.apex.training import LEVELS, data, net, settle, sgd, step

MAKE = {
    "sgd": sgd,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=2.0**-6, eps=2.0**-10),
}


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(model, optimizer, steps):
    is_dynamic = amp._amp_state.loss_scalers[0].dynamic
    for number in steps:
        step(model, optimizer, data(number), bad=is_dynamic and number == 2)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("order", ["before", "after", "scaler before", "model before"])
@pytest.mark.parametrize("level", LEVELS)
def test_resuming_is_exact(level, order, kind):
    model = net()
    optimizer = MAKE[kind](model)
    scale = "dynamic" if level == "O4" else None
    options = {"opt_level": level, "verbosity": 0, "loss_scale": scale}
    amp.initialize(model, optimizer, **options)
    settle()
    run(model, optimizer, range(5))
    assert all(torch.isfinite(p).all() for p in amp.master_params(optimizer))
    assert not torch.equal(next(amp.master_params(optimizer)), net()[0].weight)
    saved = through_a_file((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    run(model, optimizer, range(5, 9))
    expected, expected_optimizer, expected_amp = model.state_dict(), optimizer.state_dict(), amp.state_dict()
    amp.shutdown()

    model = net(seed=9)
    optimizer = MAKE[kind](model)
    loads = [
        ("model", lambda: model.load_state_dict(saved[0])),
        ("optimizer", lambda: optimizer.load_state_dict(saved[1])),
        ("scaler", lambda: amp.load_state_dict(saved[2])),
    ]
    first = [load for name, load in loads if order in ("before", f"{name} before")]
    for load in first:
        load()
    amp.initialize(model, optimizer, **options)
    for _, load in loads:
        if load not in first:
            load()
    run(model, optimizer, range(5, 9))
    assert_same_bits(model.state_dict(), expected)
    assert_same_bits(optimizer.state_dict(), expected_optimizer)
    assert amp.state_dict() == expected_amp


def assert_same_bits(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same_bits(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_small_second_moments_survive(level):
    """apex cast Adam's state to the model's float16, where it underflows."""
    model = net()
    optimizer = MAKE["adam"](model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    settle()
    step(model, optimizer, data() * 1e-3)
    saved = optimizer.state_dict()
    assert min(s["exp_avg_sq"].max() for s in saved["state"].values()) < 2.0**-24
    optimizer.load_state_dict(through_a_file(saved))
    assert_same_bits(optimizer.state_dict(), saved)


def test_an_o2_checkpoint_is_a_float32_models():
    model = net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    step(model, optimizer, data())
    saved = model.state_dict()
    amp.shutdown()
    plain = net(3)
    plain.load_state_dict(saved)
    assert_same_bits(plain.state_dict(), saved)
