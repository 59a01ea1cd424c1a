"""Scripts written for a device that isn't on this machine, run on another: ``redirect``, ``install``, ``advice``."""

from .redirection import install, redirect, uninstall
from .refusals import advice

__all__ = ["advice", "install", "redirect", "uninstall"]
