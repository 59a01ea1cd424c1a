"""The plugin manager, with entry points made up for the tests: found, loaded, blocked, quarantined, in conflict."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mpamp
from mpamp.devices.registry import DeviceState, settle
from mpamp.plugins.backend import Backend
from mpamp.plugins.hookspecs import API_VERSION, hookimpl
from mpamp.plugins.manager import PluginManager

HALF, BRAIN = torch.float16, torch.bfloat16


class Npu(Backend):
    """A device that no torch knows."""

    device_type = "npu"
    autocast_key = "AutocastPrivateUse1"


class Point:
    """An entry point of a distribution that isn't installed."""

    def __init__(self, name: str, plugin: Any, distribution: str = "acme-npu", version: str = "1.2") -> None:
        self.name, self.value, self._plugin = name, f"{name}:plugin", plugin
        self.dist = SimpleNamespace(name=distribution, version=version)
        self.loads = 0

    def load(self) -> Any:
        self.loads += 1
        if isinstance(self._plugin, BaseException):
            raise self._plugin
        return self._plugin


def plugin(*backends: Any, rules: Callable[..., Any] | None = None, **attributes: Any) -> Any:
    """Return a plugin that brings some backends and rules."""
    members: dict[str, Any] = {"mpamp_backends": staticmethod(hookimpl(lambda: list(backends))), **attributes}
    if rules is not None:
        members["mpamp_op_rules"] = staticmethod(hookimpl(rules))
    return type("Plugin", (), members)()


def manage(*points: Any) -> PluginManager:
    return PluginManager(points)


def statuses(manager: PluginManager) -> list[str]:
    return [info.status for info in manager.infos.values()]


# -- Finding and loading -------------------------------------------------------------------------------


def test_a_plugin_is_loaded_when_its_device_is_first_asked_for() -> None:
    point = Point("npu", plugin(Npu()))
    manager = manage(point)
    manager.backend("cpu")
    assert (point.loads, statuses(manager)) == (0, ["found"])
    assert isinstance(manager.backend("npu"), Npu)
    assert statuses(manager) == ["loaded"]


def test_a_plugin_is_loaded_once() -> None:
    point = Point("npu", plugin(Npu()))
    manager = manage(point)
    assert manager.backend("npu") is manager.backend("npu")
    assert point.loads == 1


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_built_in_backends_need_no_entry_point(device: str) -> None:
    assert manage().backend(device).device_type == device


def test_a_pack_of_rules_is_loaded_with_any_device() -> None:
    point = Point("ops.vision", plugin(rules=lambda device_type, dtype: {"softmax": "fp32"}))
    manager = manage(point)
    manager.backend("cpu")
    assert point.loads == 1
    assert list(manager.op_rules("cpu", [BRAIN])) == ["acme-npu:ops.vision"]


def test_known_devices_are_the_built_in_ones_and_the_plugins() -> None:
    manager = manage(Point("npu", plugin(Npu())), Point("ops.vision", plugin()))
    assert manager.known_devices() == ["cpu", "cuda", "npu", "xpu"]


def test_an_unknown_device_lists_the_plugins_too() -> None:
    with pytest.raises(mpamp.UnknownDeviceError, match=r"'npv'.*'npu'.*cpu, cuda, npu, xpu.*pip install"):
        manage(Point("npu", plugin(Npu()))).backend("npv")


def test_a_plugin_that_does_not_bring_its_device_is_an_unknown_device() -> None:
    with pytest.raises(mpamp.UnknownDeviceError):
        manage(Point("npu", plugin())).backend("npu")


def test_the_listing_shows_every_plugin_and_what_became_of_it() -> None:
    manager = manage(Point("npu", plugin(Npu())), Point("tpu", plugin(), "other-tpu", "3"))
    manager.backend("npu")
    manager.backend("cpu")
    found = [(i.name, i.distribution, i.version, i.status) for i in manager.listing()]
    assert found[0][::3] == ("cpu", "loaded")
    assert found[1][::3] == ("cuda", "built-in")
    assert found[3:] == [("npu", "acme-npu", "1.2", "loaded"), ("tpu", "other-tpu", "3", "found")]


# -- Quarantine ----------------------------------------------------------------------------------------


def test_a_plugin_that_fails_to_import_gives_one_warning_and_an_error_with_its_cause() -> None:
    cause = ImportError("libnpu.so is missing")
    point = Point("npu", cause)
    manager = manage(point)
    with (
        pytest.warns(mpamp.MpampWarning, match=r"acme-npu 1\.2.*libnpu\.so is missing") as caught,
        pytest.raises(mpamp.PluginLoadError, match=r"acme-npu 1\.2.*libnpu\.so") as failed,
    ):
        manager.backend("npu")
    assert len(caught) == 1
    assert failed.value.__cause__ is cause
    assert statuses(manager) == ["failed"]


def test_a_plugin_that_failed_is_not_tried_or_warned_of_again() -> None:
    point = Point("npu", ImportError("broken"))
    manager = manage(point)
    with pytest.warns(mpamp.MpampWarning), pytest.raises(mpamp.PluginLoadError):
        manager.backend("npu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(mpamp.PluginLoadError):
            manager.backend("npu")
    assert point.loads == 1


def test_a_broken_plugin_leaves_other_devices_alone() -> None:
    manager = manage(Point("npu", ImportError("broken")), Point("ops.vision", RuntimeError("also broken"), "vision"))
    with pytest.warns(mpamp.MpampWarning, match="vision") as caught:
        assert manager.backend("cpu").device_type == "cpu"
    assert len(caught) == 1


@pytest.mark.parametrize("error", [RuntimeError("x"), SyntaxError("x"), OSError("x")])
def test_any_error_of_an_import_is_quarantined(error: Exception) -> None:
    manager = manage(Point("ops.vision", error))
    with pytest.warns(mpamp.MpampWarning):
        manager.backend("cpu")


def _raise() -> Any:
    raise RuntimeError("no driver")


def test_a_plugin_whose_hook_raises_is_quarantined() -> None:
    broken = plugin(rules=lambda device_type, dtype: {"softmax": "fp32"})
    type(broken).mpamp_backends = staticmethod(hookimpl(_raise))
    manager = manage(Point("npu", broken))
    with pytest.warns(mpamp.MpampWarning), pytest.raises(mpamp.PluginLoadError, match="no driver"):
        manager.backend("npu")


def test_a_quarantined_plugin_brings_no_rules() -> None:
    broken = plugin(rules=lambda device_type, dtype: {"softmax": "fp32"})
    type(broken).mpamp_backends = staticmethod(hookimpl(_raise))
    manager = manage(Point("ops.vision", broken))
    with pytest.warns(mpamp.MpampWarning):
        manager.backend("cpu")
    assert manager.op_rules("cpu", [BRAIN]) == {}


def test_a_plugin_that_brings_something_else_than_a_backend_is_quarantined() -> None:
    manager = manage(Point("npu", plugin("npu")))
    with pytest.warns(mpamp.MpampWarning), pytest.raises(mpamp.PluginLoadError) as failed:
        manager.backend("npu")
    assert isinstance(failed.value.__cause__, TypeError)


def test_a_hook_with_unknown_arguments_is_quarantined() -> None:
    manager = manage(Point("npu", plugin(Npu(), rules=lambda device_type, colour: {})))
    with pytest.warns(mpamp.MpampWarning), pytest.raises(mpamp.PluginLoadError, match="colour"):
        manager.backend("npu")


def test_a_hook_that_does_not_exist_is_quarantined() -> None:
    manager = manage(Point("npu", plugin(Npu(), mpamp_magic=staticmethod(hookimpl(lambda: None)))))
    with pytest.warns(mpamp.MpampWarning), pytest.raises(mpamp.PluginLoadError, match="mpamp_magic"):
        manager.backend("npu")


def test_strict_mode_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPAMP_STRICT_PLUGINS", "1")
    cause = RuntimeError("broken")
    with pytest.raises(mpamp.PluginLoadError, match="acme-npu") as failed:
        manage(Point("ops.vision", cause)).backend("cpu")
    assert failed.value.__cause__ is cause


@pytest.mark.parametrize("needed", [API_VERSION + 1, API_VERSION - 1])
def test_another_api_version_is_quarantined_and_named(needed: int) -> None:
    manager = manage(Point("npu", plugin(Npu(), MPAMP_API_VERSION=needed)))
    with pytest.warns(mpamp.MpampWarning), pytest.raises(mpamp.PluginLoadError) as failed:
        manager.backend("npu")
    assert all(str(each) in str(failed.value) for each in ("acme-npu", needed, API_VERSION))


def test_the_same_api_version_is_loaded() -> None:
    assert manage(Point("npu", plugin(Npu(), MPAMP_API_VERSION=API_VERSION))).backend("npu")


# -- Block and allow lists -----------------------------------------------------------------------------


@pytest.mark.parametrize("blocked", ["npu", "acme-npu", "*", "other, npu", " acme-npu ,"])
def test_a_blocked_plugin_is_never_loaded(monkeypatch: pytest.MonkeyPatch, blocked: str) -> None:
    monkeypatch.setenv("MPAMP_DISABLE_PLUGINS", blocked)
    point = Point("npu", plugin(Npu()))
    manager = manage(point)
    with pytest.raises(mpamp.UnknownDeviceError) as failed:
        manager.backend("npu")
    assert (point.loads, statuses(manager)) == (0, ["blocked"])
    assert "Known devices: cpu, cuda, xpu." in str(failed.value)


def test_blocking_one_plugin_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPAMP_DISABLE_PLUGINS", "tpu")
    assert manage(Point("npu", plugin(Npu())), Point("tpu", plugin(), "t")).backend("npu").device_type == "npu"


def test_blocking_one_of_two_plugins_ends_their_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPAMP_DISABLE_PLUGINS", "acme-npu")
    second = Npu()
    manager = manage(Point("npu", plugin(Npu())), Point("npu", plugin(second), "other-npu"))
    assert manager.backend("npu") is second


@pytest.mark.parametrize("allowed", ["npu", "acme-npu"])
def test_only_allowed_plugins_are_loaded(monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    monkeypatch.setenv("MPAMP_LOAD_PLUGINS", allowed)
    manager = manage(Point("npu", plugin(Npu())), Point("tpu", plugin(), "t"))
    assert statuses(manager) == ["found", "blocked"]
    assert manager.backend("npu")


def test_blocking_wins_over_allowing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPAMP_LOAD_PLUGINS", "npu")
    monkeypatch.setenv("MPAMP_DISABLE_PLUGINS", "acme-npu")
    assert statuses(manage(Point("npu", plugin(Npu())))) == ["blocked"]


def test_built_in_backends_cannot_be_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPAMP_DISABLE_PLUGINS", "*")
    assert manage().backend("cpu")


# -- Conflicts between backends ------------------------------------------------------------------------


def _two_claims() -> PluginManager:
    return manage(Point("npu", plugin(Npu())), Point("npu", plugin(Npu()), "other-npu"))


def test_two_plugins_for_one_device_are_an_error_that_names_both() -> None:
    with pytest.raises(mpamp.PluginConflictError) as failed:
        _two_claims().backend("npu")
    assert all(each in str(failed.value) for each in ("'npu'", "acme-npu", "other-npu", "MPAMP_DISABLE_PLUGINS"))


def test_a_conflict_stays_one_when_the_device_is_asked_for_again() -> None:
    manager = _two_claims()
    for _ in range(2):
        with pytest.raises(mpamp.PluginConflictError):
            manager.backend("npu")


class MyCpu(Npu):
    device_type, autocast_key = "cpu", "AutocastCPU"


class NewCpu(MyCpu):
    replaces_builtin = True


def test_replacing_a_built_in_backend_unasked_is_a_conflict() -> None:
    with pytest.raises(mpamp.PluginConflictError, match=r"mpamp and acme-npu.*replaces_builtin"):
        manage(Point("cpu", plugin(MyCpu()))).backend("cpu")


def test_replacing_a_built_in_backend_explicitly_works() -> None:
    assert isinstance(manage(Point("cpu", plugin(NewCpu()))).backend("cpu"), NewCpu)


def test_a_plugin_in_conflict_brings_no_rules() -> None:
    rules = lambda device_type, dtype: {"softmax": "fp32"}  # noqa: E731
    manager = manage(Point("npu", plugin(Npu())), Point("npu", plugin(Npu(), rules=rules), "other-npu"))
    with pytest.raises(mpamp.PluginConflictError):
        manager.backend("npu")
    assert manager.op_rules("cpu", [BRAIN]) == {}


# -- Rules ---------------------------------------------------------------------------------------------


def rules_of(*points: Point, device: str = "cpu") -> dict[str, mpamp.OpTable]:
    manager = manage(*points)
    manager.backend(device)
    return manager.op_rules(device, (BRAIN, HALF))


def pack(name: str, rules: Any, distribution: str = "") -> Point:
    """Return an entry point of a plugin that brings rules, always the same or by a function."""
    function = rules if callable(rules) else lambda device_type, dtype: rules
    return Point(f"ops.{name}", plugin(rules=function), distribution or name)


def test_rules_are_asked_for_once_for_each_dtype() -> None:
    asked: list[Any] = []
    rules_of(pack("a", lambda device_type, dtype: asked.append((device_type, dtype))))
    assert asked == [("cpu", BRAIN), ("cpu", HALF)]


def test_rules_may_depend_on_the_dtype() -> None:
    (table,) = rules_of(pack("a", lambda device_type, dtype: {"softmax": "fp32"} if dtype is HALF else None)).values()
    assert table.policy("softmax.int", HALF) is mpamp.CastPolicy.FP32
    assert table.policy("softmax.int", BRAIN) is None


def test_a_hook_may_take_fewer_arguments() -> None:
    def by_device(device_type: str) -> dict[str, str]:
        return {"softmax": "fp32"} if device_type == "cpu" else {}

    (table,) = rules_of(pack("a", by_device)).values()
    assert table.policy("softmax.int", BRAIN) is mpamp.CastPolicy.FP32


def test_a_plugin_without_rules_for_the_device_is_left_out() -> None:
    assert rules_of(pack("a", {}), pack("b", None), pack("c", {"softmax": "fp32"})).keys() == {"c:ops.c"}


def device_with(*points: Point) -> DeviceState:
    state = DeviceState(manage().backend("cpu"), settle)
    state.add_plugin_rules(rules_of(*points))
    return state


def test_rules_go_on_top_of_the_built_in_table() -> None:
    state = device_with(pack("a", {"softmax": "fp32", "mm": "fp32"}))
    assert state.table.policy("softmax.int", BRAIN) is mpamp.CastPolicy.FP32
    assert state.table.policy("mm", BRAIN) is mpamp.CastPolicy.FP32
    assert state.table.policy("bmm", BRAIN) is mpamp.CastPolicy.LOWER_PRECISION_FP


def test_rules_of_several_plugins_are_merged() -> None:
    state = device_with(pack("a", {"softmax": "fp32"}), pack("b", {"relu": "fp32", "softmax": "fp32"}))
    assert {str(state.table.policy(op, BRAIN)) for op in ("softmax.int", "relu")} == {"fp32"}


def test_the_user_s_rules_go_on_top_of_plugins() -> None:
    state = device_with(pack("a", {"softmax": "fp32", "relu": "fp32"}))
    state.set_rules(dict(mpamp.OpTable({"softmax": "fallthrough"}, device="cpu")))
    assert state.table.policy("softmax.int", BRAIN) is mpamp.CastPolicy.FALLTHROUGH
    assert state.table.policy("relu", BRAIN) is mpamp.CastPolicy.FP32


def test_rules_name_the_plugin_that_brought_them() -> None:
    assert device_with(pack("a", {"softmax": "fp32"})).table["softmax.int"].source == "a:ops.a"


def test_two_plugins_with_different_rules_for_one_op_are_an_error_that_names_both() -> None:
    with pytest.raises(mpamp.PluginConflictError) as failed:
        device_with(pack("a", {"softmax": "fp32"}), pack("b", {"softmax": "promote"}))
    assert all(each in str(failed.value) for each in ("aten::softmax", "a:ops.a", "b:ops.b", "fp32", "promote"))


def test_a_conflict_of_rules_leaves_the_table_as_it_was() -> None:
    state = DeviceState(manage().backend("cpu"), settle)
    before = state.table
    with pytest.raises(mpamp.PluginConflictError):
        state.add_plugin_rules(rules_of(pack("a", {"softmax": "fp32"}), pack("b", {"softmax": "promote"})))
    assert state.table == before


def test_rules_for_different_dtypes_of_one_op_are_no_conflict() -> None:
    def only(wanted: torch.dtype, policy: str) -> Any:
        return lambda device_type, dtype: {"softmax": policy} if dtype is wanted else {}

    state = device_with(pack("a", only(HALF, "fp32")), pack("b", only(BRAIN, "lower_precision_fp")))
    assert state.table.policy("softmax.int", HALF) is mpamp.CastPolicy.FP32
    assert state.table.policy("softmax.int", BRAIN) is mpamp.CastPolicy.LOWER_PRECISION_FP


# -- Nothing is half done ------------------------------------------------------------------------------


def test_a_plugin_in_conflict_over_one_device_brings_no_other() -> None:
    other = type("Other", (Npu,), {"device_type": "other"})
    manager = manage(Point("npu", plugin(Npu())), Point("other", plugin(other(), Npu()), "rival"))
    first = manager.backend("npu")
    with pytest.raises(mpamp.PluginConflictError, match="'npu' is claimed by both acme-npu and rival"):
        manager.backend("other")
    assert statuses(manager) == ["loaded", "conflict"]
    assert "other" not in manager._backends
    assert manager.backend("npu") is first


def test_a_refused_backend_is_not_asked_again() -> None:
    manager = manage(
        Point("npu", plugin(Npu())), Point("more", plugin(type("More", (Npu,), {"device_type": "more"})()))
    )
    assert (type(manager.backend("npu")), manager.backend("more").device_type) == (Npu, "more")
    with pytest.raises(mpamp.PluginLoadError, match=r"device 'npu' \(acme-npu 1.2\) failed to load: OSError\('gone'\)"):
        manager.refuse("npu", OSError("gone"))
    assert statuses(manager) == ["failed", "loaded"]
    with pytest.raises(mpamp.PluginLoadError, match="gone"):
        manager.backend("npu")
    manager.refuse("cpu", OSError("mpamp's own are not taken back"))
    assert manager.backend("cpu").device_type == "cpu"


def test_a_refused_backend_is_named_by_its_device_not_by_its_entry_point() -> None:
    manager = manage(Point("npu", plugin(Npu(), type("Vpu", (Npu,), {"device_type": "vpu"})())))
    manager.backend("npu")
    with pytest.raises(mpamp.PluginLoadError, match="the plugin for device 'vpu'"):
        manager.refuse("vpu", OSError("gone"))
    with pytest.raises(mpamp.PluginLoadError, match="the plugin for device 'vpu'"):
        manager.backend("vpu")


def test_a_plugin_may_ask_for_devices_while_it_is_imported() -> None:
    point, seen = Point("ops.reentrant", plugin(rules=lambda device_type: {"relu": "fp32"})), []
    manager = manage(point)
    load, point.load = point.load, lambda: (seen.append(manager.backend("cpu").device_type), load())[1]  # type: ignore[method-assign]
    assert manager.backend("cpu").device_type == "cpu"
    assert (seen, point.loads, statuses(manager)) == (["cpu"], 1, ["loaded"])
    assert list(manager.op_rules("cpu", (BRAIN,))) == ["acme-npu:ops.reentrant"]


def test_a_plugin_that_exits_on_import_is_quarantined() -> None:
    manager = manage(Point("npu", SystemExit(0)))
    with pytest.warns(mpamp.MpampWarning, match=r"SystemExit\(0\)"), pytest.raises(mpamp.PluginLoadError):
        manager.backend("npu")


def test_devices_asked_for_by_a_hook_have_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpamp.devices import registry
    from mpamp.plugins import manager as module

    def rules(device_type: str) -> dict[str, str]:
        if device_type == "xpu":
            mpamp.get_op_table("cpu")
        return {"relu": "fp32"}

    found = manage(Point("ops.curious", plugin(rules=rules)))
    monkeypatch.setattr(module, "manager", lambda: found)
    monkeypatch.setattr(registry, "_devices", {})
    monkeypatch.setattr(registry, "DEVICES", [])
    registry.device_state("xpu")
    devices = registry.devices_in_use()
    assert sorted(state.type for state in devices) == ["cpu", "xpu"]
    assert sorted(state.index for state in devices) == [0, 1]
