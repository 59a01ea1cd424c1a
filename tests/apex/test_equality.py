"""Training under every opt_level against plain float32: models, optimizers, losses, overflows, groups, zeroing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mpamp.apex import amp
from tests.apex.training import LEVELS, settle

STEPS = 4
SCALE = 256.0
ATOL = {"O0": 1e-7, "O1": 1e-3, "O2": 1e-3, "O3": 4e-3, "O4": 4e-3, "O5": 4e-3}
"""Parameters are below 1 and move by about 0.05: four units in the last place of float16, one of bfloat16."""


@dataclass(frozen=True)
class Topology:
    """Which models an optimizer steps, and which models and optimizers a loss has."""

    optimizers: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def models(self):
        return 1 + max(m for models in self.optimizers for m in models)


TOPOLOGIES = {
    "1 model 1 optimizer 1 loss": Topology(((0,),), (((0,), (0,)),)),
    "1 model 1 optimizer 2 losses": Topology(((0,),), (((0,), (0,)), ((0,), (0,)))),
    "2 models 1 optimizer 2 losses": Topology(((0, 1),), (((0,), (0,)), ((0, 1), (0,)))),
    "2 models 2 optimizers 2 losses": Topology(((0,), (1,)), (((0,), (0,)), ((1,), (1,)))),
    "2 models 2 optimizers crossed": Topology(((0,), (1,)), (((0, 1), (0, 1)), ((1,), (1,)))),
    "3 models 2 optimizers 2 losses": Topology(((0, 1), (2,)), (((0, 1), (0,)), ((1, 2), (0, 1)))),
}
OVERFLOWS = {
    "no overflow": (),
    "first loss in step 1": ((1, 0),),
    "last loss in step 1": ((1, -1),),
    "first step, and the last loss in step 2": ((0, 0), (2, -1)),
}
PLACES = ("loss", "first gradient", "last gradient")
ZEROING = ("optimizer.zero_grad", "model.zero_grad", "grad = None")
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-2),
}


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def make_data(number, device):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
    return x.to(device), y.to(device)


class Run:
    """One training, with amp or, where ``level`` is None, in plain float32."""

    def __init__(self, topology, kind, level, zeroing, overflow, place, adds_group, device):
        self.topology, self.level, self.zeroing, self.place = topology, level, zeroing, place
        count = len(topology.losses)
        self.bad = {(step, loss % count) for step, loss in overflow}
        self.models = [make_model(seed).to(device) for seed in range(topology.models)]
        self.late = make_model(9).to(device) if adds_group else None
        self.optimizers = [
            OPTIMIZERS[kind]([p for m in models for p in self.models[m].parameters()]) for models in topology.optimizers
        ]
        self.scales = [[SCALE, 0] for _ in range(count)]
        self.device = device
        if level is not None:
            models = self.models if self.late is None else [*self.models, self.late]
            amp.initialize(
                models, self.optimizers, opt_level=level, loss_scale="dynamic", num_losses=count, verbosity=0
            )
            settle(SCALE)

    def train(self):
        for step in range(STEPS):
            self.zero()
            skipping = set()
            for loss_id, (models, optimizers) in enumerate(self.topology.losses):
                is_bad = (step, loss_id) in self.bad
                x, y = make_data(10 * step + loss_id, self.device)
                outputs = [self.models[m](x) for m in models]
                if self.late is not None and step >= 2 and 0 in optimizers:
                    outputs.append(self.late(x))
                loss = sum(nn.functional.mse_loss(out, y) for out in outputs)
                self.backward(loss, loss_id, [self.optimizers[o] for o in optimizers], models, is_bad)
                if is_bad:
                    skipping.update(optimizers)
            for number, optimizer in enumerate(self.optimizers):
                if self.level is not None or number not in skipping:
                    optimizer.step()
            if self.late is not None and step == 1:
                self.optimizers[0].add_param_group({"params": list(self.late.parameters()), "lr": 0.02})

    def zero(self):
        models = self.models if self.late is None else [*self.models, self.late]
        if self.zeroing == "optimizer.zero_grad":
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        elif self.zeroing == "model.zero_grad":
            for model in models:
                model.zero_grad()
        else:
            for model in models:
                for p in model.parameters():
                    p.grad = None

    def backward(self, loss, loss_id, optimizers, models, is_bad):
        scale = self.scales[loss_id]
        scale[:] = [scale[0] / 2, 0] if is_bad else [scale[0], scale[1] + 1]
        if self.level is None:
            if not is_bad:
                loss.backward()
            return
        if is_bad and self.place == "loss":
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizers, loss_id=loss_id) as scaled:
            scaled.backward()
            if is_bad and self.place != "loss":
                params = [p for m in models for p in self.models[m].parameters()]
                params[0 if self.place == "first gradient" else -1].grad.view(-1)[0] = float("inf")

    def result(self):
        models = self.models if self.late is None else [*self.models, self.late]
        return [p.detach().float().cpu() for model in models for p in model.parameters()]


CASES = [
    (*case, ZEROING[number % 3], PLACES[number // 3 % 3])
    for number, case in enumerate(itertools.product(TOPOLOGIES, LEVELS, OPTIMIZERS, OVERFLOWS, (False, True)))
]


def check(device, topology, level, kind, overflow, adds_group, zeroing, place):
    shape, bad = TOPOLOGIES[topology], OVERFLOWS[overflow]
    reference = Run(shape, kind, None, zeroing, bad, place, adds_group, device)
    reference.train()
    run = Run(shape, kind, level, zeroing, bad, place, adds_group, device)
    run.train()
    start = Run(shape, kind, None, zeroing, bad, place, adds_group, device).result()
    moved = [(a - b).abs().max().item() for a, b in zip(start, reference.result(), strict=True)]
    assert min(moved) > 1e-3
    for found, expected in zip(run.result(), reference.result(), strict=True):
        torch.testing.assert_close(found, expected, atol=ATOL[level], rtol=0)
    states = [[entry["loss_scale"], entry["unskipped"]] for entry in amp.state_dict().values()]
    assert states == reference.scales


@pytest.mark.parametrize(("topology", "level", "kind", "overflow", "adds_group", "zeroing", "place"), CASES)
def test_training_equals_float32(topology, level, kind, overflow, adds_group, zeroing, place):
    check("cpu", topology, level, kind, overflow, adds_group, zeroing, place)


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize(("topology", "level", "kind", "overflow", "adds_group", "zeroing", "place"), CASES)
def test_training_equals_float32_on_the_accelerator(topology, level, kind, overflow, adds_group, zeroing, place):
    device = torch.accelerator.current_accelerator()
    check(device, topology, level, kind, overflow, adds_group, zeroing, place)


def test_the_cases_are_many_and_cover_each_choice_with_each_level():
    assert len(CASES) > 500
    for choices, place in ((ZEROING, 5), (PLACES, 6)):
        assert {(case[1], case[place]) for case in CASES} == set(itertools.product(LEVELS, choices))
