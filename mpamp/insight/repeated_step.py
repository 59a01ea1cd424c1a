"""A step of a model that is run again as it was: with its inputs, buffers and random numbers put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..functions.module_rules import module_rules
from ..regions.region import autocast
from ..torch_internals import tree_map_only
from .frames import table_on
from .overflow_measures import floats_in

__all__ = ["Change", "RepeatedStep", "run_backward"]


@dataclass(frozen=True, slots=True)
class Change:
    """What is other when a step is run again.

    Attributes:
        ops: Rules for ops.
        modules: Rules for modules.
        dtype: The region's; None is the one that it had.
        is_eager: Whether compiled code runs uncompiled.
    """

    ops: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    is_eager: bool = False


class RepeatedStep:
    """One forward pass, its loss and the backward pass; made before they run, for what they may change.

    Args:
        model: The model.
        inputs: Its arguments.
        kwargs: Its keyword arguments.
        loss: Makes the loss of its output.
        device: The type of the device that it runs on.
        region: What its forward pass runs in.
        scale: The loss scale.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], Tensor] | None,
        device: str,
        region: contextlib.AbstractContextManager[Any] | None,
        scale: float,
    ) -> None:
        self.model, self._loss, self._device, self._region, self._scale = model, loss, device, region, scale
        self.inputs = tree_map_only(Tensor, _copied, (inputs, kwargs))
        self._before = _State(model, device)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Have the model and the random numbers be afterwards as they are now."""
        now = _State(self.model, self._device)
        try:
            yield
        finally:
            now.put_back()

    def run(self, change: Change, see: Callable[[Any], None] | None = None) -> bool:
        """Run the step; tell whether the output, the loss and all gradients are finite.

        Args:
            change: What is other this time.
            see: Called with the loss.
        """
        self._before.put_back()
        inputs, kwargs = tree_map_only(Tensor, _copied, self.inputs)
        params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with self._region or contextlib.nullcontext(), self._changed(change):
            output = self.model(*inputs, **kwargs)
            value = None if self._loss is None else self._loss(output)
            if see is not None:
                see(value)
        found = [tensor for _, tensor in floats_in([output, value])]
        if value is not None and params:
            found += run_backward(value, params, self._device, self._scale, retain_graph=False).values()
        return all(bool(tensor.isfinite().all()) for tensor in found)

    @contextlib.contextmanager
    def _changed(self, change: Change) -> Iterator[None]:
        table = table_on(self._device)
        with contextlib.ExitStack() as stack:
            if change.is_eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if table is not None and (change.ops or change.dtype is not None):
                dtype = change.dtype or torch.get_autocast_dtype(self._device)
                stack.enter_context(autocast(self._device, dtype, ops=table.override(change.ops)))
            if change.modules:
                stack.enter_context(module_rules(self.model, change.modules))
            yield


def run_backward(
    loss: Tensor, params: Mapping[str, Tensor], device: str, scale: float, retain_graph: bool = True
) -> dict[str, Tensor]:
    """Run the backward pass of a loss times a scale; return the parameters' gradients."""
    with autocast(device, enabled=False):
        try:
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                loss * scale, list(params.values()), allow_unused=True, retain_graph=retain_graph
            )
        except RuntimeError as error:
            if "heckpoint" not in str(error) or ".grad()" not in str(error):
                raise  # what reentrant checkpoints don't allow
            found = _grads_of(loss * scale, list(params.values()))
    return {name: grad for name, grad in zip(params, found, strict=True) if grad is not None}


def _grads_of(loss: Tensor, params: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return gradients as ``torch.autograd.grad`` does, of what reentrant checkpoints are in."""
    before = [param.grad for param in params]
    hooks = [param._post_accumulate_grad_hooks for param in params]
    try:
        for param in params:
            param.grad = None
            param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        loss.backward(retain_graph=True)
        return tuple([param.grad for param in params])
    finally:
        for param, grad, hook in zip(params, before, hooks, strict=True):
            param.grad, param._post_accumulate_grad_hooks = grad, hook


class _State:
    """What a step changes: buffers, and where the random numbers are."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._random = torch.get_rng_state()
        module = torch.get_device_module(device)
        self._set = getattr(module, "set_rng_state", None)
        self._on_device = module.get_rng_state() if self._set is not None and device != "meta" else None

    def put_back(self) -> None:
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        torch.set_rng_state(self._random)
        if self._set is not None and self._on_device is not None:
            self._set(self._on_device)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
