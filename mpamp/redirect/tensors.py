"""Tensors, storages, modules and factories: every way of saying where something goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..torch_internals import StorageBase, device_constructors, device_context
from .classes import stand_in
from .patches import Patches
from .target import Target

__all__ = ["redirect_tensors"]

Wrap = Callable[..., Any]
_METHODS = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "normal")
_UNLISTED = ("sparse_coo_tensor", "from_file")


def redirect_tensors(patches: Patches, target: Target) -> None:
    """Have tensors that are meant for an absent device made on the present one, and moved to it."""
    for owner, name in _factories():
        patches.wrap(owner, name, lambda original: _with_device(original, target))
    for name in _METHODS:
        patches.wrap(torch.Tensor, name, lambda original: _with_device(original, target))
    for owner in (torch.Tensor, torch.nn.Module, torch.nn.utils.rnn.PackedSequence):
        patches.wrap(owner, "to", lambda original: _with_first(original, target, 1))
    patches.wrap(StorageBase, "to", lambda original: _with_device(original, target))
    for name in target.absent:
        _redirect_moves(patches, target, name)
    _redirect_types(patches, target)
    _redirect_defaults(patches, target)
    _redirect_loading(patches, target)
    if not target.is_accelerator:
        _redirect_host_memory(patches, target)


def _factories() -> Iterator[tuple[Any, str]]:
    # torch asks this function which of its own make tensors, and remembers: it must see them before they are replaced.
    makers = device_constructors()
    for owner in (torch, torch.fft, torch.nested):
        yield from ((owner, name) for name, value in list(vars(owner).items()) if _is_one_of(value, makers))
    known = {name for name, value in vars(torch).items() if _is_one_of(value, makers)}
    yield from ((torch, name) for name in (*_LIKE, *_UNLISTED) if name not in known)


def _is_one_of(value: Any, functions: Any) -> bool:
    return callable(value) and value.__hash__ is not None and value in functions


def _with_device(original: Wrap, target: Target) -> Wrap:
    present = target.present

    def function(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = present(kwargs["device"])
        if "pin_memory" in kwargs and not target.is_accelerator:
            del kwargs["pin_memory"]
        return original(*args, **kwargs)

    return function


def _with_first(original: Wrap, target: Target, place: int) -> Wrap:
    """Return a function whose argument at ``place``, or by the name ``device``, is present."""
    present = target.present

    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args = (*args[:place], present(args[place]), *args[place + 1 :])
        if "device" in kwargs:
            kwargs["device"] = present(kwargs["device"])
        return original(*args, **kwargs)

    return function


def _redirect_moves(patches: Patches, target: Target, name: str) -> None:
    """Replace ``tensor.<name>()``, ``module.<name>()``, ``storage.<name>()`` and ``is_<name>``."""
    device = target.device

    def move(tensor: Any, _device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        return tensor.to(device=device, non_blocking=non_blocking, **kwargs)

    def move_module(module: Any, device: Any = None) -> Any:
        return module._apply(lambda tensor: move(tensor))

    def move_storage(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
        return storage.to(device=target.device, non_blocking=non_blocking)

    patches.wrap(torch.Tensor, name, lambda _: move)
    patches.wrap(torch.nn.Module, name, lambda _: move_module)
    patches.wrap(torch.nn.utils.rnn.PackedSequence, name, lambda _: move)
    patches.wrap(StorageBase, name, lambda _: move_storage)
    if name == target.absent[0] and hasattr(torch.Tensor, f"is_{name}"):  # the one that says it is available
        patches.put(torch.Tensor, f"is_{name}", property(target.is_here))


# -- torch.<device>.FloatTensor, and its name ----------------------------------------------------------


def _redirect_types(patches: Patches, target: Target) -> None:
    absent = target.absent
    home = "torch." if not target.is_accelerator else f"torch.{target.device.type}."

    def here(kind: Any) -> Any:
        for name in absent if isinstance(kind, str) else ():
            if kind.startswith(f"torch.{name}."):
                return home + kind.removeprefix(f"torch.{name}.")
        return kind

    def typed(original: Wrap) -> Wrap:
        def type_(tensor: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
            if dtype is not None:
                return original(tensor, here(dtype), non_blocking, **kwargs)
            name = original(tensor)
            if any(isinstance(name, str) and name.startswith(f"torch.{other}.") for other in absent):
                return name  # of a subclass, for which torch asks this function again
            is_said = bool(absent) and isinstance(name, str) and target.is_here(tensor) and name.startswith(home)
            return f"torch.{absent[0]}.{name.removeprefix(home)}" if is_said else name

        return type_

    patches.wrap(torch.Tensor, "type", typed)
    patches.wrap(torch, "set_default_tensor_type", lambda original: lambda kind: original(here(kind)))
    own = torch if not target.is_accelerator else torch.get_device_module(target.device)
    for module in (getattr(torch, name) for name in absent):
        for name in vars(module).copy():
            if name.endswith(("Tensor", "Storage")) and hasattr(own, name):
                patches.put(module, name, getattr(own, name))


# -- Defaults, generators, loading ---------------------------------------------------------------------


def _redirect_defaults(patches: Patches, target: Target) -> None:
    device_class: Any = torch.device
    generator_class: Any = torch.Generator

    def device(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int and target.accelerator is None and target.absent:
            return device_class(target.absent[0], args[0])
        return device_class(*args, **kwargs)

    def generator(device: Any = "cpu") -> Any:
        return generator_class(device=target.present(device))

    patches.put(torch, "device", stand_in(torch.device, device))
    patches.put(torch, "Generator", stand_in(torch.Generator, generator))
    patches.wrap(torch, "set_default_device", lambda original: lambda device: original(target.present(device)))
    patches.wrap(device_context(), "__init__", lambda original: _with_first(original, target, 1))


def _redirect_loading(patches: Patches, target: Target) -> None:
    def placed(original: Wrap) -> Wrap:
        def default_restore_location(storage: Any, location: Any) -> Any:
            return original(storage, str(target.present(location)))

        return default_restore_location

    def loaded(original: Wrap) -> Wrap:
        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            location = target.device if map_location is None else target.present(map_location)
            return original(f, location, *args, **kwargs)

        return load

    patches.wrap(torch.serialization, "default_restore_location", placed)
    patches.wrap(torch.jit, "load", loaded)


# -- What has no meaning beside an accelerator ---------------------------------------------------------


def _redirect_host_memory(patches: Patches, target: Target) -> None:
    def get_device(original: Wrap) -> Wrap:
        return lambda tensor: 0 if target.is_here(tensor) else original(tensor)

    def loader(original: Wrap) -> Wrap:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.pin_memory, self.pin_memory_device = False, ""

        return __init__

    patches.wrap(torch.Tensor, "get_device", get_device)
    patches.wrap(torch, "get_device", get_device)
    patches.wrap(torch.Tensor, "pin_memory", lambda _: lambda tensor, device=None: tensor)
    patches.wrap(torch.Tensor, "record_stream", lambda _: lambda tensor, stream: None)
    patches.wrap(torch.utils.data.DataLoader, "__init__", loader)
