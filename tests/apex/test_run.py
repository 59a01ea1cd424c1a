"""``install`` and ``mpamp run``: scripts that import apex run as they are."""

from __future__ import annotations

import os
import re
import socket
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

import mpamp.apex
from mpamp.apex import amp
from mpamp.cli.app import app
from tests import processes
from tests.paths import search_path

EXAMPLE = Path(__file__).parents[2] / "examples" / "apex_style" / "train_digits.py"


@pytest.fixture
def _uninstalled(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a run puts another in its place
    yield
    mpamp.uninstall()
    mpamp.apex.uninstall()
    assert "apex.amp" not in sys.modules


@pytest.mark.usefixtures("_uninstalled")
def test_install_gives_apex_and_its_submodules():
    assert mpamp.apex.install() is mpamp.apex.install() is amp
    import apex
    import apex.amp
    from apex import amp as imported
    from apex.amp import _amp_state, scale_loss
    from apex.amp.handle import scale_loss as from_handle
    from apex.amp.scaler import LossScaler

    assert apex.amp is imported is amp
    assert _amp_state is amp._amp_state
    assert not isinstance(_amp_state, types.ModuleType)
    assert scale_loss is from_handle is amp.scale_loss
    assert LossScaler("dynamic").loss_scale() == 65536.0
    assert issubclass(apex.DeprecatedFeatureWarning, FutureWarning)
    with pytest.raises(ImportError):
        import apex.nothing


@pytest.mark.usefixtures("_uninstalled")
def test_an_installed_apex_keeps_everything_but_amp(monkeypatch):
    real = types.ModuleType("apex")
    real.optimizers, real.amp = object(), "the old one"
    monkeypatch.setitem(sys.modules, "apex", real)
    mpamp.apex.install()
    assert sys.modules["apex"] is real
    assert real.amp is amp
    mpamp.apex.uninstall()
    assert real.amp == "the old one"


def test_every_public_name_of_apex_is_there():
    names = """initialize scale_loss state_dict load_state_dict master_params disable_casts init half_function
    float_function promote_function register_half_function register_float_function register_promote_function
    _amp_state AmpHandle NoOpHandle OptimWrapper"""
    assert [name for name in names.split() if not hasattr(amp, name)] == []


def test_initialize_has_apexs_signature():
    import inspect

    parameters = inspect.signature(amp.initialize).parameters.values()
    assert [(p.name, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY][1:] == [
        ("optimizers", None),
        ("enabled", True),
        ("opt_level", "O1"),
        ("cast_model_type", None),
        ("patch_torch_functions", None),
        ("keep_batchnorm_fp32", None),
        ("master_weights", None),
        ("loss_scale", None),
        ("cast_model_outputs", None),
        ("num_losses", 1),
        ("verbosity", 1),
        ("min_loss_scale", None),
        ("max_loss_scale", 2.0**24),
    ]
    names = list(inspect.signature(amp.scale_loss).parameters)
    assert names == ["loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check"]


def run_example(*arguments, env=None):
    command = ["-c", "from mpamp.cli.main import main; main()", "run", "--device", "cpu", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(EXAMPLE.parents[2]), **(env or {})}
    done = processes.python(*command, *arguments, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_example_here(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = CliRunner().invoke(app, ["run", "--device", "cpu", str(EXAMPLE), *arguments], catch_exceptions=False)
    amp.shutdown()
    return result.output


def accuracies(text):
    return [float(found) for found in re.findall(r"accuracy (\d\.\d+)", text)]


@pytest.mark.usefixtures("_uninstalled")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_example_learns_digits(monkeypatch, level):
    pytest.importorskip("sklearn")
    text = run_example_here(monkeypatch, "--opt-level", level, "--epochs", "3")
    assert f"Selected optimization level {level}" in text
    assert len(accuracies(text)) == 3
    assert accuracies(text)[-1] > 0.93


@pytest.mark.slow
@pytest.mark.usefixtures("_uninstalled")
def test_the_example_takes_strings_ddp_and_resumes(monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    options = ["--opt-level", "O2", "--keep-batchnorm-fp32", "False", "--loss-scale", "128.0", "--epochs", "2"]
    whole = run_example_here(monkeypatch, *options)
    assert "loss_scale             : 128.0" in whole
    assert "keep_batchnorm_fp32    : False" in whole
    file = str(tmp_path / "checkpoint.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first = run_example(*options, "--checkpoint", file, "--stop-after", "1", env=env)
    second = run_example_here(monkeypatch, *options, "--resume", file)
    lines = [line for line in whole.splitlines() if line.startswith("epoch")]
    assert [line for line in (first + second).splitlines() if line.startswith("epoch")] == lines


SCRIPT = """
import sys, torch
from apex import amp
from helper_beside_it import NAME
model = torch.nn.Linear(2, 2).{to}
x = torch.ones(1, 2, device="{device}")
print(sys.argv[1:], __name__, NAME, model(x).device, x.to("{device}:0").device, torch.ones(1).to(torch.float64).dtype)
"""


@pytest.fixture
def absent():
    """A device type that has AMP and isn't on this machine."""
    found = [n for n in ("cuda", "xpu") if not mpamp.get_backend(n).is_available()]
    return found[0] if found else pytest.skip("every device is here")


@pytest.mark.usefixtures("_uninstalled")
@pytest.mark.parametrize("call", ["{0}()", "to('{0}')", "to(torch.device('{0}'))"])
def test_run_redirects_devices_that_are_not_here(tmp_path, monkeypatch, absent, call):
    (tmp_path / "helper_beside_it.py").write_text("NAME = 'found'")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(to=call.format(absent), device=absent))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = CliRunner().invoke(app, ["run", "--device", "cpu", str(script), "--device", "mine", "-x"])
    assert result.exception is None, result.output
    assert result.output.strip() == "['--device', 'mine', '-x'] __main__ found cpu cpu torch.float64"
    sys.modules.pop("helper_beside_it", None)


@pytest.mark.usefixtures("_uninstalled")
def test_run_without_a_device_leaves_devices_alone(tmp_path, monkeypatch, absent):
    script = tmp_path / "script.py"
    script.write_text(f"import torch\ntorch.ones(1, device='{absent}')\n")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = CliRunner().invoke(app, ["run", str(script)])
    assert isinstance(result.exception, AssertionError | RuntimeError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpuu", str(EXAMPLE)], "cpuu"),
        (["nonesuch.py"], "does not exist"),
        ([], "Missing argument"),
    ],
)
def test_run_refuses_clearly(arguments, words):
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert "apex.amp" not in sys.modules


def test_run_refuses_a_device_that_is_not_here(absent):
    result = CliRunner().invoke(app, ["run", "--device", absent, str(EXAMPLE)])
    assert result.exit_code == 2
    assert f"no {absent} device on this machine" in result.output
