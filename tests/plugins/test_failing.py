"""Plugins that fail, as wheels in a fresh environment: quarantined, named, blocked, uninstalled."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.plugins.environments import Environment

pytestmark = pytest.mark.slow
Make = Callable[..., Environment]
ASK = (
    "import mpamp\ntry:\n    mpamp.autocast({device!r})\nexcept mpamp.MpampError as e:\n    print(type(e).__name__, e)"
)
WORKS = """
import torch, warnings, mpamp
warnings.simplefilter("ignore")
with mpamp.autocast("cpu"):
    print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
"""


def ask(env: Environment, device: str, **variables: str) -> str:
    """Return the error of a region on a device."""
    return env.python(ASK.format(device=device), **variables).stdout


FAULTS = [
    ("raises-on-import", "broken", "ImportError: libbroken.so: cannot open shared object file"),
    ("newer-api", "future", "newer-api needs plugin API 99, this mpamp speaks 1"),
    ("nonsense-backends", "nonsense", "returned 'nonsense', not a mpamp.Backend"),
    ("nonsense-hook", "misspelt", "mpamp_backend"),
]


@pytest.mark.parametrize(("distribution", "device", "cause"), FAULTS)
def test_quarantine(environment: Make, distribution: str, device: str, cause: str) -> None:
    env = environment(distribution, "claims-first")
    code, records, problems = env.plugins()
    assert code == 1
    assert records[distribution]["status"] == "failed"
    assert cause in records[distribution]["error"]
    assert records["claims-first"]["status"] == "loaded"
    assert any(distribution in problem for problem in problems)
    error = ask(env, device)
    assert error.startswith(f"PluginLoadError the plugin for device {device!r} ({distribution} 1.0) failed to load")
    assert env.python(WORKS).stdout == "torch.bfloat16\n"


@pytest.mark.parametrize(
    ("distribution", "cause"), [("nonsense-rules", "'lukewarm'"), ("nonsense-mapping", "ops.mapping")]
)
def test_packs_in_quarantine(environment: Make, distribution: str, cause: str) -> None:
    env = environment(distribution)
    code, records, _ = env.plugins()
    assert (code, records[distribution]["status"]) == (1, "failed")
    done = env.python(WORKS.replace('warnings.simplefilter("ignore")', ""))
    assert done.stdout == "torch.bfloat16\n"
    assert cause in done.stderr
    assert done.stderr.count("MpampWarning") == 1
    strict = env.python(WORKS, MPAMP_STRICT_PLUGINS="1")
    assert strict.returncode == 1
    assert "PluginLoadError" in strict.stderr


def test_strict_mode(environment: Make) -> None:
    env = environment("raises-on-import")
    done = env.python("import mpamp; mpamp.autocast('broken')", MPAMP_STRICT_PLUGINS="1")
    assert "PluginLoadError: plugin 'broken' of raises-on-import failed to load" in done.stderr
    assert "MpampWarning" not in done.stderr
    assert env.python(WORKS, MPAMP_STRICT_PLUGINS="1").stdout == "torch.bfloat16\n"  # nobody asked for its device


def test_two_claims(environment: Make) -> None:
    env = environment("claims-first", "claims-second")
    code, records, problems = env.plugins()
    assert code == 1
    assert sorted(r["status"] for r in records.values()) == ["conflict", "loaded"]
    assert len(problems) == 1
    error = ask(env, "twin")
    for text in (problems[0], error):
        assert all(name in text for name in ("'twin'", "claims-first", "claims-second", "MPAMP_DISABLE_PLUGINS"))
    assert error.startswith("PluginConflictError")
    unnamed = "UnknownDeviceError torch knows no device 'twin', though the plugin for device 'twin' "  # it is no device
    assert ask(env, "twin", MPAMP_DISABLE_PLUGINS="claims-first").startswith(f"{unnamed}(claims-second")
    env.uninstall("claims-second")
    assert env.plugins()[0] == 0
    assert ask(env, "twin").startswith(f"{unnamed}(claims-first")


def test_a_built_in_device_is_not_taken_unasked(environment: Make) -> None:
    env = environment("claims-builtin")
    code, records, _ = env.plugins()
    assert (code, records["claims-builtin"]["status"]) == (1, "conflict")
    assert "replaces_builtin" in ask(env, "cpu")


def test_packs_that_disagree(environment: Make) -> None:
    env = environment("pack-first", "pack-second")
    error = ask(env, "cpu")
    assert error.startswith("PluginConflictError aten::softmax")
    assert all(part in error for part in ("pack-first:ops.first", "pack-second:ops.second", "fp32", "promote"))
    assert env.plugins()[0] == 1
    assert ask(env, "cpu", MPAMP_DISABLE_PLUGINS="ops.second") == ""


@pytest.mark.parametrize(
    ("variable", "value", "statuses"),
    [
        ("MPAMP_DISABLE_PLUGINS", "raises-on-import", ("blocked", "loaded", "loaded")),
        ("MPAMP_DISABLE_PLUGINS", "broken, ops.first", ("blocked", "loaded", "blocked")),
        ("MPAMP_DISABLE_PLUGINS", "*", ("blocked", "blocked", "blocked")),
        ("MPAMP_LOAD_PLUGINS", "twin", ("blocked", "loaded", "blocked")),
        ("MPAMP_LOAD_PLUGINS", "pack-first", ("blocked", "blocked", "loaded")),
    ],
)
def test_block_and_allow_lists(environment: Make, variable: str, value: str, statuses: tuple[str, ...]) -> None:
    env = environment("raises-on-import", "claims-first", "pack-first")
    code, records, problems = env.plugins(**{variable: value})
    found = tuple(records[d]["status"] for d in ("raises-on-import", "claims-first", "pack-first"))
    assert (code, found, problems) == (0, statuses, [])
    if value == "*":
        assert ask(env, "twin", **{variable: value}).startswith("UnknownDeviceError unknown device 'twin'")


# -- Commands of plugins -------------------------------------------------------------------------------------


def test_a_plugin_s_command(environment: Make) -> None:
    env = environment("tunes")
    done = env.mpamp("tune", "440")
    assert (done.returncode, done.stdout, done.stderr) == (0, "tuned to 440 Hz\n", "")
    assert "Tune to a PITCH." in env.mpamp("--help").stdout
    wrong = env.mpamp("tune", "high")
    assert (wrong.returncode, "'high' is not a valid float" in wrong.stderr) == (2, True)
    env.uninstall("tunes")
    assert "No such command 'tune'" in env.mpamp("tune", "440").stderr


@pytest.mark.parametrize(
    ("distribution", "cause"),
    [
        ("claims-doctor", "command 'doctor' is claimed by both mpamp and claims-doctor:ops.claims-doctor"),
        ("nonsense-commands", "AttributeError"),
    ],
)
def test_commands_in_quarantine(environment: Make, distribution: str, cause: str) -> None:
    env = environment(distribution, "tunes")
    asked = env.mpamp("--help")
    assert asked.returncode == 0
    assert f"of {distribution} is left out" in asked.stderr
    assert cause in asked.stderr
    assert "surgeon" not in asked.stdout, "all of its commands or none"
    code, records, _ = env.plugins()
    assert (code, records[distribution]["status"]) == (1, "conflict" if "claimed" in cause else "failed")
    assert env.mpamp("tune", "440").stdout == "tuned to 440 Hz\n"
    assert ("claimed" in env.mpamp("doctor").stdout) is ("claimed" in cause)
    strict = env.mpamp("tune", "440", MPAMP_STRICT_PLUGINS="1")
    assert strict.returncode == 1
    assert f"the commands of plugin '{distribution}:ops.{distribution}' are left out" in strict.stderr
    assert env.mpamp("tune", "440", MPAMP_STRICT_PLUGINS="1", MPAMP_DISABLE_PLUGINS=distribution).returncode == 0


def test_a_missing_command_of_a_broken_plugin_names_the_plugin(environment: Make) -> None:
    done = environment("raises-on-import").mpamp("tune")
    assert done.returncode == 2
    assert "No such command 'tune'" in done.stderr
    assert "plugin broken of raises-on-import is left out: ImportError" in done.stderr


# -- Backends that raise when they are asked about themselves --------------------------------------------------


def test_a_backend_without_a_table_is_refused(environment: Make) -> None:
    env = environment("raises-when-asked")
    error = ask(env, "maia")
    assert error.startswith(
        "PluginLoadError the plugin for device 'maia' (raises-when-asked 1.0) failed: its op_table() raised"
    )
    assert "OSError('no table on this disk')" in error
    twice = "try:\n    import mpamp; mpamp.autocast('maia')\nexcept mpamp.MpampError as e:\n    first = str(e)\n"
    again = env.python(
        f"{twice}try:\n    mpamp.autocast('maia')\nexcept mpamp.MpampError as e:\n    print(first == str(e))"
    )
    assert again.stdout == "True\n", again.stderr
    assert env.python(WORKS).stdout == "torch.bfloat16\n"


def test_doctor_survives_backends_that_raise(environment: Make) -> None:
    done = environment("raises-when-asked").mpamp("doctor", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert sorted(problem.partition(":")[0] for problem in report["problems"]) == ["hpu", "maia"]
    said = "(raises-when-asked 1.0) failed: its is_available() raised OSError('no driver')"
    assert any(said in problem for problem in report["problems"])
    assert [device["type"] for device in report["devices"]] == ["cpu", "cuda", "xpu"]
    statuses = {plugin["name"]: plugin["status"] for plugin in report["plugins"]}
    assert (statuses["maia"], statuses["hpu"]) == ("failed", "failed")
