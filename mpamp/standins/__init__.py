"""mpamp under torch's own names, for the whole process and the ones it starts: ``install`` and ``uninstall``."""

from .installing import Installation, install, uninstall
from .rules import use_table

__all__ = ["Installation", "install", "uninstall", "use_table"]
