"""Train a small transformer on scikit-learn's digits with the Hugging Face Trainer in mixed precision, on any device.

The line to change is the Trainer's class. ``--fp16`` scales the loss, on a processor too.
Usage: python transformers_digits.py [--fp16] [--cpu] [--epochs 3] [--out out]
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

from mpamp.integrations.transformers import MpampTrainer


def rows(start: int, stop: int) -> list[dict[str, torch.Tensor]]:
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    return [{"pixel_values": images[i], "labels": labels[i]} for i in range(start, stop)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp16", action="store_true", help="float16 with a loss scale, else bfloat16")
    parser.add_argument("--cpu", action="store_true", help="don't use an accelerator")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--out", default="out")
    options = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes))
    args = TrainingArguments(
        options.out,
        fp16=options.fp16,
        bf16=not options.fp16,
        use_cpu=options.cpu,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=360,
        learning_rate=5e-3,
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=not options.cpu,
    )
    trainer = MpampTrainer(model, args, train_dataset=rows(0, 1437), eval_dataset=rows(1437, 1797))
    trainer.train()
    predictions = trainer.predict(trainer.eval_dataset)
    accuracy = (predictions.predictions.argmax(1) == predictions.label_ids).mean()
    print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
