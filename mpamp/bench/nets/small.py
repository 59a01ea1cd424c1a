"""Models whose time is the host's, or that train in another way: an LSTM, MLPs, a chain of linear layers, a GAN."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Gan", "LanguageLSTM", "mlp", "small_linears"]


class LanguageLSTM(nn.Module):
    """Tokens [n, t] in int64 to logits [n, t, vocabulary]."""

    def __init__(self, vocabulary: int, dim: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])  # type: ignore[no-any-return]


def mlp(dim: int, classes: int) -> nn.Module:
    """Return three linear layers: [n, dim] -> [n, classes]."""
    return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, classes))


def small_linears(count: int, dim: int) -> nn.Module:
    """Return ``count`` linear layers, one after the other: [n, dim] -> [n, dim]."""
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(count)))


class Gan(nn.Module):
    """A generator, [n, noise] -> [n, 3, side, side], and a discriminator of its images, -> [n, 1] (DCGAN, 2015)."""

    def __init__(self, side: int, width: int, noise: int) -> None:
        super().__init__()
        self.noise, small = noise, side // 4
        self.generator = nn.Sequential(
            nn.Linear(noise, 2 * width * small * small),
            nn.Unflatten(1, (2 * width, small, small)),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * small * small, 1),
        )
