"""State dicts of models with lower-precision weights: float32, exact, and written through as torch's own are."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mpamp.apex import amp
from tests.apex.training import LEVELS, LOW_MODEL, data, net, settle, sgd, start, step

LOW = ["O2", "O3", "O5"]
WRITES = {
    "mul_": lambda v: v.mul_(2),
    "*=": lambda v: v.__imul__(2),
    "copy_": lambda v: v.copy_(2 * v),
    "item": lambda v: v.__setitem__(slice(None), 2 * v),
    "out": lambda v: torch.mul(v, 2, out=v),
    "data": lambda v: v.data.mul_(2),
    "detach": lambda v: v.detach().mul_(2),
    "view": lambda v: v.view(-1).mul_(2),
    "each row": lambda v: [row.mul_(2) for row in v.unbind()],
    "chunks": lambda v: [part.mul_(2) for part in v.flatten().chunk(2)],
    "foreach": lambda v: torch._foreach_mul_([v], 2),
    "lerp": lambda v: v.lerp_(2 * v, 1.0),
    "init": lambda v: nn.init.constant_(v, 0.5),
}


@pytest.mark.parametrize("level", LOW)
@pytest.mark.parametrize("how", list(WRITES))
@pytest.mark.parametrize("which", ["model", "copy"])
def test_writes_into_a_state_dict_reach_the_model(level, how, which):
    model, optimizer = start(level)
    model = copy.deepcopy(model) if which == "copy" else model
    entry = model.state_dict()["0.weight"]
    wanted = torch.full_like(entry, 0.5) if how == "init" else 2 * entry
    with torch.no_grad():
        WRITES[how](entry)
    assert torch.equal(model[0].weight, wanted.to(LOW_MODEL[level]))
    assert torch.equal(model.state_dict()["0.weight"], wanted)
    if which == "model":
        if level != "O3":
            assert torch.equal(next(amp.master_params(optimizer)), wanted)
        optimizer.step()
        assert torch.equal(model[0].weight, wanted.to(LOW_MODEL[level]))


@pytest.mark.parametrize("level", LOW)
def test_what_is_computed_from_an_entry_is_a_plain_tensor(level):
    model, _ = start(level)
    entry = model.state_dict()["0.weight"]
    exact = entry.clone()
    assert type(exact) is torch.Tensor
    assert type(entry + 1) is torch.Tensor
    assert type(copy.deepcopy(entry)) is torch.Tensor
    assert type(pickle.loads(pickle.dumps(entry))) is torch.Tensor
    assert type(entry.double()) is torch.Tensor
    assert repr(entry).startswith("tensor(")
    assert entry.numpy().dtype == "float32"
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(v) for v in loaded.values()} == {torch.Tensor}
    assert torch.equal(loaded["0.weight"], exact)
    copies = copy.deepcopy(model.state_dict())
    assert [v.shape for v in copies.values()] == [v.shape for v in loaded.values()]
    with torch.no_grad():
        copies["0.weight"].zero_()
        exact.zero_()
    assert model[0].weight.abs().max() > 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_state_dict_goes_along_with_training_as_torchs_does(level):
    model, optimizer = start(level)
    entries = model.state_dict()
    step(model, optimizer, data())
    if level != "O3":
        assert torch.equal(entries["0.weight"], next(amp.master_params(optimizer)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("copied", ["before", "after"])
def test_an_average_through_state_dicts_is_exact(level, copied):
    """As yolov5's and timm's averages of a model's weights."""
    model = net()
    optimizer = sgd(model)
    average = copy.deepcopy(model) if copied == "before" else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    settle()
    average = copy.deepcopy(model) if average is None else average
    wanted = {k: v.clone() for k, v in average.state_dict().items() if v.is_floating_point()}
    for seed in range(6):
        step(model, optimizer, data(seed))
        now = model.state_dict()
        with torch.no_grad():
            for name, value in average.state_dict().items():
                if value.is_floating_point():
                    value *= 0.99
                    value += 0.01 * now[name]
        for name, value in wanted.items():
            value.mul_(0.99).add_(0.01 * now[name])
    for name, value in average.state_dict().items():
        assert name not in wanted or torch.equal(value, wanted[name])
    for name, p in average.named_parameters():
        assert torch.equal(p, wanted[name].to(p.dtype))


@pytest.mark.parametrize("level", LEVELS)
def test_torchs_averaged_model(level):
    model, optimizer = start(level)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    step(model, optimizer, data())
    average.update_parameters(model)
    first = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, data(2))
    average.update_parameters(model)
    for p, a, b in zip(average.parameters(), first, model.parameters(), strict=True):
        torch.testing.assert_close(p, (a + b) / 2, atol=2e-2, rtol=0)
    assert average(data()).dtype is torch.float32 or level in ("O1", "O4")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_weights_swapped_for_an_evaluation_come_back_exactly(level):
    model, optimizer = start(level)
    step(model, optimizer, data())
    exact = [p.detach().clone() for p in amp.master_params(optimizer)]
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(torch.zeros_like(p))
    assert model(data()).abs().max() == 0
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(exact[:2], list(amp.master_params(optimizer))[:2], strict=True))


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("side", ["model", "masters"])
@pytest.mark.parametrize("way", ["in place", "data"])
def test_weights_clipped_by_hand_stay_clipped(level, side, way):
    model, optimizer = start(level, make=lambda m: sgd(m, momentum=0.0))
    for seed in range(2):
        step(model, optimizer, data(seed))
        with torch.no_grad():
            for p in model.parameters() if side == "model" else amp.master_params(optimizer):
                (p if way == "in place" else p.data).clamp_(-0.125, 0.125)
    optimizer.zero_grad()
    if way == "in place" or side == "model":
        model(data())
        assert max(p.abs().max() for p in model.parameters()) <= 0.125
    optimizer.step()
    for low, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert low.abs().max() <= 0.125
        assert torch.equal(low, master.to(low.dtype))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_is_written_into_masters_is_in_the_model_at_its_next_call(level):
    model, optimizer = start(level)
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.zero_()
    assert model(data()).abs().max() == 0
    assert model[0].weight.abs().max() == 0
    with torch.no_grad():
        next(amp.master_params(optimizer)).fill_(1.0)
    assert model.state_dict()["0.weight"].min() == 1.0
    assert model[0].weight.min() == 1.0


@pytest.mark.parametrize("level", LOW)
def test_buffers_in_a_state_dict_write_through(level):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(2))
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(x) * self.scale

    model, _ = start(level, model=Scaled())
    with torch.no_grad():
        model.state_dict()["scale"].mul_(1 + 2**-14)
    assert model.state_dict()["scale"].tolist() == [1 + 2**-14] * 2
    with torch.no_grad():
        model.scale.mul_(2)
    assert model.state_dict()["scale"].tolist() == [2.0] * 2
    model.load_state_dict({k: torch.full_like(v, 1 + 2**-13) for k, v in model.state_dict().items()})
    assert model.state_dict()["scale"].tolist() == [1 + 2**-13] * 2
    assert model.scale.tolist() == [1.0, 1.0] or level != "O5"


@pytest.mark.parametrize("level", LOW)
def test_shutdown_after_writes_into_state_dicts(level):
    model, optimizer = start(level)
    entry = model.state_dict()["0.weight"]
    with torch.no_grad():
        entry.fill_(1 + 2**-14)
    amp.shutdown()
    wanted = 1 + 2**-14 if level != "O3" else 1.0
    assert model[0].weight.unique().tolist() == [wanted]
    start(level, model=model, make=lambda _: optimizer)
    assert model.state_dict()["0.weight"].unique().tolist() == [wanted]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_parameter_in_two_optimizers_has_one_master(level):
    model = nn.Linear(2, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=2.0**-12) for _ in range(2)]
    wanted = copy.deepcopy(model)
    by_hand = [torch.optim.SGD(wanted.parameters(), lr=2.0**-12) for _ in range(2)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(3):
        model.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizers) as scaled:
            scaled.backward()
        wanted.weight.grad = torch.ones(1, 2)
        for optimizer in (*optimizers, *by_hand):
            optimizer.step()
    assert torch.equal(next(amp.master_params(optimizers[0])), wanted.weight)
    assert torch.equal(next(amp.master_params(optimizers[1])), wanted.weight)
    amp.shutdown()
    assert torch.equal(model.weight, wanted.weight)
