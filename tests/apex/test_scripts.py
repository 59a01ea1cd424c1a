"""Scripts as public ones are written run unchanged on the stand-in, with losses as in float32."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

import mpamp.apex
from mpamp.apex import amp

SCRIPTS = Path(__file__).parent / "scripts"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _installed():
    mpamp.apex.install()
    yield
    mpamp.apex.uninstall()


@pytest.fixture
def run(monkeypatch):
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        finally:
            amp.shutdown()

    return run


def close(found, wanted):
    assert found["losses"] == pytest.approx(wanted["losses"], rel=0.1, abs=0.05)
    assert wanted["losses"][-1] != wanted["losses"][0]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        (["--opt-level", "O2", "--loss-scale", "128.0"], {F16, F32}),
        (["--opt-level", "O2", "--loss-scale", "128.0", "--delay-allreduce"], {F16, F32}),
        (["--opt-level", "O3", "--keep-batchnorm-fp32", "True"], {F16, F32}),
        (["--opt-level", "O4"], {F32}),
        (["--opt-level", "O5"], {BF16, F32}),
    ],
)
def test_imagenet(run, tmp_path, options, dtypes):
    wanted = run("imagenet", "--store", str(tmp_path / "first"))
    found = run("imagenet", "--store", str(tmp_path / "second"), *options)
    close(found, wanted)
    assert found["dtypes"] == dtypes
    assert wanted["losses"][-1] < wanted["losses"][0] / 2


@pytest.mark.parametrize(("level", "dtypes"), [("O2", {F16, F32}), ("O4", {F32}), ("O5", {BF16, F32})])
def test_dcgan(run, level, dtypes):
    found = run("dcgan", "--opt_level", level)
    close(found, run("dcgan"))
    assert found["dtypes"] == dtypes


@pytest.mark.parametrize(("level", "dtypes"), [("O2", {F16}), ("O4", {F32}), ("O5", {BF16})])
def test_bert(run, level, dtypes):
    wanted, found = run("bert"), run("bert", "--opt_level", level)
    close(found, wanted)
    assert found["dtypes"] == dtypes
    assert not any(found["skipped"])
    assert wanted["losses"][-1] < wanted["losses"][0] / 2


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_berts_own_overflow_check(run, level):
    found = run("bert", "--opt_level", level, "--overflow_at", "3")
    assert found["skipped"] == [step == 3 for step in range(12)]
    assert found["losses"][4] == pytest.approx(found["losses"][3], rel=1e-3)


@pytest.mark.parametrize("options", [["--loss_scale", "128"], []])
def test_squad(run, options):
    found = run("squad", "--fp16", *options)
    close(found, run("squad"))
    assert found["dtypes"] == {F16}
    assert found["optimizer"].loss_scale == (128.0 if options else 2.0 ** (32 - found["skips"]))
    assert found["losses"][-1] < found["losses"][0] / 1.5
