"""The demo, run as a person would, and what it says to a wrong option."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result

import mpamp
from mpamp._version import __version__
from mpamp.cli import demo_plot, demo_training
from mpamp.cli.app import app
from mpamp.cli.demo_training import Digits, TrainingRun
from mpamp.cli.main import main


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def _lower_precision_is(monkeypatch: pytest.MonkeyPatch, *, emulated: bool) -> None:
    """Let every backend say this of its lower precision, whatever this processor has."""
    backend = type(mpamp.get_backend("cpu"))
    monkeypatch.setattr(backend, "is_emulated", lambda self, dtype: emulated)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return demo_training.load_digits(torch.device("cpu"))


@pytest.fixture(scope="module")
def float32_run(digits: Digits) -> TrainingRun:
    return demo_training.train("float32", digits, None, epochs=1)


@pytest.fixture
def trained(float32_run: TrainingRun, bfloat16_run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the demo show runs that were made before, where what it says beside them is asked."""

    def train(name: str, digits: Digits, dtype: torch.dtype | None, *_: object) -> TrainingRun:
        return replace(float32_run if dtype is None else bfloat16_run, name=name)

    monkeypatch.setattr(demo_training, "train", train)


@pytest.fixture(scope="module")
def bfloat16_run(digits: Digits) -> TrainingRun:
    return demo_training.train("mixed bfloat16", digits, torch.bfloat16, epochs=1)


def test_demo_shows_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    result = _run("demo", "--device", "cpu", "--dtype", "bf16", "--epochs", "1", "--out", str(picture))
    assert result.exit_code == 0, result.output
    for heading in (
        "run",
        "test accuracy",
        "final loss",
        "ms per step",
        "weight casts per step",
        "loss scale",
    ):
        assert heading in result.stdout
    assert "float32" in result.stdout
    assert "mixed bfloat16" in result.stdout
    assert str(picture) in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("emulated", [True, False])
def test_demo_says_where_lower_precision_is_emulated(
    emulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lower_precision_is(monkeypatch, emulated=emulated)
    arguments = ("--device", "cpu", "--dtype", "bfloat16", "--epochs", "1", "--out", str(tmp_path / "x.png"))
    result = _run("demo", *arguments)
    assert result.exit_code == 0, result.output
    assert ("emulated" in result.stdout) is emulated


def test_an_unknown_dtype_is_answered_with_the_allowed_ones(tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    result = _run("demo", "--device", "cpu", "--dtype", "float7", "--out", str(picture))
    assert result.exit_code == 2
    assert "float7" in result.stderr
    for dtype in mpamp.get_backend("cpu").lower_precision_dtypes:
        assert str(dtype).removeprefix("torch.") in result.stderr
    assert not picture.exists()


def test_an_unknown_device_is_answered_with_the_text_of_mpamp() -> None:
    with pytest.raises(mpamp.MpampError) as error:
        mpamp.get_backend("abacus")
    result = _run("demo", "--device", "abacus")
    assert result.exit_code == 2
    assert str(error.value) in result.stderr


@pytest.mark.parametrize("device", ["cpu:x", "cpu:7"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    result = _run("demo", "--device", device)
    assert result.exit_code == 2
    assert repr(device) in result.stderr


def test_a_backend_without_its_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(mpamp.get_backend("cpu")), "is_available", lambda self: False)
    result = _run("demo", "--device", "cpu")
    assert result.exit_code == 2
    assert "no cpu device on this machine" in result.stderr


def test_a_picture_in_a_folder_that_is_missing_is_refused_before_the_training(tmp_path: Path) -> None:
    result = _run("demo", "--out", str(tmp_path / "missing" / "x.png"))
    assert result.exit_code == 2
    assert "missing" in result.stderr


@pytest.mark.usefixtures("trained")
def test_without_options_a_device_that_mpamp_does_not_know_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: SimpleNamespace(type="abacus")
    )
    result = _run("demo", "--epochs", "1", "--out", str(tmp_path / "x.png"))
    assert result.exit_code == 0, result.output
    assert "on cpu" in result.stdout


@pytest.mark.parametrize("module", ["sklearn", "matplotlib"])
def test_a_missing_library_is_answered_with_its_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("demo_plot", "demo_training"):
        monkeypatch.delattr(f"mpamp.cli.{name}")
        monkeypatch.delitem(sys.modules, f"mpamp.cli.{name}")
    _hide(module, monkeypatch)
    result = _run("demo")
    assert result.exit_code == 1
    assert module in result.stderr
    assert "pip install 'mpamp[demo]'" in result.stderr


@pytest.mark.parametrize("module", ["click", "rich"])
def test_without_the_extra_the_command_names_it(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("app", "demo"):
        monkeypatch.delitem(sys.modules, f"mpamp.cli.{name}")
    _hide(module, monkeypatch)
    with pytest.raises(SystemExit, match=rf"needs {module}.*pip install 'mpamp\[cli\]'"):
        main()


def _hide(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a package that is installed look as if it were not."""
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


def test_version() -> None:
    assert _run("--version").stdout == f"mpamp, version {__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_training_learns_in_both_precisions(digits: Digits, dtype: torch.dtype | None) -> None:
    assert demo_training.train("run", digits, dtype, epochs=4).accuracy > 0.95


def test_the_split_is_always_the_same(digits: Digits) -> None:
    again = demo_training.load_digits(digits.device)
    assert torch.equal(again.train_images, digits.train_images)
    assert torch.equal(again.test_labels, digits.test_labels)
    assert len(digits.train_images) + len(digits.test_images) == 1797


def test_two_runs_start_from_the_same_weights_and_batches(
    digits: Digits, float32_run: TrainingRun, bfloat16_run: TrainingRun
) -> None:
    assert float32_run.losses == demo_training.train("float32", digits, None, epochs=1).losses
    assert bfloat16_run.losses[0] == pytest.approx(float32_run.losses[0], rel=1e-2)
    assert bfloat16_run.losses != float32_run.losses


def test_each_of_eight_weights_is_cast_once_in_a_step(float32_run: TrainingRun, bfloat16_run: TrainingRun) -> None:
    assert bfloat16_run.weight_casts_per_step == 8
    assert float32_run.weight_casts_per_step == 0


def test_the_loss_is_scaled_in_float16_alone(digits: Digits, bfloat16_run: TrainingRun) -> None:
    float16_run = demo_training.train("mixed float16", digits, torch.float16, epochs=1)
    assert len(float16_run.loss_scales) == digits.steps_per_epoch
    assert bfloat16_run.loss_scales == ()


def test_progress_is_told_of_every_step(digits: Digits) -> None:
    told: list[None] = []
    demo_training.train("float32", digits, None, epochs=2, on_step=lambda: told.append(None))
    assert len(told) == 2 * digits.steps_per_epoch


def test_the_picture_has_a_second_axis_where_a_scale_is_used(
    tmp_path: Path, bfloat16_run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(demo_plot.Figure, "savefig", lambda self, path, **kwargs: figures.append(self))
    scaled = replace(bfloat16_run, loss_scales=(65536.0,) * len(bfloat16_run.losses))
    demo_plot.save([bfloat16_run], tmp_path / "x.png")
    demo_plot.save([bfloat16_run, scaled], tmp_path / "x.png")
    assert [len(figure.axes) for figure in figures] == [1, 2]
    assert figures[1].axes[1].get_ylabel() == "loss scale"
