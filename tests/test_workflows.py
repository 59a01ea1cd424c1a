"""The workflow files for a repository host: valid, of tox environments that there are, and asking for no rights."""

from __future__ import annotations

import configparser
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'mpamp[dev]'")

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / ".github" / "workflows" / "wheels.yml"
WORKFLOWS = sorted(set((ROOT / ".github" / "workflows").glob("*.yml")) - {WHEELS})
EACH = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def load(path: Path) -> dict[Any, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def environments(job: dict[str, Any]) -> list[str]:
    """Return the tox environments that a job runs: one for each row of its matrix."""
    matrix = job["strategy"]["matrix"]
    return [*matrix.get("env", ()), *(row["env"] for row in matrix.get("include", ()) if "env" in row)]


def named_environments() -> set[str]:
    return {env for path in WORKFLOWS for job in load(path)["jobs"].values() for env in environments(job)}


def expand(pattern: str) -> Iterator[str]:
    """Yield what braces in tox's ``env_list`` stand for."""
    parts = [p.strip("{}").split(",") if p[:1] == "{" else [p] for p in re.split(r"(\{[^}]*\})", pattern.strip())]
    for picked in itertools.product(*parts):
        yield "".join(picked)


def is_known(environment: str, tox: configparser.ConfigParser) -> bool:
    """Tell whether tox has an environment: by a section or the list of its own, else by each of its factors."""
    listed = {env for p in re.split(r",(?![^{]*\})", tox["tox"]["env_list"]) for env in expand(p)}
    if f"testenv:{environment}" in tox or environment in listed:
        return True
    conditions = re.findall(r"^([\w!-]+): ", "\n".join(tox["testenv"].values()), flags=re.M)
    known = {factor.lstrip("!") for condition in conditions for factor in condition.split("-")}
    known |= {factor for env in listed for factor in env.split("-")}
    return all(factor in known or re.fullmatch(r"py3\d+", factor) for factor in environment.split("-"))


@pytest.fixture(scope="module")
def tox() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini", encoding="utf-8")
    return config


def test_every_environment_is_toxs(tox: configparser.ConfigParser) -> None:
    named = named_environments()
    assert len(named) > 15
    assert [env for env in sorted(named) if not is_known(env, tox)] == []


@pytest.mark.parametrize(
    "wrong", ["torch99-cpu", "torch213-gpu", "lints", "torchlatest-fake-hpu", "python311-torch28-cpu"]
)
def test_the_check_of_environments_can_fail(wrong: str, tox: configparser.ConfigParser) -> None:
    assert not is_known(wrong, tox)


def test_every_device_and_check_has_a_job() -> None:
    named = named_environments()
    places = ("cpu", "fake-cuda", "fake-xpu", "plugin", "ipex", "compiled", "integrations", "cuda", "xpu")
    for place in places:
        assert any(re.fullmatch(rf"torch\w+-{place}", env) for env in named), place
    assert {"lint", "type", "docs", "doctest"} <= named


def test_every_environment_of_toxs_list_that_tests_has_a_job(tox: configparser.ConfigParser) -> None:
    newest = [e for p in re.split(r",(?![^{]*\})", tox["tox"]["env_list"]) for e in expand(p) if "torch28" not in e]
    assert [env for env in newest if env not in named_environments()] == []


@EACH
def test_it_has_a_trigger_a_group_and_may_only_read(path: Path) -> None:
    workflow = load(path)
    triggers = workflow[True]  # YAML 1.1 takes the key `on` for a boolean
    assert set(triggers) <= {"push", "pull_request", "schedule", "workflow_dispatch"}
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"].startswith("${{ github.workflow }}")
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        assert job["strategy"]["fail-fast"] is False


@EACH
def test_its_steps_are_pinned_cached_and_call_tox(path: Path) -> None:
    for job in load(path)["jobs"].values():
        used = {step["uses"].partition("@")[0]: step for step in job["steps"] if "uses" in step}
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in used.values())
        setup = used["actions/setup-python"]["with"]
        assert setup["cache"] == "pip"
        assert all((ROOT / name).is_file() for name in setup["cache-dependency-path"].split())
        assert job["steps"][-1]["run"] == "tox run -e ${{ matrix.env }}"


@EACH
def test_it_names_no_registry_and_no_secret(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"https?:|pypi|index-url|secrets\.|conda|ghcr|docker", text)


def test_latest_torch_is_by_the_clock_and_only_there_with_cards() -> None:
    jobs = {path.stem: load(path) for path in WORKFLOWS}
    assert "schedule" in jobs["latest"][True]
    assert not any("torchlatest" in env for env in environments(jobs["ci"]["jobs"]["tox"]))
    assert all(env.startswith("torchlatest-") for env in environments(jobs["latest"]["jobs"]["tox"]))


def test_machines_of_our_own_run_no_pull_requests() -> None:
    for path in WORKFLOWS:
        workflow = load(path)
        owned = [job for job in workflow["jobs"].values() if "self-hosted" in job["runs-on"]]
        assert not (owned and "pull_request" in workflow[True])
        for job in owned:
            for row in job["strategy"]["matrix"]["include"]:
                assert re.fullmatch(rf"torch\w+-{row['label']}(-compiled)?", row["env"])


# -- The wheels ----------------------------------------------------------------------------------------

MINORS = [f"2.{minor}" for minor in range(8, 15)]


def test_wheels_are_made_for_every_python_and_minor_version_of_torch() -> None:
    jobs = load(WHEELS)["jobs"]
    assert list(jobs) == ["linux", "macos", "assemble", "try", "publish"]
    for job in ("linux", "macos"):
        versions = jobs[job]["strategy"]["matrix"]["torch"]
        assert [version.rpartition(".")[0] for version in versions] == MINORS
        assert jobs[job]["steps"][-1]["uses"].startswith("actions/upload-artifact@")
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    assert jobs["macos"]["strategy"]["matrix"]["python"] == pythons
    assert " ".join(version[2:] for version in pythons) in str(jobs["assemble"]["steps"])


def test_every_wheel_is_tried_with_every_minor_version_before_it_is_published() -> None:
    jobs = load(WHEELS)["jobs"]
    matrix = jobs["try"]["strategy"]["matrix"]
    tried = {version.rpartition(".")[0] for version in matrix["torch"]}
    assert tried == set(MINORS)
    assert set(jobs["linux"]["strategy"]["matrix"]["torch"]) <= set(matrix["torch"])
    assembled = {row["platform"]: row["runner"] for row in jobs["assemble"]["strategy"]["matrix"]["include"]}
    assert {row["name"]: row["runner"] for row in matrix["platform"]} == assembled
    assert "tools/try_wheel.py compiled" in jobs["try"]["steps"][-1]["run"]
    assert "tests/engine" in jobs["try"]["steps"][-1]["run"]
    assert jobs["publish"]["needs"] == ["try"]


def test_only_the_job_that_publishes_may_do_more_than_read_and_only_for_tags() -> None:
    workflow = load(WHEELS)
    assert workflow["permissions"] == {"contents": "read"}
    assert [name for name, job in workflow["jobs"].items() if "permissions" in job] == ["publish"]
    publish = workflow["jobs"]["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["environment"] == "release"
    assert publish["permissions"] == {"id-token": "write", "attestations": "write", "contents": "read"}
    assert publish["steps"][-1]["with"] == {"attestations": True}
    text = WHEELS.read_text(encoding="utf-8")
    assert not re.findall(r"https?:|index-url|secrets\.|conda", text)
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v1", each) for each in used)
