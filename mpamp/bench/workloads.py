"""What there is to infer and to train: a model, a batch and a kind of step, each under a name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from .nets import GPT, Bert, Gan, LanguageLSTM, ResNet, add_lora, mlp, small_linears
from .sizes import Shape, Sizes
from .steps import MakeJob, gan, inference, training

__all__ = ["Workload", "ddp_workload", "workloads"]

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A model and a batch.

    Attributes:
        name: Model, kind and batch.
        suite: Whether it infers or trains.
        model: Builds the model, in float32 on the CPU.
        batch: Makes the inputs and the labels, on the CPU.
        job: Makes what runs its steps.
        parts: The parts of the model that have an optimizer each; the empty name is the whole.
        is_parallel: Whether it runs on two cards.
    """

    name: str
    suite: Literal["infer", "train"]
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    job: MakeJob = training
    parts: tuple[str, ...] = ("",)
    is_parallel: bool = False


def tokens(shape: Shape, vocabulary: int) -> Batch:
    """Make tokens [n, t], and as labels the same one place on."""
    n, t = shape
    text = torch.randint(vocabulary, (n, t + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def rows(n: int, dim: int, classes: int) -> Batch:
    """Make rows [n, dim] and labels [n]."""
    return torch.randn(n, dim), torch.randint(classes, (n,))


def images(n: int, side: int, classes: int) -> Batch:
    """Make images [n, 3, side, side] and labels [n]."""
    return torch.randn(n, 3, side, side), torch.randint(classes, (n,))


def workloads(sizes: Sizes) -> list[Workload]:
    """Return all workloads of one process, those that infer first.

    Example:
        >>> from mpamp.bench.sizes import CARD
        >>> [w.name for w in workloads(CARD)][:3]
        ['gpt2-infer-1x16', 'gpt2-infer-8x1024', 'resnet50-infer-1']
    """
    return [*_inferring(sizes), *_training(sizes)]


def _inferring(s: Sizes) -> list[Workload]:
    gpt, bert, resnet, lstm = _models(s)
    infer = functools.partial(Workload, suite="infer", job=inference)
    small, classes = s.mlp
    return [
        *(
            infer(name=f"gpt2-infer-{n}x{t}", model=gpt, batch=partial(tokens, (n, t), s.gpt["vocabulary"]))
            for n, t in s.gpt_infer
        ),
        *(infer(name=f"resnet50-infer-{n}", model=resnet, batch=partial(images, n, *s.image)) for n in s.images_infer),
        infer(
            name=_name("bert-infer", s.bert_infer),
            model=bert,
            batch=partial(tokens, s.bert_infer, s.bert["vocabulary"]),
        ),
        infer(
            name=_name("lstm-infer", s.lstm_batch),
            model=lstm,
            batch=partial(tokens, s.lstm_batch, s.lstm["vocabulary"]),
        ),
        infer(
            name=f"mlp-infer-{s.mlp_batch}",
            model=partial(mlp, *s.mlp),
            batch=partial(rows, s.mlp_batch, small, classes),
        ),
    ]


def _training(s: Sizes) -> list[Workload]:
    gpt, bert, resnet, lstm = _models(s)
    train = functools.partial(Workload, suite="train")
    vocabulary = s.gpt["vocabulary"]
    count, width = s.linears
    side, noise = s.gan["side"], s.gan["noise"]

    def noisy_images() -> Batch:
        return torch.randn(s.gan_batch, 3, side, side), torch.randn(s.gan_batch, noise)

    return [
        *(
            train(name=f"gpt2-train-{n}x{t}", model=gpt, batch=partial(tokens, (n, t), vocabulary))
            for n, t in s.gpt_train
        ),
        *(train(name=f"resnet50-train-{n}", model=resnet, batch=partial(images, n, *s.image)) for n in s.images_train),
        train(
            name=_name("lora-train", s.lora),
            model=lambda: add_lora(GPT(**s.gpt)),
            batch=partial(tokens, s.lora, vocabulary),
        ),
        train(
            name=f"linears{count}-train-{s.linears_batch}",
            model=partial(small_linears, count, width),
            batch=partial(rows, s.linears_batch, width, width),
        ),
        train(
            name=_name("accumulate8-train", s.accumulated),
            model=gpt,
            batch=partial(tokens, s.accumulated, vocabulary),
            job=partial(training, accumulate=8),
        ),
        train(
            name=_name("bert-train", s.bert_train),
            model=bert,
            batch=partial(tokens, s.bert_train, s.bert["vocabulary"]),
        ),
        train(
            name=_name("lstm-train", s.lstm_batch),
            model=lstm,
            batch=partial(tokens, s.lstm_batch, s.lstm["vocabulary"]),
        ),
        train(name=f"mlp-train-{s.mlp_batch}", model=partial(mlp, *s.mlp), batch=partial(rows, s.mlp_batch, *s.mlp)),
        train(
            name=f"gan-train-{s.gan_batch}",
            model=partial(Gan, **s.gan),
            batch=noisy_images,
            job=gan,
            parts=("generator", "discriminator"),
        ),
        ddp_workload(s),
    ]


def _models(s: Sizes) -> tuple[Callable[[], nn.Module], ...]:
    classes = s.image[1]
    return (
        partial(GPT, **s.gpt),
        partial(Bert, **s.bert),
        partial(ResNet, s.depths, classes=classes, **s.resnet),
        partial(LanguageLSTM, **s.lstm),
    )


def ddp_workload(s: Sizes) -> Workload:
    """Return the workload that runs on two cards, by ``DistributedDataParallel``."""
    layers, width, n = s.ddp
    return Workload(
        f"ddp-train-{n}",
        "train",
        partial(small_linears, layers, width),
        partial(rows, n, width, width),
        is_parallel=True,
    )


def _name(kind: str, shape: Shape) -> str:
    return f"{kind}-{shape[0]}x{shape[1]}"
