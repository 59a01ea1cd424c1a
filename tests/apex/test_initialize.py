"""``initialize``: shapes, identity, refusals, ``enabled=False``, once more, and ``shutdown``."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from mpamp.apex import ambient, amp
from tests.apex.training import LEVELS, LOW_MODEL, data, net, sgd, start, step


@pytest.mark.parametrize("level", LEVELS)
def test_everything_keeps_its_identity(level):
    model, other = net(), net(1)
    params = list(model.parameters())
    optimizer = sgd(model)
    models, optimizers = [model, other], [optimizer]
    result = amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    assert result[0] is models
    assert result[1] is optimizers
    assert models == [model, other]
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert {p.dtype for p in (model[0].weight,)} == {LOW_MODEL.get(level, torch.float32)}


def test_shapes_mirror_the_arguments():
    assert isinstance(amp.initialize(net(), opt_level="O1", verbosity=0), nn.Module)
    model, optimizer = start("O0")
    assert isinstance(optimizer, torch.optim.SGD)
    model = net()
    assert amp.initialize(model, [], opt_level="O0", verbosity=0) == (model, [])
    models = [net()]
    assert amp.initialize(models, opt_level="O0", verbosity=0) is models
    models, optimizers = (net(), net()), (sgd(net()),)
    found = amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
    assert found[0] is models
    assert found[1] is optimizers
    assert models[1][0].weight.dtype is torch.float16


@pytest.mark.parametrize("enabled_first", [False, True])
def test_disabled_returns_what_it_was_given_before_any_check(enabled_first):
    if enabled_first:
        start("O1")
    models, optimizers = (net().half(),), object()
    found = amp.initialize(models, optimizers, enabled=False, opt_level="nonsense", loss_scale="x")
    assert found[0] is models
    assert found[1] is optimizers
    assert amp.initialize(models, enabled=False) is models
    assert amp._amp_state.opt_properties.enabled is False
    assert amp.state_dict() == {}
    assert ambient.installed() == []


def test_disabled_changes_nothing_anywhere():
    model = net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, enabled=False)
    loss = model(data()).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}
    assert len(list(amp.master_params(optimizer))) == 6
    with amp.disable_casts():
        pass
    assert amp.half_function(lambda x: x.dtype)(data()) is torch.float32


@pytest.mark.parametrize(
    ("models", "optimizers", "words"),
    [
        ({nn.Linear(1, 1)}, None, "single model or a list of models; got set"),
        ([nn.Linear(1, 1), 3], None, "a list of Linear, int"),
        ("net", None, "single model or a list of models"),
        (nn.Linear(1, 1), (1,), "a tuple of int"),
        (nn.Linear(1, 1), "sgd", "single optimizer or a list"),
        (nn.Linear(1, 1), [None], "a list of NoneType"),
    ],
)
def test_wrong_shapes(models, optimizers, words):
    with pytest.raises(TypeError, match=words):
        amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
    assert not hasattr(amp._amp_state, "opt_properties")


def test_wrapped_models_are_refused():
    with pytest.raises(RuntimeError, match=r"already wrapped in DataParallel.*wrap what it returns"):
        amp.initialize(nn.DataParallel(net()), opt_level="O1", verbosity=0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:.*torch.jit.script:Warning")
def test_scripted_models_are_refused_where_their_forward_would_change():
    model = torch.jit.script(nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="unscripted"):
        amp.initialize(model, opt_level="O2", verbosity=0)
    assert model.weight.dtype is torch.float32
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model(data()).dtype is torch.float16


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_half_models_are_refused_unless_allowed(kind, capsys):
    model = nn.BatchNorm1d(2)
    if kind == "parameter":
        model.weight.data = model.weight.data.half()
    else:
        model.running_var = model.running_var.half()
    with pytest.raises(RuntimeError, match=f"found {kind} .*float16"):
        amp.initialize(model, opt_level="O1", verbosity=0)
    amp._amp_state.hard_override = True
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert "Warning:" in capsys.readouterr().out
    amp._amp_state.hard_override, amp._amp_state.allow_incoming_model_not_fp32 = False, True
    amp.initialize(model, opt_level="O0", verbosity=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_other_dtypes_are_taken(dtype, level):
    model, optimizer = start(level, model=nn.Linear(4, 2).to(dtype))
    assert model.weight.dtype is LOW_MODEL.get(level, torch.float32)
    step(model, optimizer, data().double())


def test_an_optimizer_goes_through_once():
    _, optimizer = start("O1")
    with pytest.raises(RuntimeError, match=r"only be passed through amp.initialize once"):
        amp.initialize(net(), optimizer, opt_level="O1", verbosity=0)
    optimizer = sgd(net())
    with pytest.raises(RuntimeError, match="listed twice"):
        amp.initialize(net(), [optimizer, optimizer], opt_level="O1", verbosity=0)


def test_an_optimizer_with_a_name_that_amp_needs():
    optimizer = sgd(net())
    optimizer._amp_lazy_init = None
    with pytest.raises(RuntimeError, match="already has _amp_lazy_init"):
        amp.initialize(net(), optimizer, opt_level="O1", verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_once_more_with_others_starts_over(level):
    first = start(level, num_losses=2)
    count = ambient.installed()
    second = start(level, num_losses=3)
    assert ambient.installed() == count
    assert len(amp._amp_state.loss_scalers) == 3
    for model, optimizer in (first, second):
        step(model, optimizer, data())


def test_another_level_replaces_process_wide_casts():
    start("O1")
    assert ambient.installed()
    start("O2")
    assert ambient.installed() == []


@pytest.mark.parametrize("level", LEVELS)
def test_shutdown_gives_everything_back(level):
    model = net()
    optimizer = sgd(model)
    before = dict(vars(optimizer))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for seed in range(3):
        step(model, optimizer, data(seed))
    values = [p.detach().clone() for p in amp.master_params(optimizer)]
    amp.shutdown()
    assert type(model) is nn.Sequential
    assert set(vars(optimizer)) == set(before)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 6
    params = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    if level != "O3":
        assert all(torch.equal(a, b) for a, b in zip(params, values, strict=True))
    assert all(optimizer.state[p]["momentum_buffer"].dtype is torch.float32 for p in params) or level == "O3"
    with pytest.raises(RuntimeError, match=r"before amp.initialize"), amp.scale_loss(torch.ones(1), optimizer):
        pass
    amp.shutdown()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    step(model, optimizer, data())


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_keeps_models_and_optimizers_alive(level):
    model, optimizer = start(level)
    step(model, optimizer, data())
    refs = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_nothing_asks_for_cuda(monkeypatch):
    def refuse(*args):
        raise AssertionError("asked for CUDA")

    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    for level in LEVELS:
        step(*start(level), data())


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_existing_optimizer_state_takes_the_new_dtypes(level):
    model = net().double()
    optimizer = sgd(model)
    model(data().double()).sum().backward()
    optimizer.step()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    found = {optimizer.state[p]["momentum_buffer"].dtype for p in amp.master_params(optimizer)}
    assert found == {torch.float16 if level == "O3" else torch.float32}
