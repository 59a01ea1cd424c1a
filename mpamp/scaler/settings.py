"""What a scaler is set to, and how that is changed, saved and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import MpampWarning, ScalerUsageError
from .checkpoint import read_state
from .config import ScalerConfig
from .history import History, ScaleRecord
from .ledger import Ledger
from .outcomes import Outcomes
from .state import ScaleState, check_count, check_number

__all__ = ["ScalerSettings"]


class ScalerSettings(torch.amp.GradScaler):
    """The part of ``GradScaler`` that no gradient passes through."""

    def _set_up(self, config: ScalerConfig) -> None:
        is_enabled = config.enabled
        if is_enabled and not config.is_on_this_machine():
            warnings.warn(
                f"mpamp.GradScaler is enabled for {config.device!r}, which is not available.  Disabling.",
                MpampWarning,
                stacklevel=4,
            )
            is_enabled = False
        arguments = {name: getattr(config, name) for name in ("init_scale", "growth_factor", "backoff_factor")}
        super().__init__(str(config.device), **arguments, growth_interval=config.growth_interval, enabled=is_enabled)
        # torch's scaler leaves these out if it is disabled, and its getters then fail.
        self._growth_factor, self._backoff_factor = config.growth_factor, config.backoff_factor
        self._growth_interval = config.growth_interval
        self._min_scale, self._max_scale = config.min_scale, config.max_scale
        self._max_consecutive_skips = config.max_consecutive_skips
        self._error_on_max_skips = config.error_on_max_skips
        self._allow_fp16_grads = config.allow_fp16_grads
        self.process_group = config.process_group
        """The ranks that step and skip together, or None."""
        self._history = History(config.history_size if is_enabled else 0)
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Make what belongs to this process and is not saved."""
        self._ledger = Ledger(getattr(self, "_per_optimizer_states", None))  # a disabled scaler has none
        self._outcomes = Outcomes(self._max_consecutive_skips, self._history)

    @property
    def state(self) -> ScaleState:
        """The scale and its rule as a value; waits for the device."""
        if not self._enabled:
            raise ScalerUsageError("a disabled GradScaler has no state; ask is_enabled() first.")
        return self._state(self.get_scale(), self._get_growth_tracker())

    def _state(self, scale: float, tracker: int) -> ScaleState:
        assert self._min_scale is not None
        assert self._max_scale is not None
        rule = (self._growth_factor, self._backoff_factor, self._growth_interval)
        # A scale that the user wrote into the tensor may be out of bounds: it is until the next update.
        bounds = (min(self._min_scale, scale), max(self._max_scale, scale))
        return ScaleState(scale, tracker, *rule, *bounds)

    @property
    def history(self) -> list[ScaleRecord]:
        """The last ``history_size`` updates, oldest first; waits for the device.

        Example:
            >>> from mpamp.scaler import GradScaler
            >>> GradScaler("cpu").history
            []
        """
        return self._history.records()

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor; 1.0 keeps the scale from growing.

        Raises:
            ScalerSettingError: It isn't a finite number of at least 1.
        """
        self._growth_factor = check_number("growth_factor", new_factor, least=1.0)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor; 1.0 keeps the scale from falling.

        Raises:
            ScalerSettingError: It isn't in (0, 1].
        """
        self._backoff_factor = check_number("backoff_factor", new_factor, most=1.0)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval. If as many good updates have passed already, the scale grows after the next.

        Raises:
            ScalerSettingError: It isn't an integer of at least 1.
        """
        self._growth_interval = check_count("growth_interval", new_interval)
        if self._enabled:
            self._init_growth_tracker = min(self._init_growth_tracker, self._growth_interval - 1)
            if self._growth_tracker is not None:
                self._growth_tracker.clamp_(max=self._growth_interval - 1)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a GradScaler, torch's or mpamp's, or of ``apex.amp``; nothing if this one is disabled.

        A scale out of ``[min_scale, max_scale]`` is moved into it, with a warning.

        Raises:
            ScalerStateError: It is no such state, or a corrupt one; the scaler is as before then.

        Example:
            >>> from mpamp.scaler import GradScaler
            >>> scaler = GradScaler("cpu")
            >>> scaler.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}})
            >>> scaler.get_scale()
            1024.0
        """
        if not self._enabled:
            return
        state = read_state(state_dict, self._state(self._init_scale, 0))
        self._init_scale, self._init_growth_tracker = state.scale, state.growth_tracker
        self._growth_factor, self._backoff_factor = state.growth_factor, state.backoff_factor
        self._growth_interval = state.growth_interval
        if self._scale is not None:
            self._scale.fill_(state.scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(state.growth_tracker)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise ScalerUsageError(
                "a GradScaler with a process_group can't be pickled or copied; save its state_dict() instead."
            )
        state = super().__getstate__()
        for name in ("_ledger", "_outcomes"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_afresh()
