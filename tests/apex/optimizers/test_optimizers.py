"""Fused optimizers against each one's formula, written out in plain Python, over several steps and every mode."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math

import pytest
import torch

from mpamp.apex.errors import AmpNotImplementedError, AmpUsageError, AmpValueError
from mpamp.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

STEPS = 4
SHAPES = [(3,), (2, 2), ()]


def norm(values):
    return math.sqrt(sum(v * v for v in values))


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) * 3 for shape in SHAPES]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(99)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [value.to(dtype).requires_grad_(True) for value in values]


def flat(tensors):
    return [[float(v) for v in tensor.detach().double().reshape(-1)] for tensor in tensors]


def run(make, dtype=torch.float32, steps=STEPS):
    params = parameters(dtype)
    optimizer = make(params)
    for step in range(steps):
        for p, grad in zip(params, gradients(step), strict=True):
            p.grad = grad.to(dtype)
        optimizer.step()
    return flat(params), optimizer


def by_formula(rule, dtype=torch.float32, steps=STEPS):
    """Apply ``rule(step, values, grads, states)`` to lists of floats; it returns the new values."""
    values = flat(parameters(dtype))
    states = [{} for _ in values]
    for step in range(steps):
        grads = flat([grad.to(dtype) for grad in gradients(step)])
        values = rule(step + 1, values, grads, states)
    return values


def close(found, wanted, tolerance=2e-5):
    for a, b in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)


# -- Adam ----------------------------------------------------------------------------------------------


def adam(lr=1e-3, correct=True, betas=(0.9, 0.999), eps=1e-8, decoupled=True, decay=0.0, most=0.0):
    def rule(step, values, grads, states):
        out = []
        total = norm([g for grad in grads for g in grad])
        clip = max(1.0, (total + 1e-6) / most) if most else 1.0
        for value, grad, state in zip(values, grads, states, strict=True):
            m = state.setdefault("m", [0.0] * len(value))
            v = state.setdefault("v", [0.0] * len(value))
            new = []
            for i, (p, raw) in enumerate(zip(value, grad, strict=True)):
                g = raw / clip + (0.0 if decoupled else decay * p)
                m[i] = betas[0] * m[i] + (1 - betas[0]) * g
                v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
                one = 1 - betas[0] ** step if correct else 1.0
                two = 1 - betas[1] ** step if correct else 1.0
                update = (m[i] / one) / (math.sqrt(v[i] / two) + eps)
                new.append(p - lr * (update + (decay * p if decoupled else 0.0)))
            out.append(new)
        return out

    return rule


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("capturable", [True, False])
def test_adam(correct, decoupled, decay, capturable):
    options = {
        "lr": 0.05,
        "bias_correction": correct,
        "adam_w_mode": decoupled,
        "weight_decay": decay,
        "betas": (0.8, 0.95),
    }
    found, optimizer = run(lambda params: FusedAdam(params, capturable=capturable, **options))
    close(found, by_formula(adam(0.05, correct, (0.8, 0.95), 1e-8, decoupled, decay)))
    assert int(optimizer.param_groups[0]["step"]) == STEPS


def test_adams_defaults():
    close(run(FusedAdam)[0], by_formula(adam()))
    defaults = FusedAdam(parameters()).defaults
    assert (defaults["lr"], defaults["betas"], defaults["eps"]) == (1e-3, (0.9, 0.999), 1e-8)


def test_adam_clips_each_group_by_the_old_argument():
    close(run(lambda p: FusedAdam(p, 0.05, max_grad_norm=1.0))[0], by_formula(adam(0.05, most=1.0)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adam_keeps_float32_moments_of_lower_precision_parameters(dtype):
    _, optimizer = run(FusedAdam, dtype)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.float32)


def test_adams_masters_take_what_lower_precision_would_lose():
    def moved(**options):
        p = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        optimizer = FusedAdam([p], lr=1e-3, capturable=True, **options)
        for _ in range(8):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return 1 - p.detach().float()[0].item()

    assert moved() == 0
    assert moved(master_weights=True) == pytest.approx(0.008, abs=0.004)


def test_adam_refuses_what_apex_refuses():
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedAdam(parameters(), amsgrad=True)
    with pytest.raises(AmpUsageError, match="capturable"):
        FusedAdam(parameters(), master_weights=True)
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        FusedAdam(parameters()).step(scale=128.0)


# -- SGD and Adagrad -----------------------------------------------------------------------------------


def sgd(lr, momentum=0.0, dampening=0.0, decay=0.0, nesterov=False, after=False):
    def rule(step, values, grads, states):
        out = []
        for value, grad, state in zip(values, grads, states, strict=True):
            new = []
            buffers = state.setdefault("buffer", [None] * len(value))
            for i, (p, raw) in enumerate(zip(value, grad, strict=True)):
                g = raw if after else raw + decay * p
                if momentum:
                    buffers[i] = g if buffers[i] is None else momentum * buffers[i] + (1 - dampening) * g
                    g = g + momentum * buffers[i] if nesterov else buffers[i]
                new.append(p - lr * (g + decay * p if after else g))
            out.append(new)
        return out

    return rule


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.25])
@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), [(0, 0, False), (0.9, 0.5, False), (0.9, 0, True)])
def test_sgd(after, decay, momentum, dampening, nesterov):
    make = lambda p: FusedSGD(p, 0.05, momentum, dampening, decay, nesterov, after)  # noqa: E731
    close(run(make)[0], by_formula(sgd(0.05, momentum, dampening, decay, nesterov, after)))


def test_sgd_starts_the_momentum_of_each_parameter_by_itself():
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    optimizer = FusedSGD([first, second], lr=0.5, momentum=0.5, dampening=0.5)
    for grads in ([1.0, None], [1.0, 1.0]):
        for p, grad in zip((first, second), grads, strict=True):
            p.grad = None if grad is None else torch.tensor([grad])
        optimizer.step()
    assert (first.item(), second.item()) == (0.0, 0.5)  # a first gradient isn't dampened


def test_sgd_refuses_what_apex_refuses():
    for options in ({"lr": -1.0}, {"lr": 1.0, "momentum": -1.0}, {"lr": 1.0, "nesterov": True}):
        with pytest.raises(AmpValueError):
            FusedSGD(parameters(), **options)
    assert FusedSGD(parameters(), lr=1.0).set_grad_none is False


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_adagrad(decoupled, decay):
    def rule(step, values, grads, states):
        out = []
        for value, grad, state in zip(values, grads, states, strict=True):
            sums, new = state.setdefault("sum", [0.0] * len(value)), []
            for i, (p, raw) in enumerate(zip(value, grad, strict=True)):
                g = raw if decoupled else raw + decay * p
                sums[i] += g * g
                update = g / (math.sqrt(sums[i]) + 1e-10)
                new.append(p - 0.05 * (update + (decay * p if decoupled else 0.0)))
            out.append(new)
        return out

    make = lambda p: FusedAdagrad(p, 0.05, weight_decay=decay, adagrad_w_mode=decoupled)  # noqa: E731
    close(run(make)[0], by_formula(rule))
    assert FusedAdagrad(parameters()).defaults == {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}


# -- LAMB ----------------------------------------------------------------------------------------------


def lamb(lr=1e-3, correct=True, decoupled=True, decay=0.01, average=True, most=1.0, nvlamb=False):
    beta1, beta2, eps = 0.9, 0.999, 1e-6

    def rule(step, values, grads, states):
        out = []
        total = norm([g for grad in grads for g in grad])
        clip = total / most if total > most else 1.0
        for value, grad, state in zip(values, grads, states, strict=True):
            m = state.setdefault("m", [0.0] * len(value))
            v = state.setdefault("v", [0.0] * len(value))
            updates = []
            for i, (p, raw) in enumerate(zip(value, grad, strict=True)):
                g = raw / clip + (0.0 if decoupled else decay * p)
                m[i] = beta1 * m[i] + (1 - beta1 if average else 1.0) * g
                v[i] = beta2 * v[i] + (1 - beta2) * g * g
                one = 1 - beta1**step if correct else 1.0
                two = 1 - beta2**step if correct else 1.0
                updates.append((m[i] / one) / (math.sqrt(v[i] / two) + eps) + (decay * p if decoupled else 0.0))
            of_p, of_u = norm(value), norm(updates)
            ratio = of_p / of_u if (nvlamb or decay) and of_p and of_u else 1.0
            out.append([p - lr * ratio * u for p, u in zip(value, updates, strict=True)])
        return out

    return rule


@pytest.mark.parametrize("cls", [FusedLAMB, FusedMixedPrecisionLamb])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("decay", "nvlamb"), [(0.0, False), (0.0, True), (0.2, False)])
@pytest.mark.parametrize(("correct", "average", "most"), [(True, True, 1.0), (False, False, 100.0)])
def test_lamb(cls, decoupled, decay, nvlamb, correct, average, most):
    options = {"bias_correction": correct, "grad_averaging": average, "max_grad_norm": most, "adam_w_mode": decoupled}
    found, _ = run(lambda p: cls(p, lr=0.05, weight_decay=decay, use_nvlamb=nvlamb, **options))
    close(found, by_formula(lamb(0.05, correct, decoupled, decay, average, most, nvlamb)))


def test_lambs_defaults_and_a_parameter_of_zeros():
    close(run(FusedLAMB)[0], by_formula(lamb()))
    p = torch.zeros(2, requires_grad=True)
    optimizer = FusedLAMB([p], lr=0.5)
    p.grad = torch.ones(2)
    optimizer.step()
    assert p.tolist() == pytest.approx([-0.5, -0.5], abs=1e-4)


def test_lamb_leaves_gradients_alone():
    p = torch.ones(2, requires_grad=True)
    optimizer = FusedLAMB([p])
    p.grad = torch.full((2,), 3.0)
    optimizer.step()
    assert p.grad.tolist() == [3.0, 3.0]


def test_mixed_precision_lamb_steps_float32_masters():
    options = {"lr": 1e-3, "reduced_precision_dtype": torch.bfloat16}
    found, optimizer = run(lambda p: FusedMixedPrecisionLamb(p, **options), torch.bfloat16, steps=6)
    wanted = by_formula(lamb(), torch.bfloat16, steps=6)
    masters = [optimizer.state[p]["master"] for p in optimizer.param_groups[0]["params"]]
    close(flat(masters), wanted)
    close(found, wanted, tolerance=1 / 128)
    assert {master.dtype for master in masters} == {torch.float32}
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert optimizer.param_groups[0]["step"].item() == 6


# -- NovoGrad ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("norm_type", [2, 0])
@pytest.mark.parametrize(("zero", "correct", "average"), [(False, True, True), (True, False, False)])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_novograd(inside, norm_type, zero, correct, average, decay):
    beta1, beta2, eps, lr = 0.9, 0.98, 1e-8, 0.05

    def rule(step, values, grads, states):
        out = []
        for value, grad, state in zip(values, grads, states, strict=True):
            now = norm(grad) if norm_type == 2 else max(map(abs, grad))
            before = state.get("norm", 0.0 if zero else now)
            if norm_type == 2:
                state["norm"] = math.sqrt(beta2 * before**2 + (1 - beta2) * now**2)
            else:
                state["norm"] = beta2 * before + (1 - beta2) * now
            m, new = state.setdefault("m", [0.0] * len(value)), []
            one = 1 - beta1**step if correct else 1.0
            two = math.sqrt(1 - beta2**step) if correct else 1.0
            denominator = state["norm"] / two + eps
            for i, (p, raw) in enumerate(zip(value, grad, strict=True)):
                g = raw / denominator + decay * p if inside else raw
                m[i] = beta1 * m[i] + (1 - beta1 if average else 1.0) * g
                update = m[i] / one
                new.append(p - lr * (update if inside else update / denominator + decay * p))
            out.append(new)
        return out

    options = {"reg_inside_moment": inside, "norm_type": norm_type, "init_zero": zero, "bias_correction": correct}
    make = lambda p: FusedNovoGrad(  # noqa: E731
        p, lr, betas=(beta1, beta2), weight_decay=decay, grad_averaging=average, **options
    )
    close(run(make)[0], by_formula(rule))


def test_novograd_refuses_another_norm():
    with pytest.raises(AmpValueError, match="norm_type"):
        FusedNovoGrad(parameters(), norm_type=1)


# -- All -----------------------------------------------------------------------------------------------

MAKERS = {
    "adam": FusedAdam,
    "adam, capturable": lambda p: FusedAdam(p, capturable=True, master_weights=True),
    "sgd": lambda p: FusedSGD(p, lr=0.1, momentum=0.9),
    "lamb": FusedLAMB,
    "mixed lamb": lambda p: FusedMixedPrecisionLamb(p, reduced_precision_dtype=torch.bfloat16),
    "novograd": FusedNovoGrad,
    "adagrad": FusedAdagrad,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resuming_is_exact(name, dtype, tmp_path):
    params = parameters(dtype)
    optimizer = MAKERS[name](params)

    def step(number, params, optimizer):
        for p, grad in zip(params, gradients(number), strict=True):
            p.grad = grad.to(dtype)
        optimizer.step()

    for number in range(3):
        step(number, params, optimizer)
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, tmp_path / "saved")
    saved = torch.load(tmp_path / "saved")
    others = [p.detach().requires_grad_(True) for p in saved["params"]]
    other = MAKERS[name](others)
    other.load_state_dict(saved["optimizer"])
    for number in range(3, 6):
        step(number, params, optimizer)
        step(number, others, other)
    assert flat(params) == flat(others)
    for p, q in zip(params, others, strict=True):
        for key, value in optimizer.state[p].items():
            assert value.dtype is other.state[q][key].dtype
            assert value.dtype is (torch.float32 if dtype is torch.bfloat16 else value.dtype)


@pytest.mark.parametrize("name", MAKERS)
def test_lower_precision_steps_as_float32_does_and_rounds(name):
    found, _ = run(MAKERS[name], torch.bfloat16, steps=1)
    params = [p.detach().float().requires_grad_(True) for p in parameters(torch.bfloat16)]
    optimizer = MAKERS[name](params)
    for p, grad in zip(params, gradients(0), strict=True):
        p.grad = grad.bfloat16().float()
    optimizer.step()
    assert found == flat([p.detach().bfloat16() for p in params])


@pytest.mark.parametrize("name", MAKERS)
def test_closures_groups_and_parameters_without_gradients(name):
    params = parameters()
    idle = torch.ones(2, requires_grad=True)
    optimizer = MAKERS[name]([{"params": params[:1], "lr": 0.0, "weight_decay": 0.0}, {"params": [*params[1:], idle]}])
    before = copy.deepcopy(params)

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert torch.equal(params[0], before[0])
    if name in ("mixed lamb", "adam, capturable"):
        assert [group["lr"].item() for group in optimizer.param_groups] == pytest.approx([0.0, 1e-3])
    assert not torch.equal(params[1], before[1])
    assert idle.tolist() == [1.0, 1.0]
    optimizer.zero_grad()
    assert (params[1].grad is None) is (name != "sgd")


@pytest.mark.parametrize("name", MAKERS)
def test_sparse_gradients_are_refused(name):
    p = torch.ones(2, requires_grad=True)
    optimizer = MAKERS[name]([p])
    p.grad = torch.ones(2).to_sparse()
    with pytest.raises(AmpNotImplementedError, match="SparseAdam"):
        optimizer.step()


# -- How they are called -------------------------------------------------------------------------------

SIGNATURES = {
    FusedAdagrad: "lr eps weight_decay set_grad_none adagrad_w_mode",
    FusedAdam: "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable master_weights",
    FusedLAMB: "lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none "
    "max_grad_norm use_nvlamb",
    FusedMixedPrecisionLamb: "lr step bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging "
    "max_grad_norm use_nvlamb reduced_precision_dtype",
    FusedNovoGrad: "lr bias_correction betas eps weight_decay amsgrad reg_inside_moment grad_averaging norm_type "
    "init_zero set_grad_none",
    FusedSGD: "lr momentum dampening weight_decay nesterov wd_after_momentum materialize_master_grads set_grad_none",
}
"""apex's arguments, in its order."""


@pytest.mark.parametrize("kind", SIGNATURES, ids=lambda kind: kind.__name__)
def test_arguments_are_apexs_by_place_and_by_name(kind):
    taken = inspect.signature(kind).parameters.values()
    by_place = [p.name for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place == ["params", *SIGNATURES[kind].split()]
    assert [p.name for p in taken if p.default is p.empty] == ["params"]  # lr, too, may be in the groups


@pytest.mark.parametrize("kind", SIGNATURES, ids=lambda kind: kind.__name__)
def test_groups_say_their_own_learning_rates(kind):
    """As if each group had an optimizer of its own; LAMB clips them together, so not there."""
    options = {"max_grad_norm": 1e9} if "max_grad_norm" in SIGNATURES[kind] else {}
    together, apart = parameters(), parameters()
    both = kind([{"params": together[:1], "lr": 0.5}, {"params": together[1:], "lr": 0.25}], **options)
    assert [float(group["lr"]) for group in both.param_groups] == [0.5, 0.25]
    for optimizer, params in (
        (both, together),
        (kind(apart[:1], lr=0.5, **options), apart[:1]),
        (kind(iter(apart[1:]), 0.25, **options), apart[1:]),
    ):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    close(flat(together), flat(apart))


def test_sgd_without_any_learning_rate_is_refused():
    params = parameters()
    with pytest.raises(ValueError, match=r"required optimization parameter lr"):
        FusedSGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], momentum=0.9)
    optimizer = FusedSGD([{"params": params[:1], "lr": 0.5}])
    with pytest.raises(ValueError, match=r"required optimization parameter lr"):
        optimizer.add_param_group({"params": params[1:]})
    with pytest.raises(AmpValueError, match="lr can't be negative"):
        FusedSGD(params, -1.0)


@pytest.mark.parametrize("kind", [*SIGNATURES, "capturable"], ids=str)
def test_a_group_without_parameters_is_passed_over(kind):
    make = functools.partial(FusedAdam, capturable=True) if kind == "capturable" else kind
    p = torch.ones(2, requires_grad=True)
    optimizer = make([{"params": [], "lr": 0.5}, {"params": [p], "lr": 0.5}])
    p.grad = torch.ones(2)
    optimizer.step()
    assert p.detach().tolist() != [1.0, 1.0]
