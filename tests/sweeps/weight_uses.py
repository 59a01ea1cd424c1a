"""Uses of weights in random programs: ops, in every kind of region, thread, graph and mode."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mpamp
from tests.fork_server import HUNG, wait

from .weight_lives import SIDE, Refused, Stale, Step, Worker, World, fresh, watched

__all__ = ["USES", "pick"]

Tensor = torch.Tensor
Op = Callable[[Tensor, Tensor], Tensor]
BRAIN, HALF = torch.bfloat16, torch.float16

USES: dict[str, tuple[Step, int]] = {}
"""What a step does, and how often it is picked."""


def use(name: str, often: int = 1) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        USES[name] = (step, often)
        return step

    return register


FLAT: dict[str, Op] = {
    "linear": F.linear,
    "mm": torch.mm,
    "matmul": lambda x, w: x[None] @ w,
    "turned": lambda x, w: x @ w.T,
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "conv1d": lambda x, w: F.conv1d(x[None], w[:, :, None]),
    "conv2d": lambda x, w: F.conv2d(x[None, :, :, None], w[:, :, None, None]),
    "some rows": lambda x, w: F.linear(x, w[: SIDE // 2]),
    "a row": lambda x, w: x @ w[1],
    "a part": lambda x, w: F.linear(x, w.chunk(2)[1]),
    "detached": lambda x, w: x @ w.detach(),
    "data": lambda x, w: x @ w.data,
    "tied to an embedding": lambda x, w: F.linear(F.embedding(torch.arange(SIDE), w), w) + F.linear(x, w),
}
CONV: dict[str, Op] = {
    "conv2d": lambda x, w: F.conv2d(x[None, :, :, None], w),
    "as a linear": lambda x, w: F.linear(x, w.flatten(1)),
    "as mm": lambda x, w: x @ w[:, :, 0, 0],
}
_compiled: dict[str, Op] = {}


def compiled(name: str, op: Op) -> Op:
    if name not in _compiled:
        _compiled[name] = torch.compile(op, backend="eager", dynamic=False)
    return _compiled[name]


def pick(world: World, chance: random.Random) -> nn.Module:
    return chance.choice(world.modules)


def pick_op(chance: random.Random, weight: Tensor) -> tuple[str, Op]:
    ops = FLAT if weight.dim() == 2 else CONV
    name = chance.choice(list(ops))
    return name, ops[name]


@contextlib.contextmanager
def by_hand() -> Iterator[None]:
    """Be outside of every region."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        yield


def expected(op: Op, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    with by_hand(), torch.no_grad():
        return op(x.detach().to(dtype), weight.detach().clone().to(dtype))


def compare(name: str, result: Tensor, right: Tensor) -> None:
    result = result.detach()
    is_right = (result == right) | (result.isnan() & right.isnan())  # what memory has that was just made may be NaN
    if result.dtype is not right.dtype or not is_right.all():
        raise Stale(f"{name} gave {result.dtype}\n{result.tolist()}\nby hand {right.dtype}\n{right.tolist()}")


def check(name: str, op: Op, x: Tensor, weight: Tensor, dtype: torch.dtype, *, run: Op | None = None) -> Tensor:
    """Use a weight in the region that is open and compare the result with that of a cast by hand."""
    result = (run or op)(x, weight)
    compare(name, result, expected(op, x, weight, dtype))
    return result


def ones(requires_grad: bool = False) -> Tensor:
    """Return what tells each element of a weight from the others."""
    return (2 * torch.eye(SIDE)).requires_grad_(requires_grad)


# -- Regions -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def some_region(world: World, chance: random.Random) -> Iterator[torch.dtype]:
    """Be in the program's open region, or in one or two of its own."""
    dtype = HALF if chance.random() < 0.2 else BRAIN
    with contextlib.ExitStack() as stack:
        kind = chance.choice([*(3 * ["open", "persistent"]), "plain", "nested", "off", "uncached"])
        if kind == "open" and world.regions:
            yield world.regions[-1].dtype
            return
        if kind in ("nested", "off"):
            stack.enter_context(mpamp.autocast("cpu", BRAIN, persistent_cache=chance.random() < 0.5))
        if kind == "off":
            stack.enter_context(mpamp.autocast("cpu", enabled=False))
        is_lasting, is_cached = kind == "persistent" or chance.random() < 0.3, kind != "uncached"
        stack.enter_context(mpamp.autocast("cpu", dtype, cache_enabled=is_cached, persistent_cache=is_lasting))
        yield dtype


@use("use", 12)
def use_some(world: World, chance: random.Random) -> None:
    with some_region(world, chance) as dtype:
        for _ in range(chance.randrange(1, 4)):
            weight = pick(world, chance).weight
            check(*pick_op(chance, weight), ones(), weight, dtype)


@use("use all", 3)
def use_all(world: World, chance: random.Random) -> None:
    """In every cache that there may be: those of open regions, of workers, and the one of the process."""
    places: list[Callable[[Callable[[], object]], None]] = [worker.do for worker in world.workers]
    for module in world.modules:
        name, op = pick_op(chance, module.weight)

        def work(op: Op = op, name: str = name, module: nn.Module = module) -> None:
            with torch.no_grad():
                check(name, op, ones(), module.weight, BRAIN)

        for place in places:
            place(work)
        with mpamp.autocast("cpu", BRAIN, persistent_cache=True):
            check(name, op, ones(), module.weight, BRAIN)
        if world.regions:
            check(name, op, ones(), module.weight, world.regions[-1].dtype)


@use("enter a region", 6)
def enter(world: World, chance: random.Random) -> None:
    if len(world.regions) < 3:
        dtype = HALF if chance.random() < 0.2 else BRAIN
        region = mpamp.autocast("cpu", dtype, persistent_cache=chance.random() < 0.3)
        region.__enter__()
        world.regions.append(region)


@use("leave a region", 2)
def leave(world: World, chance: random.Random) -> None:
    if world.regions:
        world.regions.pop(chance.randrange(len(world.regions))).__exit__(None, None, None)


@use("modes", 4)
def use_in_modes(world: World, chance: random.Random) -> None:
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    modes = (torch.no_grad, torch.inference_mode, Functions, Ops, mpamp.trace)
    with some_region(world, chance) as dtype, chance.choice(modes)():
        for _ in range(2):
            weight = pick(world, chance).weight
            check(*pick_op(chance, weight), ones(), weight, dtype)


@use("compiled")
def use_compiled(world: World, chance: random.Random) -> None:
    weight = pick(world, chance).weight
    name, op = pick_op(chance, weight)
    with some_region(world, chance) as dtype:
        check(name, op, ones(), weight, dtype)
        check(name, op, ones(), weight, dtype, run=compiled(f"{name} {weight.dim()}", op))


@use("functional_call", 2)
def use_by_functional_call(world: World, chance: random.Random) -> None:
    module = nn.Linear(SIDE, SIDE, bias=False)
    given = nn.Parameter(fresh(chance, (SIDE, SIDE)), requires_grad=False)
    with some_region(world, chance) as dtype:
        for _ in range(2):
            result = torch.func.functional_call(module, {"weight": given}, (ones(),))
            compare("functional_call", result, expected(F.linear, ones(), given, dtype))
            given.data.add_(0.125)


# -- Graphs --------------------------------------------------------------------------------------------


@use("use with a graph", 6)
def use_with_graph(world: World, chance: random.Random) -> None:
    """The backward pass, now or later, is of what the weight was."""
    weight, x = pick(world, chance).weight, ones(requires_grad=True)
    name, op = chance.choice(list(FLAT.items())[:4]) if weight.dim() == 2 else ("conv2d", CONV["conv2d"])
    with torch.enable_grad(), some_region(world, chance) as dtype:
        result = check(name, op, x, weight, dtype)
        gradient = fresh(chance, result.shape).to(dtype)
        with by_hand():
            low_x, low = (t.detach().clone().to(dtype).requires_grad_() for t in (x, weight))
            right = torch.autograd.grad(op(low_x, low), (low_x, low), gradient)

    def backward() -> None:
        with by_hand():  # its ops would be cast by a region that is open
            found = torch.autograd.grad(result, x, gradient, retain_graph=True)[0]
        compare(f"the gradient of {name}", found, right[0].float())

    if chance.random() < 0.5:
        world.pending.append(backward)
        return
    backward()
    if weight.requires_grad and weight.is_leaf and not weight.is_inference():
        with by_hand():
            found = torch.autograd.grad(result, weight, gradient)[0]
        compare("the weight's gradient", found, right[1].float())


@use("backward passes", 4)
def backward_of_all(world: World, chance: random.Random) -> None:
    while world.pending:
        world.pending.pop()()


@use("checkpoint", 3)
def use_in_checkpoint(world: World, chance: random.Random) -> None:
    weight, x = pick(world, chance).weight, ones(requires_grad=True)
    name, op = pick_op(chance, weight)
    is_reentrant = chance.random() < 0.5
    with torch.enable_grad(), some_region(world, chance) as dtype:
        result = check(
            name, op, x, weight, dtype, run=lambda x, w: checkpoint(lambda x: op(x, w), x, use_reentrant=is_reentrant)
        )
    result.float().sum().backward(inputs=None if is_reentrant else [x])


@use("anomaly mode", 3)
def use_in_anomaly_mode(world: World, chance: random.Random) -> None:
    with torch.autograd.detect_anomaly():
        use_with_graph(world, chance)
        backward_of_all(world, chance)


@use("saved-tensor hooks", 2)
def use_under_hooks(world: World, chance: random.Random) -> None:
    hooks = chance.choice([torch.autograd.graph.save_on_cpu, _packing])
    with hooks():
        use_with_graph(world, chance)


def _packing() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


# -- Threads and processes -----------------------------------------------------------------------------


@use("a worker", 5)
def use_on_worker(world: World, chance: random.Random) -> None:
    if len(world.workers) < 2 and chance.random() < 0.6:
        world.workers.append(Worker(chance.random() < 0.5))
    if world.workers:
        weight = pick(world, chance).weight
        name, op = pick_op(chance, weight)
        chance.choice(world.workers).do(lambda: check(name, op, ones(), weight, BRAIN))


@use("a new thread", 2)
def use_on_thread(world: World, chance: random.Random) -> None:
    errors: list[BaseException] = []
    weight = pick(world, chance).weight
    name, op = pick_op(chance, weight)

    def work() -> None:
        try:
            with mpamp.autocast("cpu", BRAIN, persistent_cache=True):
                check(name, op, ones(), weight, BRAIN)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@use("a race", 3)
def race(world: World, chance: random.Random) -> None:
    """Whatever threads use while others write, what is used after is of what was written last.

    No thread gives a weight other data meanwhile: torch itself reads freed memory then.
    """
    from .weight_writes import RACING

    weight = pick(world, chance).weight
    if not weight.is_leaf or weight.is_inference():
        raise Refused
    _, op = pick_op(chance, weight)
    seeds = [chance.random() for _ in range(2)]

    def write(seed: float) -> None:
        mine = random.Random(seed)
        with torch.no_grad():
            for _ in range(5):
                mine.choice(RACING)(weight, fresh(mine, weight.shape))

    def read(persistent: bool) -> None:
        for _ in range(3):
            with torch.no_grad(), mpamp.autocast("cpu", BRAIN, persistent_cache=persistent):
                op(ones(), weight)
                op(ones(), weight)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in seeds]
    threads += [threading.Thread(target=read, args=(persistent,)) for persistent in (True, True, False)]
    for thread in threads:
        thread.start()
    for worker in world.workers:  # where gradients are recorded, torch refuses views whose base is being written
        worker.do(torch.no_grad()(lambda: op(ones(), weight)))
    for thread in threads:
        thread.join()
    use_all(world, chance)


@use("a child", 2)
def use_in_child(world: World, chance: random.Random) -> None:
    """A forked process uses, writes and uses again, with every cache that its parent had."""
    from .weight_writes import WRITES

    names = [chance.choice([name for name in WRITES if name not in ("a worker's write",)]) for _ in range(2)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            watched(30)
            world.workers.clear()  # their threads are the parent's
            use_some(world, chance)
            for name in names:
                with contextlib.suppress(Refused):
                    WRITES[name][0](world, chance)
                use_all(world, chance)
            os.write(writer, b"right")
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    if wait(child, 60) == HUNG:
        raise Stale("a child hung")
    if said != "right":
        raise Stale(f"a child, {names}: {said or 'ended without a word: it hung or crashed'}")
