"""What a scaler is made from: the constructor's arguments, checked."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..devices.registry import device_state
from ..errors import ScalerSettingError
from ..plugins.backend import TorchNativeBackend
from .state import MAX_SCALE, MIN_SCALE, ScaleState, check_count, check_number, check_scale

__all__ = ["ScalerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerConfig:
    """The arguments of one scaler, checked and with the device resolved; what ``mpamp_make_scaler`` is given.

    Attributes:
        device: The device type, such as ``"xpu"``.
        others: As the arguments of ``GradScaler``; ``min_scale`` and ``max_scale`` are numbers if it is enabled.

    Raises:
        ScalerSettingError: An argument that can't be; the message names it. A disabled scaler's are not looked at.
        UnknownDeviceError: No backend covers the device.

    Example:
        >>> ScalerConfig(device="cpu", init_scale=1024).arguments()["init_scale"]
        1024.0
    """

    device: str | torch.device | None = None
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    min_scale: float | None = None
    max_scale: float | None = None
    max_consecutive_skips: int | None = 100
    error_on_max_skips: bool = False
    allow_fp16_grads: bool = False
    process_group: Any = None
    history_size: int = 1024

    def __post_init__(self) -> None:
        self._set("device", device_type_of(self.device))
        self._set("enabled", bool(self.enabled))
        if self.enabled:
            self._check_scales()
            self._check_options()

    def _check_scales(self) -> None:
        init = check_scale("init_scale", self.init_scale)
        low = min(MIN_SCALE, init) if self.min_scale is None else check_scale("min_scale", self.min_scale)
        high = max(MAX_SCALE, init) if self.max_scale is None else check_scale("max_scale", self.max_scale)
        if low > high:
            raise ScalerSettingError(f"min_scale ({low:g}) is greater than max_scale ({high:g}).")
        self._set("init_scale", check_scale("init_scale", init, least=low, most=high))
        self._set("min_scale", low)
        self._set("max_scale", high)
        growth = check_number("growth_factor", self.growth_factor)
        backoff = check_number("backoff_factor", self.backoff_factor)
        if growth <= 1:
            raise ScalerSettingError(
                f"growth_factor must be greater than 1, got {growth:g}; set_growth_factor(1.0) stops the growth."
            )
        if backoff >= 1:
            raise ScalerSettingError(
                f"backoff_factor must be less than 1, got {backoff:g}; set_backoff_factor(1.0) stops the fall."
            )
        self._set("growth_factor", growth)
        self._set("backoff_factor", backoff)
        self._set("growth_interval", check_count("growth_interval", self.growth_interval))

    def _check_options(self) -> None:
        for name in ("error_on_max_skips", "allow_fp16_grads"):
            if not isinstance(getattr(self, name), bool):
                raise ScalerSettingError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.max_consecutive_skips is not None:
            self._set("max_consecutive_skips", check_count("max_consecutive_skips", self.max_consecutive_skips))
        self._set("history_size", check_count("history_size", self.history_size, least=0))
        if self.process_group is not None and not _is_process_group(self.process_group):
            raise ScalerSettingError(
                f"process_group must be a torch.distributed.ProcessGroup or None, got {self.process_group!r}."
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name, for a constructor that takes the same ones."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def state(self) -> ScaleState:
        """Return the state that an enabled scaler starts in."""
        low, high = self.min_scale, self.max_scale
        assert low is not None
        assert high is not None
        return ScaleState(self.init_scale, 0, self.growth_factor, self.backoff_factor, self.growth_interval, low, high)

    def is_on_this_machine(self) -> bool:
        """Tell whether the device is here. Devices that torch alone knows are taken to be, as torch takes them."""
        backend = device_state(str(self.device)).backend
        return isinstance(backend, TorchNativeBackend) or backend.is_available()


def device_type_of(device: Any) -> str:
    """Return the device type of an argument; None is the current accelerator, or the processor without one.

    Raises:
        ScalerSettingError: It is neither a str, a torch.device nor None.
        UnknownDeviceError: No backend covers it.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if accelerator is None else accelerator
    if not isinstance(device, str | torch.device):
        raise ScalerSettingError(f"device must be a str, a torch.device or None, got {device!r}.")
    device_type = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    return device_state(device_type).type


def _is_process_group(value: object) -> bool:
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)


class PluginMadeMeta(ABCMeta):
    """Asks the plugins for the scaler of a device before the class makes its own. Subclasses make their own.

    ``__new__`` can't do it: Python would run ``__init__`` once more on what it returns. It derives from ABCMeta so
    that users' subclasses may have abstract bases beside it.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls._made_by_plugin(args, kwargs) if "_asks_plugins" in vars(cls) else None
        return super().__call__(*args, **kwargs) if made is None else made

    def _made_by_plugin(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.amp.GradScaler | None:
        from ..plugins.manager import manager

        config = ScalerConfig(**cls.__signature__.bind(*args, **kwargs).arguments)
        if not (manager().implementations("mpamp_make_scaler") and config.enabled and config.is_on_this_machine()):
            return None
        kind = torch.amp.GradScaler
        made: torch.amp.GradScaler | None = manager().first(
            "mpamp_make_scaler", kind, f"scalers for {config.device}", device_type=config.device, config=config
        )
        return made
