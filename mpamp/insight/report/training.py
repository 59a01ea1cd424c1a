"""How a script trains, as far as it goes against mixed precision: what is seen at its optimizers, clips and passes."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...engine.compiling import left_to_python
from ...patching import Patches
from ...torch_internals import current_graph_task_id

__all__ = ["Training", "TrainingWatch"]

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_HALF = {torch.float16, torch.bfloat16}
_LOOKS = 3
"""Some optimizers make their float32 copies in the first step."""
_IN_STATE = ("master", "master_param", "master_params")
"""Where optimizers hold float32 copies of their weights."""


@dataclass(slots=True)
class Training:
    """What goes against mixed precision, and how often it was seen."""

    clipped_scaled: dict[str, float] = field(default_factory=dict)
    """Functions that clipped gradients which an optimizer then took as scaled ones, and the largest scale of them."""
    passes_in_regions: int = 0
    """Backward passes that began in a region."""
    steps_in_regions: int = 0
    """Optimizers' steps that were made in a region."""
    low_weights: dict[str, int] = field(default_factory=dict)
    """Weights in lower precision that an optimizer updates itself, in elements by dtype."""


class TrainingWatch:
    """Looks at optimizers, clips and backward passes; nothing waits for a device but a clip of scaled gradients."""

    def __init__(self) -> None:
        self.found = Training()
        self._scaler: Any = None
        """Of a loss that was scaled since the last update."""
        self._unscaled: set[int] = set()
        """The parameters of optimizers whose gradients were unscaled since."""
        self._clipped: dict[int, str] = {}
        """By a parameter: the function that clipped its scaled gradient."""
        self._optimizers: WeakKeyDictionary[Any, tuple[int, dict[torch.dtype, int]]] = WeakKeyDictionary()
        """How often an optimizer was looked at, and its weights in lower precision, in elements."""

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look inside."""
        patches = Patches()
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._steps(optimizer))
        try:
            patches.wrap(torch.autograd, "backward", functools.partial(_before, self._pass))
            for name in _CLIPS:
                original = getattr(torch.nn.utils, name, None)
                for module in _holders(name, original):
                    patches.wrap(module, name, functools.partial(self._clip, name))
            yield
        finally:
            hook.remove()
            patches.undo()

    # -- What scalers do ---------------------------------------------------------------------------

    def scaled(self, scaler: Any) -> None:
        """A loss is scaled."""
        self._scaler = scaler

    def unscaled(self, optimizer: Any) -> None:
        """An optimizer's gradients are about to be unscaled: those that were clipped were so too early."""
        self._look_at(optimizer)
        params = _ids(optimizer)
        early = {name for number, name in self._clipped.items() if number in params}
        scale = float(self._scaler.get_scale()) if early and self._scaler is not None else 1.0
        if scale != 1.0:
            clipped = self.found.clipped_scaled
            clipped.update({name: max(scale, clipped.get(name, 0.0)) for name in early})
        self.were_unscaled(optimizer)

    def were_unscaled(self, optimizer: Any) -> None:
        """An optimizer's gradients were unscaled, now or before: of clips until now nothing can be said."""
        params = _ids(optimizer)
        self._clipped = {number: name for number, name in self._clipped.items() if number not in params}
        self._unscaled |= params

    def updated(self) -> None:
        """The scale is updated: an iteration is over."""
        self._scaler = None
        self._unscaled.clear()
        self._clipped.clear()

    # -- What the script does ----------------------------------------------------------------------

    def _clip(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @left_to_python
        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if self._scaler is None or _only_measures(args, kwargs):
                return original(parameters, *args, **kwargs)
            note = functools.partial(self._note_clip, name)
            if isinstance(parameters, Tensor):
                note(parameters)
                return original(parameters, *args, **kwargs)
            if isinstance(parameters, list | tuple):
                for param in parameters:
                    note(param)
                return original(parameters, *args, **kwargs)
            return original((param for param in parameters if note(param) is None), *args, **kwargs)

        return clip

    def _note_clip(self, name: str, param: Tensor) -> None:
        if param.grad is not None and id(param) not in self._unscaled:
            self._clipped[id(param)] = name

    def _pass(self, tensors: Any, *_: Any, **__: Any) -> None:
        if current_graph_task_id() != -1:
            return  # one in another, as a checkpoint's
        first = next((t for t in ([tensors] if isinstance(tensors, Tensor) else tensors)), None)
        self.found.passes_in_regions += first is not None and _is_lowered(first.device.type)

    def _steps(self, optimizer: Any) -> None:
        params = self._look_at(optimizer)
        self.found.steps_in_regions += bool(params) and _is_lowered(params[0].device.type)

    def _look_at(self, optimizer: Any) -> list[Tensor]:
        """Look at an optimizer's weights, in its first steps; return those that have gradients."""
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        looks, low = self._optimizers.get(optimizer, (0, {}))
        if params and looks < _LOOKS:
            low = dict.fromkeys({p.dtype for p in params} & _HALF, 0)
            for param in params:
                if param.dtype in low:
                    low[param.dtype] += param.numel()
            self._optimizers[optimizer] = (looks + 1, {} if _has_masters(optimizer) else low)
            self.found.low_weights = {}
            for _, weights in self._optimizers.values():
                for dtype, count in weights.items():
                    name = str(dtype).removeprefix("torch.")
                    self.found.low_weights[name] = self.found.low_weights.get(name, 0) + count
        return params


def _ids(optimizer: Any) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _only_measures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    limit = kwargs.get("max_norm", kwargs.get("clip_value", args[0] if args else None))
    return isinstance(limit, float) and math.isinf(limit)


def _before(listener: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    @left_to_python
    @functools.wraps(original)
    def listened(*args: Any, **kwargs: Any) -> Any:
        listener(*args, **kwargs)
        return original(*args, **kwargs)

    return listened


def _holders(name: str, function: Any) -> list[Any]:
    """Return the modules that have a function by its name: those of torch, and who has imported it."""
    found = [module for module in list(sys.modules.values()) if isinstance(module, type(sys))]
    return [] if function is None else [module for module in found if vars(module).get(name) is function]


def _is_lowered(device_type: str) -> bool:
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return False
    return torch.get_autocast_dtype(device_type) in _HALF


def _has_masters(optimizer: Any) -> bool:
    """Tell whether an optimizer has float32 copies of its weights, or rounds in a way that keeps small updates."""
    if getattr(optimizer, "master_weights", False) or getattr(optimizer, "bf16_stochastic_round", False):
        return True
    return any(name in state for state in optimizer.state.values() if isinstance(state, dict) for name in _IN_STATE)
