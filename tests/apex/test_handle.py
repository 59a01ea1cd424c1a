"""apex's first interface: ``init``, the handle, wrapped optimizers."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import mpamp
from mpamp.apex import amp
from tests.apex.training import net, sgd

A = torch.ones(1, 2)


def init(*args, **kwargs):
    """Cast on the processor, whatever else there is."""
    return amp.init(*args, **kwargs, devices=["cpu"])


def linear():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize(
    ("args", "kwargs", "caching", "dynamic"),
    [
        ((), {}, True, True),
        ((True, "dynamic", False), {}, False, True),
        ((True, 128.0), {}, True, False),
        ((True, False), {}, False, True),  # before February 2019 caching came second
        ((True, True, True), {}, True, True),
        ((), {"enable_caching": False, "loss_scale": 2.0}, False, False),
    ],
)
def test_init_takes_both_orders_of_arguments(args, kwargs, caching, dynamic):
    handle = init(*args, **kwargs)
    assert (handle.has_cache, handle._default_scaler.dynamic) == (caching, dynamic)


def test_early_positional_verbose_and_allow_banned():
    handle = init(True, True, True, True)
    assert handle.verbose
    assert nn.functional.binary_cross_entropy(A.half() / 2, A).dtype is torch.float32


def test_the_handle_and_the_state():
    handle = init()
    assert amp._amp_state.handle is handle
    assert amp.amp._DECORATOR_HANDLE is handle
    assert handle.is_active()
    with handle._disable_casts():
        assert not handle.is_active()
    handle._deactivate()
    handle._deactivate()
    assert not handle.is_active()
    assert (A @ A.t()).dtype is torch.float32
    loss = torch.ones(1)
    with handle.scale_loss(loss, sgd(net())) as scaled:
        assert scaled is loss


def test_deactivating_an_old_handle_leaves_a_newer_one_alone():
    old, new = init(), init()
    old._deactivate()
    assert new.is_active()
    assert (A @ A.t()).dtype is torch.float16


def test_scale_loss_works_and_skips_once(capsys):
    handle = init()
    model, optimizer = linear()
    handle._default_scaler._loss_scale = 1024.0
    with handle.scale_loss(model(A).sum().float(), optimizer) as scaled:
        assert scaled.item() == 2048.0
        scaled.backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.5]]
    for _ in range(2):
        with handle.scale_loss(model(A).sum().float() * float("inf"), optimizer) as scaled:
            scaled.backward()
    assert handle._default_scaler.loss_scale() == 256.0
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.5]]
    assert capsys.readouterr().out.count("Gradient overflow, skipping update") == 1
    optimizer.zero_grad()
    with handle.scale_loss(model(A).sum().float(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.0, 0.0]]


def test_scale_loss_clears_the_cache_also_after_an_exception():
    handle = init()
    model, optimizer = linear()
    model(A)
    assert list(handle.cache) == [model.weight]
    handle.remove_cache(model.weight)
    assert handle.cache == {}
    model(A)
    with pytest.raises(KeyError), handle.scale_loss(torch.ones(1), optimizer):
        raise KeyError
    assert handle.cache == {}
    model(A)
    handle._clear_cache()
    assert handle.cache == {}


def test_backward_on_the_loss_itself_is_noticed():
    handle = init()
    model, optimizer = linear()
    loss = model(A).sum().float()
    with pytest.warns(mpamp.MpampWarning, match="almost certainly"), handle.scale_loss(loss, optimizer):
        loss.backward()


def test_the_handle_refuses_where_optimizers_are_wrapped():
    handle = init()
    _, optimizer = linear()
    handle.wrap_optimizer(optimizer)
    with pytest.raises(RuntimeError, match=r"optimizer.scale_loss"), handle.scale_loss(torch.ones(1), optimizer):
        pass


def wrapped(num_loss=1):
    handle = init()
    model, optimizer = linear()
    wrapper = handle.wrap_optimizer(optimizer, num_loss=num_loss)
    for scaler, scale in zip(wrapper._loss_scaler, (4.0, 64.0, 1024.0), strict=False):
        scaler._loss_scale = scale
    return handle, model, wrapper


def backward(model, wrapper, factor=1.0):
    with wrapper.scale_loss(model(A).sum().float() * factor) as scaled:
        scaled.backward()


def test_losses_with_scales_of_their_own_accumulate():
    _, model, optimizer = wrapped(3)
    for factor in (1.0, 2.0, 4.0):
        backward(model, optimizer, factor)
    assert model.weight.grad.tolist() == [[7.0, 7.0]]
    with pytest.raises(AssertionError, match="num_loss=3"):
        backward(model, optimizer)
    optimizer.step()
    assert model.weight.tolist() == [[-2.5, -2.5]]
    backward(model, optimizer)


def test_any_overflow_skips_the_step_and_lowers_its_own_scale():
    _, model, optimizer = wrapped(2)
    backward(model, optimizer, float("inf"))
    optimizer.zero_grad()
    backward(model, optimizer)
    assert optimizer.step() is None
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert [s.loss_scale() for s in optimizer._loss_scaler] == [2.0, 64.0]
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.5]]


def test_parameters_without_gradients_of_the_second_loss():
    handle = init()
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), num_loss=2)
    for scaler in optimizer._loss_scaler:
        scaler._loss_scale = 8.0
    for module in model:
        with optimizer.scale_loss(module(A).sum().float()) as scaled:
            scaled.backward()
    assert [p.grad.tolist() for p in model.parameters()] == [[[1.0, 1.0]]] * 2


def test_an_exception_gives_the_earlier_gradients_back():
    _, model, optimizer = wrapped(2)
    backward(model, optimizer)

    def failing():
        with optimizer.scale_loss(model(A).sum().float()) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    backward(model, optimizer)
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


def test_a_wrapped_step_drops_its_weights_casts_and_takes_no_closure():
    handle, model, optimizer = wrapped()
    model(A)
    optimizer.step()
    assert handle.cache == {}
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: None)


def test_the_rest_is_the_wrapped_optimizers():
    _, model, wrapper = wrapped()
    inner = wrapper._optimizer
    assert isinstance(wrapper, torch.optim.Optimizer)
    assert wrapper.param_groups is inner.param_groups
    assert wrapper.defaults is inner.defaults
    assert repr(wrapper) == repr(inner)
    wrapper.load_state_dict(wrapper.state_dict())
    wrapper.add_param_group({"params": nn.Linear(1, 1).weight})
    assert len(inner.param_groups) == 2
    model.weight.grad = torch.ones(1, 2)
    wrapper.zero_grad()
    assert model.weight.grad is None
    with pytest.raises(AttributeError):
        _ = wrapper.nonesuch
    scheduler = torch.optim.lr_scheduler.StepLR(wrapper, 1, 0.5)
    wrapper.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.25


def test_a_wrapper_can_be_pickled():
    _, _, wrapper = wrapped()
    again = pickle.loads(pickle.dumps(wrapper))
    assert again._loss_scaler[0].loss_scale() == 4.0
    again.step()


def test_disabled():
    handle = amp.init(enabled=False)
    model, optimizer = linear()
    loss = model(A).sum()
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    wrapper = handle.wrap_optimizer(optimizer)
    with wrapper.scale_loss(loss) as scaled, handle._disable_casts():
        assert scaled is loss
        scaled.backward()
    assert wrapper.step(lambda: 3) == 3
    assert (handle.is_active(), handle.has_cache, handle.verbose) == (False, False, False)
    assert not hasattr(handle, "cache")
    assert not hasattr(handle, "remove_cache")
    handle._clear_cache()
    handle._deactivate()
