"""Fused optimizers under amp: they step as by hand, skip on overflow, and train as torch's in float32."""

from __future__ import annotations

import pytest
import torch

from mpamp.apex import amp
from mpamp.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from mpamp.apex.parallel import LARC
from tests.apex import stepping
from tests.apex.training import net, settle

MAKERS = {
    "adam": lambda p: FusedAdam(p, lr=0.125, weight_decay=0.125),
    "adam, L2": lambda p: FusedAdam(p, lr=0.125, adam_w_mode=False, weight_decay=0.125, bias_correction=False),
    "sgd": lambda p: FusedSGD(p, lr=0.125, momentum=0.5, weight_decay=0.125),
    "sgd, after": lambda p: FusedSGD(
        p, lr=0.125, momentum=0.5, weight_decay=0.125, wd_after_momentum=True, materialize_master_grads=False
    ),
    "lamb": lambda p: FusedLAMB(p, lr=0.125),
    "novograd": lambda p: FusedNovoGrad(p, lr=0.125),
    "adagrad": lambda p: FusedAdagrad(p, lr=0.125),
    "larc of sgd": lambda p: LARC(FusedSGD(p, lr=0.125, weight_decay=0.125)),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_fused_optimizers_step_as_by_hand(level, name):
    stepping.check(level, MAKERS[name], per_step=2)


PLAIN = {
    "adam": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
}
FUSED = {
    "adam": lambda p: FusedAdam(p, lr=0.05, weight_decay=0.1),
    "sgd": lambda p: FusedSGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5"])
def test_training_goes_as_with_torchs_in_float32(level, name):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))

    def train(model, optimizer, backward):
        found = []
        for _ in range(15):
            optimizer.zero_grad()
            loss = (model(x).float() - x[:, :3].cumsum(1)).square().mean()
            backward(loss, optimizer)
            optimizer.step()
            found.append(loss.item())
        return found

    def scaled(loss, optimizer):
        with amp.scale_loss(loss, optimizer) as given:
            given.backward()

    plain = net()
    wanted = train(plain, PLAIN[name](plain.parameters()), lambda loss, _: loss.backward())
    model = net()
    model, optimizer = amp.initialize(model, FUSED[name](model.parameters()), opt_level=level, verbosity=0)
    settle()
    assert train(model, optimizer, scaled) == pytest.approx(wanted, rel=0.05, abs=0.01)
    assert wanted[-1] < wanted[0] / 2
