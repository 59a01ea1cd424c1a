"""Every call is seen from above all, with what it is made of, and runs as it would unwatched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mpamp
from mpamp import engine
from mpamp.engine.watching import unwatched, watch_calls


class Calls:
    """Notes each call, how deep it is, and the dtypes of its tensors."""

    def __init__(self) -> None:
        self.depth = 0
        self.seen: list[tuple[int, str]] = []
        self.dtypes: list[tuple[str, list[torch.dtype]]] = []

    def __call__(self, op: Any, args: Any, kwargs: Any, run: Any) -> Any:
        self.seen.append((self.depth, op.name()))
        self.dtypes.append((op.name(), [a.dtype for a in args if isinstance(a, Tensor)]))
        self.depth += 1
        try:
            return run()
        finally:
            self.depth -= 1

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.seen]


def test_a_call_is_seen_before_autocast_with_the_casts_and_the_call_below() -> None:
    calls, x, w = Calls(), torch.ones(2, 2), torch.ones(2, 2)
    with mpamp.autocast("cpu", torch.float16), watch_calls(calls):
        torch.nn.functional.linear(x, w)
    assert calls.dtypes[0] == ("aten::linear", [torch.float32, torch.float32])
    assert [name for name in calls.names if name in ("aten::_to_copy", "aten::mm")] == ["aten::_to_copy"] * 2 + [
        "aten::mm"
    ]
    assert dict(calls.dtypes)["aten::mm"] == [torch.float16, torch.float16]
    assert max(depth for depth, _ in calls.seen) >= 2


def test_what_a_kernel_calls_below_autograd_is_not_seen() -> None:
    calls = Calls()
    with watch_calls(calls):
        torch.ones(2, 2).sum()
    assert calls.names == ["aten::ones", "aten::sum"]


def test_backward_passes_are_seen_and_numbers_keep_what_they_are() -> None:
    calls, x = Calls(), torch.full((3,), 2.0, requires_grad=True)
    with watch_calls(calls):
        y = (x.half() / 4 * 2.5 + 1) / 2
        z = torch.ones(2, dtype=torch.int64) * 2.5
        y.sum().backward()
    assert (y.dtype, z.dtype) == (torch.float16, torch.float32)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((3,), 0.3125))
    assert "aten::div.Tensor" in calls.names[calls.names.index("aten::ones_like") :]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("number", [2.5, 3])
def test_a_number_that_torchscript_casts_stays_what_it_is(number: Any) -> None:
    class Model(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu() * number

    x, model = torch.ones(2, 3), Model(3, 3)
    watched, other = torch.jit.trace(model, x), torch.jit.trace(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        with watch_calls(Calls()):
            found = [watched(x) for _ in range(3)]  # profiled, then optimized
        expected = [other(x) for _ in range(3)]
    assert all(map(torch.equal, found, expected))


def test_nothing_is_seen_before_after_or_in_other_threads() -> None:
    calls, x = Calls(), torch.ones(2)
    with watch_calls(calls):
        thread = threading.Thread(target=x.exp)
        thread.start()
        thread.join()
        with unwatched():
            x.exp()
    x.exp()
    assert calls.seen == []


def test_modes_parameters_and_subclasses_are_made_and_run() -> None:
    class Mode(TorchDispatchMode):
        seen: list[str]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func.name())
            return func(*args, **(kwargs or {}))

    def work() -> list[str]:
        mode = Mode()
        mode.seen = []
        with mode, mpamp.autocast("cpu"):
            weight = torch.nn.Parameter(torch.ones(2, 2).clone())
            torch.nn.functional.linear(torch.ones(2, 2), weight).softmax(0).sum().backward()
        return mode.seen

    plain, calls = work(), Calls()
    with watch_calls(calls):
        watched = work()
    assert watched == plain
    assert "aten::linear" in calls.names


@pytest.mark.parametrize("time", ["first", "anew"])
def test_ops_defined_later_and_anew_are_seen(time: str) -> None:
    with watch_calls(Calls()):
        pass
    with torch.library._scoped_library("mpamp_watching", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        calls = Calls()
        with watch_calls(calls):
            torch.ops.mpamp_watching.twice(torch.ones(2))
        assert calls.names == ["aten::ones", "mpamp_watching::twice"]


def test_higher_order_ops_run() -> None:
    calls, x = Calls(), torch.ones(2)
    with watch_calls(calls):
        result = torch.ops.higher_order.cond(True, torch.sin, torch.cos, (x,))
    torch.testing.assert_close(result, torch.sin(x))
    assert "aten::sin" in calls.names


def test_one_at_a_time() -> None:
    with watch_calls(Calls()), pytest.raises(mpamp.MpampError, match="watched already"), watch_calls(Calls()):
        pass


def test_casts_are_whole_while_somebody_observes() -> None:
    def seen() -> list[str]:
        found: list[str] = []
        x = torch.ones(4)
        with watch_calls(lambda op, args, kwargs, run: (found.append(str(op)), run())[1]):
            with mpamp.autocast("cpu", torch.bfloat16):
                (x.half() + x.half()).float()
            x.half()
        return [op for op in found if "copy" in op]

    with mpamp.autocast("cpu", torch.bfloat16):
        pass
    plain = seen()
    with engine.observe(lambda call: None):
        assert seen() == plain == 4 * ["aten._to_copy.default"]
