"""``mpamp doctor``, ``plugins`` and ``ops``: what they say, as text and as JSON, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import mpamp
from mpamp.cli.app import app
from mpamp.devices.registry import device_state
from mpamp.engine.python.kernels import native_ops, needs_kernel
from tests import processes

ROOT = Path(__file__).parents[2]
DTYPES = ("bfloat16", "float16")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def _json(*arguments: str) -> Any:
    result = _run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# -- ops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_op_is_shown_as_its_table_and_the_kernels_have_it(device: str, dtype: str) -> None:
    report = _json("ops", "--device", device, "--dtype", dtype)
    state, torch_dtype = device_state(device), getattr(torch, dtype)
    assert (report["device"], report["dtype"], report["fingerprint"]) == (device, dtype, state.table.fingerprint)
    ours = needs_kernel(state, state.table, torch_dtype)
    assert [op["op"] for op in report["ops"] if op["kernel"] == "mpamp"] == ours
    assert {op["op"] for op in report["ops"] if op["kernel"] == "torch"} == native_ops(state) - set(ours)
    for op in report["ops"]:
        policy = state.table.policy(op["op"], torch_dtype)
        assert op["policy"] == (None if policy is None else policy.value)
        assert op["source"] == (state.table[op["op"]].source if op["op"] in state.table else None)


def test_an_op_means_all_its_overloads() -> None:
    report = _json("ops", "--device", "cpu", "conv2d")
    assert [op["op"] for op in report["ops"]] == ["aten::conv2d", "aten::conv2d.padding"]


def test_an_op_that_is_not_listed_is_shown_too() -> None:
    report = _json("ops", "--device", "cpu", "softmax.int", "linear", "relu")
    assert [op["op"] for op in report["ops"]] == ["aten::softmax.int", "aten::linear", "aten::relu"]
    assert [op["policy"] for op in report["ops"]] == [None, "lower_precision_fp", None]
    assert [op["kernel"] for op in report["ops"]] == ["none", "mpamp", "none"]


def test_who_decided_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "default"\ndevice = "cpu"\n[ops]\nsoftmax = "fp32"\n')
    mpamp.set_op_rules("cpu", {"relu": "fp32"})
    try:
        by_rules = _json("ops", "--device", "cpu", "relu", "linear")
    finally:
        mpamp.set_op_rules("cpu", None)
    assert [op["source"] for op in by_rules["ops"]] == ["user", "native"]
    by_file = _json("ops", "--device", "cpu", "--table", str(file), "softmax.int")
    assert [(op["source"], op["kernel"]) for op in by_file["ops"]] == [(str(file), "mpamp")]
    assert _json("ops", "--device", "cuda", "fft_fft")["ops"][0]["source"] == "default"


def test_the_text_has_each_op_on_a_line() -> None:
    lines = _run("ops", "--device", "cpu", "linear", "fft_fft", "relu").stdout.splitlines()
    assert lines[0].rstrip() == "Table default in regions of bfloat16 on cpu"
    assert [line.split() for line in lines[1:]] == [
        ["op", "policy", "source", "kernel"],
        ["aten::linear", "lower_precision_fp", "native", "mpamp"],
        ["aten::fft_fft", "fp32", "native", "torch"],
        ["aten::relu", "-", "-", "none"],
    ]


def test_the_difference_of_two_tables_is_theirs() -> None:
    report = _json("ops", "--device", "xpu", "--table", "native", "--diff", "default")
    native, default = (mpamp.OpTable.named(name, "xpu") for name in ("native", "default"))
    assert [d["op"] for d in report["differences"]] == [d.op for d in native.diff(default)]
    banned = next(d for d in report["differences"] if d["op"] == "aten::binary_cross_entropy")
    assert banned["left"] == dict.fromkeys(DTYPES, "banned")
    assert banned["right"] == dict.fromkeys(DTYPES, "fp32")


def test_a_difference_may_be_of_one_dtype_and_one_op() -> None:
    def found(*more: str) -> list[Any]:
        return [
            d["op"]
            for d in _json("ops", "--device", "cpu", "--table", "native", "--diff", "default", *more)["differences"]
        ]

    only_half = set(found("--dtype", "float16")) - set(found("--dtype", "bfloat16"))
    assert only_half  # [default.cpu.float16] in tables.toml
    op = sorted(only_half)[0]
    assert found("--dtype", "float16", op) == [op]
    assert found("--dtype", "bfloat16", op) == []
    assert "float16: " in _run("ops", "--device", "cpu", "--table", "native", "--diff", "default", op).stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("softmx",), "did you mean 'softmax'"),
        (("--device", "xpv"), "did you mean 'xpu'"),
        (("--device", "cpu", "--dtype", "float64"), "torch.float64 was asked for"),
        (("--device", "cpu", "--dtype", "float7"), "unknown dtype 'float7'"),
        (("--device", "cpu", "--table", "nativ"), "did you mean 'native'"),
        (("--device", "cpu", "--diff", "missing.toml"), "missing.toml: No such file"),
        (("--devise",), "No such option"),
    ],
)
def test_a_wrong_argument_exits_with_2_and_mpamps_message(arguments: tuple[str, ...], error: str) -> None:
    result = _run("ops", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert error in result.stderr


def test_a_table_of_another_device_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "xpu.toml"
    mpamp.OpTable.named("default", "xpu").save(file)
    result = _run("ops", "--device", "cpu", "--table", str(file))
    assert result.exit_code == 2
    assert "for device 'xpu'" in result.stderr


# -- doctor ------------------------------------------------------------------------------------------------


def test_doctor_says_what_is_here() -> None:
    report = _json("doctor")
    assert (report["mpamp"], report["torch"]) == (mpamp.__version__, torch.__version__)
    assert [d["type"] for d in report["devices"][:1]] == ["cpu"]
    assert {"cpu", "cuda", "xpu"} <= {d["type"] for d in report["devices"]}
    for device in report["devices"]:
        backend = mpamp.get_backend(device["type"])
        assert device["available"] is backend.is_available()
        assert device["default_dtype"] == str(backend.default_dtype).removeprefix("torch.")
        assert (device["count"] > 0) is device["available"]
        assert set(device["dtypes"].values()) <= ({"real", "emulated"} if device["available"] else {"absent"})
    assert [p["status"] for p in report["plugins"][:3]] == ["loaded"] * 3
    assert report["engine"]["mpamp_kernels"] > 0
    assert report["problems"] == []


@pytest.mark.parametrize("emulated", [(), (torch.bfloat16,), (torch.bfloat16, torch.float16)])
def test_doctor_tells_real_from_emulated_and_advises(
    emulated: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = type(mpamp.get_backend("cpu"))
    monkeypatch.setattr(backend, "is_emulated", lambda self, dtype: dtype in emulated)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None)
    report = _json("doctor")
    cpu = next(d for d in report["devices"] if d["type"] == "cpu")
    assert [name for name, support in cpu["dtypes"].items() if support == "emulated"] == [
        str(d).removeprefix("torch.") for d in emulated
    ]
    start = {
        0: 'Train in mpamp.autocast("cpu", dtype=torch.bfloat16); ',
        1: "Train in ",
        2: "Lower precision is emulated",
    }
    assert report["advice"].startswith(start[len(emulated)])
    assert ('mpamp.GradScaler("cpu")' in report["advice"]) is (len(emulated) == 1)
    assert "\n" not in report["advice"]
    text = _run("doctor").stdout
    assert f"Advice: {report['advice']}" in text
    assert ("bfloat16 (emulated)" in text) is bool(emulated)


def test_doctor_names_an_accelerator_that_nothing_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("meta"))
    result = _run("doctor")
    assert result.exit_code == 1
    assert "Problem: meta: unknown device 'meta'" in result.stdout


# -- Plugins, as installed distributions in a process of their own ------------------------------------------

GOOD = """
import mpamp
from mpamp.plugins.hookspecs import hookimpl

class Npu(mpamp.Backend):
    device_type = "npu"
    autocast_key = "AutocastPrivateUse1"

    def op_table(self):
        return mpamp.OpTable.named("uniform", "npu")

@hookimpl
def mpamp_backends():
    return [Npu()]
"""
BAD = "raise RuntimeError('the driver is too old')"


def _install(folder: Path, distribution: str, name: str, source: str) -> None:
    module = distribution.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{module}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(f"[mpamp]\n{name} = {module}\n")


def _process(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), **variables}
    return processes.python("-m", "mpamp.cli.main", *arguments, env=environment)


def _statuses(process: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {p["distribution"]: p["status"] for p in json.loads(process.stdout)["plugins"]}


@pytest.mark.slow
def test_plugins_shows_one_that_works(tmp_path: Path) -> None:
    _install(tmp_path, "acme-npu", "npu", GOOD)
    process = _process(tmp_path, "plugins", "--json")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["plugins"][-1] == {
        "name": "npu",
        "distribution": "acme-npu",
        "version": "1.2",
        "module": "acme_npu",
        "status": "loaded",
        "error": None,
    }
    process = _process(tmp_path, "doctor")
    assert process.returncode == 0, process.stderr
    assert "acme_npu.Npu" in process.stdout


@pytest.mark.slow
@pytest.mark.parametrize("strict", ["", "1"])
@pytest.mark.parametrize("name", ["npu", "ops.extra"])
def test_one_that_fails_is_a_problem(name: str, strict: str, tmp_path: Path) -> None:
    _install(tmp_path, "acme-npu", name, BAD)
    process = _process(tmp_path, "plugins", "--json", MPAMP_STRICT_PLUGINS=strict)
    assert (process.returncode, _statuses(process)["acme-npu"]) == (1, "failed")
    assert "the driver is too old" in json.loads(process.stdout)["plugins"][-1]["error"]
    process = _process(tmp_path, "doctor", "--json", MPAMP_STRICT_PLUGINS=strict)
    report = json.loads(process.stdout)
    assert process.returncode == 1
    assert any("acme-npu" in problem and "the driver is too old" in problem for problem in report["problems"])
    assert "MPAMP_DISABLE_PLUGINS" in report["advice"]


@pytest.mark.slow
def test_two_for_one_device_are_in_conflict(tmp_path: Path) -> None:
    _install(tmp_path, "acme-npu", "npu", GOOD)
    _install(tmp_path, "other-npu", "npu", GOOD)
    process = _process(tmp_path, "plugins")
    assert process.returncode == 1
    assert "acme-npu" in process.stderr
    assert "other-npu" in process.stderr
    assert _process(tmp_path, "ops", "--device", "npu").returncode == 1  # a plugin's fault, not the caller's
    assert _process(tmp_path, "plugins", MPAMP_DISABLE_PLUGINS="other-npu").returncode == 0


def test_one_that_is_blocked_is_no_problem(tmp_path: Path) -> None:
    _install(tmp_path, "acme-npu", "npu", BAD)
    process = _process(tmp_path, "plugins", "--json", MPAMP_DISABLE_PLUGINS="acme-npu")
    assert (process.returncode, _statuses(process)["acme-npu"]) == (0, "blocked")
