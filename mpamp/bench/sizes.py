"""How large the workloads are: on a card, on a processor, and in a test."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .timing import is_card

__all__ = ["CARD", "PROCESSOR", "QUICK", "Sizes", "sizes_for"]

Shape = tuple[int, int]
"""Sequences, and tokens in each."""


@dataclass(frozen=True)
class Sizes:
    """Options of the models, and the batches.

    Attributes:
        gpt, bert, resnet, lstm, gan: What the models are made with.
        mlp: Its width, and its classes.
        linears: How many there are, and their width.
        vocabulary: The tokens of GPT-2 and LSTM, and the classes that their losses tell apart.
        image: The side and the classes of ResNet's images.
        gpt_infer, gpt_train, lora, accumulated, bert_infer, bert_train, lstm_batch: Shapes of batches.
        images_infer, images_train, gan_batch, mlp_batch, linears_batch: Rows in a batch.
        ddp: Layers, their width, and rows in a batch.
    """

    gpt_infer: tuple[Shape, ...]
    gpt_train: tuple[Shape, ...]
    lora: Shape
    accumulated: Shape
    bert_infer: Shape
    bert_train: Shape
    lstm_batch: Shape
    images_infer: tuple[int, ...]
    images_train: tuple[int, ...]
    gan_batch: int
    mlp_batch: int
    linears_batch: int
    linears: tuple[int, int] = (500, 64)
    mlp: tuple[int, int] = (256, 10)
    ddp: tuple[int, int, int] = (8, 1024, 8192)
    image: tuple[int, int] = (224, 1000)
    gpt: dict[str, int] = field(default_factory=lambda: {"vocabulary": 50257})
    bert: dict[str, int] = field(default_factory=lambda: {"vocabulary": 30522})
    lstm: dict[str, int] = field(default_factory=lambda: {"vocabulary": 10_000, "dim": 512, "layers": 2})
    gan: dict[str, int] = field(default_factory=lambda: {"side": 64, "width": 64, "noise": 128})
    resnet: dict[str, int] = field(default_factory=dict)
    depths: tuple[int, ...] = (3, 4, 6, 3)


CARD = Sizes(
    gpt_infer=((1, 16), (8, 1024)),
    gpt_train=((8, 1024),),
    lora=(4, 512),
    accumulated=(1, 512),
    bert_infer=(8, 128),
    bert_train=(16, 128),
    lstm_batch=(32, 64),
    images_infer=(1, 64),
    images_train=(64,),
    gan_batch=64,
    mlp_batch=128,
    linears_batch=64,
)

PROCESSOR = Sizes(
    gpt_infer=((1, 16), (1, 128)),
    gpt_train=((1, 16),),
    lora=(1, 32),
    accumulated=(1, 16),
    bert_infer=(1, 64),
    bert_train=(1, 32),
    lstm_batch=(4, 32),
    images_infer=(1, 4),
    images_train=(4,),
    gan_batch=8,
    mlp_batch=64,
    linears_batch=16,
    ddp=(4, 256, 64),
)
"""The same models with less in a batch, for a step takes seconds on two cores."""

_TINY = {"layers": 2, "dim": 32, "heads": 2, "vocabulary": 64, "context": 16}
QUICK = Sizes(
    gpt_infer=((1, 8),),
    gpt_train=((1, 8),),
    lora=(1, 8),
    accumulated=(1, 8),
    bert_infer=(1, 8),
    bert_train=(1, 8),
    lstm_batch=(1, 4),
    images_infer=(1,),
    images_train=(1,),
    gan_batch=2,
    mlp_batch=2,
    linears_batch=2,
    linears=(4, 8),
    mlp=(8, 4),
    ddp=(2, 8, 4),
    image=(32, 10),
    gpt=_TINY,
    bert=_TINY,
    lstm={"vocabulary": 32, "dim": 8, "layers": 1},
    gan={"side": 8, "width": 4, "noise": 8},
    resnet={"width": 8},
    depths=(1, 1),
)


def sizes_for(device: torch.device, *, is_quick: bool) -> Sizes:
    """Return the sizes for a device.

    Example:
        >>> sizes_for(torch.device("cpu"), is_quick=False).gpt_infer
        ((1, 16), (1, 128))
    """
    if is_quick:
        return QUICK
    return CARD if is_card(device) else PROCESSOR
