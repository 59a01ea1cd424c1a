"""What a module with a rule has as its ``forward``: it goes with the module into copies, pickles and replicas."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from typing import Any

from torch import nn

from ..engine.compiling import stepped_over
from ..torch_internals import REPLICATE
from .modulerule import ModuleRule, run_by

__all__ = ["Layers", "RuledForward", "put_rule", "take_rules"]

Layers = tuple[tuple[str, ModuleRule], ...]
"""The rules that were put on a module, each with the key of who did it; the last one holds."""


class RuledForward:
    """A module's ``forward`` run by a rule. It doesn't keep the module alive, as an attribute of it.

    An attribute and not a subclass: the module's class stays what it was. And no hooks: an interrupt between two
    of them would leave the rule's region open.
    """

    __script_unsupported = "a module with a rule is not supported in script mode"

    def __init__(self, owner: nn.Module, inner: Any, layers: Layers) -> None:
        _serve_replicas()
        self._owner = weakref.ref(owner)
        self.inner = inner
        """A ``forward`` that the module had as an attribute of its own; None is its class's."""
        self.layers = layers

    @stepped_over
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.__self__
        # Not a bound method, which Dynamo makes from torch 2.13 on.
        function = functools.partial(type(owner).forward, owner) if self.inner is None else self.inner
        return run_by(self.layers[-1][1], function, args, kwargs) if self.layers else function(*args, **kwargs)

    @property
    def __self__(self) -> nn.Module:
        owner = self._owner()
        if owner is None:
            raise ReferenceError(
                "the module is gone whose forward this is; copy.deepcopy makes copies that outlive it."
            )
        return owner

    @property
    def __wrapped__(self) -> Any:
        owner = self.__self__
        return types.MethodType(type(owner).forward, owner) if self.inner is None else self.inner

    def of(self, owner: nn.Module) -> RuledForward:
        """Return the same for another module, such as a replica."""
        return RuledForward(owner, self.inner, self.layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> RuledForward:
        return RuledForward(copy.deepcopy(self.__self__, memo), copy.deepcopy(self.inner, memo), self.layers)

    def __reduce__(self) -> Any:
        return RuledForward, (self.__self__, self.inner, self.layers)


def put_rule(module: nn.Module, key: str, rule: ModuleRule) -> RuledForward:
    """Have a module's ``forward`` run by a rule, whatever rules it has already."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, RuledForward) and forward._owner() is module:
        forward.layers = (*forward.layers, (key, rule))
    else:
        forward = module.__dict__["forward"] = RuledForward(module, forward, ((key, rule),))
    return forward


def take_rules(forward: RuledForward, key: str) -> None:
    """Take away the rules of a key; with the last one goes the attribute, unless others have put theirs over it."""
    forward.layers = tuple([layer for layer in forward.layers if layer[0] != key])
    owner = forward._owner()
    if forward.layers or owner is None or owner.__dict__.get("forward") is not forward:
        return
    if forward.inner is None:
        del owner.__dict__["forward"]
    else:
        owner.__dict__["forward"] = forward.inner


@functools.cache
def _serve_replicas() -> None:
    """Have DataParallel's replicas run their own forward: their attributes are the module's."""
    replicate: Any = getattr(*REPLICATE)

    @functools.wraps(replicate)
    def wrapper(self: nn.Module) -> Any:
        replica = replicate(self)
        forward = replica.__dict__.get("forward")
        if isinstance(forward, RuledForward):
            replica.__dict__["forward"] = forward.of(replica)
        return replica

    setattr(*REPLICATE, wrapper)
