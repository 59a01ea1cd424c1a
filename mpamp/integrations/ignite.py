"""Ignite's supervised steps and engines with mpamp's region and scaler, on any device.

The names and arguments are Ignite's, whose own AMP steps run in a region for CUDA whatever the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from ignite.engine import DeterministicEngine, Engine
from ignite.metrics import Metric
from ignite.utils import convert_tensor
from torch import Tensor

from ..regions.region import autocast
from ..scaler import GradScaler

__all__ = [
    "create_supervised_evaluator",
    "create_supervised_trainer",
    "supervised_evaluation_step_amp",
    "supervised_training_step_amp",
]

Device = str | torch.device | None
Step = Callable[[Engine, Any], Any]


def _prepare_batch(batch: Sequence[Tensor], device: Device = None, non_blocking: bool = False) -> tuple[Any, Any]:
    x, y = batch
    return convert_tensor(x, device, non_blocking), convert_tensor(y, device, non_blocking)


def _unchanged(output: Any) -> Any:
    return output


def _call(model: torch.nn.Module, x: Any) -> Any:
    return model(x)


def _loss_alone(x: Any, y: Any, y_pred: Any, loss: Tensor) -> float:
    return loss.item()


def _prediction_and_target(x: Any, y: Any, y_pred: Any) -> tuple[Any, Any]:
    return y_pred, y


def _device_of(model: torch.nn.Module, device: Device) -> Device:
    return device if device is not None else next((p.device for p in model.parameters()), None)


def supervised_training_step_amp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: Device = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., Any] = _prepare_batch,
    model_transform: Callable[[Any], Any] = _unchanged,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = _loss_alone,
    scaler: torch.amp.GradScaler | None = None,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[torch.nn.Module, Any], Any] = _call,
    *,
    dtype: torch.dtype | str | None = None,
    ops: Any = None,
    max_grad_norm: float | None = None,
) -> Step:
    """Return a training step for an ``Engine``: Ignite's arguments, then what is mpamp's.

    Args:
        model: Is moved nowhere.
        optimizer: Steps every ``gradient_accumulation_steps`` iterations.
        loss_fn: Gets prediction and target, within the region.
        device: Where batches go. The region is for it; for None, for that of the model's parameters at the time.
        non_blocking: As Ignite's, like the others that aren't listed.
        prepare_batch: Gets batch, ``device=`` and ``non_blocking=``, returns input and target.
        model_transform: Gets the model's output, returns the prediction.
        output_transform: Gets input, target, prediction and loss, returns the engine's output.
        scaler: Scales the loss, if given; float16 needs one.
        gradient_accumulation_steps: How many iterations' gradients are added up, each divided by it.
        model_fn: Gets model and input, returns the model's output.
        dtype: What lower-precision ops run in. None is the device's default.
        ops: Rules for ops, as those of ``mpamp.autocast``.
        max_grad_norm: Clip the norm of the (unscaled) gradients of the optimizer's parameters to it.

    Raises:
        ValueError: ``gradient_accumulation_steps`` is less than 1.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = supervised_training_step_amp(model, optimizer, torch.nn.functional.mse_loss, "cpu")
        >>> state = Engine(step).run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1)
        >>> type(state.output)
        <class 'float'>
    """
    count = gradient_accumulation_steps
    if count <= 0:
        raise ValueError(f"gradient_accumulation_steps must be 1 (no accumulation) or more, got {count}.")

    def forward(batch: Any) -> tuple[Any, Any, Any, Tensor]:
        x, y = prepare_batch(batch, device=device, non_blocking=non_blocking)
        with autocast(_device_of(model, device), dtype=dtype, ops=ops):
            y_pred = model_transform(model_fn(model, x))
            return x, y, y_pred, loss_fn(y_pred, y)

    def update_weights() -> None:
        if max_grad_norm is not None:
            if scaler:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_grad_norm)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    def step(engine: Engine, batch: Any) -> Any:
        if (engine.state.iteration - 1) % count == 0:
            optimizer.zero_grad()
        model.train()
        x, y, y_pred, loss = forward(batch)
        part = loss / count if count > 1 else loss
        (scaler.scale(part) if scaler else part).backward()
        if engine.state.iteration % count == 0:
            update_weights()
        return output_transform(x, y, y_pred, loss)

    return step


def supervised_evaluation_step_amp(
    model: torch.nn.Module,
    device: Device = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., Any] = _prepare_batch,
    model_transform: Callable[[Any], Any] = _unchanged,
    output_transform: Callable[[Any, Any, Any], Any] = _prediction_and_target,
    model_fn: Callable[[torch.nn.Module, Any], Any] = _call,
    *,
    dtype: torch.dtype | str | None = None,
    ops: Any = None,
) -> Step:
    """Return an evaluation step for an ``Engine``; the arguments are those of ``supervised_training_step_amp``."""

    def step(engine: Engine, batch: Any) -> Any:
        model.eval()
        with torch.no_grad():
            x, y = prepare_batch(batch, device=device, non_blocking=non_blocking)
            with autocast(_device_of(model, device), dtype=dtype, ops=ops):
                y_pred = model_transform(model_fn(model, x))
            return output_transform(x, y, y_pred)

    return step


def create_supervised_trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: Device = None,
    non_blocking: bool = False,
    *,
    deterministic: bool = False,
    amp_mode: str = "amp",
    scaler: bool | torch.amp.GradScaler = False,
    **options: Any,
) -> Engine:
    """Return an engine that trains in mixed precision.

    Args:
        model: As those of ``supervised_training_step_amp``, like all that aren't listed.
        optimizer: See there.
        loss_fn: See there.
        device: See there.
        non_blocking: See there.
        deterministic: Whether the engine is a ``DeterministicEngine``.
        amp_mode: As Ignite's argument; ``"amp"`` is all there is.
        scaler: A scaler; or True for a ``mpamp.GradScaler``, which is then ``engine.state.scaler``.
        options: See there: ``dtype=``, ``ops=``, ``gradient_accumulation_steps=``, ...

    Raises:
        ValueError: ``amp_mode`` is another.
    """
    _check_mode(amp_mode)
    made = GradScaler(_device_of(model, device)) if scaler is True else (scaler or None)
    step = supervised_training_step_amp(model, optimizer, loss_fn, device, non_blocking, scaler=made, **options)
    engine = DeterministicEngine(step) if deterministic else Engine(step)
    if scaler is True:
        engine.state.scaler = made
    return engine


def create_supervised_evaluator(
    model: torch.nn.Module,
    metrics: Mapping[str, Metric] | None = None,
    device: Device = None,
    non_blocking: bool = False,
    *,
    amp_mode: str = "amp",
    **options: Any,
) -> Engine:
    """Return an engine that evaluates in mixed precision; the arguments are as those of ``create_supervised_trainer``.

    Args:
        model: See there.
        metrics: Attached to the engine, by name.
        device: See there.
        non_blocking: See there.
        amp_mode: See there.
        options: As those of ``supervised_evaluation_step_amp``.

    Raises:
        ValueError: ``amp_mode`` is another than ``"amp"``.
    """
    _check_mode(amp_mode)
    engine = Engine(supervised_evaluation_step_amp(model, device, non_blocking, **options))
    for name, metric in (metrics or {}).items():
        metric.attach(engine, name)
    return engine


def _check_mode(amp_mode: Any) -> None:
    if amp_mode != "amp":
        raise ValueError(f"amp_mode is 'amp' here, got {amp_mode!r}; ignite.engine has the function for others.")
