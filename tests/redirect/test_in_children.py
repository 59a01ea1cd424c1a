"""Child processes are redirected while they import torch, where nothing may run that waits for that import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_children import OURS, ROOT, WAYS, needs_no_cuda, run_children

pytestmark = needs_no_cuda

WATCHED = """
import sys

def see(frame, event, called):
    if event == "call":
        name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        if name.startswith("OpOverload") and name.endswith("__call__"):
            print("RUNS", frame.f_locals["self"])
    elif event == "c_call":
        name = getattr(called, "__qualname__", "")
        if name.startswith(("_VariableFunctionsClass", "TensorBase.", "start_")):
            print("RUNS", name)

for finder in sys.meta_path:
    if "torch" in getattr(finder, "waiting", ()):  # of a child
        finder.waiting["torch"].insert(0, lambda: sys.setprofile(see))
        finder.waiting["torch"].append(lambda: sys.setprofile(None))
"""
"""A sitecustomize: says which kernels and threads are started from when torch is imported to when mpamp is done."""


@pytest.mark.slow
def test_nothing_runs_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCHED)
    table = tmp_path / "table.toml"
    table.write_text('name = "mine"\n[ops]\nexp = "fp32"\n')
    more = ("--ops", str(table))
    assert run_children(tmp_path, "subprocess", redirects=True, more=more) == [f"here {OURS}", f"subprocess {OURS}"]


PROCESSOR = """
import sys, threading

def put_on():
    from mpamp.backends import cpu
    def asks(*args):
        thread = threading.Thread(target=lambda: __import__("torch").ones(1), daemon=True)
        thread.start()
        thread.join(20)
        if thread.is_alive():
            print("WAITS FOR THE IMPORT OF TORCH", flush=True)
        return False
    cpu._has_units = cpu._onednn_runs = lambda dtype: True
    cpu.fails = cpu.leaves_garbage = asks

for finder in sys.meta_path:
    if "torch" in getattr(finder, "waiting", ()):  # of a child
        finder.waiting["mpamp"].insert(0, put_on)
"""
"""A sitecustomize: a processor with units for 16 bits, whose kernels are tried on another thread."""


def on_a_processor_with_units(tmp_path: Path, *ways: str, redirects: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text(PROCESSOR)
    table = tmp_path / "table.toml"
    table.write_text('name = "mine"\n[ops]\nexp = "lower_precision_fp"\n')
    theirs = OURS.replace("float32", "float16")
    expected = [
        "here",
        *(how for how in ways if not how.startswith("torch.")),
        *["launched"] * 2 * ("torch." in str(ways)),
    ]
    found = run_children(tmp_path, *ways, redirects=redirects, more=("--ops", str(table)))
    assert found == [f"{how} {theirs}" for how in expected]


@pytest.mark.slow
def test_no_kernel_is_tried_while_torch_is_imported(tmp_path: Path) -> None:
    on_a_processor_with_units(tmp_path, "grandchild", "spawn", redirects=True)


@pytest.mark.sweep
@pytest.mark.parametrize("redirects", [False, True])
@pytest.mark.parametrize("way", [*WAYS[:-1], "spawn", "grandchild"])
def test_no_kernel_is_tried_while_torch_is_imported_however_it_is_started(
    tmp_path: Path, way: str, redirects: bool
) -> None:
    on_a_processor_with_units(tmp_path, way, redirects=redirects)


def install_npy(folder: Path) -> None:
    """Have a folder on the path bring the example's device, as an installed distribution does."""
    shutil.copytree(ROOT / "examples" / "mpamp-npy" / "src" / "mpamp_npy", folder / "mpamp_npy")
    info = folder / "mpamp_npy-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mpamp-npy\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[mpamp]\nnpy = mpamp_npy\n")


NPY_SCRIPT = """
import subprocess, sys, torch
print("here", torch.ones(1, device="cuda").device)
try:
    torch.distributed.init_process_group("nccl")
except Exception as error:
    print(type(error).__name__, "npy" in str(error), flush=True)
code = "import torch; print('child', torch.ones(1, device='cuda').device)"
subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
"""


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="the example's device needs torch 2.11")
@pytest.mark.slow
def test_a_plugins_device_stands_in_in_a_child_too(tmp_path: Path) -> None:
    install_npy(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(NPY_SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "mpamp", "run", "--device", "npy", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.stdout.splitlines() == ["here npy:0", "RedirectError True", "child npy:0"], done.stderr
