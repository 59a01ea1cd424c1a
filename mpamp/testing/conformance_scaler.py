"""The gradient scaler on a device: scale, unscale, skip, back off, grow, save and load."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..scaler import kernels
from .conformance_report import require
from .conformance_subject import Subject, Test

__all__ = ["scaler_tests"]

START = 64.0


def scaler_tests(subject: Subject) -> Iterator[Test]:
    """Return the checks of the device's scaler."""
    tests: dict[str, Callable[[Training], None]] = {
        "it is a torch.amp.GradScaler, and enabled": _is_enabled,
        "unscale_ undoes scale": _unscales,
        "step applies the unscaled gradients": _applies,
        "inf skips the step and lowers the scale": functools.partial(_skips, factor=math.inf),
        "-inf skips the step and lowers the scale": functools.partial(_skips, factor=-math.inf),
        "NaN skips the step and lowers the scale": functools.partial(_skips, factor=math.nan),
        "an inf in one of several gradients skips all": _skips_all,
        "one inf among the elements of a gradient skips the step": _skips_element,
        "one optimizer's inf does not skip another's step": _skips_own,
        "growth_factor and backoff_factor are obeyed": _obeys,
        "a weight without a gradient is left alone": _without_gradient,
        "unscale_ and step are refused the second time": _refuses,
        "a disabled scaler leaves everything as it is": _disabled,
        "good steps raise the scale": _grows,
        "a skip starts the count anew": _counts_anew,
        "state_dict and load_state_dict": _round_trip,
    }
    for name, test in tests.items():
        yield name, functools.partial(_run, subject, test)


class Training:
    """Two weights, an optimizer and a scaler of the device."""

    def __init__(self, subject: Subject) -> None:
        subject.need_values()
        self.subject = subject
        self.weights = [torch.nn.Parameter(torch.ones(n).to(subject.device)) for n in (3, 2)]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.5)
        self.scaler = self.make()

    def make(self, **settings: Any) -> Any:
        settings = {"init_scale": START, "growth_interval": 2, **settings}
        return self.subject.make_scaler(self.subject.device, **settings)

    def backward(self, *factors: float) -> None:
        self.optimizer.zero_grad()
        given = (*factors, *(1.0,) * (2 - len(factors)))
        loss = sum(w.sum() * f for w, f in zip(self.weights, given, strict=True))
        self.scaler.scale(loss).backward()

    def iterate(self, *factors: float) -> None:
        self.backward(*factors)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def values(self) -> list[list[float]]:
        return [w.tolist() for w in self.weights]


def _run(subject: Subject, test: Callable[[Training], None]) -> None:
    subject.backend.has_kernel(kernels.UNSCALE)
    kernels.has_kernel.cache_clear()  # it may have the answer of the backend that is registered
    try:
        test(Training(subject))
    finally:
        kernels.has_kernel.cache_clear()


def _is_enabled(training: Training) -> None:
    scaler = training.scaler
    require(isinstance(scaler, torch.amp.GradScaler), f"it is a {type(scaler).__name__}")
    require(scaler.is_enabled(), "it is disabled")


def _unscales(training: Training) -> None:
    training.backward(3.0, 5.0)
    scaled = [w.grad.tolist() for w in training.weights if w.grad is not None]
    require(scaled == [[3 * START] * 3, [5 * START] * 2], f"gradients of 3 and 5, scaled by {START:g}, are {scaled}")
    training.scaler.unscale_(training.optimizer)
    found = [w.grad.tolist() for w in training.weights if w.grad is not None]
    require(found == [[3.0] * 3, [5.0] * 2], f"gradients of 3 and 5 are {found} when scaled and unscaled")


def _require_step(training: Training, how: str) -> None:
    """Require what SGD makes of weights of 1 and gradients of 3 and 5."""
    expected = [[1 - 3 / 2] * 3, [1 - 5 / 2] * 2]
    require(training.values() == expected, f"{how}, weights of 1 become {training.values()}, not {expected}")


def _applies(training: Training) -> None:
    for is_unscaled in (False, True):
        each = Training(training.subject)
        each.backward(3.0, 5.0)
        if is_unscaled:
            each.scaler.unscale_(each.optimizer)
        each.scaler.step(each.optimizer)
        _require_step(each, "after unscale_" if is_unscaled else "without unscale_")


def _skips(training: Training, factor: float) -> None:
    before = training.values()
    training.iterate(factor, factor)
    scale = training.scaler.get_scale()
    require(training.values() == before, f"the optimizer stepped though gradients were {factor}: inf is ignored")
    require(scale == START / 2, f"the scale went from {START:g} to {scale:g}, not to {START / 2:g}")


def _skips_all(training: Training) -> None:
    before = training.values()
    training.iterate(1.0, math.inf)
    require(training.values() == before, "the optimizer stepped though one of its gradients was inf")
    training.iterate(1.0)
    require(training.values() != before, "the optimizer does not step any more after a skip")


def _skips_element(training: Training) -> None:
    before = training.values()
    training.backward(1.0)
    gradient = training.weights[0].grad
    assert gradient is not None
    gradient[1] = math.inf
    training.scaler.step(training.optimizer)
    require(training.values() == before, "the optimizer stepped though one element of a gradient was inf")


def _skips_own(training: Training) -> None:
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in training.weights]
    training.backward(math.inf, 1.0)
    for optimizer in optimizers:
        training.scaler.step(optimizer)
    training.scaler.update()
    expected = [[1.0] * 3, [0.5] * 2]
    require(
        training.values() == expected, f"with an inf for the first, weights are {training.values()}, not {expected}"
    )
    scale = training.scaler.get_scale()
    require(scale == START / 2, f"though one of two optimizers met an inf, the scale went from {START:g} to {scale:g}")


def _obeys(training: Training) -> None:
    training.scaler = training.make(growth_factor=4.0, backoff_factor=0.25, growth_interval=1)
    scales = []
    for factor in (1.0, math.inf):
        training.iterate(factor)
        scales.append(training.scaler.get_scale())
    require(scales == [4 * START, START], f"with factors of 4 and 0.25 the scales are {scales}")


def _without_gradient(training: Training) -> None:
    training.optimizer.zero_grad()
    training.scaler.scale(training.weights[0].sum()).backward()
    training.scaler.step(training.optimizer)
    require(
        training.values() == [[0.5] * 3, [1.0] * 2], f"weights of 1, the second without gradient: {training.values()}"
    )


def _refuses(training: Training) -> None:
    for name in ("unscale_", "step"):
        each = Training(training.subject)
        each.backward(1.0)
        getattr(each.scaler, name)(each.optimizer)
        try:
            getattr(each.scaler, name)(each.optimizer)
        except RuntimeError:
            continue
        require(False, f"{name} can be called twice before update: gradients are divided twice, or applied twice")


def _disabled(training: Training) -> None:
    training.scaler = training.make(enabled=False)
    require(not training.scaler.is_enabled(), "with enabled=False it is enabled")
    training.iterate(3.0, 5.0)
    _require_step(training, "disabled")


def _grows(training: Training) -> None:
    scales = []
    for _ in range(4):
        training.iterate(1.0)
        scales.append(training.scaler.get_scale())
    expected = [START, 2 * START, 2 * START, 4 * START]
    require(scales == expected, f"with growth_interval=2 the scales are {scales}, not {expected}")


def _counts_anew(training: Training) -> None:
    scales = []
    for factor in (1.0, math.inf, 1.0, 1.0):
        training.iterate(factor)
        scales.append(training.scaler.get_scale())
    expected = [START, START / 2, START / 2, START]
    require(scales == expected, f"after a good step, a skip and two good ones the scales are {scales}, not {expected}")


def _round_trip(training: Training) -> None:
    for factor in (1.0, math.inf, 1.0):
        training.iterate(factor)
    state = training.scaler.state_dict()
    other = Training(training.subject)
    other.scaler = other.make(growth_factor=8.0, backoff_factor=0.125, growth_interval=50)
    other.scaler.load_state_dict(state)
    require(other.scaler.state_dict() == state, f"{state} was loaded, {other.scaler.state_dict()} is saved again")
    for each in (training, other):
        each.iterate(1.0)
    scales = [each.scaler.get_scale() for each in (training, other)]
    require(scales[0] == scales[1], f"one step later the scale is {scales[0]:g}, the loaded scaler's {scales[1]:g}")
