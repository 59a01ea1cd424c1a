"""Master weights: where they come from, how they follow the model, groups, zeroing, closures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpamp
from mpamp.apex import amp
from tests.apex.training import data, net, settle, sgd, start, step

LEVELS = ("O2", "O5")
DTYPE = {"O2": torch.float16, "O5": torch.bfloat16}


@pytest.mark.parametrize("level", LEVELS)
def test_masters_are_there_at_once_and_exact(level):
    model = net()
    values = [p.detach().clone() for p in model.parameters()]
    model, optimizer = start(level, model=model)
    masters = list(amp.master_params(optimizer))
    assert [m.dtype for m in masters] == [torch.float32] * 6
    assert all(torch.equal(a, b) for a, b in zip(values, masters, strict=True))
    assert not torch.equal(values[0], model[0].weight.float())
    assert masters[2] is model[1].weight  # batch norm is its own master


def test_the_stash_has_apexs_names():
    model, optimizer = start("O2")
    stash = optimizer._amp_stash
    assert (stash.lazy_init_called, stash.already_patched, stash.params_have_scaled_gradients) == (True, False, False)
    assert [len(g) for g in stash.fp16_groups] == [4]
    assert [len(g) for g in stash.fp32_from_fp16_groups] == [4]
    assert [len(g) for g in stash.fp32_from_fp32_groups] == [2]
    assert stash.all_fp16_params[0] is model[0].weight
    assert stash.all_fp32_from_fp16_params[0] is next(amp.master_params(optimizer))
    assert stash.all_fp32_from_fp32_params == [model[1].weight, model[1].bias]
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_lazy_init()
    optimizer._master_params_to_model_params()
    model, optimizer = start("O1")
    assert len(optimizer._amp_stash.all_fp32_params) == 6
    assert optimizer._amp_stash.all_fp16_params == []
    assert not hasattr(optimizer, "_master_params_to_model_params")


def test_master_params_is_a_generator():
    _, optimizer = start("O2")
    found = amp.master_params(optimizer)
    assert len(list(found)) == 6
    assert list(found) == []
    assert len(list(amp.master_params(sgd(net())))) == 6


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_before_anything_else(level):
    model, optimizer = start(level)
    optimizer.step()
    model(data()).sum().backward()
    for p in model[1].parameters():
        p.grad = None
    with pytest.warns(mpamp.MpampWarning, match=r"none on the master weights.*amp.scale_loss"):
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_the_model_follows_its_masters(level):
    model, optimizer = start(level)
    for seed in range(3):
        step(model, optimizer, data(seed))
    for low, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(low, master.to(low.dtype))
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_frozen_parameters_stay_as_they_are_until_thawed(level):
    model = net()
    model[0].weight.requires_grad_(False)
    model, optimizer = start(level, model=model)
    assert next(amp.master_params(optimizer)) is model[0].weight
    step(model, optimizer, data())
    model[0].weight.requires_grad_(True)
    step(model, optimizer, data())
    master = next(amp.master_params(optimizer))
    assert master.dtype is torch.float32
    assert torch.equal(master.to(DTYPE[level]), model[0].weight)


# -- Writing into the model --------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_masters_follow_what_is_loaded_exactly(level):
    model, optimizer = start(level)
    step(model, optimizer, data())
    other = net(5).state_dict()
    model.load_state_dict(other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other[name])
    assert torch.equal(next(amp.master_params(optimizer)), other["0.weight"])
    optimizer.step()
    assert torch.equal(model[0].weight, other["0.weight"].to(DTYPE[level]))


def test_masters_follow_what_is_loaded_into_a_part_of_the_model():
    model, optimizer = start("O2")
    other = nn.Linear(4, 8).state_dict()
    model[0].load_state_dict(other)
    assert torch.equal(next(amp.master_params(optimizer)), other["weight"])


def test_a_failed_load_leaves_masters_and_model_in_step():
    model, optimizer = start("O2")
    before = model.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**before, "0.weight": torch.ones(1), "3.bias": torch.ones(3)})
    after = model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["3.bias"], torch.ones(3))
    optimizer.step()
    assert torch.equal(model[3].bias, torch.ones(3).half())


@pytest.mark.parametrize("when", ["step", "state_dict", "shutdown"])
def test_masters_follow_writes_by_hand_and_keep_the_rest_exact(when):
    model, optimizer = start("O2")
    exact = next(amp.master_params(optimizer)).detach().clone()
    with torch.no_grad():
        model[0].weight[0].fill_(0.25)
    expected = exact.clone()
    expected[0] = 0.25
    if when == "step":
        optimizer.step()
        found = next(amp.master_params(optimizer))
    elif when == "state_dict":
        found = model.state_dict()["0.weight"]
    else:
        amp.shutdown()
        found = model[0].weight
    assert torch.equal(found, expected)


# -- Groups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("how", ["one", "list", "generator"])
def test_add_param_group_mid_training(level, how):
    model, late = net(), nn.Linear(3, 3)
    optimizer = sgd(model)
    amp.initialize([model, late], optimizer, opt_level=level, verbosity=0)
    settle()
    step(model, optimizer, data())
    given = {"one": late.weight, "list": [late.weight], "generator": (p for p in [late.weight])}[how]
    optimizer.add_param_group({"params": given, "lr": 0.5})
    added = optimizer.param_groups[1]["params"][0]
    assert added.dtype is (torch.float16 if level == "O3" else torch.float32)
    before = late.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(late(model(data())).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert not torch.equal(late.weight, before)
    assert "momentum_buffer" in optimizer.state[added]


def test_bad_groups_change_nothing():
    model, optimizer = start("O2")
    for group, error in (([1], AssertionError), ({"params": {model[0].weight}}, TypeError)):
        with pytest.raises(error):
            optimizer.add_param_group(group)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
    with pytest.raises(TypeError, match=r"float64 parameter"):
        optimizer.add_param_group({"params": [torch.ones(1, dtype=torch.float64, requires_grad=True)]})
    assert len(optimizer.param_groups) == 1
    step(model, optimizer, data())


def test_a_foreign_float64_parameter_is_refused_before_anything_changes():
    model = net()
    optimizer = torch.optim.SGD([*model.parameters(), torch.ones(1, dtype=torch.float64, requires_grad=True)], lr=1.0)
    with pytest.raises(TypeError, match="float64 parameter"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model[0].weight.dtype is torch.float32


def test_gradients_on_added_parameters_are_kept():
    model, late = net(), nn.Linear(2, 1, bias=False)
    optimizer = sgd(model)
    amp.initialize([model, late], optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)
    late.weight.grad = torch.ones(1, 2)
    optimizer.add_param_group({"params": [late.weight]})
    with amp.scale_loss(late(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    assert late.weight.grad.tolist() == [[2.0, 2.0]]


# -- Zeroing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("options", "left"), [({}, 0.0), ({"set_to_none": False}, 0.0), ({"set_to_none": True}, None)])
def test_zero_grad(level, options, left):
    model, optimizer = start(level)
    with amp.scale_loss(model(data()).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.zero_grad(**options)
    for p in model.parameters():
        assert (p.grad is None) if left is None else (p.grad.abs().max() == 0)
    assert all(m.grad is None for m in optimizer._amp_stash.all_fp32_from_fp16_params)


def test_a_step_clears_the_masters_gradients_and_leaves_float32_ones():
    model, optimizer = start("O2")
    step(model, optimizer, data())
    assert all(m.grad is None for m in optimizer._amp_stash.all_fp32_from_fp16_params)
    assert all(p.grad is not None for p in model[1].parameters())


# -- Closures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_closures(level, by):
    make = lambda m: torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=4)  # noqa: E731
    model, optimizer = start(level, model=nn.Linear(4, 1), make=make)
    target = data().sum(1, keepdim=True)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data()), target)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss.detach()

    first = optimizer.step(closure) if by == "position" else optimizer.step(closure=closure)
    for _ in range(5):
        last = optimizer.step(closure)
    assert last.item() < first.item() / 10


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_a_closure_skips_the_step(level):
    model, optimizer = start(level, loss_scale="dynamic")
    before = [p.detach().clone() for p in amp.master_params(optimizer)]

    def closure():
        optimizer.zero_grad()
        with amp.scale_loss(model(data()).sum() * float("inf"), optimizer) as scaled:
            scaled.backward()

    optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
    step(model, optimizer, data())
    assert not torch.equal(before[0], next(amp.master_params(optimizer)))


class Calling(torch.optim.SGD):
    """An optimizer whose step calls its parent's, which has hooks of its own."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_calls_its_parents(level):
    sgd(net())
    model, optimizer = start(level, make=lambda m: Calling(m.parameters(), lr=0.125))
    step(model, optimizer, data(), bad=True)
    before = next(amp.master_params(optimizer)).detach().clone()
    step(model, optimizer, data())
    assert not torch.equal(before, next(amp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_raises(level):
    class Failing(torch.optim.SGD):
        fails = True

        @torch.no_grad()
        def step(self, closure=None):
            if self.fails:
                raise KeyError
            return super().step(closure)

    model, optimizer = start(level, make=lambda m: Failing(m.parameters(), lr=0.125))
    with pytest.raises(KeyError):
        step(model, optimizer, data())
    optimizer.fails = False
    x = model(data())
    assert x.dtype is (torch.float16 if level == "O1" else torch.float32)
    step(model, optimizer, data())
