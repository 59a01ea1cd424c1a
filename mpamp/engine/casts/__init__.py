"""The casts of weights that are kept: what is kept, when it counts, and what drops it."""
