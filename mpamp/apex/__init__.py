"""A drop-in for apex.amp: ``from mpamp.apex import amp``, or ``install`` for scripts that import apex."""

from .errors import DeprecatedFeatureWarning
from .install import install, uninstall

__all__ = ["DeprecatedFeatureWarning", "install", "uninstall"]
