"""mpamp in Accelerate: an ``Accelerator`` whose regions and scaler are mpamp's.

Example:
    >>> model = torch.nn.Linear(2, 2)
    >>> accelerator = Accelerator(mixed_precision="bf16", cpu=True, ops={"softmax": "fp32"})
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> with accelerator.autocast():
    ...     print(model(torch.ones(1, 2)).dtype, torch.ones(1, 2).mm(torch.ones(2, 2)).softmax(0).dtype)
    torch.float32 torch.float32
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, convert_outputs_to_fp32

from ..regions.region import Region, autocast
from ..rules.optable import OpTable
from ..scaler import GradScaler
from ..scaler.gradients import parameters_of
from .iteration import Iteration

__all__ = ["Accelerator"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_WITH_THEIR_OWN = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
"""What has a mixed precision of its own, which Accelerate leaves to it."""


class Accelerator(accelerate.Accelerator):
    """Accelerate's ``Accelerator``, with a region of mpamp's wherever it has torch's; in float16 with mpamp's scaler.

    Under DeepSpeed, Megatron-LM, XLA and in float8 it is Accelerate's own. float16 runs on the processor, too.

    Args:
        args: As Accelerate's.
        ops: Rules of the regions, as of ``mpamp.autocast``.
        persistent_cache: Whether casts of weights outlive a region, as of ``mpamp.autocast``.
        scaler: For float16. None: ``mpamp.GradScaler`` with what a ``GradScalerKwargs`` in ``kwargs_handlers`` says.
        kwargs: As Accelerate's.

    Raises:
        ValueError: A scaler is given, and ``mixed_precision`` isn't ``"fp16"``.
        UnknownDeviceError, UnsupportedDtypeError, OpTableError: As ``mpamp.autocast``.
    """

    def __init__(
        self,
        *args: Any,
        ops: Mapping[str, Any] | OpTable | None = None,
        persistent_cache: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._use_mpamp(ops, persistent_cache, scaler)

    def _use_mpamp(self, ops: Any, persistent_cache: bool, scaler: torch.amp.GradScaler | None) -> None:
        """Set up what is ours; for an accelerator that somebody else made, too, which gets this class first."""
        self._ops = ops
        self._persistent_cache = persistent_cache
        self._iteration: Iteration | None = None
        self._clipped: list[torch.Tensor] = []
        self._is_ours = self.mixed_precision in _DTYPES and self.distributed_type not in _WITH_THEIR_OWN
        if scaler is not None and not (self._is_ours and self.mixed_precision == "fp16"):
            raise ValueError(f"a scaler is for mixed_precision='fp16', which is {self.mixed_precision!r} here.")
        if self._is_ours:
            self.native_amp = True
            self._region(self.autocast_handler)  # what it can't be made of is an error here
            if self.mixed_precision == "fp16":
                self.scaler = self._make_scaler() if scaler is None else scaler
                self._iteration = Iteration(self.scaler)

    def _make_scaler(self) -> GradScaler:
        options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
        is_fsdp1 = self.distributed_type == DistributedType.FSDP and not self.is_fsdp2
        group = torch.distributed.group.WORLD if is_fsdp1 else None
        return GradScaler(self.device.type, process_group=group, **options)

    def _region(self, handler: Any) -> Region:
        """Return the region that an ``AutocastKwargs`` asks for."""
        options = {} if handler is None else handler.to_kwargs()
        dtype = _DTYPES[self.mixed_precision]
        return autocast(self.device.type, dtype, ops=self._ops, persistent_cache=self._persistent_cache, **options)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Generator[None]:
        """Run a block in a region, if mixed precision is on."""
        handler = self.autocast_handler if autocast_handler is None else autocast_handler
        with self._region(handler) if self._is_ours else super().autocast(handler):
            yield

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model as Accelerate does, with its ``forward`` in a region and its outputs in float32."""
        if not self._is_ours or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, *args, **kwargs)
        forward = model._original_forward = model.forward
        within = convert_outputs_to_fp32(self._region(self.autocast_handler)(getattr(forward, "__func__", forward)))
        model.forward = MethodType(within, model) if hasattr(forward, "__func__") else within
        with self._without_its_region():
            return super().prepare_model(model, *args, **kwargs)

    @contextlib.contextmanager
    def _without_its_region(self) -> Iterator[None]:
        self.native_amp = False
        try:
            yield
        finally:
            self.native_amp = True

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare an optimizer as Accelerate does, to step by mpamp's scaler and know whether that skipped."""
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        if type(prepared) is AcceleratedOptimizer and isinstance(self.scaler, GradScaler):
            prepared.__class__ = _SteppedOptimizer
            prepared.iteration, prepared.all = self._iteration, self._optimizers
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scale the loss, if there is a scaler, and run its backward pass."""
        if self._iteration is not None:
            self._iteration.end()
        super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients that are scaled: of some optimizers, or of all; of those that own what is being clipped."""
        if self._iteration is None:
            return super().unscale_gradients(optimizer)  # type: ignore[no-any-return]
        asked = self._owners() if optimizer is None else optimizer
        for each in asked if isinstance(asked, list | tuple) else [asked]:
            while isinstance(each, AcceleratedOptimizer):
                each = each.optimizer
            self._iteration.unscale_(each)

    def _owners(self) -> list[Any]:
        clipped = set(map(id, self._clipped))
        owners = [each for each in self._optimizers if not clipped.isdisjoint(map(id, parameters_of(each)))]
        return owners or self._optimizers

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip unscaled gradients by their norm, which it returns."""
        return self._clip(super().clip_grad_norm_, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> Any:
        """Clip unscaled gradients by value."""
        return self._clip(super().clip_grad_value_, parameters, clip_value)

    def _clip(self, clip: Callable[..., Any], parameters: Any, *args: float) -> Any:
        given: Iterable[torch.Tensor] = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        self._clipped = list(given)
        try:
            return clip(list(self._clipped), *args)
        finally:
            self._clipped = []

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save all states, the scaler's among them."""
        if self._iteration is not None:
            self._iteration.end()
        return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load all states, the scaler's among them: torch's or mpamp's."""
        if self._iteration is not None:
            self._iteration.end()
        return super().load_state(*args, **kwargs)


class _SteppedOptimizer(AcceleratedOptimizer):
    """What ``prepare`` makes of an optimizer: it steps by mpamp's scaler, which knows whether it skipped."""

    iteration: Iteration
    all: list[AcceleratedOptimizer]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step by the scaler, if this is a step at which gradients are whole."""
        if self.gradient_state.sync_gradients:
            args = () if closure is None else (closure,)
            self.iteration.step(self.optimizer, *args, is_only=len(self.all) == 1)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. Only with a fused optimizer does asking wait for the device."""
        return self.scaler.last_step_skipped(self.optimizer)  # type: ignore[no-any-return]
