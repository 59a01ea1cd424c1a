"""Writes into weights in random programs: by optimizers, aliases, pointers, storages, swaps, rewraps, other threads."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .weight_lives import Plain, Refused, Step, World, fresh, watched
from .weight_uses import compiled, pick

__all__ = ["RACING", "WRITES"]

Tensor = torch.Tensor
Write = Callable[[Tensor, Tensor], object]
"""Has a weight hold new values."""

WRITES: dict[str, tuple[Step, int]] = {}
"""What a step does, and how often it is picked."""


def step(name: str, often: int = 1) -> Callable[[Step], Step]:
    def register(function: Step) -> Step:
        WRITES[name] = (function, often)
        return function

    return register


def _numpy(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _set_bytes(storage: torch.UntypedStorage, values: Tensor) -> None:
    for number, byte in enumerate(bytes(values.contiguous().numpy().tobytes()[: storage.nbytes()])):
        storage[number] = byte


def _through_memoryview(tensor: Tensor, values: Tensor) -> None:
    view = memoryview(_numpy(tensor))
    np.asarray(view)[...] = values.numpy()


def _has_all(weight: Tensor) -> bool:
    return weight.untyped_storage().nbytes() == weight.nbytes


def _whole(values: Tensor, weight: Tensor) -> torch.UntypedStorage:
    return torch.empty_like(weight, requires_grad=False).copy_(values).untyped_storage()


COUNTED: dict[str, Write] = {
    "copy_": lambda w, v: w.copy_(v),
    "add_": lambda w, v: w.add_(v - w),
    "fill_": lambda w, v: w.fill_(v.flatten()[0].item()),
    "zero_": lambda w, v: w.zero_(),
    "lerp_": lambda w, v: w.lerp_(v, 0.5),
    "clamp_": lambda w, v: w.clamp_(-1, 1),
    "items": lambda w, v: w.__setitem__(slice(1), v[:1]),
    "masked": lambda w, v: w.masked_fill_(v > 0, 1.5),
    "index": lambda w, v: w.index_copy_(0, torch.tensor([1]), v[:1]),
    "out": lambda w, v: torch.add(v, 1, out=w),
    "view": lambda w, v: w.view(-1).copy_(v.flatten()) if w.is_contiguous() else w[0].copy_(v[0]),
    "detach": lambda w, v: w.detach().copy_(v),
    "init": lambda w, v: nn.init.constant_(w, v.flatten()[0].item()),
    "foreach": lambda w, v: torch._foreach_copy_([w], [v]),
    "foreach add": lambda w, v: torch._foreach_add_([w], [v]),
    "foreach lerp": lambda w, v: torch._foreach_lerp_([w], [v], 0.5),
    "fused": lambda w, v: torch._fused_sgd_(
        [w], [v], [], weight_decay=0, momentum=0, lr=1, dampening=0, nesterov=False, maximize=False, is_first_step=True
    ),
    "compiled": lambda w, v: compiled(f"write {w.dim()}", lambda w, v: w.copy_(v))(w, v),
    "inference": lambda w, v: _in_inference(lambda: w.copy_(v)),
    "custom op": lambda w, v: torch.ops.mpamp_lives.write(w, v),
}
ALIASES: dict[str, Write] = {
    "data": lambda w, v: w.data.copy_(v),
    "data add": lambda w, v: w.data.add_(v),
    "part of data": lambda w, v: w.data[1:].mul_(0.5).add_(v[1:]),
    "data's data": lambda w, v: w.data.detach().data.copy_(v),
    "foreach data": lambda w, v: torch._foreach_copy_([w.data], [v]),
    "out data": lambda w, v: torch.mul(v, 2, out=w.data),
    "compiled data": lambda w, v: compiled(f"write data {w.dim()}", lambda w, v: w.data.copy_(v))(w, v),
    "inference data": lambda w, v: _in_inference(lambda: w.data.copy_(v)),
    "numpy": lambda w, v: np.copyto(_numpy(w), v.numpy()),
    "memoryview": _through_memoryview,
    "from_numpy": lambda w, v: torch.from_numpy(_numpy(w)).copy_(v),
    "dlpack": lambda w, v: torch.from_dlpack(w.detach()).copy_(v),
    "storage": lambda w, v: w.untyped_storage().copy_(_whole(v, w)) if _has_all(w) else w.data.copy_(v),
    "bytes": lambda w, v: _set_bytes(w.untyped_storage(), v),
    "typed storage": lambda w, v: w.data.storage().fill_(v.flatten()[0].item()),
    "set from the weight": lambda w, v: torch.empty(0).set_(w.detach()).copy_(v),
    "set from the storage": lambda w, v: torch.empty(0).set_(w.untyped_storage()).fill_(v.flatten()[0].item()),
    "parameter of data": lambda w, v: nn.Parameter(w.data, requires_grad=False).copy_(v),
    "fused data": lambda w, v: COUNTED["fused"](w.data, v),
    "custom op data": lambda w, v: torch.ops.mpamp_lives.write_data(w, v),
}
RACING = [
    *(COUNTED[name] for name in ("copy_", "add_", "view", "foreach", "fused", "inference")),
    *(ALIASES[name] for name in ("data", "foreach data", "part of data", "numpy", "storage", "from_numpy")),
]
"""What threads may do at once."""


@torch.library.custom_op("mpamp_lives::write", mutates_args={"weight"})
def _write(weight: Tensor, values: Tensor) -> None:
    weight.copy_(values)


@torch.library.custom_op("mpamp_lives::write_data", mutates_args=())
def _write_data(weight: Tensor, values: Tensor) -> None:
    weight.data.copy_(values)


def _in_inference(write: Callable[[], object]) -> None:
    with torch.inference_mode():
        write()


@contextlib.contextmanager
def may_be_refused(*texts: str) -> Any:
    """Take torch's word that something can't be done with the weight as it is."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        if any(text in str(error) for text in texts):
            raise Refused from error
        raise


NO_INFERENCE = ("Inference tensor", "inference tensor")


def base_of(module: nn.Module) -> Tensor:
    """Return what can be written of a module's weight: where that is computed, what it is computed of."""
    if parametrize.is_parametrized(module):
        return next(module.parametrizations.weight.parameters())
    return module.weight  # type: ignore[return-value]


@torch.no_grad()
def _write_one(world: World, chance: random.Random, writes: dict[str, Write]) -> None:
    weight = base_of(pick(world, chance))
    write = chance.choice(list(writes.values()))
    with may_be_refused(*NO_INFERENCE):
        write(weight, fresh(chance, weight.shape))


@step("a counted write", 8)
def write_counted(world: World, chance: random.Random) -> None:
    _write_one(world, chance, COUNTED)


@step("a write through an alias", 10)
def write_alias(world: World, chance: random.Random) -> None:
    _write_one(world, chance, ALIASES)


@step("a worker's write", 2)
def write_on_worker(world: World, chance: random.Random) -> None:
    if world.workers:
        writes = chance.choice([COUNTED, ALIASES])
        chance.choice(world.workers).do(lambda: _write_one(world, chance, writes))


# -- What is held ----------------------------------------------------------------------------------------

HELD: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "view": lambda w: w[:],
    "part of data": lambda w: w.data[1:],
    "data of detach": lambda w: w.detach().data,
    "numpy": _numpy,
    "part of an array": lambda w: _numpy(w)[1:],
    "memoryview": lambda w: np.asarray(memoryview(_numpy(w))),
    "from_numpy": lambda w: torch.from_numpy(_numpy(w)),
    "dlpack": lambda w: torch.from_dlpack(w.detach()),
    "NumPy's dlpack": lambda w: np.from_dlpack(w.detach()),
    "parameter": lambda w: nn.Parameter(w.data, requires_grad=False),
    "parameter of the weight": lambda w: nn.Parameter(w, requires_grad=False),
    "set": lambda w: torch.empty(0).set_(w.detach()),
    "set from the storage": lambda w: torch.empty(0).set_(w.untyped_storage(), 0, w.shape, w.stride()),
    "storage": lambda w: w.untyped_storage(),
    "another's data": lambda w: _of_another(w),
    "copied": lambda w: copy.copy(w),
    "pickled by reference": lambda w: w.data.view_as(w),
}


def _of_another(weight: Tensor) -> Tensor:
    other = torch.empty(0)
    other.data = weight.data
    return other


@step("something is handed out", 8)
@torch.no_grad()
def hand_out(world: World, chance: random.Random) -> None:
    weight = base_of(pick(world, chance))
    with may_be_refused(*NO_INFERENCE, "numpy() on a tensor", "Can't export", "can't detach"):
        held = chance.choice(list(HELD.values()))(weight)

    def write(chance: random.Random) -> None:
        if isinstance(held, torch.UntypedStorage):
            if held.nbytes():
                held.copy_(fresh(chance, (held.nbytes() // 4,)).untyped_storage())
        elif isinstance(held, np.ndarray):
            held[...] = fresh(chance, held.shape).numpy()
        else:
            with torch.no_grad(), may_be_refused(*NO_INFERENCE):
                held.copy_(fresh(chance, held.shape))

    world.held.append(write)


@step("a write through what is held", 10)
def write_held(world: World, chance: random.Random) -> None:
    for write in chance.sample(world.held, k=min(2, len(world.held))):
        write(chance)


@step("what is held goes", 2)
def let_go(world: World, chance: random.Random) -> None:
    if world.held:
        world.held.pop(chance.randrange(len(world.held)))
    if chance.random() < 0.2:
        gc.collect()


# -- Optimizers and averages -----------------------------------------------------------------------------


def _optimizer(world: World, chance: random.Random, weights: list[Tensor]) -> torch.optim.Optimizer:
    mode: dict[str, Any] = chance.choice([{"foreach": True}, {"foreach": False}, {"fused": True}])
    kind = chance.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
    return kind(weights, lr=0.5, **mode)  # type: ignore[no-any-return]


@step("an optimizer's step", 8)
def step_optimizer(world: World, chance: random.Random) -> None:
    if not world.optimizers or chance.random() < 0.3:
        weights = [base_of(module) for module in world.modules if base_of(module).is_leaf]
        if not weights or any(w.is_inference() for w in weights):
            raise Refused
        world.optimizers.append((_optimizer(world, chance, weights), weights))
    optimizer, weights = chance.choice(world.optimizers)
    for weight in weights:
        with may_be_refused("assigned grad has data"):
            weight.grad = fresh(chance, weight.shape) if chance.random() < 0.8 else None
    with may_be_refused("must be on the same", "shape", "size of tensor", *NO_INFERENCE):
        optimizer.step()


@step("a step inside of backward", 3)
def step_in_backward(world: World, chance: random.Random) -> None:
    weight = base_of(pick(world, chance))
    if not weight.requires_grad or not weight.is_leaf:
        raise Refused
    how = chance.choice(list(ALIASES.values()))

    def write(weight: Tensor) -> None:
        with torch.no_grad():
            how(weight, fresh(chance, weight.shape))

    handle = weight.register_post_accumulate_grad_hook(write)
    try:
        with torch.enable_grad():
            (weight * 2).sum().backward()
    finally:
        handle.remove()


@step("an average", 4)
def average(world: World, chance: random.Random) -> None:
    module = pick(world, chance)
    if parametrize.is_parametrized(module) or not module.weight.is_leaf or isinstance(module, Plain):
        raise Refused
    averaged = world.averages.get(id(module), (None, None))[0]
    if averaged is None:
        averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        world.averages[id(module)] = averaged, module
    if averaged.module.weight.shape != module.weight.shape or averaged.module.weight.is_inference():
        raise Refused
    with may_be_refused(*NO_INFERENCE):
        averaged.update_parameters(module)
    world.modules.append(averaged.module) if chance.random() < 0.2 else None
    ours, theirs = module.weight, averaged.module.weight
    kind = chance.choice(["swap", "swap tensors", "load", "copy", "none"])
    if kind == "swap":
        ours.data, theirs.data = theirs.data, ours.data
    elif kind == "load":
        module.load_state_dict(averaged.module.state_dict())
    elif kind == "copy":
        ours.data.copy_(theirs.data)
    elif kind == "swap tensors":
        _swap_tensors(ours, theirs)


def _swap_tensors(ours: Tensor, theirs: Tensor) -> None:
    if ours.is_inference() or theirs.is_inference():
        raise Refused
    with may_be_refused("swap", "weak", "use_count", "AccumulateGrad"):
        torch.utils.swap_tensors(ours, theirs)


# -- Other data --------------------------------------------------------------------------------------------


@step("other data", 6)
@torch.no_grad()
def give_data(world: World, chance: random.Random) -> None:
    """And back, at some later time."""
    module = pick(world, chance)
    weight = base_of(module)
    old, values = weight.data, fresh(chance, weight.shape)
    kind = chance.choice(["new", "turned", "part", "inference", "another's", "empty"])
    if kind == "turned":
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    elif kind == "part":
        values = torch.cat([values, values])[len(values) :]
    elif kind == "inference" and not parametrize.is_parametrized(module):  # which is computed with a graph
        with torch.inference_mode():
            values = values.clone()
    elif kind == "another's":
        other = base_of(pick(world, chance))
        values = other.data if other.shape == weight.shape else values
    with may_be_refused(*NO_INFERENCE, "incompatible tensor type"):
        if kind == "empty":
            weight.data = torch.empty(0)
            old.add_(0.25)
            weight.data = old
            return
        weight.data = values
    world.held.append(lambda chance: values.copy_(fresh(chance, values.shape)) if not values.is_inference() else None)

    def back() -> None:
        if weight.shape == old.shape and weight.dtype is old.dtype:
            with may_be_refused(*NO_INFERENCE, "incompatible tensor type"):
                weight.data = old

    world.undo.append(back)


@step("data comes back", 5)
def take_back(world: World, chance: random.Random) -> None:
    if world.undo:
        world.undo.pop(chance.randrange(len(world.undo)))()


@step("set_", 3)
@torch.no_grad()
def set_(world: World, chance: random.Random) -> None:
    weight = base_of(pick(world, chance))
    values = fresh(chance, weight.shape)
    target = chance.choice([weight, weight.data, weight.detach()])
    with may_be_refused(*NO_INFERENCE, "not allowed on a Tensor created from .data", "metadata"):
        if chance.random() < 0.5:
            target.set_(values)
        else:
            target.set_(values.untyped_storage(), 0, values.shape, values.stride())


@step("memory is resized", 2)
@torch.no_grad()
def resize(world: World, chance: random.Random) -> None:
    weight = base_of(pick(world, chance))
    if world.held:
        raise Refused  # a tensor from DLPack would go on pointing at what is freed here, which torch doesn't prevent
    storage, values = weight.untyped_storage(), weight.detach().clone()
    if not storage.resizable() or storage.is_shared():  # torch crashes on resizing what is shared
        raise Refused
    size = storage.nbytes()
    with may_be_refused("not resizable", *NO_INFERENCE):
        storage.resize_(chance.choice([0, 2 * size]))
    storage.resize_(size)
    weight.data.copy_(values + 0.5)


@step("swap_tensors", 2)
def swap_tensors(world: World, chance: random.Random) -> None:
    module, other = pick(world, chance), pick(world, chance)
    ours, theirs = base_of(module), base_of(other)
    if ours is theirs or ours.shape != theirs.shape or type(ours) is not type(theirs):
        raise Refused
    _swap_tensors(ours, theirs)


@step("vector_to_parameters", 2)
def from_vector(world: World, chance: random.Random) -> None:
    weights = [
        base_of(module) for module in chance.sample(world.modules, k=chance.randrange(1, len(world.modules) + 1))
    ]
    if any(weight.is_inference() for weight in weights):
        raise Refused
    vector = fresh(chance, (sum(weight.numel() for weight in weights),))
    nn.utils.vector_to_parameters(vector, weights)
    world.held.append(lambda chance: vector.copy_(fresh(chance, vector.shape)))


@step("load_state_dict", 4)
def load(world: World, chance: random.Random) -> None:
    module = pick(world, chance)
    if isinstance(module, Plain):
        raise Refused
    state = {name: fresh(chance, value.shape) for name, value in module.state_dict().items()}
    with may_be_refused(*NO_INFERENCE):
        module.load_state_dict(state, assign=chance.random() < 0.5)
    world.held.append(lambda chance: [value.copy_(fresh(chance, value.shape)) for value in state.values()] and None)


# -- Modules -------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


@step("a rewrap", 4)
def rewrap(world: World, chance: random.Random) -> None:
    module = pick(world, chance)
    if isinstance(module, Plain) or base_of(module).is_inference():
        raise Refused
    with may_be_refused(*NO_INFERENCE, "leaf Variable"):
        if parametrize.is_parametrized(module):
            keeps = len(list(module.parametrizations.weight.parameters())) > 1 or chance.random() < 0.5
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=keeps)
        elif chance.random() < 0.7:
            parametrize.register_parametrization(module, "weight", Doubled())
        else:
            parametrizations.weight_norm(module)


@step("a copy of a module", 3)
def copy_module(world: World, chance: random.Random) -> None:
    number = chance.randrange(len(world.modules))
    module = world.modules[number]
    if not module.weight.is_leaf and not parametrize.is_parametrized(module):
        raise Refused
    if chance.random() < 0.7 or parametrize.is_parametrized(module):
        made = copy.deepcopy(module)
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    world.modules[number] = made
    # The two would share a class that torch makes for parametrizations, and takes apart with the first of them.
    if chance.random() < 0.5 and not parametrize.is_parametrized(module):
        world.modules.append(module)


@step("a new weight where one was", 4)
def replace(world: World, chance: random.Random) -> None:
    """The allocator gives the same memory, and Python the same address, as likely as not."""
    module = pick(world, chance)
    if parametrize.is_parametrized(module):
        raise Refused
    shape, requires_grad = module.weight.shape, chance.random() < 0.5 or isinstance(module, Plain)
    world.optimizers.clear()
    world.undo.clear()
    world.held.clear()
    world.averages.clear()
    del module.weight
    if chance.random() < 0.3:
        gc.collect()
    values = fresh(chance, shape)
    module.weight = values.requires_grad_() if isinstance(module, Plain) else nn.Parameter(values, requires_grad)


@step("a conversion", 4)
def convert(world: World, chance: random.Random) -> None:
    module = pick(world, chance)
    if base_of(module).is_inference():
        raise Refused
    swaps = chance.random() < 0.3
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        with may_be_refused("swap", "weak", "use_count", "AccumulateGrad", *NO_INFERENCE):
            change = chance.choice(
                [lambda m: m.double().float(), lambda m: m.bfloat16().float(), lambda m: m.half().float()]
            )
            change(module)
            if chance.random() < 0.3 and base_of(module).dim() == 4:
                module.to(memory_format=torch.channels_last)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if base_of(module).dtype is not torch.float32:
        module.float()


@step("requires_grad", 3)
def switch_gradient(world: World, chance: random.Random) -> None:
    weight = base_of(pick(world, chance))
    if isinstance(weight, nn.Parameter) and not weight.is_inference():
        weight.requires_grad_(not weight.requires_grad)


@step("shared with a child", 1)
def write_in_child(world: World, chance: random.Random) -> None:
    """A child writes into memory that it has in common with its parent."""
    module = pick(world, chance)
    if parametrize.is_parametrized(module) or isinstance(module, Plain) or module.weight.is_inference():
        raise Refused
    with may_be_refused("not supported", *NO_INFERENCE):
        module.weight.share_memory_()
    values = fresh(chance, module.weight.shape)
    child = os.fork()
    if child == 0:
        watched(30)
        module.weight.data.copy_(values)
        os._exit(0)
    os.waitpid(child, 0)
    if not torch.equal(module.weight.detach(), values):
        raise Refused


@step("a preserved counter", 2)
@torch.no_grad()
def write_unseen_by_autograd(world: World, chance: random.Random) -> None:
    weight = base_of(pick(world, chance))
    if weight.is_inference():
        raise Refused
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(fresh(chance, weight.shape))
