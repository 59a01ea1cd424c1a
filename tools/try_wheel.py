"""Try the mpamp that this Python has installed: the engine it runs, and that it computes what the one in Python does.

    try_wheel.py compiled       fails unless the compiled engine runs
    try_wheel.py python         fails unless the engine in Python runs

Both engines train a small model for ten steps, with casts kept for a region and persistently, views of weights and
checkpoints, and run it in inference mode: to the last digit the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mpamp  # noqa: E402
from mpamp import engine  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.first, self.second = torch.nn.Linear(4 * 64, 32), torch.nn.Linear(32, 32)
        self.norm, self.last = torch.nn.LayerNorm(32), torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(x)).flatten(1)
        x = F.gelu(self.first(x))
        x = checkpoint(self.block, x, use_reentrant=False) if x.requires_grad else self.block(x)
        return self.last(x)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        top, bottom = self.second.weight.chunk(2)  # views of a weight
        return self.norm(x + torch.cat([F.linear(x, top), F.linear(x, bottom)], 1).softmax(-1))


def train(persistent: bool) -> list[str]:
    torch.manual_seed(0)
    model, seen = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, target = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
    for _ in range(10):
        with mpamp.autocast("cpu", torch.bfloat16, persistent_cache=persistent):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item().hex())
    with torch.inference_mode(), mpamp.autocast("cpu", torch.bfloat16, persistent_cache=persistent):
        result = model(x)
        again = torch.autocast("cpu", torch.bfloat16)
        with again:
            F.linear(x.flatten(1)[:, :32], model.second.weight)
    return [*seen, str(result.dtype), float(result.double().sum()).hex()]


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    started = time.perf_counter()
    with mpamp.autocast("cpu", torch.bfloat16):
        pass
    first = time.perf_counter() - started
    name, why = engine.which()
    cases: dict[str, Callable[[], list[str]]] = {"region": lambda: train(False), "persistent": lambda: train(True)}
    return {
        "torch": torch.__version__,
        "mpamp": mpamp.__file__,
        "engine": name,
        "why": why,
        "first_region_ms": round(first * 1e3, 1),
        "results": {case: train_() for case, train_ in cases.items()},
        "casts": mpamp.cache_info().casts,
    }


def main(wanted: str) -> None:
    if wanted == "--print":
        print(json.dumps(run()))
        return
    found = {}
    for choice in ("auto", "python"):
        environment = {**os.environ, "MPAMP_ENGINE": choice}
        command = [sys.executable, "-W", "error::UserWarning:mpamp", __file__, "--print"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"MPAMP_ENGINE={choice}: exit code {done.returncode}")
        found[choice] = json.loads(done.stdout.splitlines()[-1])
    auto, python = found["auto"], found["python"]
    print(json.dumps({key: value for key, value in auto.items() if key != "results"}))
    if auto["engine"] != wanted:
        raise SystemExit(f"the engine is {auto['engine']} ({auto['why']}), not {wanted}.")
    for key in ("results", "casts"):
        if auto[key] != python[key]:
            raise SystemExit(f"{key} differ:\n{wanted}: {auto[key]}\npython: {python[key]}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "compiled")
