"""State dicts of models that were cast: float32 entries that, as torch's own do, write into the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import DisableTorchFunctionSubclass, tree_leaves, tree_map
from .masters import LOW, Master, adopt, is_ahead, keep, master_of, write_back

__all__ = ["Entry", "follow_state_dicts"]


class Entry(Tensor):
    """A state dict's float32 values of a lower-precision tensor; what is written into it goes into that tensor too.

    It shares memory with the tensor's master. Copies, pickles and what is computed from it are plain tensors; views
    of it write through as it does.
    """

    model: Tensor
    master: Master

    @staticmethod
    def of(values: Tensor, model: Tensor, master: Master) -> Entry:
        """Return ``values``, which are the master's memory, as an entry for ``model``."""
        with DisableTorchFunctionSubclass():
            entry = values.detach().as_subclass(Entry)
            entry.model, entry.master = model, master
        return entry

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            entries = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Entry)]
            versions = [entry._version for entry in entries]
            result = func(*args, **kwargs)
            for entry, version in zip(entries, versions, strict=True):
                if entry._version != version:
                    keep(entry.model, entry.master)
                    write_back([(entry.model, entry.master)])
            by_memory = {entry.untyped_storage()._cdata: entry for entry in entries}
            return tree_map(lambda value: _linked(value, by_memory), result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        plain = _plain(self)
        copied: Tensor = plain.__deepcopy__(memo)
        del memo[id(plain)]  # another object will have this id
        return copied

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        text: str = _plain(self).__repr__(**options)
        return text


def _plain(entry: Tensor) -> Tensor:
    with DisableTorchFunctionSubclass():
        plain = entry.detach().as_subclass(Tensor)
        is_param = getattr(entry, "_is_param", False)  # load_state_dict(..., assign=True) makes it one
        return nn.Parameter(plain, entry.requires_grad) if is_param else plain


def _linked(value: Any, by_memory: dict[int, Entry]) -> Any:
    if type(value) is not Tensor:
        return value
    entry = by_memory.get(value.untyped_storage()._cdata)
    if entry is None:
        return value
    linked = value.as_subclass(Entry)
    linked.model, linked.master = entry.model, entry.master
    return linked


def follow_state_dicts(model: nn.Module) -> list[Any]:
    """Have a model's state dicts hold float32, with masters' own values, and loading one set the masters.

    Returns:
        The handles that take it back.
    """
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_state_dict_post_hook(_widen))
        handles.append(module.register_load_state_dict_pre_hook(_see_loaded))
        handles.append(module.register_load_state_dict_post_hook(_take_loaded))
    return handles


def _own(module: nn.Module) -> dict[str, Tensor | None]:
    return {**module._parameters, **module._buffers}


def _widen(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, tensor in _own(module).items():
        value = state_dict.get(prefix + name)
        if tensor is not None and isinstance(value, Tensor) and value.dtype in LOW:
            state_dict[prefix + name] = _entry(tensor)


def _entry(tensor: Tensor) -> Entry:
    master = master_of(tensor)
    if master is None:
        master = Master(tensor)  # kept from the first write on
    else:
        adopt(tensor, master)
        if is_ahead(master):
            write_back([(tensor, master)])
    return Entry.of(master.weight, tensor, master)


def _see_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, tensor in _own(module).items():
        master = None if tensor is None else master_of(tensor)
        if master is not None:
            master.loaded = state_dict.get(prefix + name)


@torch.no_grad()
def _take_loaded(module: nn.Module, incompatible_keys: Any) -> None:
    for tensor in _own(module).values():
        master = None if tensor is None else master_of(tensor)
        if master is None or tensor is None:
            continue
        loaded, master.loaded = master.loaded, None
        if isinstance(loaded, Tensor) and loaded.shape == tensor.shape:
            exact = loaded.detach().to(device=tensor.device, dtype=torch.float32)
            if torch.equal(exact.to(tensor.dtype), tensor.detach()):
                master.weight.copy_(exact)
                write_back([(tensor, master)])
