"""Random programs of several optimizers that share parameters, against a reference that keeps true gradients."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp.grad_scaler import OptState

from mpamp.scaler import GradScaler

GROUPS = {"a": (0, 1), "b": (1, 2), "c": (2,), "d": (0, 2)}
"""Optimizers, and which of the three parameters they own."""
FUSED = {"c", "d"}
SCALE, RATE, LARGEST = 64.0, 0.5, 1.0


class Do(NamedTuple):
    """One call: what is done, to which optimizer or parameter, and by how much."""

    what: str
    which: Any = None
    much: float = 0.0


SUBSETS = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]
CALLS = [
    *[Do("backward", which, much) for which in SUBSETS for much in (1.0, 2.0, -1.0, 0.5)],
    *[Do("backward", which, much) for which in SUBSETS[:3] for much in (math.inf, math.nan)],
    *[Do("unscaled backward", which, 0.25) for which in SUBSETS],
    *[Do("unscale", name) for name in GROUPS] * 4,
    *[Do("step", name) for name in GROUPS] * 3,
    *[Do("zero", name, much) for name in GROUPS for much in (0.0, 1.0)],
    *[Do(what, which) for what in ("clip", "replace", "multiply", "copy", "penalty") for which in range(3)],
    *[Do("update")] * 3,
]


class Reference:
    """What each parameter's true gradient is, and whether the one that torch holds is scaled.

    A step by gradients of which a part is scaled, or a change that fits neither, is no program that has a meaning: it
    is left out, as are calls that torch's scaler refuses too.
    """

    def __init__(self) -> None:
        self.weights = [torch.ones(2, dtype=torch.float64) for _ in range(3)]
        self.begin()
        self.grads: list[Any] = [None] * 3
        self.has_scaled_loss = False

    def begin(self) -> None:
        """End an iteration: what is left of gradients is dropped by the programs, as by every training loop."""
        self.stages = dict.fromkeys(GROUPS, "ready")
        self.infs = dict.fromkeys(GROUPS, False)
        self.is_scaled: list[bool | None] = [True] * 3
        """None: a fused kernel has skipped, and whether it left them scaled is its affair."""
        self.grads = [None] * 3
        self.has_been_passed = [False] * 3
        """Whether a pass of a scaled loss has come since the gradient was unscaled."""

    def allows(self, do: Do) -> bool:
        """Tell whether a call has a meaning now."""
        if do.what == "unscaled backward":  # where all that it reaches is unscaled already
            return self.has_scaled_loss and all(self.is_scaled[i] is False for i in do.which)
        if do.what == "replace" and self.has_been_passed[do.which]:
            return False  # refused: it may be a scaled one
        if do.what in ("clip", "replace", "multiply", "copy", "penalty"):
            return self.has_scaled_loss and self.grads[do.which] is not None and self.is_scaled[do.which] is False
        if do.what == "unscale":
            late = any(self.is_scaled[i] is True and self.grads[i] is not None for i in GROUPS[do.which])
            return self.has_scaled_loss and (
                self.stages[do.which] == "ready" or (self.stages[do.which] == "unscaled" and late)
            )
        if do.what == "step":
            has_grads = any(self.grads[i] is not None for i in GROUPS[do.which])
            return self.has_scaled_loss and self.stages[do.which] != "stepped" and has_grads
        return do.what != "update" or any(stage != "ready" for stage in self.stages.values())

    def unscale(self, name: str, *, by_kernel: bool = False) -> None:
        owned = [i for i in GROUPS[name] if self.grads[i] is not None]
        by_kernel = by_kernel and all(self.is_scaled[i] is True for i in owned)
        self.infs[name] |= any(not bool(torch.isfinite(self.grads[i]).all()) for i in owned)
        for i in GROUPS[name]:
            self.has_been_passed[i] = False
        for i in GROUPS[name]:  # what is put in the place of None without a pass of a scaled loss is unscaled, too
            self.is_scaled[i] = None if by_kernel and self.infs[name] and i in owned else False

    def run(self, do: Do) -> None:
        if do.what in ("backward", "unscaled backward"):
            self.has_scaled_loss = True
            self.has_been_passed = [self.has_been_passed[i] or do.what == "backward" for i in range(3)]
            for i in do.which:
                self.grads[i] = (0 if self.grads[i] is None else self.grads[i]) + torch.full(
                    (2,), do.much * (i + 1.0)
                ).double()
                self.is_scaled[i] = True if do.what == "backward" else self.is_scaled[i]
        elif do.what == "penalty":
            self.has_been_passed = [True] * 3
        elif do.what == "unscale":
            self.unscale(do.which)
            self.stages[do.which] = "unscaled"
        elif do.what == "step":
            is_ready, passed = self.stages[do.which] == "ready", self.has_been_passed
            self.has_been_passed = list(passed)
            self.unscale(do.which, by_kernel=do.which in FUSED and is_ready)
            if not is_ready:  # it was unscaled before the passes that came since
                self.has_been_passed = passed
            self.stages[do.which] = "stepped"
            if not self.infs[do.which]:
                for i in GROUPS[do.which]:
                    if self.grads[i] is not None:
                        self.weights[i] -= RATE * self.grads[i]
        elif do.what == "zero":
            for i in GROUPS[do.which]:
                if self.grads[i] is not None:
                    self.grads[i] = torch.zeros(2).double() if do.much else None
        elif do.what == "update":
            self.begin()
        elif do.what in ("clip", "replace"):
            self.grads[do.which] = self.grads[do.which].clamp(-LARGEST, LARGEST)
        elif do.what == "multiply":
            self.grads[do.which] = self.grads[do.which] * 0.5
        elif do.what == "copy":
            self.grads[do.which] = torch.full((2,), 0.75, dtype=torch.float64)


class Real:
    """The same calls on a scaler, with float32 weights."""

    def __init__(self) -> None:
        self.weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
        self.scaler = GradScaler("cpu", init_scale=SCALE, max_consecutive_skips=None)
        self.optimizers = {
            name: torch.optim.SGD([self.weights[i] for i in owned], lr=RATE, fused=name in FUSED)
            for name, owned in GROUPS.items()
        }

    def run(self, do: Do, reference: Reference) -> None:
        weight = self.weights[do.which] if isinstance(do.which, int) else None
        if do.what in ("backward", "unscaled backward"):
            loss = sum((self.weights[i] * (i + 1.0)).sum() * do.much for i in do.which)
            (self.scaler.scale(loss) if do.what == "backward" else loss).backward()
        elif do.what == "unscale":
            self.scaler.unscale_(self.optimizers[do.which])
        elif do.what == "step":
            self.scaler.step(self.optimizers[do.which])
            assert self.scaler.last_step_skipped(self.optimizers[do.which]) is reference.infs[do.which]
        elif do.what == "zero":
            for i in GROUPS[do.which]:
                if reference.grads[i] is None:
                    self.weights[i].grad = None
                elif self.weights[i].grad is not None:
                    self.weights[i].grad.zero_()
        elif do.what == "update":
            self.scaler.update()
            for each in self.weights:
                each.grad = None
        elif do.what == "penalty":
            (grad,) = torch.autograd.grad(self.scaler.scale((weight * 2.0).sum()), weight)
            assert grad.tolist() == [2.0 * self.scaler.get_scale()] * 2
        else:
            self.change(do.what, weight)

    def change(self, what: str, weight: Any) -> None:
        if what == "clip":
            weight.grad.clamp_(-LARGEST, LARGEST)
        elif what == "replace":
            weight.grad = weight.grad.clamp(-LARGEST, LARGEST)
        elif what == "multiply":
            weight.grad.mul_(0.5)
        else:
            weight.grad.copy_(torch.full((2,), 0.75))


def play(choices: list[int]) -> None:
    """Run a program: each number chooses among the calls that have a meaning then."""
    reference, real, program = Reference(), Real(), list[Do]()
    scale = SCALE
    for choice in choices:
        allowed = [do for do in CALLS if reference.allows(do)]
        do = allowed[choice % len(allowed)]
        program.append(do)
        if do.what == "update":
            scale *= 0.5 if any(reference.infs.values()) else 1.0
        reference.run(do)
        real.run(do, reference)
        said = program
        assert real.scaler.get_scale() == scale, said
        for number, (weight, expected) in enumerate(zip(real.weights, reference.weights, strict=True)):
            assert weight.double().tolist() == expected.tolist(), said
            grad, true = weight.grad, reference.grads[number]
            assert (grad is None) is (true is None), said
            if true is not None and reference.is_scaled[number] is False:
                assert repr(grad.double().tolist()) == repr(true.tolist()), said  # type: ignore[union-attr]
        for name, optimizer in real.optimizers.items():
            stage = real.scaler._per_optimizer_states[id(optimizer)]["stage"]
            assert stage is OptState[reference.stages[name].upper()], said


@given(st.lists(st.integers(0, 10**4), max_size=24))
@settings(max_examples=150, deadline=None)
def test_random_programs(choices: list[int]) -> None:
    play(choices)


@pytest.mark.sweep
def test_many_random_programs() -> None:
    for seed in range(5000):
        chance = random.Random(seed)
        play([chance.randrange(10**4) for _ in range(chance.randrange(8, 60))])
