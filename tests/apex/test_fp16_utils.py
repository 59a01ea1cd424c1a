"""fp16_utils: casting networks, masters by hand, loss scalers, and FP16_Optimizer against float32."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from mpamp.apex import amp
from mpamp.apex.errors import AmpTypeError, AmpUsageError
from mpamp.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
)
from mpamp.apex.optimizers import FusedAdam
from mpamp.apex.parallel import LARC

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


def net(norm=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model):
    return (model(X).float() - Y).square().mean()


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


# -- Networks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [network_to_half, lambda m: convert_network(m, torch.float16), FP16Model])
def test_networks_keep_batch_norm_in_float32(cast):
    model = cast(net())
    for module in model.modules():
        kept = torch.float32 if isinstance(module, nn.BatchNorm1d) else torch.float16
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        assert {tensor.dtype for tensor in own if tensor.is_floating_point()} <= {kept}
    assert len(dtypes(model)) == 8
    assert model(X if not isinstance(model, nn.Sequential) or len(model) == 2 else X.half()).dtype is torch.float16


def test_batch_norm_without_weights_and_other_layers_are_cast():
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.LSTM(2, 2), nn.Embedding(2, 2), nn.InstanceNorm1d(2))
    model.register_buffer("ids", torch.zeros(1, dtype=torch.int64))
    convert_network(model, torch.bfloat16)
    assert set(dtypes(model).values()) == {torch.bfloat16}
    assert model.ids.dtype is torch.int64
    assert set(dtypes(BN_convert_float(nn.Sequential(nn.BatchNorm2d(2), nn.Linear(2, 2)).half())).values()) == {
        torch.float16,
        torch.float32,
    }


def test_converting_a_module_leaves_those_in_it():
    model = nn.Sequential(nn.Linear(2, 2))
    model.own = nn.Parameter(torch.ones(2))
    model.own.grad = torch.ones(2)
    convert_module(model, torch.float16)
    assert (model.own.dtype, model.own.grad.dtype, model[0].weight.dtype) == (
        torch.float16,
        torch.float16,
        torch.float32,
    )


# -- Masters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [True, False])
def test_training_by_hand_goes_as_in_float32(flat):
    model, plain = network_to_half(net(norm=False)), net(norm=False)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert len(masters) == (1 if flat else 4)
    optimizer, other = (
        torch.optim.SGD(masters, lr=0.1, momentum=0.9),
        torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
    )
    for _ in range(10):
        model.zero_grad()
        loss = loss_of(model)
        (loss * 128.0).backward()
        model_grads_to_master_grads(params, masters, flat_master=flat)
        for master in masters:
            master.grad.data.div_(128.0)
        clip_grad_norm(masters, 10.0)
        optimizer.step()
        master_params_to_model_params(params, masters, flat_master=flat)
        other.zero_grad()
        wanted = loss_of(plain)
        wanted.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 10.0)
        other.step()
        assert to_python_float(loss) == pytest.approx(wanted.item(), rel=0.02, abs=0.01)
    for p, master in zip(plain.parameters(), params, strict=True):
        torch.testing.assert_close(p.detach(), master.detach().float(), rtol=0.01, atol=0.01)


def test_parameters_without_gradients():
    params, masters = prep_param_lists(nn.Linear(2, 1).half())
    params[0].grad = torch.ones_like(params[0])
    masters[1].grad = torch.ones(1)
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad.tolist() == [[1.0, 1.0]]
    assert masters[1].grad is None
    kept = masters[0].grad
    params[0].grad.mul_(2)
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad is kept
    assert kept.tolist() == [[2.0, 2.0]]
    _, (flat,) = prep_param_lists(nn.Linear(2, 1).half(), flat_master=True)
    model_grads_to_master_grads(params, [flat], flat_master=True)
    assert flat.grad.tolist() == [2.0, 2.0, 0.0]


def test_one_flat_master_needs_one_dtype():
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    with pytest.raises(AmpTypeError, match="FP16_Optimizer"):
        prep_param_lists(model, flat_master=True)
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)
    assert len(prep_param_lists(frozen)[0]) == 1


# -- Loss scalers ------------------------------------------------------------------------------------


def test_the_dynamic_scales_rule():
    scaler = DynamicLossScaler(init_scale=16.0, scale_factor=4.0, scale_window=3)
    found = []
    for overflow in [False, False, False, True, False, False, False, True, True, True]:
        scaler.update_scale(overflow)
        found.append(scaler.loss_scale)
    # It grows at each third iteration after the last overflow, which "was" in iteration -1.
    assert found == [16.0, 16.0, 64.0, 16.0, 16.0, 16.0, 64.0, 16.0, 4.0, 1.0]
    assert (DynamicLossScaler().loss_scale, DynamicLossScaler().scale_window) == (2.0**32, 1000)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_overflow_is_found(bad):
    params = [torch.ones(2, requires_grad=True) for _ in range(3)]
    scaler = DynamicLossScaler()
    assert scaler.has_overflow(params) is False
    params[0].grad, params[2].grad = torch.ones(2), torch.tensor([60000.0, 1.0], dtype=torch.float32)
    assert scaler.has_overflow(params) is False
    params[2].grad = torch.tensor([1.0, bad])
    assert scaler.has_overflow(params) is True
    assert LossScaler().has_overflow(params) is False
    assert DynamicLossScaler._has_inf_or_nan(torch.tensor([bad])) is True


def test_static_scale():
    scaler = LossScaler(8.0)
    scaler.update_scale(True)
    p = torch.ones(1, requires_grad=True)
    scaler.backward(p.sum())
    assert (p.grad.item(), scaler.loss_scale) == (8.0, 8.0)
    assert scaler.scale_gradient(None, (torch.ones(1),), None)[0].item() == 8.0


# -- FP16_Optimizer ----------------------------------------------------------------------------------

MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.01),
    "larc": lambda params: LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9), trust_coefficient=0.5),
}
SCALES = {
    "static": {"static_loss_scale": 128.0},
    "dynamic": {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1024.0}},
}


def train(optimizer, model, steps, backward):
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(loss)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp16_optimizer_trains_as_float32(name, scale, dtype):
    model, plain = convert_network(net(), dtype), net()
    optimizer = FP16_Optimizer(MAKERS[name](model.parameters()), verbose=False, **SCALES[scale])
    wanted = train(MAKERS[name](plain.parameters()), plain, 12, lambda loss: loss.backward())

    class Cast(nn.Module):
        def forward(self, x):
            return model(x.to(dtype))

    found = train(optimizer, Cast(), 12, optimizer.backward)
    assert found == pytest.approx(wanted, rel=0.1, abs=0.02)
    assert [p.dtype for p in optimizer.param_groups[0]["params"]] == [torch.float32] * 6
    assert [len(group) for group in optimizer.fp32_from_fp32_groups] == [2]
    for low, master in zip(optimizer.fp16_groups[0], optimizer.fp32_from_fp16_groups[0], strict=True):
        assert torch.equal(low.detach(), master.detach().to(dtype))


def test_an_overflow_skips_the_step_and_halves_the_scale(capsys):
    model = network_to_half(net())
    optimizer = FP16_Optimizer(MAKERS["sgd"](model.parameters()), dynamic_loss_scale=True)
    optimizer.loss_scale = 64.0
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.backward(loss_of(model) * float("inf"))
    assert (optimizer.overflow, optimizer.clip_master_grads(1.0)) == (True, -1)
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.loss_scale == 32.0
    assert "OVERFLOW! Skipping step. Attempted loss scale: 64.0, reducing to 32.0" in capsys.readouterr().out
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(p.grad is None for p in model.parameters())
    optimizer.backward(loss_of(model))
    optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))


@pytest.mark.parametrize("at_once", [True, False])
def test_several_losses_add_up(at_once):
    model, plain = network_to_half(net()), net()
    optimizer = FP16_Optimizer(MAKERS["sgd"](model.parameters()), static_loss_scale=64.0, verbose=False)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            optimizer.backward(loss_of(model), update_master_grads=at_once)
        if not at_once:
            optimizer.update_master_grads()
    for _ in range(3):
        loss_of(plain).backward()
    grads = optimizer.inspect_master_grad_data()[0]
    for grad, p in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=0.02, atol=0.02)
    total = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    assert optimizer.clip_master_grads(0.5).item() == pytest.approx(total, rel=0.01)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")  # torch 2.8's LBFGS does
def test_closures_with_a_static_scale():
    def make(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    model, plain = network_to_half(net(norm=False)), net(norm=False)
    optimizer, other = FP16_Optimizer(make(model), static_loss_scale=16.0, verbose=False), make(plain)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        return loss

    def plainly():
        other.zero_grad()
        loss = loss_of(plain)
        loss.backward()
        return loss

    for _ in range(2):
        assert optimizer.step(closure).item() == pytest.approx(other.step(plainly).item(), rel=0.05, abs=0.02)
    dynamic = FP16_Optimizer(MAKERS["sgd"](net().parameters()), dynamic_loss_scale=True, verbose=False)
    with pytest.raises(AmpUsageError, match="static"):
        dynamic.step(closure)


@pytest.mark.parametrize("scale", SCALES)
def test_resuming_is_exact(scale, tmp_path):
    def begin():
        model = network_to_half(net())
        return model, FP16_Optimizer(MAKERS["adam"](model.parameters()), verbose=False, **SCALES[scale])

    model, optimizer = begin()
    train(optimizer, model, 4, optimizer.backward)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved")
    wanted = train(optimizer, model, 4, optimizer.backward)
    again, other = begin()
    saved = torch.load(tmp_path / "saved")  # with weights_only, torch's default
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert train(other, again, 4, other.backward) == wanted


def test_what_fp16_optimizer_refuses():
    optimizer = FP16_Optimizer(MAKERS["sgd"](net().parameters()), verbose=False)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(AmpTypeError, match="float64"):
        FP16_Optimizer(MAKERS["sgd"](net().double().parameters()), verbose=False)
    for given in (optimizer, LARC(optimizer)):
        with pytest.raises(RuntimeError, match="loss scale of its own"):
            amp.initialize(net(), given, opt_level="O2", verbosity=0)


def test_what_is_printed(capsys):
    FP16_Optimizer(MAKERS["sgd"](nn.Linear(2, 1).half().parameters()))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FP16_Optimizer processing param group 0:"
    assert lines[1] == "FP16_Optimizer received torch.HalfTensor with torch.Size([1, 2])"


def test_groups_and_state_are_the_wrapped_ones():
    inner = MAKERS["sgd"](net().parameters())
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    optimizer.param_groups = inner.param_groups[:]
    optimizer.state = inner.state
    assert len(optimizer.param_groups) == 1
