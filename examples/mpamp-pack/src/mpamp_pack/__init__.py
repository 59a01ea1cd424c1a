"""A library of ops, and how they are cast."""

from .library import entropy, join, scores

__all__ = ["entropy", "join", "scores"]
