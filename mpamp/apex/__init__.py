"""A drop-in for apex.amp: ``from mpamp.apex import amp``."""

from .errors import DeprecatedFeatureWarning

__all__ = ["DeprecatedFeatureWarning"]
