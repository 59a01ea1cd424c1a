"""An ``initialize`` that fails, at whichever line, leaves everything as it was."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import mpamp.apex
from mpamp.apex import ambient, amp, attachment, initialize, masters
from tests.apex import odd
from tests.apex.training import LEVELS, data, net, sgd, start, step

ROOM = Path(mpamp.apex.__file__).parent
OWN_UNDOING = {"ambient.py", "blocks.py", "classes.py", "undo.py"}
"""Files that undo by themselves what they have half done; how is tested by failures of what they call."""


class Injected(BaseException):
    pass


class Lines:
    """Counts the lines of the drop-in that a call runs, each once, and raises before one of them."""

    def __init__(self, fails_at=None):
        self.seen: dict[tuple[str, int], None] = {}
        self.fails_at = fails_at

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def _call(self, frame, event, arg):
        path = Path(frame.f_code.co_filename)
        return self._line if path.parent == ROOM and path.name not in OWN_UNDOING else None

    def _line(self, frame, event, arg):
        if event == "line" and frame.f_code.co_name not in ("put_back", "only_attached", "leave_data_parallel"):
            key = (frame.f_code.co_filename, frame.f_lineno)
            if key not in self.seen:
                self.seen[key] = None
                if len(self.seen) == self.fails_at:
                    sys.settrace(None)
                    raise Injected(f"{Path(key[0]).name}:{key[1]}")
        return self._line


ORIGINALS = {
    (owner, name): getattr(owner, name)
    for owner, name in (
        (torch.Tensor, "cpu"),
        (torch.autograd, "_engine_run_backward"),
        (threading.Thread, "start"),
        (torch.autograd.function.BackwardCFunction, "apply"),
        (nn.functional, "interpolate"),
        (sys.modules["torch.nn.parallel.distributed"], "_sync_module_states"),
    )
}


def look(model, optimizer):
    """Return everything that an ``initialize`` may change, as what can be compared."""
    tensors = [*model.parameters(), *model.buffers()]
    inner = [optimizer, *(v for v in vars(optimizer).values() if hasattr(v, "param_groups"))]
    return {
        "classes": [type(m) for m in model.modules()],
        "attributes": [{k: id(v) for k, v in vars(m).items()} for m in model.modules()],
        "hooks": [{k: list(v) for k, v in vars(m).items() if isinstance(v, dict)} for m in model.modules()],
        "tensors": [(id(t), t.dtype, t.data_ptr(), t.detach().tolist()) for t in tensors],
        "gradients": [(id(t.grad), None if t.grad is None else t.grad.tolist()) for t in tensors],
        "masters": [masters.master_of(t) for t in tensors],
        "optimizers": [(type(o), {k: id(v) for k, v in vars(o).items()}) for o in inner],
        "groups": [[(id(g), list(g), [id(p) for p in g["params"]]) for g in o.param_groups] for o in inner],
        "state": [[(id(k), {n: id(x) for n, x in v.items()}) for k, v in o.state.items()] for o in inner],
        "amp": {k: id(v) for k, v in vars(amp._amp_state).items()},
        "registries": (list(initialize._models), set(map(id, attachment.attached()))),
        "torch": (
            [original is getattr(owner, name) for (owner, name), original in ORIGINALS.items()],
            list(torch.nn.modules.module._global_forward_pre_hooks.values()),
            dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
            sorted(vars(nn.Linear)),
            sorted(vars(torch.optim.SGD)),
            torch.is_autocast_enabled("cpu"),
            (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
        ),
        "installed": ambient.installed(),
    }


def subject(make):
    with mpamp.autocast("cpu", torch.bfloat16):  # the first region of a process brings what stays for all
        model = net()
    optimizer = make(list(model.parameters()))
    for _ in range(2):
        model(data()).sum().backward()
        optimizer.step()
    return model, optimizer


MAKERS = {"sgd": odd.sgd, "lookahead": odd.MAKERS["lookahead"], "own groups": odd.OwnGroups}


CASES = [("O2", "lookahead", None), ("O1", "sgd", "O1")]
ALL = [(level, make, earlier) for level in LEVELS for make in MAKERS for earlier in (None, "O1", "O2")]


@pytest.mark.parametrize(
    ("level", "make", "earlier"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in ALL if case not in CASES),
    ],
)
def test_a_failure_at_any_line_changes_nothing(level, earlier, make):
    options = {"opt_level": level, "verbosity": 0, "loss_scale": 8.0, "cast_model_outputs": torch.float32}
    other = None
    if earlier:
        other = start(earlier)
    model, optimizer = subject(MAKERS[make])
    before = look(model, optimizer)
    line = 0
    while True:
        line += 1
        failed = None
        try:
            with Lines(fails_at=line):
                amp.initialize(model, optimizer, **options)
        except Injected as injected:
            failed = injected
        if failed is None:
            break
        after = look(model, optimizer)
        assert {k: after[k] for k in before if after[k] != before[k]} == {}, failed
    assert line > 100
    step(model, optimizer, data())
    if other:
        step(*other, data())


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("earlier", [None, "O1"])
@pytest.mark.parametrize("what", ["region", "patch"])
def test_regions_that_cannot_be_entered_change_nothing(level, earlier, what, monkeypatch):
    if earlier:
        start(earlier)
    model, optimizer = subject(odd.sgd)
    before = look(model, optimizer)
    owner, name = (ambient.Region, "__enter__") if what == "region" else (ambient.Patches, "wrap")
    real, calls = getattr(owner, name), []

    def failing(self, *args):
        calls.append(self)
        if len(calls) == (2 if what == "patch" else 1):
            raise Injected
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(Injected):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    after = look(model, optimizer)
    assert {k: after[k] for k in before if after[k] != before[k]} == {}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_inside_an_open_region_nothing_changes(level):
    start("O1")
    model, optimizer = subject(odd.sgd)
    before = look(model, optimizer)
    with (
        mpamp.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match="inside an open region"),
    ):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    after = look(model, optimizer)
    assert {k: after[k] for k in before if after[k] != before[k]} == {}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_refused_changes_nothing_and_can_be_mended(level):
    class Bad(odd.Bare):
        step = torch.optim.Optimizer.step

    model = net()
    optimizer = Bad(sgd(model))
    before = look(model, optimizer)
    with pytest.raises(AttributeError, match=r"Bad has no step\(\) of its own"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    after = look(model, optimizer)
    assert {k: after[k] for k in before if after[k] != before[k]} == {}
    amp.initialize(model, optimizer.base, opt_level=level, verbosity=0)
    step(model, optimizer.base, data())
