"""find_overflow names what was planted, says nothing of clean models, and changes no dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpamp
from mpamp import find_overflow
from tests.insight import faults

HALF = torch.float16


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def half(**ops: str) -> mpamp.Region:
    return mpamp.autocast("cpu", HALF, ops=ops or None)


def total(y: Tensor) -> Tensor:
    return y.float().sum()


# -- Planted faults -------------------------------------------------------------------------------


def test_a_softmax_forced_to_float16_is_named_with_what_made_its_input() -> None:
    x, model = torch.randn(2, 4, 8), faults.MaskedAttention()
    found = find_overflow(model, x, loss=total, region=half(softmax="lower_precision_fp"))
    assert found.first is not None
    overflow = found.first.overflow
    assert overflow is not None
    assert (overflow.op, overflow.kernel, overflow.module) == ("softmax", "aten::_to_copy", "softmax")
    assert (overflow.phase, overflow.rule, overflow.made_by) == ("forward", {"softmax": "fp32"}, "add")
    (given,) = overflow.inputs
    assert (given.dtype, given.shape, given.values.least) == (torch.float32, (2, 4, 4), -1e9)
    assert overflow.outputs[0].dtype is HALF
    assert overflow.outputs[0].values.least == float("-inf")
    assert found.first.parameters == ("query.weight", "query.bias", "key.weight", "key.bias")
    repaired = find_overflow(model, x, loss=total, region=half(**overflow.rule))
    assert repaired.first is None


def test_an_exp_in_the_loss_is_named_outside_of_the_model() -> None:
    def loss(y: Tensor) -> Tensor:
        return (y.abs() + 11.2).exp().mean()

    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    found = find_overflow(model, x, loss=loss, region=half(exp="fallthrough"))
    assert found.first is not None
    overflow = found.first.overflow
    assert overflow is not None
    assert (overflow.op, overflow.module, overflow.phase) == ("exp", None, "forward")
    assert overflow.rule == {"exp": "fp32"}
    assert 11.09 < overflow.inputs[0].values.absmax < 13
    assert find_overflow(model, x, loss=loss, region=half()).first is None


def test_a_weight_that_overflows_a_product_is_named_with_its_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(model[2].weight, 6e4)
    overflow = find_overflow(model, torch.full((2, 4), 50.0), region=half()).reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.kernel, overflow.module) == ("linear", "aten::addmm", "2")
    assert (overflow.parameter, overflow.rule) == ("2.weight", {"linear": "fp32"})
    ranges = {tensor.label: tensor.values.absmax for tensor in overflow.inputs}
    assert ranges["mat2"] == 6e4


def test_a_gradient_that_overflows_is_named_with_the_forward_op_and_a_scale_that_fits() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model[1].weight, 1e4)

    def loss(y: Tensor) -> Tensor:
        return y.float().mul(3.0).sum()

    found = find_overflow(model, torch.full((1, 4), 1e-3), loss=loss, region=half())
    overflow = found.reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.module, overflow.phase) == ("linear", "1", "backward")
    assert (overflow.parameter, overflow.fitting_scale) == ("1.weight", 0.5)  # 4 * 3 * 1e4 / 65504 is above 1
    assert found.reports[0].parameters == ("0.weight", "0.bias")
    scaler = mpamp.GradScaler("cpu", init_scale=0.5)
    assert find_overflow(model, torch.full((1, 4), 1e-3), loss=loss, region=half(), scaler=scaler).first is None


def test_a_gradient_too_large_for_the_value_that_was_cast_names_what_made_that() -> None:
    model = nn.Linear(4, 4)
    found = find_overflow(model, torch.ones(2, 4), loss=lambda y: y.float().mul(1e6).sum(), region=half())
    overflow = found.reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.module, overflow.phase) == ("linear", "", "backward")
    assert (overflow.rule, overflow.fitting_scale) == ({"linear": "fp32"}, 2.0**-5)  # the bias has twice 1e6


def test_an_embedding_whose_gradients_underflow_is_named_with_the_scale_that_keeps_them() -> None:
    model, x = faults.TinySlope(), faults.words()

    def loss(y: Tensor) -> Tensor:
        return y.mean()

    found = find_overflow(model, x, loss=loss, region=half())
    assert found.first is not None
    assert found.first.overflow is None
    (underflow,) = found.first.underflows
    assert (underflow.parameter, underflow.share) == ("embedding.weight", 1.0)
    assert (underflow.op, underflow.module, underflow.scale) == ("linear", "narrow", 1.0)
    # 8 x 1e-7 / 96 = 8.3e-9, and float16's least is 6e-8: times 8 it is there, and times 32 it isn't far off.
    assert underflow.scale_to_keep == 32.0
    scaler = mpamp.GradScaler("cpu", init_scale=underflow.scale_to_keep)
    assert find_overflow(model, x, loss=loss, region=half(), scaler=scaler).first is None
    assert find_overflow(model, x, loss=loss, region=half(), least_share=None).first is None


def test_a_report_names_no_more_than_eight_parameters_of_a_kind() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    nn.init.constant_(model[5].weight, 1e-7)
    report = find_overflow(model, torch.ones(2, 4), loss=lambda y: y.mean(), region=half()).reports[0]
    assert len(report.underflows) > 8
    assert str(report).splitlines()[-1] == f"  and {len(report.underflows) - 8} more"
    nn.init.constant_(model[5].weight, 6e4)
    report = find_overflow(model, torch.full((2, 4), 50.0), loss=total, region=half()).reports[0]
    assert len(report.parameters) > 8
    assert str(report).splitlines()[-1].endswith(f" and {len(report.parameters) - 8} more")


def test_a_nan_in_a_parameter_is_said_to_be_older_than_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    overflow = find_overflow(model, torch.ones(2, 4), region=half()).reports[0].overflow
    assert overflow is not None
    assert (overflow.parameter, overflow.rule) == ("1.weight", {})
    assert "before the step" in overflow.advice


class Scaled(nn.Module):
    """Multiplies by a buffer before a norm, which makes NaN of an inf."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("run", torch.ones(8))
        self.meddle: Callable[[Tensor], Tensor] = lambda y: y

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.meddle(self.layer(x * self.run)))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["an input", "run", "layer.bias"])
@pytest.mark.parametrize("in_a_loop", [False, True])
def test_what_was_there_before_is_not_blamed_on_an_op(value: float, where: str, in_a_loop: bool) -> None:
    model, x = Scaled(), torch.randn(4, 8)
    with torch.no_grad():
        {"an input": x[0], "run": model.run, "layer.bias": model.layer.bias}[where][3] = value
    if in_a_loop:
        with find_overflow(model) as found, half():
            model(x)
    else:
        found = find_overflow(model, x, loss=total, region=half())
    overflow = found.reports[0].overflow
    assert overflow is not None
    assert (overflow.kernel, overflow.rule) == ("no call", {})
    if in_a_loop and where == "an input":
        assert "came in with an inf or NaN when mul took it" in overflow.advice
    else:
        assert overflow.op == where
        assert overflow.advice.startswith(f"{where} had an inf or NaN before the step")


def by_numpy(y: Tensor) -> Tensor:
    y.detach().view(torch.int16).numpy()[0, 0] = 0x7C00  # inf
    return y


def by_untyped_memory(y: Tensor) -> Tensor:
    y.detach().untyped_storage()[1] = 0x7C
    y.detach().untyped_storage()[0] = 0
    return y


@pytest.mark.parametrize("meddle", [by_numpy, by_untyped_memory])
@pytest.mark.parametrize("in_a_loop", [False, True])
def test_what_was_written_unseen_is_said_to_be(meddle: Callable[[Tensor], Tensor], in_a_loop: bool) -> None:
    model, x = Scaled(), torch.randn(4, 8)
    model.meddle = meddle
    if in_a_loop:
        with find_overflow(model) as found, half():
            model(x)
    else:
        found = find_overflow(model, x, region=half())
    overflow = found.reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.kernel, overflow.rule) == ("the result of linear in layer", "no call", {})
    assert "NumPy" in overflow.advice


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_another_library_made_is_said_to_be() -> None:
    model = Scaled()
    model.meddle = lambda y: y + torch.from_numpy(y.detach().float().numpy() * float("inf"))
    overflow = find_overflow(model, torch.randn(4, 8), region=half()).reports[0].overflow
    assert overflow is not None
    assert (overflow.kernel, overflow.rule) == ("no call", {})
    assert "came in with an inf or NaN when add took it" in overflow.advice


@pytest.mark.parametrize("held", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("how", ["out", "copy", "zero"])
def test_memory_that_is_only_written_to_is_no_input(held: float, how: str) -> None:
    def meddle(y: Tensor) -> Tensor:
        memory = torch.full((4, 8), held, dtype=HALF)
        if how == "out":
            torch.mul(y.detach(), 1e6, out=memory)
        elif how == "copy":
            memory.copy_(y.detach() * 1e6)
        else:
            memory.zero_().add_(y.detach()).mul_(1e6)
        return y + memory

    model = Scaled()
    model.meddle = meddle
    overflow = find_overflow(model, torch.randn(4, 8), region=half()).reports[0].overflow
    assert overflow is not None
    assert overflow.kernel.startswith("aten::mul")


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_memory_that_a_kernel_has_not_written_yet_is_not_looked_at(dtype: torch.dtype) -> None:
    """torch's sum fills its result through a view of it: what was there before is nobody's."""
    x = torch.full((4, 4), float("-inf"))
    region = mpamp.autocast("cpu", dtype=dtype)
    overflow = find_overflow(nn.Softmax(-1), x, loss=lambda y: y.sum(), region=region).reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.kernel) == ("softmax", "aten::_softmax")


def test_a_mask_that_is_given_is_no_fault_unless_it_leaves_nothing() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.softmax(super().forward(x) + mask, -1)

    model, x, mask = Masked(4, 4), torch.randn(4, 4), torch.zeros(4, 4)
    mask[:, 1] = float("-inf")
    assert find_overflow(model, x, mask, loss=lambda y: (y * torch.arange(4)).sum(), region=half()).first is None
    mask[2] = float("-inf")
    overflow = find_overflow(model, x, mask, loss=total, region=half()).reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.rule) == ("softmax", {})
    assert "a row is -inf only at index (2,)" in overflow.advice


def test_a_cast_in_the_code_gets_no_rule() -> None:
    for cast in (
        Tensor.half,
        lambda y: y.to(HALF),
        lambda y: y.type(HALF),
        lambda y: torch.empty_like(y).half().copy_(y),
    ):
        model = Scaled()
        model.meddle = lambda y, cast=cast: cast(y.float() * 1e6)  # type: ignore[misc]
        overflow = find_overflow(model, torch.randn(4, 8), loss=total, region=half()).reports[0].overflow
        assert overflow is not None
        assert overflow.rule == {}
        assert "no rule decides it" in overflow.advice


def test_what_cannot_be_looked_at_is_said_and_does_no_harm() -> None:
    model = nn.Linear(4, 4)
    with mock.patch("mpamp.insight.overflow_calls.range_of", side_effect=RuntimeError("no such thing")):
        found = find_overflow(model, torch.ones(2, 4), loss=total, region=half())
    assert "RuntimeError: no such thing" in str(found)


def test_what_runs_in_float32_gets_no_rule() -> None:
    overflow = find_overflow(nn.Identity(), torch.zeros(2), loss=torch.log, region=half()).reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.rule) == ("log", {})
    assert "float32" in overflow.advice


def test_a_masked_row_is_named_as_what_made_a_nan_of_the_masks_infinities() -> None:
    scores = torch.zeros(2, 4)

    def loss(y: Tensor) -> Tensor:
        return y.masked_fill(torch.tensor([[True], [False]]), float("-inf")).softmax(-1)

    overflow = find_overflow(nn.Linear(4, 4), scores, loss=lambda y: loss(y).sum(), region=half()).reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.kernel) == ("softmax", "aten::_softmax")
    assert overflow.inputs[0].values.least == float("-inf")


# -- Clean models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_is_said_of_a_clean_model(dtype: torch.dtype) -> None:
    scaler = mpamp.GradScaler("cpu")
    region = mpamp.autocast("cpu", dtype)
    found = find_overflow(faults.Words(), faults.words(), loss=faults.next_word, region=region, scaler=scaler)
    assert (found.steps, found.waits, list(found.reports)) == (1, 1, [])
    assert "nothing overflows" in str(found)


@pytest.mark.parametrize(
    "model",
    [
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        nn.LSTM(16, 8),
        nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(112, 4)),
    ],
    ids=["transformer", "lstm", "convolution"],
)
def test_nothing_is_said_of_torchs_layers(model: nn.Module) -> None:
    def loss(y: Any) -> Tensor:
        return (y[0] if isinstance(y, tuple) else y).float().square().mean()

    found = find_overflow(
        model, torch.randn(3, 4, 16), loss=loss, region=half(), scaler=mpamp.GradScaler("cpu", 2.0**10)
    )
    assert list(found.reports) == []


# -- What it leaves alone -------------------------------------------------------------------------


class Dtypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = torch.utils._pytree.tree_leaves((args, kwargs, result))
        self.seen.append((str(func), [t.dtype for t in tensors if isinstance(t, Tensor)]))
        return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "ops", [None, {"softmax": "fp32", "add": "fp32", "div": "lower_precision_fp"}], ids=["default", "ops"]
)
def test_every_op_runs_in_the_dtypes_that_it_would_run_in(dtype: torch.dtype, ops: dict[str, str] | None) -> None:
    model, x = faults.Words(), faults.words()

    def step() -> tuple[list[tuple[str, list[torch.dtype]]], list[Tensor]]:
        with Dtypes() as mode:
            with mpamp.autocast("cpu", dtype, ops=ops):
                loss = faults.next_word(model(x))
            grads = torch.autograd.grad(loss * 64, list(model.parameters()))
        return mode.seen, list(grads)

    step()  # a process's first region of a dtype looks at what the machine can do
    plain, grads = step()
    with find_overflow(model) as finder:
        watched, watched_grads = step()
    assert finder.steps == 1
    assert len(plain) > 200
    assert watched == plain
    torch.testing.assert_close(watched_grads, grads, rtol=0, atol=0)


def test_a_step_of_its_own_leaves_gradients_weights_and_the_scaler() -> None:
    model, scaler = faults.Words(), mpamp.GradScaler("cpu", 8.0)
    before = [p.detach().clone() for p in model.parameters()]
    find_overflow(model, faults.words(), loss=faults.next_word, region=half(), scaler=scaler)
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert scaler.get_scale() == 8.0
    assert not model._forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch._C._dispatch_tls_local_include_set().has(torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode"))


def test_an_error_in_the_model_leaves_nothing() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError("broken")

    with pytest.raises(LookupError):
        find_overflow(Broken(), torch.ones(2))
    assert not torch.nn.modules.module._global_forward_hooks
    assert find_overflow(nn.Linear(2, 2), torch.ones(2, 2), region=half()).steps == 1


def test_two_finders_at_once_are_refused() -> None:
    model = nn.Linear(2, 2)
    with find_overflow(model), pytest.raises(mpamp.MpampError, match="watched already"), find_overflow(model):
        pass


# -- Around a training loop -----------------------------------------------------------------------


def train(model: nn.Module, scaler: mpamp.GradScaler, steps: int, each: Callable[[int], None] | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        if each is not None:
            each(step)
        optimizer.zero_grad()
        with half():
            loss = faults.next_word(model(faults.words()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_the_steps_that_a_scaler_skips_are_explained() -> None:
    model, scaler = faults.Words(), mpamp.GradScaler("cpu", 2.0**24, backoff_factor=2.0**-4)
    with find_overflow(model, scaler=scaler) as finder:
        train(model, scaler, 4)
    skipped = [record.step for record in scaler.history if record.skipped]
    assert skipped
    assert [report.step for report in finder.skips] == skipped
    assert finder.steps == 4
    report = finder.skips[0]
    assert report.scale == 2.0**24
    assert "head.weight" in report.parameters
    assert report.overflow is not None
    assert (report.overflow.op, report.overflow.module, report.overflow.phase) == ("linear", "head", "backward")
    assert report.overflow.fitting_scale is None  # the loop's backward pass can't be run again


def test_a_step_that_is_skipped_for_what_was_done_to_its_gradients_is_told() -> None:
    model, scaler = nn.Linear(4, 2), mpamp.GradScaler("cpu", 2.0**4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with find_overflow(model, scaler=scaler) as finder:
        for step in range(3):
            optimizer.zero_grad()
            with half():
                loss = model(torch.ones(2, 4)).float().sum()
            scaler.scale(loss).backward()
            if step == 1:
                assert model.weight.grad is not None
                model.weight.grad.mul_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
    assert [(r.step, r.is_skipped_for_others, r.overflow, r.parameters) for r in finder.skips] == [(2, True, None, ())]
    assert "no op here overflowed: the inf or NaN is of a step before" in str(finder)
    assert finder.waits == 3


def test_a_weight_that_goes_bad_is_found_in_its_step() -> None:
    model, scaler = faults.Words(), mpamp.GradScaler("cpu", 2.0**10)

    def spoil(step: int) -> None:
        if step == 2:
            nn.init.constant_(model.head.weight, 6e4)

    with find_overflow(model, scaler=scaler) as finder:
        train(model, scaler, 3, spoil)
    assert [report.step for report in finder.reports] == [3]
    overflow = finder.reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.module, overflow.parameter) == ("linear", "head", "head.weight")


def test_the_device_is_waited_for_once_a_step() -> None:
    model = faults.Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    waits: list[str] = []

    def counted(name: str) -> Any:
        original = getattr(Tensor, name)

        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            waits.append(name)
            return original(self, *args, **kwargs)

        return mock.patch.object(Tensor, name, call)

    names = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero")
    with find_overflow(model) as finder:
        patches = [counted(name) for name in names]
        for patch in patches:
            patch.start()
        try:
            for _ in range(3):
                with half():
                    loss = faults.next_word(model(faults.words()))
                loss.backward()
                optimizer.step()
            assert waits == ["tolist", "tolist"]  # the last step has not been read yet
            finder.read()
        finally:
            for patch in patches:
                patch.stop()
    assert waits == ["tolist"] * 3
    assert (finder.steps, finder.waits) == (3, 3)


def test_checkpoints_and_inference_are_seen_into() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            nn.init.constant_(self.inner.weight, 6e4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    overflow = find_overflow(Checkpointed(), torch.ones(2, 4), loss=total, region=half()).reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.module, overflow.phase) == ("linear", "inner", "forward")
    with torch.inference_mode():
        overflow = find_overflow(Checkpointed(), torch.ones(2, 4), region=half()).reports[0].overflow
    assert overflow is not None
    assert (overflow.op, overflow.module) == ("linear", "inner")


@pytest.mark.slow
def test_memory_stays_flat_over_many_steps() -> None:
    model = nn.Linear(4, 4)
    with find_overflow(model) as finder:
        for _ in range(300):
            with half():
                loss = model(torch.full((2, 4), 1e5)).float().sum()
            loss.backward()
        assert finder.steps == 299
        assert len(finder.reports) == 100
        assert len(finder._recorder.calls) < 40
