"""The Hugging Face Trainer with fp16=True."""

import argparse
import tempfile

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput


class DigitsConfig(PretrainedConfig):
    model_type = "digits"


class Digits(PreTrainedModel):
    config_class = DigitsConfig

    def __init__(self, config):
        super().__init__(config)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, a=5**0.5)
            nn.init.zeros_(module.bias)

    def forward(self, pixels, labels=None):
        logits = self.net(pixels)
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits.float(), labels), logits=logits)


class Printing(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"epoch {logs['epoch']} Loss {float(logs['loss']):.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--no_fp16", action="store_true")
    parser.add_argument("--seed", default=0, type=int)
    args = parser.parse_args()
    digits = load_digits()
    data = [
        {"pixels": torch.tensor(image, dtype=torch.float32) / 16, "labels": int(label)}
        for image, label in zip(digits.data[:512], digits.target[:512], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            fp16=not args.no_fp16,
            seed=args.seed,
            per_device_train_batch_size=64,
            num_train_epochs=3,
            learning_rate=5e-3,
            max_grad_norm=5.0,
            logging_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        torch.manual_seed(args.seed)
        Trainer(model=Digits(DigitsConfig()), args=arguments, train_dataset=data, callbacks=[Printing()]).train()


if __name__ == "__main__":
    main()
