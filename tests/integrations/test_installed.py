"""Frameworks as they are, unchanged, in ``mpamp.install()``: their regions and scalers are mpamp's.

What tells mpamp's regions from torch's: a rule of the process, which holds in the former alone, and how often a
frozen weight is cast that a step uses twice: torch casts it at each use.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpamp
from mpamp.redirect import redirect
from mpamp.testing import WeightCastCounter
from tests.integrations.digits import loader
from tests.integrations.steps import BF16, F16, F32, batches, digits, skip_without

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
    pytest.mark.filterwarnings("ignore:`torch.cuda.amp.GradScaler:FutureWarning"),  # MMEngine's
]
STEPS = 3
Train = Callable[["Served", Path], Any]


class Served(nn.Module):
    """A model with a frozen layer that is used twice, and what its regions did."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.out = nn.Linear(64, 10)
        self.config = None
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.frozen(self.frozen(images))
        active = hidden.relu()
        self.dtypes.append((hidden.dtype, active.dtype))
        logits = self.out(active)
        return logits if labels is None else {"loss": loss_of(logits, labels), "logits": logits}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@pytest.fixture(autouse=True)
def _a_rule_of_the_process() -> Iterator[None]:
    """Have ``relu``, for which torch has no row, be float32 in regions of mpamp's."""
    mpamp.set_op_rules("cpu", {"relu": "fp32"})
    yield
    mpamp.set_op_rules("cpu", None)


def lightning(model: Served, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Tensor:
            return loss_of(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.model)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(precision="bf16-mixed", accelerator="cpu", max_epochs=1, enable_model_summary=False, **quiet)
    trainer.fit(Module(), loader(STEPS))


def fabric(model: Served, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning.fabric import Fabric

    of = Fabric(precision="bf16-mixed", accelerator="cpu", devices=1)
    wrapped, optimizer = of.setup(model, optimizer_of(model))
    for images, labels in batches(STEPS):
        of.backward(loss_of(wrapped(images), labels))
        optimizer.step()


def accelerate(model: Served, folder: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        of = Accelerator(mixed_precision="bf16", cpu=True)
        wrapped, optimizer = of.prepare(model, optimizer_of(model))
        for images, labels in batches(STEPS):
            of.backward(loss_of(wrapped(images), labels))
            optimizer.step()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def trainer(model: Served, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder),
        bf16=True,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=32,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    images, labels = digits()
    Trainer(model, args, train_dataset=[{"images": images[i], "labels": labels[i]} for i in range(128)]).train()


def timm(model: Served, folder: Path) -> Any:
    from timm.utils import NativeScaler

    scaler, optimizer = NativeScaler("cpu"), optimizer_of(model)
    for images, labels in batches(STEPS):
        with torch.amp.autocast("cpu", dtype=F16):
            loss = loss_of(model(images), labels)
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    return scaler._scaler


def mmengine(model: Served, folder: Path) -> None:
    """Train in what MMEngine's loops of validation and test run in."""
    from mmengine.runner.amp import autocast

    optimizer = optimizer_of(model)
    for images, labels in batches(STEPS):
        with autocast(dtype=BF16):
            loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()


def mmengine_wrapper(model: Served, folder: Path) -> Any:
    from mmengine.optim import AmpOptimWrapper

    wrapper = AmpOptimWrapper(optimizer=optimizer_of(model), dtype="bfloat16")
    for images, labels in batches(STEPS):
        with wrapper.optim_context(model):
            loss = loss_of(model(images), labels)
        wrapper.update_params(loss)
    return wrapper.loss_scaler


def ignite(model: Served, folder: Path) -> Any:
    from ignite.engine import create_supervised_trainer

    engine = create_supervised_trainer(model, optimizer_of(model), loss_of, amp_mode="amp", scaler=True)
    engine.run(list(batches(STEPS)))
    return engine.state.scaler


@contextlib.contextmanager
def counted(model: Served) -> Iterator[Callable[[], tuple[int, int]]]:
    """Count casts of the frozen weight and of the two that train."""
    with WeightCastCounter([model.frozen.weight]) as frozen, WeightCastCounter(model.out) as trained:
        yield lambda: (frozen.count, trained.count)


@pytest.mark.parametrize(
    ("train", "module", "frozen"),
    [
        pytest.param(lightning, "lightning.pytorch", 2, id="lightning"),  # asks for regions that keep no casts
        pytest.param(fabric, "lightning.fabric", 1, id="fabric"),
        pytest.param(accelerate, "accelerate", 1, id="accelerate"),
        pytest.param(trainer, "transformers.trainer", 1, id="trainer"),
        pytest.param(timm, "timm.utils", 1, id="timm"),
        pytest.param(mmengine, "mmengine.runner", 1, id="mmengine"),
    ],
)
def test_a_framework_is_served(train: Train, module: str, frozen: int, tmp_path: Path) -> None:
    skip_without(module)
    seen = {}
    for name, names in {"torch": contextlib.nullcontext, "mpamp": mpamp.install}.items():
        model = Served()
        before = model.out.weight.detach().clone()
        with names(), counted(model) as casts:
            train(model, tmp_path)
        assert not torch.equal(before, model.out.weight)
        seen[name] = (set(model.dtypes), len(model.dtypes), casts())
    lower = F16 if train is timm else BF16
    assert seen == {
        "torch": ({(lower, lower)}, STEPS, (2 * STEPS, 2 * STEPS)),
        "mpamp": ({(lower, F32)}, STEPS, (frozen * STEPS, 2 * STEPS)),
    }


def test_timms_scaler_is_mpamps() -> None:
    skip_without("timm.utils")
    with mpamp.install():
        scaler = timm(Served(), Path())
    assert isinstance(scaler, mpamp.GradScaler)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert [record.skipped for record in scaler.history] == [False] * STEPS


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.filterwarnings("ignore:mpamp.GradScaler is enabled for 'cuda', which is not available")
def test_ignites_region_is_for_cuda_and_does_nothing_on_a_processor() -> None:
    skip_without("ignite.engine")
    if torch.cuda.is_available():
        pytest.skip("its region does something here")
    model = Served()
    with mpamp.install(), counted(model) as casts:
        scaler = ignite(model, Path())
    assert set(model.dtypes) == {(F32, F32)}
    assert casts() == (0, 0)
    assert not scaler.is_enabled()


def test_mmengines_wrapper_refuses_a_processor() -> None:
    skip_without("mmengine.optim")
    if torch.cuda.is_available():
        pytest.skip("it refuses a machine without CUDA")
    with mpamp.install(), pytest.raises(AssertionError, match="only available"):
        mmengine_wrapper(Served(), Path())


@pytest.mark.parametrize(
    ("train", "module"),
    [
        pytest.param(ignite, "ignite.engine", id="ignite"),
        pytest.param(mmengine_wrapper, "mmengine.optim", id="mmengine"),
    ],
)
def test_what_asks_for_cuda_is_served_by_the_device_that_is_given(train: Train, module: str) -> None:
    skip_without(module)
    if torch.cuda.is_available():
        pytest.skip("a device that is here stays what it is")
    model = Served()
    with mpamp.install(), redirect("cpu"), counted(model) as casts:
        scaler = train(model, Path())
    assert set(model.dtypes) == {(BF16, F32)}
    assert casts() == (STEPS, 2 * STEPS)
    assert isinstance(scaler, mpamp.GradScaler)
    assert [record.skipped for record in scaler.history] == [False] * STEPS


SCRIPT = """
import torch
from ignite.engine import create_supervised_trainer
from mmengine.optim import AmpOptimWrapper

class Net(torch.nn.Linear):
    seen = set()
    def forward(self, x):
        y = super().forward(x)
        self.seen.add(str(y.dtype))
        return y

loss_fn = torch.nn.functional.cross_entropy
batches = [(torch.rand(8, 4), torch.randint(2, (8,))) for _ in range(3)]
net = Net(4, 2).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
trainer = create_supervised_trainer(net, optimizer, loss_fn, device="cuda", amp_mode="amp", scaler=True)
trainer.run(batches, max_epochs=1)
print("ignite", *Net.seen, len(trainer.state.scaler.history))
for dtype in (None, "float16"):
    Net.seen.clear()
    wrapper = AmpOptimWrapper(optimizer=optimizer, dtype=dtype)
    for images, labels in batches:
        with wrapper.optim_context(net):
            loss = loss_fn(net(images.cuda()), labels.cuda())
        wrapper.update_params(loss)
    print("mmengine", *Net.seen, len(wrapper.loss_scaler.history))
"""


def test_a_script_for_cuda_is_served_by_the_command(tmp_path: Path) -> None:
    skip_without("click", "ignite.engine", "mmengine.optim")
    if torch.cuda.is_available():
        pytest.skip("a device that is here stays what it is")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "mpamp", "run", "--device", "cpu", "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines() == [
        "ignite torch.bfloat16 3",
        "mmengine torch.bfloat16 3",
        "mmengine torch.float16 3",
    ], done.stderr
