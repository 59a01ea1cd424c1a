"""A model whose gradients are exact in every dtype, stepped under amp and by hand."""

from __future__ import annotations

import copy

import torch
from torch import nn

from mpamp.apex import amp
from tests.apex.training import LOW_MODEL

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class Exact(nn.Module):
    """Its loss is linear in its weights, and its coefficients are powers of two."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 2))
        self.register_buffer("ca", 2.0 ** -torch.arange(1.0, 7.0).reshape(3, 2))
        self.register_buffer("cb", 2.0 ** -torch.arange(2.0, 6.0).reshape(2, 2))

    def forward(self, factor=1.0):
        return ((self.a * self.ca).sum() + (self.b * self.cb).sum()) * factor


def by_hand(level, make, steps, *, per_step, with_closure=False):
    """Return what the parameters are after so many steps of ``make``'s optimizer, in float32 or O3's float16."""
    model = Exact()
    dtype = torch.float16 if level == "O3" else torch.float32
    params = list(model.parameters())
    optimizer = make(params)
    for p in params:
        p.data = p.data.to(dtype)

    def grads():
        for p, c in zip(params, (model.ca, model.cb), strict=True):
            p.grad = (per_step * c).to(dtype)
        return sum((p.detach().float() * c).sum() for p, c in zip(params, (model.ca, model.cb), strict=True))

    for _ in range(steps):
        grads()
        optimizer.step(grads) if with_closure else optimizer.step()
    return [p.detach() for p in params]


class Training:
    """A model and an optimizer under amp, with a dynamic scale of 1024."""

    def __init__(self, level, make, *, per_step=1, with_closure=False):
        self.model, self.per_step, self.with_closure = Exact(), per_step, with_closure
        self.optimizer = make(list(self.model.parameters()))
        amp.initialize(self.model, self.optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        self.scaler = amp._amp_state.loss_scalers[0]
        self.scaler._loss_scale = 1024.0

    def losses(self, bad):
        self.optimizer.zero_grad() if hasattr(self.optimizer, "zero_grad") else self.model.zero_grad()
        for number in range(self.per_step):
            factor = float("inf") if bad and number == 0 else 1.0
            with amp.scale_loss(self.model(factor), self.optimizer) as scaled:
                scaled.backward()
        return self.model(1.0).detach()

    def step(self, *, bad=False):
        if self.with_closure:
            return self.optimizer.step(lambda: self.losses(bad))
        self.losses(bad)
        return self.optimizer.step()

    def masters(self):
        return [p.detach().clone() for p in amp.master_params(self.optimizer)]

    def state(self):
        state = getattr(self.optimizer, "state", {})
        return copy.deepcopy([dict(v) for v in state.values()])


def check(level, make, *, per_step, with_closure=False):
    """Two steps, one that is skipped, and two more: the model moves as by hand, and the skipped step moves nothing."""
    wanted = by_hand(level, make, 4, per_step=per_step, with_closure=with_closure)
    training = Training(level, make, per_step=per_step, with_closure=with_closure)
    for _ in range(2):
        training.step()
    before, state = training.masters(), training.state()
    training.step(bad=True)
    assert all(torch.equal(a, b) for a, b in zip(before, training.masters(), strict=True)), "moved on inf"
    assert same(state, training.state()), "state changed on inf"
    assert training.scaler.loss_scale() == 512.0
    for _ in range(2):
        training.step()
    for p, master, want in zip(training.model.parameters(), training.masters(), wanted, strict=True):
        assert not torch.equal(want, Exact().a if want.shape == (3, 2) else Exact().b)
        assert torch.equal(master, want)
        assert torch.equal(p.detach(), want.to(LOW_MODEL.get(level, torch.float32)))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
