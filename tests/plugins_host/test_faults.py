"""Whatever a plugin raises, wherever it is asked: it is named and left out, and other devices go on."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import mpamp
from mpamp.cli.app import app
from mpamp.devices import registry
from mpamp.engine.python import kernels
from mpamp.errors import shown
from mpamp.plugins import hookspecs
from mpamp.plugins import manager as plugins
from mpamp.plugins.backend import Backend
from mpamp.plugins.hookspecs import hookimpl
from mpamp.plugins.manager import PluginManager
from mpamp.regions.region import forget_regions
from tests.forks import in_child

BRAIN = torch.bfloat16


class OwnExit(BaseException):
    """What no ``except Exception`` catches."""


class Mute(Exception):
    """Can't even say what it is."""

    def __repr__(self) -> str:
        raise OwnExit

    __str__ = __repr__


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("boo"),
    "an error of mpamp": lambda: mpamp.RegionError("boo"),
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "BaseException": lambda: OwnExit("boo"),
    "one without a text": Mute,
}
METHODS = [n for n, m in vars(Backend).items() if inspect.isfunction(m) and (n == "__repr__" or n[0] != "_")]
ATTRIBUTES = [n for n in Backend.__annotations__ if n not in ("device_type",)]
CALLED_LATER = ("tensor_check", "capture_check", "read_later")
"""Methods that return functions, which may raise as well."""
HOOKS = [n for n, m in vars(hookspecs).items() if hasattr(m, "mpamp_spec")]


def test_there_is_something_to_sweep_over() -> None:
    assert {"is_available", "op_table", "prepare", "capture_check", "__repr__"} <= set(METHODS)
    assert {"default_dtype", "lower_precision_dtypes", "autocast_key"} <= set(ATTRIBUTES)
    assert set(HOOKS) >= {"mpamp_backends", "mpamp_op_rules", "mpamp_make_scaler", "mpamp_scale_event", "mpamp_cli"}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import in this process what each child would import again."""
    importlib.import_module("mpamp.cli.app")
    step()
    product()


def step() -> list[float]:
    """Return a weight of ones after a step with a scaler."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), mpamp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.tolist()


def point(name: str, plugin: Any, distribution: str = "acme") -> Any:
    dist = SimpleNamespace(name=distribution, version="1.2")
    return SimpleNamespace(name=name, value=f"{name}:plugin", dist=dist, load=lambda: plugin)


@contextmanager
def fresh(*points: Any) -> Iterator[PluginManager]:
    """Be in a process that has asked for no device yet, and has these entry points; for a child."""
    for state in registry.devices_in_use():
        kernels.withdraw(state)
        forget_regions(state.type)
    registry._devices.clear()
    plugins._manager = PluginManager(points)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugins._manager.caught = caught  # type: ignore[attr-defined]
        yield plugins._manager


def said(manager: Any) -> list[str]:
    return [str(w.message) for w in manager.caught if issubclass(w.category, mpamp.MpampWarning)]


def product(device: str = "cpu") -> str:
    """Return the dtype of a product on the processor in a region."""
    x = torch.ones(2, 2)
    with mpamp.autocast(device, dtype=BRAIN):
        return str((x @ x).dtype)


def ask(device: str) -> list[Any]:
    """Use a device in every way; return what was raised, as its class, message and cause."""
    found = []
    try:
        with mpamp.autocast(device):
            pass
        backend = registry.device_state(device).backend
        for name in METHODS:
            count = len(inspect.signature(getattr(Backend, name)).parameters) - 1
            given = {"read_later": torch.ones(1), "is_emulated": BRAIN}.get(name, "aten::mm")
            answer = repr(backend) if name == "__repr__" else getattr(backend, name)(*[given] * count)
            if callable(answer) and name in CALLED_LATER:
                answer(*[torch.ones(1)] * (name == "tensor_check"))
    except BaseException as error:
        found = [type(error).__name__, str(error), shown(error.__cause__) if error.__cause__ else ""]
    return found


def faulty(where: str, error: Callable[[], BaseException], later: bool = False, **members: Any) -> Backend:
    """Return a backend that raises where it is asked for something, or in the function that it gave."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error()

    made: Any = property(fail) if where in ATTRIBUTES else (lambda *args: fail) if later else fail
    base = {"device_type": "hpu", "autocast_key": "AutocastHPU", "is_available": lambda self: True}
    backend: Backend = type("Faulty", (Backend,), {**base, **members, where: made})()
    return backend


def bring(backend: Backend) -> Any:
    return SimpleNamespace(mpamp_backends=hookimpl(lambda: [backend]))


PLACES = [*((name, False) for name in (*METHODS, *ATTRIBUTES)), *((name, True) for name in CALLED_LATER)]
CPU = {"device_type": "cpu", "autocast_key": "AutocastCPU", "replaces_builtin": True, "default_dtype": BRAIN}
AFTER = [("read_later", False), ("read_later", True), ("capture_check", True)]
"""What is asked for the first time while the device is in use: mpamp's own can't take its place any more."""


@pytest.mark.parametrize(("where", "later"), PLACES)
def test_a_backend_that_raises_is_named(where: str, later: bool) -> None:
    def each() -> Any:
        results = {}
        for name, error in ERRORS.items():
            with fresh(point("hpu", bring(faulty(where, error, later)))) as manager:
                first, second = ask("hpu"), ask("hpu")
                results[name] = first, second, shown(error()), product(), manager.listing()[-1].status
        return results

    for name, (first, second, cause, dtype, status) in in_child(each).items():
        assert first[0] == second[0] == "PluginLoadError", name
        assert "acme" in first[1], name
        assert "acme" in second[1], name
        assert first[2] == cause, name
        assert (dtype, status) == ("torch.bfloat16", "failed"), name


@pytest.mark.parametrize(("where", "later"), [place for place in PLACES if place not in AFTER])
def test_where_a_backend_replaces_mpamps_own_that_one_goes_on(where: str, later: bool) -> None:
    def use() -> Any:
        with fresh(point("cpu", bring(faulty(where, lambda: OwnExit("boo"), later, **CPU)))) as manager:
            return product(), ask("cpu"), product(), said(manager), manager.listing()[-1].status

    *found, warned, status = in_child(use)
    assert (found, len(warned), status) == (["torch.bfloat16", [], "torch.bfloat16"], 1, "failed")
    if where in ("autocast_key", "replaces_builtin"):  # they are read when the plugin is loaded
        assert warned[0].startswith("plugin 'cpu' of acme 1.2 failed to load and is left out")
    else:
        assert "(acme 1.2) failed: its " in warned[0]
        assert warned[0].endswith("mpamp's own is used.")


@pytest.mark.parametrize(("where", "later"), AFTER)
def test_what_raises_in_use_is_named(where: str, later: bool) -> None:
    def use() -> Any:
        with fresh(point("cpu", bring(faulty(where, lambda: OwnExit("boo"), later, **CPU)))) as manager:
            return ask("cpu"), product("xpu"), manager.listing()[-1].status

    raised, other, status = in_child(use)
    assert (raised[0], raised[2], other, status) == ("PluginLoadError", "OwnExit('boo')", "torch.float32", "failed")
    assert "(acme 1.2) failed: its " in raised[1]


@pytest.mark.parametrize(("where", "later"), PLACES)
def test_an_interrupt_goes_through(where: str, later: bool) -> None:
    def each() -> Any:
        with fresh(point("hpu", bring(faulty(where, KeyboardInterrupt, later)))):
            return ask("hpu"), product()

    raised, dtype = in_child(each)
    assert (raised[0], dtype) == ("KeyboardInterrupt", "torch.bfloat16")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_is_left_out(hook: str) -> None:
    def use(error: Callable[[], BaseException]) -> Any:
        def fail() -> Any:
            raise error()

        working = {"mpamp_op_rules": hookimpl(lambda: {"softmax": "fp32"})}
        mine = SimpleNamespace(**{**working, hook: hookimpl(fail)})
        other = SimpleNamespace(mpamp_op_rules=hookimpl(lambda: {"relu": "fp32"}))
        with fresh(point("ops.mine", mine), point("ops.other", other, "fine")) as manager:
            seen = []
            for _ in range(2):
                seen += [product(), step()]
                _commands()
            relu = str(mpamp.get_op_table("cpu").policy("relu", BRAIN))
            return seen, relu, said(manager), [i.status for i in manager.infos.values()]

    for name, (seen, relu, warned, statuses) in in_child(lambda: {n: use(e) for n, e in ERRORS.items()}).items():
        assert seen == ["torch.bfloat16", [0.0, 0.0]] * 2, name
        assert (relu, statuses) == ("fp32", ["failed", "loaded"]), name
        assert len(warned) == 1, (name, warned)
        assert "acme" in warned[0]
        assert ("boo" in warned[0]) is (name in ("ValueError", "an error of mpamp", "BaseException"))


def _commands() -> None:
    from mpamp.cli.app import _Commands

    _Commands(name="mpamp").take_in_plugins()
    with mpamp.reporting(None):
        pass


@pytest.mark.parametrize("hook", HOOKS)
def test_an_interrupt_of_a_hook_goes_through(hook: str) -> None:
    def use() -> Any:
        def fail() -> Any:
            raise KeyboardInterrupt

        with fresh(point("ops.mine", SimpleNamespace(**{hook: hookimpl(fail)}))):
            try:
                product()
                step()
                _commands()
            except KeyboardInterrupt:
                return True

    assert in_child(use)


@pytest.mark.parametrize("error", [*ERRORS.values(), KeyboardInterrupt], ids=[*ERRORS, "KeyboardInterrupt"])
def test_an_import_that_raises(error: Callable[[], BaseException]) -> None:
    def use() -> Any:
        def fail() -> Any:
            raise error()

        broken = point("ops.mine", None)
        broken.load = fail
        with fresh(broken) as manager:
            try:
                first = product()
            except KeyboardInterrupt:
                first = "interrupted"
                broken.load = lambda: SimpleNamespace()
            return first, product(), len(said(manager)), [i.status for i in manager.infos.values()]

    first, second, count, statuses = in_child(use)
    assert second == "torch.bfloat16"
    if error is KeyboardInterrupt:
        assert (first, count, statuses) == ("interrupted", 0, ["loaded"])
    else:
        assert (first, count, statuses) == ("torch.bfloat16", 1, ["failed"])


# -- What is left behind, and what is given ------------------------------------------------------------------


LEAVES: dict[str, Callable[[], Any]] = {
    "a region": lambda: mpamp.autocast("cpu", dtype=torch.float16).__enter__(),
    "a region with a table": lambda: mpamp.autocast("cpu", ops={"relu": "fp32"}).__enter__(),
    "torch.autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.autocast on an accelerator": lambda: torch.set_autocast_enabled("xpu", True),
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("hook", ["import", "mpamp_backends", "mpamp_op_rules"])
def test_a_region_left_open_is_closed_and_the_plugin_left_out(leave: Callable[[], Any], hook: str) -> None:
    def use() -> Any:
        plugin = (
            SimpleNamespace() if hook == "import" else SimpleNamespace(**{hook: hookimpl(lambda: leave() and None)})
        )
        given = point("ops.mine", plugin)
        if hook == "import":
            given.load = lambda: (leave(), plugin)[1]
        with fresh(given) as manager:
            states = [product(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("xpu")]
            return [*states, torch.is_autocast_cache_enabled(), said(manager), manager.listing()[-1].status]

    dtype, *on, cache, warned, status = in_child(use)
    assert (dtype, on, cache, status) == ("torch.bfloat16", [False, False], True, "failed")
    assert len(warned) == 1
    assert "left an autocast region open" in warned[0]


WRONG: dict[str, Any] = {
    "a number": 5,
    "a generator": (x for x in ()),
    "an unknown op": {"no_such_op": "fp32"},
    "an unknown policy": {"softmax": "lukewarm"},
    "keys that are no strings": {1: "fp32"},
}


@pytest.mark.parametrize("rules", WRONG.values(), ids=WRONG)
def test_rules_that_are_none(rules: Any) -> None:
    def use() -> Any:
        plugin = SimpleNamespace(mpamp_op_rules=hookimpl(lambda: rules))
        with fresh(point("ops.mine", plugin)) as manager:
            return product(), said(manager), manager.listing()[-1].status

    dtype, warned, status = in_child(use)
    assert (dtype, len(warned), status) == ("torch.bfloat16", 1, "failed")


def test_a_table_will_do_for_rules() -> None:
    def use() -> Any:
        plugin = SimpleNamespace(mpamp_op_rules=hookimpl(lambda: mpamp.OpTable({"gelu": "fp32"})))
        with fresh(point("ops.mine", plugin)):
            x = torch.ones(2, dtype=BRAIN)
            with mpamp.autocast("cpu", dtype=BRAIN):
                return str(torch.nn.functional.gelu(x).dtype)

    assert in_child(use) == "torch.float32"


def test_rules_hold_in_float32_regions_too() -> None:
    def use() -> Any:
        asked: list[str] = []

        def rules(dtype: torch.dtype) -> Any:
            asked.append(str(dtype))
            return {"gelu": "fp32"}

        with fresh(point("ops.mine", SimpleNamespace(mpamp_op_rules=hookimpl(rules)))):
            x = torch.ones(2, dtype=BRAIN)
            with mpamp.autocast("cpu", dtype=torch.float32):
                return asked, str(torch.nn.functional.gelu(x).dtype)

    asked, dtype = in_child(use)
    assert sorted(asked) == ["torch.bfloat16", "torch.float16", "torch.float32"]
    assert dtype == "torch.float32"


class Attributes(Backend):
    device_type, autocast_key = "hpu", "AutocastHPU"


ODD: dict[str, Any] = {
    "default_dtype": "bfloat16",
    "lower_precision_dtypes": (BRAIN, 3),
    "autocast_key": "NoSuchKey",
    "tensor_attribute": "is_no_such_thing",
    "watched_modules": ([],),
    "op_table": lambda self: {"linear": "fp32"},
}


@pytest.mark.parametrize("name", ODD)
def test_a_backend_that_says_nonsense_is_named(name: str) -> None:
    def use() -> Any:
        backend = type("Odd", (Attributes,), {name: ODD[name]})()
        with fresh(point("hpu", bring(backend))):
            return ask("hpu"), product()

    raised, dtype = in_child(use)
    assert (raised[0], dtype) == ("PluginLoadError", "torch.bfloat16")
    assert "(acme 1.2)" in raised[1]


@pytest.mark.parametrize("wrapper", [{"wrapper": True}, {"hookwrapper": True}])
def test_a_hook_wrapper_is_refused(wrapper: dict[str, bool]) -> None:
    def use() -> Any:
        def around() -> Any:
            return (yield)

        with fresh(point("ops.mine", SimpleNamespace(mpamp_op_rules=hookimpl(**wrapper)(around)))) as manager:
            return product(), said(manager)

    dtype, warned = in_child(use)
    assert dtype == "torch.bfloat16"
    assert "is a hook wrapper" in warned[0]


# -- Strict mode and conflicts -----------------------------------------------------------------------------


def npu(**members: Any) -> Any:
    return bring(type("Npu", (Backend,), {"device_type": "npu", "autocast_key": "AutocastPrivateUse1", **members})())


def errors_of(*devices: str) -> list[str]:
    found = []
    for device in devices:
        try:
            mpamp.get_backend(device)
            found.append("")
        except mpamp.MpampError as error:
            found.append(type(error).__name__)
    return found


def test_a_plugin_whose_device_torch_does_not_know() -> None:
    """As long as torch doesn't: its package may be imported later."""

    def use() -> Any:
        said = []
        with fresh(point("npu", npu())):
            mpamp.get_backend("npu")
            for ask in (
                lambda: mpamp.autocast("npu"),
                lambda: mpamp.autocast("npu", BRAIN, ops={"mm": "fp32"}),
                lambda: CliRunner().invoke(app, ["ops", "--device", "npu", "mm"]).output,
            ):
                try:
                    said.append(str(ask()))
                except mpamp.UnknownDeviceError as error:
                    said.append(str(error))
            torch.utils.rename_privateuse1_backend("npu")
            return said, mpamp.autocast("npu").device_type

    said, later = in_child(use)
    wanted = "torch knows no device 'npu', though the plugin for device 'npu' (acme 1.2) is loaded. "
    assert [wanted in " ".join(text.split()) for text in said] == [True] * 3, said
    assert later == "npu"


def test_packs_in_conflict_over_a_device_leave_the_others_alone() -> None:
    def use() -> Any:
        with fresh(point("ops.a", npu(), "first"), point("ops.b", npu(), "second")) as manager:
            found = errors_of("cpu", "npu", "cpu", "npu", "xpu")
            return found, said(manager), [i.status for i in manager.infos.values()]

    found, warned, statuses = in_child(use)
    assert found == ["", "PluginConflictError", "", "PluginConflictError", ""]
    assert (len(warned), statuses) == (1, ["loaded", "conflict"])


@pytest.mark.parametrize("kind", ["conflict", "import", "rules"])
def test_strict_mode_raises_each_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPAMP_STRICT_PLUGINS", "1")

    def fail() -> Any:
        raise OwnExit

    def use() -> Any:
        broken = point("ops.a", SimpleNamespace(mpamp_op_rules=hookimpl(fail)), "first")
        if kind == "import":
            broken.load = fail
        points = [point("ops.a", npu(), "first"), point("ops.b", npu(), "second")] if kind == "conflict" else [broken]
        with fresh(*points):
            return errors_of("cpu", "cpu", "xpu")

    wrong = {"PluginLoadError", "PluginConflictError"}
    assert all(found in wrong for found in in_child(use))


def test_packs_that_disagree_are_both_listed_as_in_conflict() -> None:
    def use() -> Any:
        mine, other = ({"linear": policy} for policy in ("fp32", "fallthrough"))
        packs = [SimpleNamespace(mpamp_op_rules=hookimpl(lambda rules=rules: rules)) for rules in (mine, other)]
        with fresh(point("ops.a", packs[0], "first"), point("ops.b", packs[1], "second")) as manager:
            return errors_of("cpu", "cpu"), [i.status for i in manager.infos.values()]

    assert in_child(use) == [["PluginConflictError"] * 2, ["conflict"] * 2]


# -- Names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["MPAMP_DISABLE_PLUGINS", "MPAMP_LOAD_PLUGINS"])
@pytest.mark.parametrize("name", ["acme_npu", "ACME-NPU", "Acme.Npu", "acme--npu", "OPS.mine", "ops_mine"])
def test_names_are_compared_as_pip_compares_them(variable: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, name)
    manager = PluginManager([point("ops.mine", npu(), "acme-npu")])
    assert (manager.infos[0].status == "blocked") is (variable == "MPAMP_DISABLE_PLUGINS")


def test_an_unknown_device_names_the_plugins_that_are_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPAMP_DISABLE_PLUGINS", "acme-npu")
    manager = PluginManager([point("npu", npu(), "acme-npu")])
    with pytest.raises(mpamp.UnknownDeviceError, match=r"Blocked by MPAMP_DISABLE_PLUGINS: npu of acme-npu\."):
        manager.backend("npu")


def test_a_function_with_a_hooks_name_is_one() -> None:
    def use() -> Any:
        with fresh(point("ops.mine", SimpleNamespace(mpamp_op_rules=lambda device_type: {"relu": "fp32"}))):
            return str(mpamp.get_op_table("cpu").policy("relu", BRAIN))

    assert in_child(use) == "fp32"


def test_rules_reach_a_device_that_the_plugin_used_while_it_was_imported() -> None:
    def use() -> Any:
        pack = point("ops.mine", SimpleNamespace(mpamp_op_rules=hookimpl(lambda: {"gelu": "fp32"})))
        pack.load = lambda: (product(), mpamp.get_op_table("cuda"), vars(pack)["plugin"])[2]
        pack.plugin = SimpleNamespace(mpamp_op_rules=hookimpl(lambda: {"gelu": "fp32"}))
        with fresh(pack):
            product()
            with mpamp.autocast("cpu", dtype=BRAIN):
                dtype = str(torch.nn.functional.gelu(torch.ones(2, dtype=BRAIN)).dtype)
            return dtype, str(mpamp.get_op_table("cuda").policy("gelu", BRAIN))

    assert in_child(use) == ["torch.float32", "fp32"]
