"""What mpamp's precision plugins for Lightning do, whichever of its packages their other base class is from."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import LBFGS

from ..engine.casts.cache import clear_cache
from ..regions.region import Region, autocast
from ..rules.optable import OpTable
from ..scaler import GradScaler
from ..scaler.config import device_type_of
from .iteration import Iteration

__all__ = ["FabricPart", "TrainerPart"]

LIGHTNINGS_NAMES = ("MixedPrecision", "FSDPPrecision")
"""Keys of a checkpoint under which Lightning's own plugins leave a scaler's state: the names of their classes."""

if TYPE_CHECKING:
    from lightning.pytorch.plugins import MixedPrecision
else:
    MixedPrecision = object


class _Part(MixedPrecision):
    """A region, and a scaler for float16, on the device that the model is on."""

    _integration, _other = "lightning", "pytorch_lightning"

    def __init__(
        self,
        precision: str,
        device: str | torch.device | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        ops: Mapping[str, Any] | OpTable | None = None,
        persistent_cache: bool = False,
    ) -> None:
        self._asked = None if device is None else device_type_of(device)
        self._scaler: torch.amp.GradScaler | None = None
        self._iteration: Iteration | None = None
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._regions: dict[str, Region] = {}
        self._ops = ops
        self._persistent_cache = persistent_cache
        super().__init__(precision, "cpu", scaler)  # Lightning checks them; the device is known later
        self.scaler = scaler
        if self._asked is not None:
            self.forward_context()  # what it can't be made of is an error here rather than in the first step

    def __str__(self) -> str:
        """Say whose plugin it is: the other packages of Lightning's refuse it, and print it."""
        return (
            f"{type(self).__name__} of mpamp.integrations.{self._integration}, which is for other packages of "
            f"Lightning's than mpamp.integrations.{self._other}"
        )

    @property
    def device(self) -> str:
        """The device type of the region: what was asked for, else where the model's parameters are."""
        if self._asked is not None:
            return self._asked
        module = None if self._module is None else self._module()
        tensors = () if module is None else itertools.chain(module.parameters(), module.buffers())
        tensor = next((tensor for tensor in tensors if not tensor.is_meta), None)
        return device_type_of(None) if tensor is None else tensor.device.type

    @device.setter
    def device(self, device: str) -> None:
        """Take no notice of what Lightning's constructor sets."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The scaler, made when it is first needed; None in bfloat16."""
        if self._scaler is None and self.precision == "16-mixed":
            self.scaler = GradScaler(self.device)
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._iteration = None if scaler is None else Iteration(scaler)

    @property
    def iteration(self) -> Iteration | None:
        """What the scaler does in this iteration; None in bfloat16."""
        return None if self.scaler is None else self._iteration

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Take note of the model: the region is for its device."""
        self._module = weakref.ref(module)
        return module

    def forward_context(self) -> Region:
        """Return the region."""
        return self.autocast_context_manager()

    def autocast_context_manager(self) -> Region:
        """Return the region, made when it is first needed."""
        device = self.device
        region = self._regions.get(device)
        if region is None:
            dtype = torch.float16 if self.precision == "16-mixed" else torch.bfloat16
            region = autocast(device, dtype, ops=self._ops, persistent_cache=self._persistent_cache)
            self._regions[device] = region
        return region

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        if self.iteration is not None:
            self.iteration.end()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a scaler's state, mpamp's or torch's."""
        super().load_state_dict(state_dict)
        if self.scaler is not None:
            self._iteration = Iteration(self.scaler)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": None}  # another process has a model of its own


class FabricPart(_Part):
    """The precision plugin for a Fabric: its models' calls in a region of mpamp's; in float16 with mpamp's scaler.

    As Fabric's own plugin it casts a model's floating inputs to the lower dtype, and its outputs back, and moves the
    scale after each optimizer's step. The scaler's state is saved where it is part of what is saved:
    ``fabric.save(path, {"model": model, "precision": plugin})``.

    Args:
        precision: ``"bf16-mixed"``, or ``"16-mixed"``: float16, on the processor too.
        device: The region's device type. None: where the parameters of the model last set up are.
        scaler: For float16. None: ``mpamp.GradScaler()``.
        ops: Rules of the region, as of ``mpamp.autocast``.
        persistent_cache: Whether casts of weights outlive a region, as of ``mpamp.autocast``.

    Raises:
        ValueError: ``precision`` is another, or a scaler is given for bfloat16.
        UnknownDeviceError, UnsupportedDtypeError, OpTableError: As ``mpamp.autocast``; of the region that is made
            here if ``device`` is given, else at the first step.
    """

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step by the scaler, if there is one."""
        if self.iteration is None or isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, **kwargs)
        return self.iteration.step(optimizer, is_only=True, **kwargs)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale, of fused optimizers too, and once where gradients are clipped twice."""
        if self.iteration is not None:
            self.iteration.unscale_(optimizer)


class TrainerPart(_Part):
    """The precision plugin for a Trainer: every step in a region of mpamp's; in float16 with mpamp's scaler.

    It resumes checkpoints of Lightning's own ``MixedPrecision``, and that resumes checkpoints of this.

    Args:
        precision: ``"bf16-mixed"``, or ``"16-mixed"``: float16, on the processor too.
        device: The region's device type. None: where the model's parameters are.
        scaler: For float16. None: ``mpamp.GradScaler()``.
        ops: Rules of the region, as of ``mpamp.autocast``.
        persistent_cache: Whether casts of weights outlive a region, as of ``mpamp.autocast``.

    Raises:
        ValueError: ``precision`` is another.
        MisconfigurationException: A scaler is given for bfloat16.
        UnknownDeviceError, UnsupportedDtypeError, OpTableError: As ``mpamp.autocast``; of the region that is made
            here if ``device`` is given, else at the first step.
    """

    _stage: str | None = None

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Take note of the model, at the begin of every run."""
        self._note("setup")
        return super().convert_module(module)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Scale the loss."""
        if self.iteration is not None:
            self.iteration.end()
        return super().pre_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, let Lightning's hooks look at and clip the gradients, and step by the scaler."""
        if self.iteration is None or isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        is_left_out = result is None and model.automatic_optimization  # training_step returned None
        if not is_left_out:
            self.iteration.unscale_(optimizer)
        self._after_closure(model, optimizer)
        if is_left_out:
            return result
        is_only = model.automatic_optimization or len(model.trainer.optimizers) == 1
        return self.iteration.step(optimizer, is_only=is_only, **kwargs)

    def clip_gradients(
        self, optimizer: torch.optim.Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip unscaled gradients: of fused optimizers, and where manual optimization asks before the step, too."""
        if clip_val > 0 and self.iteration is not None and isinstance(self.scaler, GradScaler):
            self.iteration.unscale_(optimizer)
        self._clip(optimizer, clip_val, gradient_clip_algorithm)

    def _clip(self, optimizer: torch.optim.Optimizer, *args: float | str) -> None:
        raise NotImplementedError  # the plugin's: Lightning's own, of a precision that scales nothing

    def train_step_context(self) -> Region:
        """Return the region for a training step."""
        self._note("train")
        return self.forward_context()

    def val_step_context(self) -> Region:
        """Return the region for a validation step."""
        self._note("validate")
        return self.forward_context()

    def test_step_context(self) -> Region:
        """Return the region for a test step."""
        self._note("test")
        return self.forward_context()

    def predict_step_context(self) -> Region:
        """Return the region for a prediction step."""
        self._note("predict")
        return self.forward_context()

    def _note(self, stage: str) -> None:
        """Drop casts that outlive a region where Lightning's callbacks may have swapped weights by their ``.data``."""
        if stage != self._stage and self._persistent_cache:
            clear_cache()
        self._stage = stage

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the scaler's state where Lightning's own plugin looks for it."""
        state = checkpoint.pop(type(self).__qualname__, None)
        if state is not None:
            checkpoint[LIGHTNINGS_NAMES[0]] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load a scaler's state of Lightning's own plugins, or of this one."""
        state = next((checkpoint[name] for name in LIGHTNINGS_NAMES if name in checkpoint), None)
        if state:
            self.load_state_dict(state)
