"""What tests of mixed precision need: counters of casts and of kernels."""

from mpamp.testing.counting import KernelCounter, WeightCastCounter

__all__ = ["KernelCounter", "WeightCastCounter"]
