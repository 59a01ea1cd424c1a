"""Gradient scaling: the scaler, its rule as a pure value, and what it reports."""

from .config import ScalerConfig
from .history import ScaleEvent, ScaleRecord, StepResult
from .scaler import GradScaler
from .state import ScaleState

__all__ = ["GradScaler", "ScaleEvent", "ScaleRecord", "ScaleState", "ScalerConfig", "StepResult"]
