"""``scale_loss``: entry, accumulation by stash, exit, skips, and what happens on an exception."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from mpamp.apex import amp
from tests.apex.training import LEVELS, data, net, settle, sgd, start, step

SCALED = ("O1", "O2", "O5")


def scaled_linear(level, **options):
    """A model whose gradients are exact in any dtype: weight * x with small integers."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    make = options.pop("make", lambda m: torch.optim.SGD(m.parameters(), lr=0.5))
    return start(level, model=model, make=make, **options)


def grads(optimizer):
    return [None if p.grad is None else p.grad.tolist() for p in amp.master_params(optimizer)]


def backward(model, optimizer, factor=1.0, **options):
    with amp.scale_loss((model(torch.ones(1, 2)) * factor).sum(), optimizer, **options) as scaled:
        scaled.backward()


# -- Entry -------------------------------------------------------------------------------------------


def test_before_initialize():
    with pytest.raises(RuntimeError, match=r"before amp.initialize"), amp.scale_loss(torch.ones(1), []):
        pass


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_becomes_float32_times_the_scale(level, dtype):
    _, optimizer = start(level)
    with amp.scale_loss(torch.full((2,), 0.5, dtype=dtype, requires_grad=True), optimizer) as scaled:
        assert scaled.dtype is torch.float32
        assert scaled.tolist() == [0.5 * amp._amp_state.loss_scalers[0].loss_scale()] * 2


@pytest.mark.parametrize("loss_id", [2, -3])
def test_loss_id_out_of_range(loss_id):
    _, optimizer = start("O1", num_losses=2)
    words = rf"loss_id {loss_id} is out of range.*num_losses=2"
    with pytest.raises(IndexError, match=words), amp.scale_loss(torch.ones(1), optimizer, loss_id):
        pass


def test_negative_loss_ids_count_from_the_end():
    model, optimizer = scaled_linear("O1", num_losses=2)
    backward(model, optimizer, loss_id=-1)
    assert [s._unskipped for s in amp._amp_state.loss_scalers] == [0, 1]


def test_an_optimizer_that_was_never_initialized():
    model, _ = start("O2")
    before = [p.detach().clone() for p in model.parameters()]
    with (
        pytest.raises(AttributeError, match=r"SGD was never passed through amp.initialize"),
        amp.scale_loss(torch.ones(1), sgd(net())),
    ):
        pass
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_a_static_scale_of_1_without_masters_touches_no_gradient(level):
    model, optimizer = scaled_linear(level)
    backward(model, optimizer)
    kept = next(model.parameters()).grad
    backward(model, optimizer)
    assert next(model.parameters()).grad is kept
    assert kept.tolist() == [[2.0, 2.0]]
    assert amp._amp_state.loss_scalers[0]._unskipped == 0


@pytest.mark.parametrize("wrap", [tuple, list, iter, set])
@pytest.mark.parametrize("level", SCALED)
def test_any_iterable_of_optimizers_accumulates(level, wrap):
    model, optimizer = scaled_linear(level, loss_scale=1024.0)
    for _ in range(3):
        backward(model, wrap([optimizer]))
    assert grads(optimizer) == [[[3.0, 3.0]]]


# -- Accumulation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [*LEVELS])
def test_different_scales_accumulate_exactly(level):
    model, optimizer = scaled_linear(level, num_losses=3, loss_scale="dynamic")
    for scaler, scale in zip(amp._amp_state.loss_scalers, (2.0, 64.0, 4096.0), strict=True):
        scaler._loss_scale = scale
    for loss_id, factor in ((0, 1.0), (1, 2.0), (2, 4.0), (0, 8.0)):
        backward(model, optimizer, factor, loss_id=loss_id)
    assert grads(optimizer) == [[[15.0, 15.0]]]


@pytest.mark.parametrize("level", SCALED)
def test_gradients_in_the_block_are_the_new_ones_only(level):
    model, optimizer = scaled_linear(level, loss_scale=2.0)
    backward(model, optimizer)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        assert next(model.parameters()).grad is None
        scaled.backward()
        assert next(model.parameters()).grad.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("level", SCALED)
def test_a_parameter_without_new_gradients_keeps_its_old_ones(level):
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    model.forward = lambda x, which: model[which](x)
    model, optimizer = start(level, model=model, loss_scale=8.0)
    for which in (0, 1, 1):
        with amp.scale_loss(model(torch.ones(1, 2), which).sum(), optimizer) as scaled:
            scaled.backward()
    assert grads(optimizer) == [[[1.0, 1.0]], [[2.0, 2.0]]]


@pytest.mark.parametrize("level", SCALED)
def test_a_parameter_in_two_optimizers_is_unscaled_once(level):
    model = nn.Linear(2, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(2)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=8.0, verbosity=0)
    backward(model, optimizers)
    assert [grads(o) for o in optimizers] == [[[[1.0, 1.0]]]] * 2


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_model_gradients_stay_scaled_and_masters_are_unscaled(level):
    model, optimizer = scaled_linear(level, loss_scale=64.0)
    backward(model, optimizer)
    assert model.weight.grad.tolist() == [[64.0, 64.0]]
    assert grads(optimizer) == [[[1.0, 1.0]]]
    total = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    assert total.item() == pytest.approx(2**0.5)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_from_before_the_first_block_do_not_count(level):
    model, optimizer = start(level)
    model(data()).sum().backward()
    assert any(p.grad is not None for p in amp.master_params(optimizer))  # batch norm's
    with amp.scale_loss(model(data()).sum() * 0, optimizer) as scaled:
        scaled.backward()
    assert all(p.grad.abs().max() == 0 for p in amp.master_params(optimizer))


# -- Delays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", SCALED)
def test_delay_unscale(level):
    model, optimizer = scaled_linear(level, loss_scale="dynamic")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 16.0
    backward(model, optimizer, delay_unscale=True)
    assert optimizer._amp_stash.params_have_scaled_gradients
    assert next(model.parameters()).grad.tolist() == [[16.0, 16.0]]
    assert scaler._unskipped == 0
    backward(model, optimizer, delay_unscale=True)
    backward(model, optimizer)
    assert not optimizer._amp_stash.params_have_scaled_gradients
    assert grads(optimizer) == [[[3.0, 3.0]]]
    assert scaler._unskipped == 1


@pytest.mark.parametrize("level", SCALED)
def test_delay_overflow_check(level):
    model, optimizer = scaled_linear(level, loss_scale="dynamic")
    scaler = amp._amp_state.loss_scalers[0]
    backward(model, optimizer, float("inf"), delay_overflow_check=True)
    assert (scaler.loss_scale(), scaler._unskipped) == (1024.0, 0)
    assert not optimizer._amp_stash.already_patched


# -- Overflow ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_skips_one_step_and_touches_nothing(level, capsys):
    model, optimizer = scaled_linear(level, loss_scale="dynamic", verbosity=1, make=sgd)
    step_method = optimizer.step.__func__
    capsys.readouterr()
    before = next(amp.master_params(optimizer)).detach().clone()
    backward(model, optimizer, float("inf"))
    assert optimizer.step() is None
    assert optimizer.step.__func__ is step_method
    assert "step" not in vars(optimizer)
    out = capsys.readouterr().out
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 512.0\n" in out
    assert "no error" in out
    assert torch.equal(next(amp.master_params(optimizer)), before)
    assert len(optimizer.state) == 0
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert not torch.equal(next(amp.master_params(optimizer)), before)
    assert amp._amp_state.loss_scalers[0]._unskipped == 1


@pytest.mark.parametrize("order", [("bad", "good"), ("good", "bad"), ("bad", "bad")])
@pytest.mark.parametrize("level", SCALED)
def test_overflows_do_not_stack_and_a_clean_backward_does_not_undo_one(level, order):
    model, optimizer = scaled_linear(level, loss_scale="dynamic")
    for what in order:
        backward(model, optimizer, float("nan") if what == "bad" else 1.0)
    before = next(amp.master_params(optimizer)).detach().clone()
    optimizer.step()
    assert torch.equal(next(amp.master_params(optimizer)), before)
    optimizer.zero_grad(set_to_none=True)
    backward(model, optimizer)
    optimizer.step()
    assert not torch.equal(next(amp.master_params(optimizer)), before)


@pytest.mark.parametrize("level", SCALED)
def test_only_the_optimizers_passed_skip(level):
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    amp.initialize(models, optimizers, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0)
    settle()
    before = [next(amp.master_params(o)).detach().clone() for o in optimizers]
    backward(models[0], optimizers[0], float("inf"), loss_id=0)
    backward(models[1], optimizers[1], 2.0**-10, loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    after = [next(amp.master_params(o)) for o in optimizers]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [512.0, 1024.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_static_scale_steps_on_overflow(level):
    model, optimizer = scaled_linear(level, loss_scale=4.0)
    backward(model, optimizer, float("inf"))
    optimizer.step()
    assert not torch.isfinite(next(amp.master_params(optimizer))).any()


def test_a_skip_leaves_float32_gradients_for_the_user_to_zero():
    model, optimizer = scaled_linear("O1")
    backward(model, optimizer, float("inf"))
    optimizer.step()
    assert not torch.isfinite(model.weight.grad).all()
    model, optimizer = scaled_linear("O2")
    backward(model, optimizer, float("inf"))
    optimizer.step()
    assert grads(optimizer) == [None]


def test_skip_lines_get_rare(capsys):
    model, optimizer = start("O2", verbosity=1)
    capsys.readouterr()
    for _ in range(20):
        step(model, optimizer, data(), bad=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Gradient overflow")]
    assert len(lines) == 11
    assert lines[-1].endswith("(16 so far.)")


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("built", ["before", "after"])
def test_schedulers_see_every_step(level, built):
    model = net()
    optimizer = sgd(model)
    if built == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    if built == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, data(), bad=True)
        scheduler.step()
        step(model, optimizer, data())
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125 / 4


# -- Exceptions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_restores_the_gradients(level):
    model, optimizer = scaled_linear(level, loss_scale=None if level in ("O0", "O3", "O4") else 8.0)
    backward(model, optimizer)
    before = grads(optimizer)

    def failing():
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            if level in SCALED:
                scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert grads(optimizer) == before
    backward(model, optimizer)
    assert grads(optimizer) == [[[2.0, 2.0]]]
    optimizer.step()


# -- What autograd.grad gives ------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_unscale_of_autograd_grads(level):
    model, optimizer = scaled_linear(level, loss_scale=1.0 if level == "O3" else 64.0)
    x = torch.ones(1, 2, requires_grad=True)
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        found = torch.autograd.grad(scaled, [x], create_graph=True)
    assert amp.unscale(found)[0].tolist() == [[1.0, 1.0]]
