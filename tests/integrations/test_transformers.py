"""The Hugging Face Trainer in mpamp: its own arguments, float16 with a scaler on a processor too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mpamp
from mpamp.testing import WeightCastCounter
from tests.integrations.steps import BF16, F16, F32, TOLERANCE, Net, digits, needs, weights_of

needs("accelerate", "transformers.trainer")
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from mpamp.integrations.transformers import MpampTrainer, MpampTrainerMixin  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
]
FLAGS = {BF16: {"bf16": True}, F16: {"fp16": True}, F32: {}}


class Model(torch.nn.Module):
    """A Net with the Trainer's interface."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(images)
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    images, labels = digits()
    return [{"images": images[i], "labels": labels[i]} for i in range(count)]


def trainer_of(
    folder: Path,
    dtype: torch.dtype = F32,
    model: Any = None,
    kind: Any = MpampTrainer,
    init: Any = None,
    **arguments: Any,
) -> Any:
    settings = {
        "max_steps": 12,
        "per_device_train_batch_size": 32,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **FLAGS[dtype],
        **arguments,
    }
    model = Model() if model is None else model
    args = TrainingArguments(output_dir=str(folder), **settings)
    return kind(model, args, train_dataset=rows(512), eval_dataset=rows(64), **(init or {}))


def scaled(**options: Any) -> mpamp.GradScaler:
    return mpamp.GradScaler("cpu", **options)


def logged(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_losses_are_float32s(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = trainer_of(tmp_path, kind=Trainer)
    plain.train()
    trainer = trainer_of(tmp_path, dtype, init={"scaler": scaled(init_scale=2.0**10)} if dtype is F16 else None)
    with WeightCastCounter(trainer.model) as casts:
        trainer.train()
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=TOLERANCE[dtype])
    assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=2 * TOLERANCE[dtype])
    assert trainer.model.net.seen == [dtype] * 12
    assert casts.count == 4 * 12
    scaler = trainer.accelerator.scaler
    if dtype is BF16:
        assert scaler is None
    else:
        assert isinstance(scaler, mpamp.GradScaler)
        assert [record.skipped for record in scaler.history] == [False] * 12


def test_the_trainers_own_float16_does_nothing_here(tmp_path: Path) -> None:
    """What the docs say of it; when this fails they must change."""
    trainer = trainer_of(tmp_path, F16, kind=Trainer, max_steps=1)
    trainer.train()
    assert trainer.model.net.seen == [F32]
    assert trainer.accelerator.scaler is None


def test_a_scaler_is_for_float16(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a scaler is for"):
        trainer_of(tmp_path, BF16, init={"scaler": scaled()})


def test_without_a_flag_nothing_is_done(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.train()
    assert trainer.model.net.seen == [F32] * 2
    assert trainer.accelerator.scaler is None


def test_rules_hold_in_training_and_evaluation(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, BF16, init={"ops": {"linear": "fp32"}}, max_steps=2)
    trainer.train()
    trainer.evaluate()
    assert set(trainer.model.net.seen) == {F32}


def test_evaluation_and_prediction_are_in_the_region_and_give_float32(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, F16, per_device_eval_batch_size=32)
    before = trainer.predict(rows(8)).predictions
    assert before.dtype == "float32"
    plain = Net()(digits()[0][:8]).detach()
    torch.testing.assert_close(torch.tensor(before), plain, rtol=1e-2, atol=1e-2)
    assert trainer.model.net.seen == [F16]
    loss = trainer.evaluate()["eval_loss"]
    assert loss == pytest.approx(2.3, abs=0.1)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < loss
    assert set(trainer.model.net.seen) == {F16}
    assert len(trainer.model.net.seen) == 1 + 2 + 12 + 2


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_clipping_and_accumulation_are_float32s(dtype: torch.dtype, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_grad_norm": 0.1,
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 8,
        "max_steps": 4,
    }
    plain, trainer = (trainer_of(tmp_path, d, kind=k, **options) for d, k in ((F32, Trainer), (dtype, MpampTrainer)))
    plain.train()
    trainer.train()
    assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=2 * TOLERANCE[dtype])
    assert min(logged(plain, "grad_norm")) > 0.1
    torch.testing.assert_close(weights_of(trainer.model), weights_of(plain.model), rtol=0, atol=1e-3)
    assert len(trainer.model.net.seen) == 16


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
def test_a_skipped_step_holds_the_scheduler_back(optim: str, tmp_path: Path) -> None:
    rates: list[float] = []

    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                next(p for p in kwargs["model"].parameters() if p.grad is not None).grad.fill_(float("inf"))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    trainer = trainer_of(tmp_path, F16, optim=optim, max_steps=4, lr_scheduler_type="linear")
    trainer.add_callback(Overflow())
    # Clipping would have unscaled and checked the gradients before the callback.
    trainer._get_grad_norm = lambda model, grad_norm=None: 0.0
    trainer.train()
    assert [record.skipped for record in trainer.accelerator.scaler.history] == [False, True, False, False]
    assert rates == pytest.approx([0.0375, 0.0375, 0.025, 0.0125])
    assert trainer.accelerator.scaler.get_scale() == 2.0**15


def test_resuming_is_exact(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optim": "adamw_torch", "save_steps": 6, "save_strategy": "steps"}
    init = {"scaler": scaled(init_scale=2.0**10, growth_interval=5)}
    whole = trainer_of(tmp_path, F16, init=init, **options)
    whole.train()
    resumed = trainer_of(tmp_path, F16, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert len(resumed.model.net.seen) == 6
    assert torch.equal(weights_of(resumed.model), weights_of(whole.model))
    assert resumed.accelerator.scaler.get_scale() == 2.0**12


def bert(folder: Path, dtype: torch.dtype, **arguments: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=17, num_labels=10, max_position_embeddings=64, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    trainer = trainer_of(folder, dtype, BertForSequenceClassification(config), max_steps=4, **arguments)
    images, labels = digits()
    tokens = (images[:192] * 16).long()
    trainer.train_dataset = [{"input_ids": tokens[i], "labels": labels[i]} for i in range(192)]
    return trainer


def test_a_model_of_transformers_with_checkpointing(tmp_path: Path) -> None:
    losses = {}
    for dtype, checkpointing in ((F32, False), (F16, False), (F16, True)):
        trainer = bert(tmp_path, dtype, optim="adamw_torch", learning_rate=2e-3, max_grad_norm=1.0)
        if checkpointing:
            model = trainer.model  # transformers 5 gives the method another name
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with WeightCastCounter(trainer.model) as casts:
            trainer.train()
        losses[dtype, checkpointing] = logged(trainer, "loss")
        assert any(getattr(m, "gradient_checkpointing", False) for m in trainer.model.modules()) == checkpointing
        assert (casts.count > 100) == (dtype is F16)
    assert losses[F16, False] == pytest.approx(losses[F32, False], rel=TOLERANCE[F16])
    assert losses[F16, True] == losses[F16, False]


def test_the_saved_model_is_the_plain_one(tmp_path: Path) -> None:
    trainer = bert(tmp_path, BF16)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = BertForSequenceClassification.from_pretrained(str(tmp_path / "saved"))
    assert torch.equal(weights_of(again), weights_of(trainer.model))
    row = trainer.train_dataset[0]["input_ids"][None]
    with WeightCastCounter(trainer.model) as casts:
        trainer.model(row)
        assert casts.count > 10
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        casts.count = 0
        trainer.model(row)
        assert casts.count == 0


def test_the_mixin_serves_any_trainer(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(inputs["images"])
            loss = torch.nn.functional.cross_entropy(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    class OwnInMpamp(MpampTrainerMixin, Own):
        pass

    trainer = trainer_of(tmp_path, F16, kind=OwnInMpamp, max_steps=3)
    trainer.train()
    assert trainer.model.net.seen == [F16] * 3
    assert len(trainer.accelerator.scaler.history) == 3


def test_the_accelerators_autocast_is_the_region(tmp_path: Path) -> None:
    from accelerate.utils import AutocastKwargs

    trainer = trainer_of(tmp_path, F16)
    ones = torch.ones(2, 2)
    with trainer.accelerator.autocast():
        assert (ones @ ones).dtype is F16
        with trainer.accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (ones @ ones).dtype is F32
