"""``mpamp doctor``: what mixed precision can do on this machine, and what stands in its way."""

from __future__ import annotations

import platform
from typing import Any

import click
import torch

import mpamp
from mpamp import engine
from mpamp.cli.output import PROBLEM, print_json, print_table
from mpamp.cli.plugins import examine_all, plugins_left_out, record
from mpamp.devices.registry import device_state
from mpamp.errors import MpampError, shown
from mpamp.insight.machine import describe_device, describe_engine
from mpamp.plugins.manager import manager

__all__ = ["doctor"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Examine torch, the devices, the plugins and the engine, and give one line of advice.

    The exit code is 1 if a problem was found: a plugin that fails or is in conflict, or a device without a backend.
    """
    report = _examine()
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report["problems"]:
        raise SystemExit(PROBLEM)


def _examine() -> dict[str, Any]:
    problems = examine_all()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    names = [n for n in manager().known_devices() if n not in problems]
    if accelerator is not None and accelerator.type not in (*names, *problems):
        try:
            mpamp.get_backend(accelerator)
            names.append(accelerator.type)
        except MpampError as error:
            problems[accelerator.type] = str(error)
    devices = []
    for name in names:
        try:
            devices.append(describe_device(device_state(name)))
        except MpampError as error:
            problems[name] = str(error)
        except Exception as error:  # so may the vendor's module in torch
            problems[name] = f"torch.{name} can't say what is here: {shown(error)}"
    plugins = [record(info) for info in manager().listing()]
    told = [f"{device}: {problem}" for device, problem in problems.items()]
    told += plugins_left_out(but=problems)
    current = "cpu" if accelerator is None else accelerator.type
    return {
        "mpamp": mpamp.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": current,
        "devices": devices,
        "plugins": plugins,
        "engine": describe_engine(current if current in names else "cpu"),
        "problems": told,
        "advice": _advice(current, devices, told),
    }


def _advice(current: str, devices: list[dict[str, Any]], problems: list[str]) -> str:
    if problems:
        return "Mend or uninstall what the first problem names, or leave it out by MPAMP_DISABLE_PLUGINS."
    device = next(d for d in devices if d["type"] == current)
    real = [dtype for dtype, support in device["dtypes"].items() if support == "real"]
    if not real:
        return (
            f"Lower precision is emulated on {current}: a region runs, slower than float32. Use it to test; train on a "
            "device that has units for bfloat16 or float16."
        )
    dtype = device["default_dtype"] if device["default_dtype"] in real else real[0]
    region = f'mpamp.autocast("{current}", dtype=torch.{dtype})'
    more = ""
    if engine.which()[0] == "python" and not engine.lacking_to_build():
        more = " `mpamp build-core` compiles the engine: each call of an op costs less then."
    if dtype == "float16":
        return f'Train in {region}, with mpamp.GradScaler("{current}").{more}'
    return f"Train in {region}; {dtype} needs no GradScaler.{more}"


def _print(report: dict[str, Any]) -> None:
    click.echo(f"mpamp {report['mpamp']}, torch {report['torch']}, Python {report['python']}\n")
    rows = [_cells(d) for d in report["devices"]]
    print_table("Devices", ("device", "here", "default", "lower precision", "name", "backend"), rows)
    click.echo()
    headings = ("name", "distribution", "version", "status", "error")
    print_table("Plugins", headings, [[p[h] or "" for h in headings] for p in report["plugins"]])
    found = report["engine"]
    click.echo(
        "\nEngine: none"
        if found is None
        else f"\nEngine: {found['name']} ({found['why']}); on {found['device']}, mpamp's kernels run "
        f"{found['mpamp_kernels']} ops of the default table, torch's run {found['torch_kernels']}"
    )
    for device in report["devices"]:
        for fault in device["faults"]:
            click.echo(f"Fault of {device['type']}: {fault}.")
    for problem in report["problems"]:
        click.echo(f"Problem: {problem}")
    click.echo(f"Advice: {report['advice']}")


def _cells(device: dict[str, Any]) -> list[str]:
    dtypes = ", ".join(
        f"{dtype} ({support})" if device["available"] else dtype for dtype, support in device["dtypes"].items()
    )
    here = str(device["count"]) if device["available"] else "no"
    return [device["type"], here, device["default_dtype"], dtypes, device["name"] or "", device["backend"]]
