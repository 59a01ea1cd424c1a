"""LARC against its formula, and as a wrapper under amp."""

from __future__ import annotations

import math

import pytest
import torch

from mpamp.apex.parallel import LARC
from tests.apex import stepping

VALUES = [[3.0, -4.0], [0.0, 0.0], [1.0, 2.0]]
GRADS = [[0.5, 0.25], [1.0, 1.0], [0.0, 0.0]]


def norm(values):
    return math.sqrt(sum(v * v for v in values))


def by_formula(trust, clip, decay, lr, steps=3):
    values = [list(value) for value in VALUES]
    for _ in range(steps):
        for value, grad in zip(values, GRADS, strict=True):
            of_value, of_grad = norm(value), norm(grad)
            new = list(grad)
            if of_value and of_grad:
                rate = trust * of_value / (of_grad + of_value * decay + 1e-8)
                rate = min(rate / lr, 1) if clip else rate
                new = [(g + decay * v) * rate for g, v in zip(grad, value, strict=True)]
            value[:] = [v - lr * g for v, g in zip(value, new, strict=True)]
    return values


def params():
    return [torch.tensor(value, requires_grad=True) for value in VALUES]


def set_grads(given):
    for p, grad in zip(given, GRADS, strict=True):
        p.grad = torch.tensor(grad)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.25])
@pytest.mark.parametrize("trust", [0.02, 8.0])
def test_larc(clip, decay, trust):
    given = params()
    optimizer = LARC(torch.optim.SGD(given, lr=0.5, weight_decay=decay), trust_coefficient=trust, clip=clip)
    for _ in range(3):
        set_grads(given)
        optimizer.step()
        assert optimizer.param_groups[0]["weight_decay"] == decay
    for p, wanted in zip(given, by_formula(trust, clip, decay, 0.5), strict=True):
        assert p.tolist() == pytest.approx(wanted, rel=1e-5)


def test_weight_decay_comes_back_after_an_exception():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("broken")

    optimizer = LARC(Broken(params(), lr=0.5, weight_decay=0.25))
    with pytest.raises(ValueError, match="broken"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_what_larc_hands_through():
    given = params()
    inner = torch.optim.SGD(given[:2], lr=0.5, momentum=0.5)
    optimizer = LARC(inner)
    optimizer.add_param_group({"params": given[2:], "lr": 0.25})
    set_grads(given)
    assert optimizer.step(lambda: 7) == 7
    other = LARC(torch.optim.SGD([{"params": params()[:2]}, {"params": params()[2:]}], lr=1.0, momentum=0.5))
    other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.25]
    assert (optimizer.state, optimizer.defaults) == (inner.state, inner.defaults)
    assert repr(optimizer) == repr(inner)
    optimizer.zero_grad(set_to_none=False)
    assert given[0].grad.tolist() == [0.0, 0.0]
    torch.optim.lr_scheduler.StepLR(inner, 1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_larc_under_amp_steps_as_by_hand(level):
    stepping.check(level, lambda p: LARC(torch.optim.SGD(p, lr=0.125, momentum=0.5, weight_decay=0.1)), per_step=2)
