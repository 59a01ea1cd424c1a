"""Optimizers whose steps torch's hooks don't reach: by their class, or by who has replaced their ``step``.

Each maker takes parameters and returns an optimizer that takes a step of SGD with momentum, or what it says.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict

import torch

LR = 0.125


def sgd(params):
    return torch.optim.SGD(params, lr=LR, momentum=0.5)


class Bare(torch.optim.Optimizer):
    """A wrapper that leaves torch's constructor out, as Lookahead and its kin do."""

    def __init__(self, base):
        self.base = base
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state

    def step(self, closure=None):
        return self.base.step(closure)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class Lookahead(Bare):
    def __init__(self, base, every=2):
        super().__init__(base)
        self.count, self.every = 0, every
        self.slow = [p.detach().clone().float() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            params = [p for group in self.param_groups for p in group["params"]]
            for p, slow in zip(params, self.slow, strict=True):
                slow += 0.5 * (p.detach() - slow)
                with torch.no_grad():
                    p.copy_(slow)
        return loss


class TimmLookahead(Lookahead):
    """With hooks that nothing calls."""

    def __init__(self, base):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        super().__init__(base)


class LARC:
    """No optimizer of torch's, with a step that reads gradients before the wrapped one."""

    def __init__(self, optimizer):
        self.optim = optimizer

    param_groups = property(lambda self: self.optim.param_groups)
    state = property(lambda self: self.optim.state)

    def add_param_group(self, group):
        self.optim.add_param_group(group)

    def state_dict(self):
        return self.optim.state_dict()

    def zero_grad(self):
        self.optim.zero_grad()

    def step(self):
        for group in self.optim.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(min(4.0, float(p.detach().norm() / p.grad.norm())))
        self.optim.step()


class SWA(torch.optim.Optimizer):
    """Averages weights in its steps, and swaps them with their averages when asked to, as torchcontrib's did."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self.count = 0

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)
        self.count += 1
        self.update_swa()

    def update_swa(self):
        for p in self.all():
            average = self.state[p].setdefault("swa", torch.zeros_like(p))
            average.add_((p.data - average) / self.count)

    def swap_swa_sgd(self):
        for p in self.all():
            kept = p.data.clone()
            p.data.copy_(self.state[p]["swa"])
            self.state[p]["swa"].copy_(kept)

    def all(self):
        return [p for group in self.param_groups for p in group["params"]]


class Plain:
    """Written by hand: no state, and a step that needs every gradient."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": LR}]

    def zero_grad(self):
        for p in self.all():
            p.grad = None

    def all(self):
        return [p for group in self.param_groups for p in group["params"]]

    def step(self):
        for p in self.all():
            p.data -= LR * p.grad


class Slots(Plain):
    __slots__ = ("param_groups",)


class OnlySlots:
    __slots__ = ("param_groups", "step")

    def __init__(self, params):
        self.param_groups = ({"params": tuple(params)},)
        self.step = self._step

    def _step(self):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - LR * p.grad

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None


class OwnList(Plain):
    """Steps a list of its own, and keeps its momentum by position and in a dict of its own."""

    def __init__(self, params):
        super().__init__(params)
        self.own = self.all()
        self.momentum = [torch.zeros_like(p, dtype=torch.float32) for p in self.own]
        self.seen = dict.fromkeys(self.own, 0)

    def step(self):
        for p, buffer in zip(self.own, self.momentum, strict=True):
            buffer.mul_(0.5).add_(p.grad.float())
            self.seen[p] += 1
            p.data -= (LR * buffer).to(p.dtype)


class OwnGroups(Bare):
    """Wraps an optimizer that has groups of its own."""

    def __init__(self, params):
        super().__init__(sgd(params))
        self.param_groups = [{"params": list(group["params"])} for group in self.base.param_groups]


class Unhashable(torch.optim.SGD):
    def __eq__(self, other):
        return self is other

    __hash__ = None


class Delegating:
    """Has no attribute of its own, its step neither."""

    def __init__(self, base):
        self.__dict__["inner"] = base

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)


class StepProperty(Plain):
    """Chooses its step when asked for it."""

    step = property(lambda self: functools.partial(Plain.step, self))


class Several:
    """Several optimizers as one, with groups made up when asked for."""

    def __init__(self, params):
        self.optimizers = {"each": [sgd([p]) for p in params]}

    param_groups = property(lambda self: [g for o in self.optimizers["each"] for g in o.param_groups])

    def zero_grad(self):
        for optimizer in self.optimizers["each"]:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers["each"]:
            optimizer.step()


def horovod(inner):
    """As Horovod's: a class made anew of the wrapped one's, whose methods call ``super(self.__class__, self)``."""

    class Distributed(torch.optim.Optimizer):
        def step(self, closure=None):
            return super(self.__class__, self).step(closure)

        def zero_grad(self, *args, **kwargs):
            return super(self.__class__, self).zero_grad(*args, **kwargs)

    optimizer = type("SGD", (inner.__class__,), dict(Distributed.__dict__))(inner.param_groups)
    return optimizer


class Calling(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def with_method(params):
    optimizer = sgd(params)
    optimizer.step = types.MethodType(Plain.step, Handed(optimizer))
    return optimizer


class Handed:
    """Gives ``Plain.step`` another optimizer's parameters."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def all(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def with_partial(params):
    optimizer = sgd(params)
    optimizer.step = functools.partial(type(optimizer).step, optimizer)
    return optimizer


def with_class_step(params):
    class Own(torch.optim.SGD):
        pass

    optimizer = Own(params, lr=LR)
    Own.step = lambda self, closure=None: Plain.step(Handed(self))
    return optimizer


def with_schedule(params):
    optimizer = sgd(params)
    optimizer.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    return optimizer


def compiled(params):
    optimizer = sgd(params)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


class DefaultState(Plain):
    """Keeps its state in a defaultdict that makes entries up."""

    def __init__(self, params):
        super().__init__(params)
        self.state = defaultdict(dict)

    def step(self):
        for p in self.all():
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.mul_(0.5).add_(p.grad)
            p.data -= LR * buffer


MAKERS = {
    "bare": lambda params: Bare(sgd(params)),
    "lookahead": lambda params: Lookahead(sgd(params)),
    "timm's lookahead": lambda params: TimmLookahead(sgd(params)),
    "lookahead of a bare one": lambda params: Lookahead(Bare(sgd(params))),
    "swa": lambda params: SWA(sgd(params)),
    "larc": lambda params: LARC(sgd(params)),
    "plain": Plain,
    "slots": Slots,
    "only slots": OnlySlots,
    "own list": OwnList,
    "own groups": OwnGroups,
    "unhashable": lambda params: Unhashable(params, lr=LR),
    "delegating": lambda params: Delegating(sgd(params)),
    "step property": StepProperty,
    "several": Several,
    "horovod": lambda params: horovod(sgd(params)),
    "calling": lambda params: Calling(params, lr=LR),
    "step set to a method": with_method,
    "step set to a partial": with_partial,
    "step set on the class": with_class_step,
    "with a scheduler": with_schedule,
    "compiled": compiled,
    "default state": DefaultState,
}
