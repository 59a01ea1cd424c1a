"""A report holds what happened, changes nothing of it, and says what to do about it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import mpamp
from mpamp.engine.observing import OBSERVERS
from mpamp.insight import reporting
from mpamp.insight.report.clock import Clock
from mpamp.insight.report.plain import autocast_off
from mpamp.insight.report.report import Comparison, Html, Report, Table
from mpamp.insight.report.scaling import ScaleLog
from mpamp.plugins.hookspecs import hookimpl
from mpamp.plugins.manager import manager
from mpamp.scaler.stepping import SteppingPart

from .faults import TinySlope, words
from .reported import HALF, train

BRAIN = torch.bfloat16


def report_of(collecting: Any) -> Report:
    assert collecting.report is not None
    return collecting.report  # type: ignore[no-any-return]


def titles(report: Report) -> list[str]:
    return [one.title for one in report.advice]


# -- Scales and culprits -------------------------------------------------------------------------------


def test_the_history_is_the_scalers_and_each_skip_has_its_culprit() -> None:
    with reporting(None) as collecting:
        _, scaler, _ = train()
    (log,) = report_of(collecting).scalers
    history = scaler.history
    assert (log.attempts, log.skipped) == (len(history), sum(record.skipped for record in history)) == (6, 3)
    assert log.points == [(1, 2.0**13), (2, 2.0**12), (3, 2.0**11), (4, 2.0**10)]
    assert [(skip.attempt, skip.scale) for skip in log.skips] == [(1, 2.0**13), (2, 2.0**12), (3, 2.0**11)]
    for skip in log.skips:
        assert skip.overflow is not None
        assert (skip.overflow.op, skip.overflow.module, skip.overflow.phase) == ("linear", "head", "backward")
        assert skip.overflow.fitting_scale is None  # which only a run of it could tell
        assert {"head.weight", "head.bias"} <= set(skip.parameters)
    assert log.kind == "mpamp.scaler.scaler.GradScaler"


def test_a_search_for_the_first_scale_is_no_fault() -> None:
    with reporting(None) as collecting:
        train(init_scale=2.0**16, steps=10)
    report = report_of(collecting)
    assert (report.skipped, report.start_up, report.steps.overflowed) == (6, 6, 6)
    assert not report.has_overflow_faults
    assert [one.title for one in report.advice if one.rank <= 1] == []


def test_the_first_scale_that_fits_is_named_where_the_script_began_far_above() -> None:
    with reporting(None) as collecting:
        train(init_scale=2.0**20, steps=16)
    (one,) = [one for one in report_of(collecting).advice if one.rank <= 1]
    assert (one.title, one.do) == ("The first 10 steps were lost in finding a scale", "GradScaler(init_scale=1024)")
    with reporting(None) as collecting:
        train(init_scale=1024.0)
    assert report_of(collecting).skipped == 0


def test_skips_after_the_first_ones_are_faults() -> None:
    with reporting(None) as collecting:
        train(steps=40, scaler=mpamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4))
    report = report_of(collecting)
    assert report.start_up == 0
    assert {one.title.partition(" ")[2] for one in report.advice if one.rank <= 1} == {
        "of the steps were skipped",
        "in head overflows in the backward pass",
    }


def test_its_advice_is_in_order_of_worth() -> None:
    with reporting(None) as collecting:
        train(steps=40, scaler=mpamp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4))
    advice = report_of(collecting).advice
    assert len(advice) > 2
    assert [(one.rank, -one.worth) for one in advice] == sorted((one.rank, -one.worth) for one in advice)


def test_where_no_step_was_looked_at_gradients_still_name_the_parameters() -> None:
    with reporting(None, watch=0) as collecting:
        train()
    report = report_of(collecting)
    (log,) = report.scalers
    assert report.steps.watched == 0
    assert [skip.overflow for skip in log.skips] == [None, None, None]
    assert all({"head.weight", "head.bias"} <= set(skip.parameters) for skip in log.skips)


def test_torchs_own_scaler_and_regions_are_noticed() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with reporting(None) as collecting:
        for _ in range(2):
            with torch.autocast("cpu", dtype=HALF):
                loss = (model(torch.ones(1, 4)).float() * 40).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    report = report_of(collecting)
    assert [(log.kind, log.attempts, log.skipped) for log in report.scalers] == [
        ("torch.amp.grad_scaler.GradScaler", 2, 2)
    ]
    assert report.torch_regions == 2
    assert report.steps.watched == 2
    assert "Only regions of torch.autocast ran: their casts can't be listed" in titles(report)
    assert "What was cast in 2 regions of torch.autocast that aren't mpamp's." in report.unseen


def test_regions_that_install_makes_mpamps_are_seen() -> None:
    model = nn.Linear(4, 2)
    with mpamp.install(), reporting(None) as collecting, torch.autocast("cpu", dtype=BRAIN):
        model(torch.ones(1, 4))
    report = report_of(collecting)
    assert report.torch_regions == 0
    assert report.summary.total("casts") == 3


def test_apex_scalers_are_noticed() -> None:
    from mpamp.apex import amp

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with reporting(None) as collecting:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
        try:
            for _ in range(3):
                with amp.scale_loss((model(torch.ones(1, 4)).float() * 8).sum(), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            amp.shutdown()
    report = report_of(collecting)
    (log,) = report.scalers
    assert (log.kind, log.attempts, log.skipped) == ("mpamp.apex.scaler.LossScaler", 3, 3)
    assert [scale for _, scale in log.points] == [2.0**16, 2.0**15, 2.0**14]
    assert all(skip.overflow is not None and set(skip.parameters) == {"weight", "bias"} for skip in log.skips)
    assert report.half_models == ("Linear",)
    assert "No op ran in a region: the weights are in lower precision themselves" in titles(report)


def test_where_every_step_is_skipped_a_smaller_scale_is_advised() -> None:
    with reporting(None) as collecting:
        train(steps=3, init_scale=2.0**15)
    (first,) = [one for one in report_of(collecting).advice if one.title.startswith("Every step was skipped")]
    assert first.why == "3 of 3 attempts found an inf or NaN in a gradient, at scales down to 8192."
    assert first.do.startswith("A GradScaler with a smaller init_scale")
    assert not any(digit in first.do for digit in "0123456789".replace("3", "").replace("2", ""))  # none was run


def test_where_the_forward_pass_overflows_no_scale_is_named() -> None:
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 2), mpamp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with reporting(None) as collecting:
        for _ in range(2):
            with mpamp.autocast("cpu", dtype=HALF):
                loss = (model(torch.full((1, 4), 6e4)) * 6e4).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    found = {one.title: one.do for one in report_of(collecting).advice}
    assert found["Every step was skipped: nothing was trained"].startswith("A smaller scale may not mend that")


def test_a_long_history_takes_little() -> None:
    log = ScaleLog("any")
    for step in range(50_000):
        log.add(2.0 ** (step % 7), step % 2 == 0)
    assert (log.attempts, log.skipped) == (50_000, 25_000)
    assert len(log.points) <= 2000
    assert len(log.skips) == 500


# -- Steps op by op ------------------------------------------------------------------------------------


def test_a_gradient_that_underflows_is_named() -> None:
    model = TinySlope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reporting(None) as collecting:
        with mpamp.autocast("cpu", dtype=HALF):
            loss = model(words()).mean()
        loss.backward()
        optimizer.step()
    report = report_of(collecting)
    (lost, count) = report.steps.underflows["embedding.weight"]
    assert set(report.steps.underflows) == {"embedding.weight"}
    assert (lost.module, lost.scale, count.steps) == ("narrow", 1.0, 1)
    assert (lost.scale_to_keep, lost.largest_scale) == (None, None)
    advice = next(one for one in report.advice if "embedding.weight" in one.title)
    assert advice.title == "100% of the gradient of embedding.weight underflows"
    assert advice.do.startswith("A larger loss scale may keep it, which a GradScaler finds")
    assert "float16 was trained without a GradScaler" in titles(report)


def test_the_first_steps_are_looked_at_and_those_after_a_skip() -> None:
    with reporting(None, watch=2) as collecting:
        train(steps=7, scaler=mpamp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2))
    report = report_of(collecting)
    (log,) = report.scalers
    assert [skip.attempt for skip in log.skips] == [5]  # at 2**11
    assert report.steps.watched == 3
    assert log.skips[0].overflow is None


def test_evaluation_between_steps_is_not_looked_at() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reporting(None) as collecting, mpamp.autocast("cpu", dtype=BRAIN):
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.full((1, 4), 1e38) * 10)
    report = report_of(collecting)
    assert (report.steps.trains, report.steps.watched, report.steps.overflows) == (True, 3, {})


def test_calls_of_a_model_that_is_not_trained_are_looked_at() -> None:
    model = nn.Linear(4, 4)
    with reporting(None, watch=2) as collecting, torch.no_grad(), mpamp.autocast("cpu", dtype=HALF):
        for size in (1e6, 1.0, 1e6):
            model(torch.full((1, 4), size))
    steps = report_of(collecting).steps
    assert (steps.trains, steps.watched, steps.overflowed) == (False, 2, 1)
    assert list(steps.overflows) == [("linear", "", "forward")]
    assert [found.module for found, _ in steps.overflows.values()] == [""]  # the model itself


def test_a_step_of_several_passes_is_one() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reporting(None) as collecting:
        for _ in range(2):
            with mpamp.autocast("cpu", dtype=BRAIN):
                loss = (model(torch.ones(1, 4)) - model(torch.zeros(1, 4))).sum()
            loss.backward()
            optimizer.step()
    assert report_of(collecting).steps.watched == 2


def test_a_second_model_is_said_not_to_be_looked_at() -> None:
    one, other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    with reporting(None) as collecting, mpamp.autocast("cpu", dtype=BRAIN):
        other(one(torch.ones(1, 4))).sum().backward()
    report = report_of(collecting)
    assert list(report.steps.others) == ["Sequential"]
    assert "Of Sequential, called as well, no steps were looked at." in report.unseen
    assert {use.module for use in report.summary.uses if use.op == "aten::linear"} == {"Linear", "Sequential:0"}


def test_the_scripts_own_finder_has_its_way() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reporting(None) as collecting, mpamp.autocast("cpu", dtype=HALF):
        model(torch.ones(1, 4)).sum().backward()  # looked at, up to here
        with mpamp.find_overflow(model) as found:
            model(torch.full((1, 4), 1e6)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 4)).sum().backward()
    assert [step.overflow.op for step in found.reports if step.overflow is not None] == ["linear"]
    assert report_of(collecting).steps.watched == 2
    assert "the script did so itself" in report_of(collecting).steps.why_not


def test_compiled_models_run_and_are_said_not_to_be_looked_into() -> None:
    model = nn.Linear(4, 4)
    counted: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counted.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with reporting(None) as collecting:
        for _ in range(3):
            with mpamp.autocast("cpu", dtype=BRAIN):
                compiled(torch.ones(1, 4)).sum().backward()
    report = report_of(collecting)
    assert len(counted) == 1
    assert report.steps.watched == 0
    assert "is compiled" in report.steps.why_not
    assert [use.calls for use in report.summary.uses if use.op == "aten::linear"] == [
        3
    ]  # this backend compiles nothing
    assert not any("No op ran" in title for title in titles(report))


# -- It changes nothing --------------------------------------------------------------------------------


def test_training_is_the_same_to_the_last_bit() -> None:
    model, scaler, losses = train()
    with reporting(None):
        looked_at, its_scaler, its_losses = train()
    assert its_losses == losses
    assert its_scaler.history == scaler.history
    for one, other in zip(model.parameters(), looked_at.parameters(), strict=True):
        assert torch.equal(one, other)


def test_casts_are_the_same_whether_steps_are_looked_at_or_not() -> None:
    counts = []
    for watch in (0, 20):
        with reporting(None, watch=watch) as collecting:
            train()
        summary = report_of(collecting).summary
        counts.append([(u.op, u.module, u.phase, u.calls, u.casts, u.cast_bytes) for u in summary.uses])
    assert counts[0] == counts[1] != []


def test_nothing_is_left_behind() -> None:
    def traces() -> list[Any]:
        hooks = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
        steps = (dict(_optimizer_hooks(kind)) for kind in ("pre", "post"))
        owners = (torch.amp.GradScaler, SteppingPart, torch.autocast)
        functions = [dict(vars(owner)) for owner in owners]
        return [*map(dict, hooks), *steps, functions, OBSERVERS.all, list(warnings.filters)]

    train(1)  # what the first use of mpamp puts there stays
    before = traces()
    with reporting(None):
        train(1)
        assert traces() != before
    assert traces() == before


def _optimizer_hooks(kind: str) -> Any:
    return getattr(sys.modules["torch.optim.optimizer"], f"_global_optimizer_{kind}_hooks")


def test_a_report_is_made_once() -> None:
    collecting = reporting(None)
    with collecting, pytest.raises(RuntimeError, match="made once"):
        collecting.__enter__()
    with pytest.raises(RuntimeError, match="made once"):
        collecting.__enter__()


# -- How it ended --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "how", "text", "is_well"),
    [
        (ValueError("mine"), "raised", "ValueError('mine')", False),
        (SystemExit(3), "exited", "3", False),
        (SystemExit(0), "exited", "0", True),
        (SystemExit(), "exited", "0", True),
        (SystemExit("no data"), "exited", "1: no data", False),
        (KeyboardInterrupt(), "interrupted", "", False),
    ],
)
def test_the_report_is_made_whatever_is_raised(error: BaseException, how: str, text: str, is_well: bool) -> None:
    collecting = reporting(None)

    def script() -> None:
        with mpamp.autocast("cpu", dtype=BRAIN):
            nn.Linear(4, 4)(torch.ones(1, 4))
        raise error

    with pytest.raises(type(error)), collecting:
        script()
    report = report_of(collecting)
    assert (report.outcome.how, report.outcome.text, report.outcome.is_well) == (how, text, is_well)
    assert report.summary.total("casts") == 3
    assert ("ValueError: mine" in report.outcome.trace) is (how == "raised")


def test_a_script_without_a_region_is_told_what_to_do() -> None:
    model = nn.Linear(4, 4)
    with reporting(None) as collecting:
        model(torch.ones(1, 4)).sum().backward()
    report = report_of(collecting)
    (advice,) = report.advice
    assert advice.title == "No op ran in a region: everything ran in the dtypes that it was called with"
    assert f'with mpamp.autocast("{report.machine["device"]}"' in advice.do
    assert report.steps.watched == 0
    assert report.unseen[-1] == (
        "Overflow and underflow: no step was looked at, for no model was called in mixed precision."
    )


# -- Time, memory and float32 --------------------------------------------------------------------------


def test_steps_are_counted_and_timed_after_a_warm_up() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    clock = Clock()
    with clock.running():
        for _ in range(3):
            optimizer.step()
        assert clock.step_ms is None
        optimizer.step()
    optimizer.step()
    found = clock.to_dict()
    assert found["steps"] == 4
    assert found["step_ms"] > 0
    assert found["seconds"] * 1e3 >= found["step_ms"]
    least = {"process": 2**20}  # what a card holds is left by others
    assert found["memory"]
    assert all(size >= least.get(place, 0) for place, size in found["memory"].items())


def test_autocast_can_be_off_for_all_regions() -> None:
    a = torch.ones(2, 2)
    kept = mpamp.autocast("cpu", dtype=BRAIN)
    with autocast_off():
        with mpamp.autocast("cpu", dtype=BRAIN):
            assert (a @ a).dtype is torch.float32
        with torch.autocast("cpu", dtype=BRAIN):
            assert (a @ a).dtype is torch.float32
        with torch.amp.autocast("cpu", BRAIN, True):
            assert (a @ a).dtype is torch.float32
    for region in (kept, mpamp.autocast("cpu", dtype=BRAIN), torch.autocast("cpu", dtype=BRAIN)):
        with region:
            assert (a @ a).dtype is BRAIN


def test_a_slower_run_is_advised_against() -> None:
    measured: dict[str, Any] = {"seconds": 2.0, "steps": 4, "step_ms": 30.0, "memory": {}}
    faster = {**measured, "step_ms": 20.0}
    collecting = reporting(None)
    collecting.compare = lambda: Comparison("float32", measured, faster)
    with collecting:
        train(1)
    report = report_of(collecting)
    assert report.comparison is not None
    assert report.comparison.ratio == 1.5
    assert "A step takes 1.50 times as long as in float32" in titles(report)
    without_steps = Comparison("float32", {**measured, "step_ms": None}, {**measured, "seconds": 4.0})
    assert without_steps.ratio == 0.5
    assert Comparison("float32", problem="it failed").ratio is None


def test_a_script_that_failed_is_not_run_again() -> None:
    def compare() -> Comparison:
        raise AssertionError

    collecting = reporting(None)
    collecting.compare = compare
    with pytest.raises(ZeroDivisionError), collecting:
        raise ZeroDivisionError
    comparison = report_of(collecting).comparison
    assert comparison is not None
    assert "wasn't run again" in comparison.problem


# -- Plugins -------------------------------------------------------------------------------------------


class Adds:
    @hookimpl
    def mpamp_report_sections(self, report: Any) -> None:
        report.add_section("Attention", f"{report.to_dict()['totals']['casts']} casts", [("op", "calls"), ("fru", 3)])


class Fails:
    @hookimpl
    def mpamp_report_sections(self, report: Any) -> None:
        report.add_section("Half done")
        raise ValueError("broken")


@pytest.fixture
def plugins() -> Iterator[Any]:
    registered = []

    def register(plugin: object, name: str) -> None:
        manager()._pm.register(plugin, name)
        manager()._pm.check_pending()
        registered.append(plugin)

    yield register
    for plugin in registered:
        name = manager()._pm.get_name(plugin)
        manager()._pm.unregister(plugin)
        manager()._left_out.discard((str(name), "mpamp_report_sections"))


def test_plugins_add_sections(plugins: Any) -> None:
    plugins(Adds(), "mpamp-adds")
    with reporting(None) as collecting, mpamp.autocast("cpu", dtype=BRAIN):
        nn.Linear(4, 4)(torch.ones(1, 4))
    (section,) = report_of(collecting).sections
    assert (section.title, section.by) == ("Attention", "mpamp-adds")
    assert section.parts == ("3 casts", Table(("op", "calls"), (("fru", "3"),)))


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_plugin_that_fails_is_named_and_the_report_is_written(
    plugins: Any, strict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setenv("MPAMP_STRICT_PLUGINS", strict)
    plugins(Adds(), "mpamp-adds")
    plugins(Fails(), "mpamp-fails")
    collecting = reporting(tmp_path / "report.html")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if strict == "1":
            with pytest.raises(mpamp.PluginLoadError, match="mpamp-fails"), collecting:
                pass
        else:
            with collecting:
                pass
            assert [str(w.message) for w in warned if w.category is mpamp.MpampWarning] == [
                "the report sections of plugin 'mpamp-fails' are left out: ValueError('broken')"
            ]
    report = report_of(collecting)
    line = "The sections of plugin 'mpamp-fails' are left out: ValueError('broken')"
    assert report.left_out == [line]
    assert "Half done" not in [section.title for section in report.sections]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "mpamp-fails" in page
    assert "Half done" not in page
    called = [name for name, _ in manager().implementations("mpamp_report_sections")]
    assert "mpamp-fails" not in called
    assert "mpamp-adds" in called


def test_a_part_that_is_none_is_refused() -> None:
    with reporting(None) as collecting:
        pass
    report = report_of(collecting)
    report.add_section("Mine", "text", type("Picture", (), {"_repr_html_": lambda self: "<b>x</b>"})())
    assert report.sections[-1].parts == ("text", Html("<b>x</b>"))
    for part in (3, [], ["a"], type("None_", (), {"_repr_html_": lambda self: None})()):
        with pytest.raises(TypeError, match="a part of a section"):
            report.add_section("Mine", part)
