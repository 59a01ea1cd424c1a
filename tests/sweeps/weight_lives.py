"""Random programs of weights' lives: uses, writes past and through version counters, swaps, threads, forks.

A program is known by its seed. After every use the result is compared with that of a cast by hand: whether it is of
what is in the weight now is told bit by bit. ``python -m tests.sweeps.weight_lives FIRST COUNT`` runs programs and
writes what fails; a program that hangs ends the process, with every thread's stack.

Left out are the gaps that docs/regions.md lists: ``.data`` in ``torch.jit.script``, arrays of NumPy that are older than
the first region, writes by address; and weights in memory that NumPy lent, which the engine in Python doesn't tell.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

import mpamp

__all__ = ["SECONDS", "Refused", "Stale", "Step", "Worker", "World", "failure", "outline", "shrunk", "watched"]

Tensor = torch.Tensor
Step = Callable[["World", random.Random], None]
SECONDS = 120
"""How long one program may take; most take a tenth of one."""
SIDE = 4


class Stale(AssertionError):
    """A result isn't of what the weight holds."""


class Refused(Exception):
    """Torch doesn't do what a step asks for, with the weight as it is."""


class Plain(nn.Module):
    """Has a weight that is no parameter: a leaf that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.zeros(SIDE, SIDE, requires_grad=True)


def new_modules() -> list[nn.Module]:
    return [
        nn.Linear(SIDE, SIDE, bias=False),
        nn.Conv2d(SIDE, SIDE, 1, bias=False),
        nn.Embedding(SIDE, SIDE),
        Plain(),
    ]


class Worker:
    """A thread that holds a region open, and does what it is given."""

    def __init__(self, persistent: bool) -> None:
        self._given: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(persistent,), daemon=True)
        self._thread.start()

    def _serve(self, persistent: bool) -> None:
        with mpamp.autocast("cpu", torch.bfloat16, persistent_cache=persistent):
            while (work := self._given.get()) is not None:
                try:
                    work()
                    error = None
                except BaseException as raised:
                    error = raised
                self._done.put(error)
                del work, error

    def do(self, work: Callable[[], object]) -> None:
        self._given.put(work)
        error = self._done.get()
        if error is not None:
            raise error

    def stop(self) -> None:
        self._given.put(None)
        self._thread.join()


class World:
    """What a program has: modules with a weight each, what it holds of their memory, open regions, graphs."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.modules = [module for module in new_modules() if chance.random() < 0.6] or new_modules()[:1]
        self.held: list[Callable[[random.Random], None]] = []
        """Writes through what was handed out of a weight's memory at some time."""
        self.undo: list[Callable[[], None]] = []
        """Puts back what was swapped for something else."""
        self.regions: list[Any] = []
        self.pending: list[Callable[[], None]] = []
        """Backward passes of uses that were."""
        self.optimizers: list[tuple[torch.optim.Optimizer, list[Tensor]]] = []
        self.averages: dict[int, Any] = {}
        self.workers: list[Worker] = []
        for module in self.modules:
            if chance.random() < 0.5:
                module.weight.requires_grad_(False) if isinstance(module.weight, nn.Parameter) else None
            with torch.no_grad():
                module.weight.copy_(fresh(chance, module.weight.shape))

    def close(self) -> None:
        while self.regions:
            self.regions.pop().__exit__(None, None, None)
        for worker in self.workers:
            worker.stop()


def fresh(chance: random.Random, shape: Any) -> Tensor:
    """Return values that bfloat16 and float16 have, and that are others each time."""
    count = int(torch.Size(shape).numel())
    return torch.tensor([chance.randrange(-64, 65) / 8 for _ in range(count)]).reshape(shape)


def watched(seconds: int) -> None:
    """End this process after so long, with every thread's stack; a child has no alarm until it asks for one."""
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(seconds)


# -- Programs ------------------------------------------------------------------------------------------


def outline(seed: int) -> list[str]:
    """Return the names of a program's steps."""
    from . import weight_uses, weight_writes

    chance = random.Random(f"steps {seed}")
    kinds = (weight_uses.USES, weight_writes.WRITES)
    weights = [[weight for _, weight in kind.values()] for kind in kinds]
    names = []
    for _ in range(chance.randrange(8, 26)):
        which = int(chance.random() < 0.5)
        names += chance.choices(list(kinds[which]), weights[which])
    return ["use", *names, "use all"]


def _run(seed: int, names: list[str], skipped: frozenset[int]) -> str:
    from . import weight_uses, weight_writes

    steps = {**weight_uses.USES, **weight_writes.WRITES}
    world, number, name = World(seed), -1, "to begin with"
    try:
        for number, name in enumerate(names):
            if number not in skipped:
                with suppress(Refused):
                    steps[name][0](world, random.Random(f"{seed} {number}"))
        stale = mpamp.verify_cache()
        if stale:
            return f"verify_cache: {'; '.join(map(str, stale))}"
    except Exception:
        return f"step {number}, {name}:\n{traceback.format_exc(limit=-3)}"
    finally:
        world.close()
    return ""


def failure(seed: int, names: list[str] | None = None, skipped: frozenset[int] = frozenset()) -> str:
    """Run a program, without some steps; return what went wrong, if anything did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _run(seed, outline(seed) if names is None else names, skipped)
        finally:
            mpamp.clear_cache()
            gc.collect()


def shrunk(seed: int) -> str:
    """Return the fewest steps of a failing program that fail too, and how."""
    names, skipped = outline(seed), frozenset[int]()
    for number in range(len(names)):
        if failure(seed, names, skipped | {number}):
            skipped |= {number}
    left = [f"{number} {name}" for number, name in enumerate(names) if number not in skipped]
    return f"seed {seed}: {', '.join(left)}\n{failure(seed, names, skipped) or 'after other programs only'}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # a child would import all of it otherwise
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    with mpamp.autocast("cpu", torch.bfloat16):  # the process's first region
        pass
    gc.collect()
    gc.freeze()  # what is there goes on being there: a collection is of the program alone
    failed: dict[int, str] = {}
    started = time.monotonic()
    for seed in range(options.first, options.first + options.count):
        print(f"# {seed}", file=sys.stderr, flush=True)
        watched(SECONDS)
        problem = failure(seed)
        if problem:
            failed[seed] = problem
            print(f"{seed}: {problem}\n{shrunk(seed)}", file=sys.stderr, flush=True)
        watched(0)
    engine, seconds = os.environ.get("MPAMP_ENGINE"), round(time.monotonic() - started, 1)
    print(json.dumps({"engine": engine, "programs": options.count, "seconds": seconds, "failed": failed}))


if __name__ == "__main__":
    from tests.sweeps import weight_lives  # the one that the steps know, not __main__

    weight_lives.main()
