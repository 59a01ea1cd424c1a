"""Regions: entered and left, carried to other threads, into backward passes and into programs that are compiled."""
