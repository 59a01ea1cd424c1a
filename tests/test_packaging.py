"""What the files around the code promise: set-up commands, versions, extras, type information."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mpamp
from mpamp._version import __version__

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def _requirements(lines: str) -> list[Requirement]:
    stripped = (line.partition("#")[0].strip() for line in lines.splitlines())
    return [Requirement(line) for line in stripped if line]


def _setup_commands() -> dict[str, str]:
    return dict(re.findall(r"^<!-- setup: (\w+) -->\n```sh\n(.+?)\n```$", README, flags=re.M | re.S))


def test_readme_has_two_set_up_commands_of_one_line_each() -> None:
    commands = _setup_commands()
    assert list(commands) == ["demo", "tests"]
    assert all("\n" not in command for command in commands.values())
    assert commands["demo"].endswith("mpamp demo")
    assert "-m pytest" in commands["tests"]
    for command in commands.values():
        assert "-c constraints.txt" in command


def test_ci_runs_the_commands_of_the_readme() -> None:
    printed = subprocess.run(
        ["bash", ROOT / ".ci" / "run", "--print-setup"], check=True, capture_output=True, text=True
    )
    assert printed.stdout.splitlines() == list(_setup_commands().values())


def test_ci_stops_when_the_readme_has_lost_a_command(tmp_path: Path) -> None:
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    script.write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / "README.md").write_text(README.replace("<!-- setup: tests -->", ""), encoding="utf-8")
    process = subprocess.run(["bash", script, "--print-setup"], capture_output=True, text=True)
    assert process.returncode == 1
    assert "lost a set-up command" in process.stderr


def test_the_python_of_the_readme_runs() -> None:
    blocks = re.findall(r"^```python\n(.+?)^```$", README, flags=re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_files_that_the_readme_names_exist() -> None:
    named = re.findall(r"`(mpamp/[\w/]+\.py|[\w.]+\.(?:txt|cfg|toml)|\.ci/run)`|\]\((\w+\.md)\)", README)
    paths = [first or second for first, second in named]
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_versions_agree(setup_cfg: configparser.ConfigParser) -> None:
    assert mpamp.__version__ == __version__
    assert setup_cfg["metadata"]["version"] == "attr: mpamp._version.__version__"
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert newest is not None
    assert newest[1] == __version__


def test_the_installed_version_agrees() -> None:
    try:
        installed = importlib.metadata.version("mpamp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mpamp runs from the source tree, not installed")
    assert installed == __version__


def test_type_information_and_tables_are_shipped(setup_cfg: configparser.ConfigParser) -> None:
    package = ROOT / "mpamp"
    patterns = setup_cfg["options.package_data"]["mpamp"].split()
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    assert package / "py.typed" in shipped
    assert set(package.rglob("*.toml")) <= shipped


def test_the_core_needs_torch_and_two_small_libraries(setup_cfg: configparser.ConfigParser) -> None:
    requirements = _requirements(setup_cfg["options"]["install_requires"])
    assert {each.name for each in requirements if not each.marker} == {"torch", "pluggy", "packaging"}
    assert {str(each.marker) for each in requirements if each.marker} == {'python_version < "3.11"'}


def test_no_plugin_is_registered_in_tree(setup_cfg: configparser.ConfigParser) -> None:
    assert list(setup_cfg["options.entry_points"]) == ["console_scripts"]


def test_constraints_pin_versions_that_satisfy_setup_cfg(setup_cfg: configparser.ConfigParser) -> None:
    pinned = _requirements((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    versions = {each.name.lower(): next(iter(each.specifier)).version for each in pinned}
    assert all(str(each.specifier).startswith("==") for each in pinned)
    extras = setup_cfg["options.extras_require"]
    names = ("demo", "test", "dev", *_extras_of_integrations(setup_cfg))
    for requirement in _requirements(
        "\n".join([setup_cfg["options"]["install_requires"], *(extras[e] for e in names)])
    ):
        if requirement.name != "mpamp":
            assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement


def _extras_of_integrations(setup_cfg: configparser.ConfigParser) -> set[str]:
    (all_of_them,) = _requirements(setup_cfg["options.extras_require"]["integrations"])
    return set(all_of_them.extras)


def test_ci_installs_every_framework_that_an_extra_brings(setup_cfg: configparser.ConfigParser) -> None:
    (listed,) = re.findall(r"^frameworks=\((.+)\)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), flags=re.M)
    extras = setup_cfg["options.extras_require"]
    brought = {each.name for extra in _extras_of_integrations(setup_cfg) for each in _requirements(extras[extra])}
    assert set(listed.split()) == brought


def test_the_minimum_python_is_the_same_everywhere(setup_cfg: configparser.ConfigParser) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert setup_cfg["options"]["python_requires"] == ">=3.10"
    assert 'target-version = "py310"' in pyproject
    assert 'python_version = "3.10"' in pyproject
