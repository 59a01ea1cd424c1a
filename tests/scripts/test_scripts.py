"""Scripts in the manner of public ones run by ``mpamp run --device cpu`` as they are: losses, and who served them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.paths import search_path
from tests.scripts.witness import FRAMEWORKS, SCRIPTS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here: the scripts would run on it")

QUICK = ("imagenet-O1", "bert", "cuda_amp")
"""Those that are always run; the rest, and the frameworks', by ``pytest -m sweep``."""
REST = [name for name in SCRIPTS if name not in QUICK]

MODEL_IS_HALF = ("imagenet-O2", "bert", "fp16util", "fp16util-by-hand")
"""Those whose weights are float16 themselves: no region casts anything."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution")
CASTING = {"aten::linear", "aten::conv2d"}
HAS_SCALES = {"imagenet-O1": 1, "imagenet-O2": 1, "gan": 3, "workers": 1, "bert": 1}
SCALED_BY_TORCHS_NAME = ("cuda_amp", *FRAMEWORKS)


def run(file, names):
    pytest.importorskip("sklearn")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(ROOT), "MPAMP_ENGINE": "python"}
    command = [sys.executable, "-m", "tests.scripts.witness", str(file), *names]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run(tmp_path_factory.mktemp("scripts") / "quick.json", QUICK)


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    return run(tmp_path_factory.mktemp("scripts") / "rest.json", REST)


def check(name, runs):
    for one in runs.values():
        assert one["error"] == "", one["error"]
        assert len(one["losses"]) >= 2
    check_losses(runs)
    check_service(name, runs["amp-0"], runs["float32-0"])


def check_losses(runs):
    """Lower precision ends where float32 does: no further away, over its seeds, than another seed takes float32."""
    lasts = {run: one["losses"][-1] for run, one in runs.items()}
    float32 = [last for run, last in lasts.items() if run.startswith("float32")]
    away = [last - lasts[run.replace("amp", "float32")] for run, last in lasts.items() if run.startswith("amp")]
    assert abs(sum(away) / len(away)) <= max(float32) - min(float32)
    assert runs["amp-0"]["losses"] != runs["float32-0"]["losses"]


def check_service(name, amp, float32):
    """What mpamp did in lower precision, and that it did none of it in float32."""
    counted = amp["children"] if name == "spawn" else [amp]
    assert counted
    for one in counted:
        products = sum(count for op, count in one["kernels"].items() if op.startswith(PRODUCTS))
        assert products > 0
        if name not in MODEL_IS_HALF:
            assert one["casts"] > 0
            assert CASTING & set(one["ops"])
    assert len(amp["loss_scales"]) == HAS_SCALES.get(name, 0)
    assert (amp["scaler_steps"] > 0) == (name in SCALED_BY_TORCHS_NAME)
    for one in float32["children"] if name == "spawn" else [float32]:
        assert (one["casts"], one["kernels"], one["scaler_steps"]) == (0, {}, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_script_runs_as_it_is(quick, name):
    check(name, quick[name])


@pytest.mark.sweep
@pytest.mark.parametrize("name", REST)
def test_another_script_runs_as_it_is(rest, name):
    check(name, rest[name])


@pytest.mark.sweep
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_script_of_a_framework_runs_as_it_is(tmp_path, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} isn't installed")
    check(name, run(tmp_path / "found.json", [name])[name])
