"""``redirect``: what a script puts on a device that isn't here goes to one that is, in the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ..errors import RedirectError
from ..locks import Rank, made
from ..plugins.manager import is_device_type, manager
from ..torch_internals import forget_traced_names
from .autocasting import redirect_autocast, serve_regions
from .namespaces import redirect_namespaces
from .parallel import redirect_parallel
from .patches import Patches
from .sharding import redirect_sharding
from .target import Target
from .tensors import redirect_tensors

__all__ = ["install", "redirect", "resume", "uninstall"]


class _Redirection:
    """What is replaced in torch for one target, while it is in force."""

    def __init__(self, target: Target) -> None:
        self.target, self.patches, self.depth = target, Patches(), 0

    def begin(self) -> None:
        try:
            for replace in (
                redirect_tensors,
                redirect_autocast,
                redirect_parallel,
                redirect_sharding,
                redirect_namespaces,
            ):
                replace(self.patches, self.target)
            serve_regions(self.target, is_on=True)
            forget_traced_names()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        serve_regions(self.target, is_on=False)
        self.patches.undo()
        forget_traced_names()


_lock = made(Rank.INSTALLING)
_active: list[_Redirection] = []
"""At most one."""


def install(device: str | torch.device) -> None:
    """Send every way of naming an absent device to ``device``, in every thread, until ``uninstall``.

    Called again for the same device it counts, and as many calls of ``uninstall`` end it.

    Raises:
        RedirectError: Another device is being served, or this one isn't on this machine.
    """
    device = torch.device(device)
    with _lock:
        if not _active:
            target = Target(device)
            if not target.backend.is_available():
                raise RedirectError(f"there is no {device.type} device on this machine to send things to.")
            _begin(target)
        elif _active[0].target.device != device:
            raise RedirectError(
                f"what is meant for an absent device goes to {str(_active[0].target.device)!r} already; "
                f"{str(device)!r} was asked for. Call mpamp.redirect.uninstall() first."
            )
        _active[0].depth += 1


def resume(device: str, absent: Iterable[str]) -> None:
    """Do in a child process what ``install`` did in the one that started it.

    It is called while torch is being imported, where a thread that runs torch would wait for this one for ever: so
    nothing is found out again, no kernel is run and no plugin loaded, but for one that torch has the device's name of.

    Args:
        device: Where things go, as in the other process.
        absent: The device types that were absent there.
    """
    name = device.partition(":")[0]
    if not is_device_type(name):
        manager().backend(name)
    with _lock:
        if not _active:
            _begin(Target(torch.device(device), absent))
        _active[0].depth += 1


def _begin(target: Target) -> None:
    redirection = _Redirection(target)
    redirection.begin()
    _active.append(redirection)


def uninstall() -> None:
    """End what ``install`` began: torch's names are what they were. Does nothing where nothing is installed."""
    with _lock:
        if not _active:
            return
        _active[0].depth -= 1
        if _active[0].depth == 0:
            _active.pop().end()


@contextlib.contextmanager
def redirect(device: str | torch.device) -> Iterator[None]:
    """Send every way of naming an absent device to ``device`` in the block, in every thread.

    Enter it before the script imports anything that keeps functions of torch (``from torch import zeros``).

    Raises:
        RedirectError: Another device is being served, or this one isn't on this machine.

    Example:
        >>> with redirect("cpu"):
        ...     print(torch.ones(1).to("cpu").device)
        cpu
    """
    install(device)
    try:
        yield
    finally:
        uninstall()
