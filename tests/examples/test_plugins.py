"""The example device and pack in a fresh environment: mpamp and the wheels are all that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins.environments import EXAMPLES, ROOT, Environment

sys.path.append(str(EXAMPLES[0] / "src" / "mpamp_npy"))
from missing import missing_facility  # type: ignore[import-not-found]  # without the package

sys.path.pop()

pytestmark = [pytest.mark.place("plugin"), pytest.mark.slow]
Make = Callable[..., Environment]
needs_device = pytest.mark.skipif(bool(missing_facility()), reason=missing_facility())
TRAIN = """
import torch, mpamp
region, scaler = mpamp.autocast("npy"), mpamp.GradScaler("npy")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to("npy")
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
x = torch.randn(64, 8)
x, y = x.to("npy"), x.sum(1, keepdim=True).to("npy")
for step in range(60):
    optimizer.zero_grad()
    with region:
        out = model(x)
        loss = torch.nn.functional.mse_loss(out, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    first = loss.item() if step == 0 else first
print(out.device, out.dtype, loss.item() < first / 3)
"""


@needs_device
def test_a_fresh_environment(environment: Make) -> None:
    env = environment("mpamp-npy")
    code, records, problems = env.plugins()
    assert (code, problems) == (0, [])
    assert records["mpamp-npy"]["status"] == "loaded"
    doctor = env.mpamp("doctor")
    assert doctor.returncode == 0, doctor.stderr
    assert "npy" in doctor.stdout
    trained = env.python(TRAIN)
    assert trained.stdout == "npy:0 torch.bfloat16 True\n", trained.stderr
    env.uninstall("mpamp-npy")
    asked = env.python("import mpamp; mpamp.autocast('npy')")
    assert "UnknownDeviceError: unknown device 'npy'" in asked.stderr
    assert "pip install a distribution with an entry point 'npy'" in asked.stderr
    assert env.plugins()[1] == {}


def test_importing_mpamp_loads_nothing(environment: Make) -> None:
    env = environment("mpamp-npy", "mpamp-pack", "raises-on-import")
    code = "import sys, mpamp; print([m for m in sys.modules if m.startswith(('mpamp_', 'raises'))])"
    assert env.python(code).stdout == "[]\n"


@pytest.mark.skipif(not missing_facility(), reason="this torch can have the device")
def test_an_older_torch_is_named(environment: Make) -> None:
    env = environment("mpamp-npy")
    asked = env.python("import mpamp; mpamp.autocast('npy')")
    assert "PluginLoadError" in asked.stderr
    assert "mpamp-npy needs torch 2.11 or later" in asked.stderr


def test_the_old_torch_reason_is_given_only_where_the_facility_lacks(environment: Make) -> None:
    env = environment("mpamp-npy")
    found = env.python("from mpamp_npy.missing import missing_facility; print(missing_facility())").stdout.strip()
    assert found == missing_facility()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_its_own_tests(environment: Make, example: Path) -> None:
    env = environment(example.name)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH", "MPAMP_"))}
    is_old = example.name == "mpamp-npy" and missing_facility()
    command = [str(env.folder / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT / "examples" / example.name, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert not is_old or missing_facility() in done.stdout.replace("\n", " ")
