"""What tests of mixed precision need: counters of casts and of kernels, and the conformance kit for backends."""

from mpamp.testing.conformance import check_backend
from mpamp.testing.conformance_report import Check, ConformanceError, Report
from mpamp.testing.counting import KernelCounter, WeightCastCounter

__all__ = ["Check", "ConformanceError", "KernelCounter", "Report", "WeightCastCounter", "check_backend"]
