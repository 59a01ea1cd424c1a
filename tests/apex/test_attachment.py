"""Optimizers of every kind: amp sees each step, whoever takes it, or refuses the optimizer."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import types
import weakref

import pytest
import torch
from torch import nn

from mpamp.apex import amp
from tests.apex import odd, stepping
from tests.apex.training import LEVELS, data, net, settle, sgd, start, step

MASTERS = ["O2", "O5"]


NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name == "compiled")) for name in odd.MAKERS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_odd_optimizers_step_as_by_hand(level, name):
    stepping.check(level, odd.MAKERS[name], per_step=2)


TORCHS = [
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
]


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("per_step", [1, 2])
def test_torchs_optimizers_step_as_by_hand(level, name, per_step):
    options = {"lr": 0.01, **({"max_iter": 3} if name == "LBFGS" else {})}
    make = lambda params: getattr(torch.optim, name)(params, **options)  # noqa: E731
    stepping.check(level, make, per_step=per_step, with_closure=name == "LBFGS")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_sparse_gradients(level):
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.25)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    settle()
    for bad in (False, True):
        before = next(amp.master_params(optimizer)).detach().clone()
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.tensor([1])).sum() * (float("inf") if bad else 1.0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        change = (next(amp.master_params(optimizer)) - before).detach()
        torch.testing.assert_close(change[1], torch.full((2,), 0.0 if bad else -0.25))
        assert change[[0, 2, 3]].abs().max() == 0
    assert amp._amp_state.loss_scalers[0].loss_scale() == 512.0


# -- Steps replaced, fetched and called otherwise ----------------------------------------------------


def moved(training, take):
    """Tell whether a step moves the model, and whether one that is to be skipped does."""
    found = []
    for bad in (True, False):
        before = [p.detach().clone() for p in training.model.parameters()]
        training.losses(bad)
        take()
        found.append(not torch.equal(before[0], next(training.model.parameters())))
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["function", "method", "partial", "class", "twice", "scheduler"])
def test_a_step_replaced_after_initialize(level, how):
    class Own(torch.optim.SGD):
        pass

    training = stepping.Training(level, lambda params: Own(params, lr=0.125))
    optimizer = training.optimizer
    new = lambda self=optimizer, closure=None: odd.Plain.step(odd.Handed(self))  # noqa: E731
    if how == "function":
        optimizer.step = new
    elif how == "method":
        optimizer.step = types.MethodType(new, optimizer)
    elif how == "partial":
        optimizer.step = functools.partial(optimizer.step)
    elif how == "class":
        type(optimizer).step = new
        assert Own.step is new
    elif how == "twice":
        before = optimizer.step
        optimizer.step = lambda: before()
        again = optimizer.step
        optimizer.step = lambda: again()
    else:
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert moved(training, lambda: optimizer.step()) == [False, True]
    if how in ("function", "method"):
        del optimizer.step
        assert "step" not in vars(optimizer)
        with pytest.raises(AttributeError):
            del optimizer.step
        assert moved(training, lambda: optimizer.step()) == [False, True]
    amp.shutdown()
    assert type(optimizer) is Own


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["fetched before", "by the class", "of a wrapped one"])
def test_a_step_that_is_not_called_as_the_optimizers(level, how):
    fetched = []

    def make(params):
        optimizer = odd.sgd(params)
        fetched.append(optimizer.step)
        return odd.LARC(optimizer) if how == "of a wrapped one" else optimizer

    training = stepping.Training(level, make)
    take = {
        "fetched before": fetched[0],
        "by the class": lambda: torch.optim.SGD.step(training.optimizer),
        "of a wrapped one": lambda: training.optimizer.optim.step(),
    }[how]
    assert moved(training, take) == [False, True]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [odd.LARC, odd.Lookahead, odd.Delegating, odd.horovod])
@pytest.mark.parametrize("given", ["wrapper", "wrapped"])
def test_a_wrapper_made_after_initialize(level, make, given):
    training = stepping.Training(level, odd.sgd)
    inner, training.optimizer = training.optimizer, make(training.optimizer)
    for number in range(4):
        training.optimizer.zero_grad()
        with amp.scale_loss(training.model(), training.optimizer if given == "wrapper" else inner) as scaled:
            scaled.backward()
        training.optimizer.step()
        if number % 2:
            training.model()  # where amp doesn't know of the wrapper, the model follows at its next call
    for p, master in zip(training.model.parameters(), amp.master_params(inner), strict=True):
        assert torch.equal(p, master.to(p.dtype))
    training.losses(bad=True)
    before = training.masters()
    training.optimizer.step()
    if make not in (odd.Lookahead, odd.horovod) or given == "wrapper":
        assert all(torch.equal(a, b) for a, b in zip(before, training.masters(), strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("made", ["before", "after"])
def test_the_model_follows_an_optimizers_other_methods(level, made):
    training = stepping.Training(level, (lambda params: odd.SWA(odd.sgd(params))) if made == "before" else odd.sgd)
    if made == "after":
        training.optimizer = odd.SWA(training.optimizer)
    models = [p.detach().clone() for p in training.model.parameters()]
    for _ in range(2):
        training.step()
    last = training.masters()
    training.optimizer.swap_swa_sgd()
    averages = training.masters()
    assert not torch.equal(averages[0], last[0])
    assert all(torch.equal(p, a.to(p.dtype)) for p, a in zip(training.model.parameters(), averages, strict=True))
    training.optimizer.swap_swa_sgd()
    assert all(torch.equal(p, a.to(p.dtype)) for p, a in zip(training.model.parameters(), last, strict=True))
    assert not torch.equal(models[0], last[0].to(models[0].dtype))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_function_that_steps(level):
    training = stepping.Training(level, odd.sgd)
    take = torch.compile(lambda: training.optimizer.step(), backend="eager")
    assert moved(training, take) == [False, True]


# -- Closures ----------------------------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """Moves weights uphill before its closure, and steps from where they were after it."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base_optimizer = odd.sgd(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in self.params():
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.5)

    @torch.no_grad()
    def second_step(self):
        for p in self.params():
            if p.grad is not None:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()

    def step(self, closure):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()

    def params(self):
        return [p for group in self.param_groups for p in group["params"]]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ["closure", "two steps"])
def test_an_optimizer_that_moves_before_its_closure(level, form):
    def run(make, steps, bad):
        training = stepping.Training(level, make)
        for number in range(steps):
            training.losses(bad=False)
            overflows = number == bad
            if form == "closure":
                training.optimizer.step(lambda overflows=overflows: training.losses(overflows))
            else:
                training.optimizer.first_step()
                training.losses(overflows)
                training.optimizer.second_step()
        found = training.masters(), [p.detach().clone() for p in training.model.parameters()]
        amp.shutdown()
        return found

    masters, params = run(SAM, 4, bad=1)
    wanted, _ = run(SAM, 3, bad=None)
    assert all(torch.equal(a, b) for a, b in zip(masters, wanted, strict=True))
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(params, masters, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_in_a_later_evaluation_moves_nothing(level):
    training = stepping.Training(level, lambda params: torch.optim.LBFGS(params, lr=0.01, max_iter=4))
    before, calls = training.masters(), []

    def closure():
        calls.append(None)
        return training.losses(bad=len(calls) == 3)

    training.optimizer.step(closure)
    assert len(calls) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, training.masters(), strict=True))
    for p, master in zip(training.model.parameters(), before, strict=True):
        assert torch.equal(p, master.to(p.dtype))
    training.optimizer.step(closure)
    assert not torch.equal(before[0], training.masters()[0])


# -- Refusals ----------------------------------------------------------------------------------------


def test_what_cannot_be_watched_is_refused():
    model = net()
    taken = types.SimpleNamespace(param_groups=[{"params": list(model.parameters())}], step=lambda: None)
    with pytest.raises(RuntimeError, match=r"can't see the steps of a types.SimpleNamespace"):
        amp.initialize(model, taken, opt_level="O2", verbosity=0)

    class Everywhere(torch.optim.SGD):
        def __getattribute__(self, name):
            return (lambda: None) if name == "step" else super().__getattribute__(name)

    with pytest.raises(RuntimeError, match="can't see the steps"):
        amp.initialize(model, Everywhere(model.parameters(), lr=1.0), opt_level="O2", verbosity=0)

    with pytest.raises(RuntimeError, match="can't be changed"):
        amp.initialize(model, Frozen(list(model.parameters())), opt_level="O2", verbosity=0)
    for groups in (None, 3, [[]], [{"lr": 1}]):
        plain = odd.Plain(model.parameters())
        plain.param_groups = groups
        with pytest.raises(AttributeError, match="has no param_groups"):
            amp.initialize(model, plain, opt_level="O2", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)


class Frozen(odd.Plain):
    """Makes its groups up, from what nobody can reach."""

    def __init__(self, params):
        self.make = lambda: [{"params": list(params)}]

    param_groups = property(lambda self: self.make())


def test_a_wrapper_and_what_it_wraps_are_one():
    model = net()
    inner = sgd(model)
    with pytest.raises(RuntimeError, match="beside an optimizer that wraps it"):
        amp.initialize(model, [odd.LARC(inner), inner], opt_level="O2", verbosity=0)
    amp.initialize(model, inner, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match=r"only be passed through amp.initialize once"):
        amp.initialize(net(), odd.LARC(inner), opt_level="O2", verbosity=0)


@pytest.mark.parametrize("level", MASTERS)
def test_a_step_of_parameters_that_nobody_can_replace_is_refused_and_undone(level):
    class Closed(odd.Plain):
        def __init__(self, params):
            super().__init__(params)
            self.hidden = lambda: params

        def step(self):
            for p in self.hidden():
                p.data -= p.grad

    training = stepping.Training(level, Closed)
    before = [p.detach().clone() for p in training.model.parameters()]
    training.losses(bad=False)
    with pytest.raises(RuntimeError, match="wrote into the model's own parameters"):
        training.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_on_scaled_gradients_is_refused(level):
    training = stepping.Training(level, odd.sgd)
    before = training.masters()
    hook = next(training.model.parameters()).register_post_accumulate_grad_hook(lambda _: training.optimizer.step())
    with (
        pytest.raises(RuntimeError, match=r"inside of amp.scale_loss"),
        amp.scale_loss(training.model(), training.optimizer) as scaled,
    ):
        scaled.backward()
    hook.remove()
    with amp.scale_loss(training.model(), training.optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    with pytest.raises(RuntimeError, match="delay_unscale=True"):
        training.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, training.masters(), strict=True))
    training.step()
    assert not torch.equal(before[0], training.masters()[0])


# -- Attached and taken off --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_shutdown_gives_odd_optimizers_back(level, name):
    model = stepping.Exact()
    params = list(model.parameters())
    optimizer = odd.MAKERS[name](params)
    cls, own = type(optimizer), dict(getattr(optimizer, "__dict__", {}))
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    with amp.scale_loss(model(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    values = [p.detach().clone() for p in amp.master_params(optimizer)]
    amp.shutdown()
    assert type(optimizer) is cls
    assert getattr(optimizer, "__dict__", {}).keys() - {"_opt_called"} == own.keys()
    found = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(found, params, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, params, strict=True))
    model().backward()
    optimizer.step()
    assert not torch.equal(values[0], params[0])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_attached_optimizer_passes_for_its_class(level):
    model, optimizer = start(level)
    assert isinstance(optimizer, torch.optim.SGD)
    assert repr(optimizer).startswith("SGD (")
    assert type(optimizer).step is torch.optim.SGD.step
    assert vars(optimizer).keys() == vars(sgd(net())).keys()
    step(model, optimizer, data())
    saved = io.BytesIO()
    torch.save(optimizer, saved)
    saved.seek(0)
    for twin in (
        copy.deepcopy(optimizer),
        copy.copy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
        torch.load(saved, weights_only=False),
    ):
        assert type(twin) is torch.optim.SGD
        assert not hasattr(twin, "_amp_stash")
        twin.step()
    plain = odd.LARC(torch.optim.SGD(net().parameters(), lr=1.0))
    amp.initialize(net(), plain, opt_level=level, verbosity=0)
    assert type(copy.deepcopy(plain)) is odd.LARC


@pytest.mark.parametrize("name", ["plain", "only slots", "larc", "bare"])
def test_nothing_keeps_odd_optimizers_alive(name):
    training = stepping.Training("O2", odd.MAKERS[name])
    training.step()
    ref = weakref.ref(training.model)
    made = weakref.ref(type(training.optimizer))
    del training
    gc.collect()
    assert (ref(), made()) == (None, None)


@pytest.mark.parametrize("level", LEVELS)
def test_groups_added_to_odd_optimizers(level):
    model, late = stepping.Exact(), nn.Linear(2, 1, bias=False)
    optimizer = odd.LARC(odd.sgd(list(model.parameters())))
    amp.initialize([model, late], optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    optimizer.add_param_group({"params": late.weight})
    before = late.weight.detach().clone()
    optimizer.zero_grad()
    with amp.scale_loss(late(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(before, late.weight)
    count = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [late.weight]})
    assert len(optimizer.param_groups) == count


def test_state_from_before_keeps_what_wrappers_share():
    model = net()
    optimizer = odd.Lookahead(sgd(model))
    model(data()).sum().backward()
    optimizer.step()
    groups = optimizer.param_groups
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    settle()
    assert optimizer.param_groups is groups
    assert optimizer.base.param_groups is groups
    assert optimizer.state is optimizer.base.state
    step(model, optimizer, data())


# -- The first interface -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["scale_loss", "wrap_optimizer"])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_the_first_interface_skips_odd_optimizers(name, way):
    wanted = stepping.by_hand("O1", odd.MAKERS[name], 3, per_step=1)
    handle = amp.init(devices=["cpu"])
    model = stepping.Exact()
    optimizer = odd.MAKERS[name](list(model.parameters()))
    cls = type(optimizer)
    given = handle.wrap_optimizer(optimizer) if way == "wrap_optimizer" else optimizer
    for factor in (1.0, float("inf"), 1.0, 1.0):
        given.zero_grad()
        with (given if given is not optimizer else handle).scale_loss(
            model(factor), *(() if given is not optimizer else (optimizer,))
        ) as scaled:
            scaled.backward()
        given.step()
        assert type(optimizer) is cls
    assert all(torch.equal(a, b) for a, b in zip(wanted, model.parameters(), strict=True))
