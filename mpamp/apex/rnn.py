"""apex.RNN: recurrent layers that keep their hidden state between calls, cell by cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import AmpUsageError

__all__ = ["GRU", "LSTM", "RNNCell", "ReLU", "Tanh", "bidirectionalRNN", "mLSTM", "mLSTMRNNCell", "stackedRNN"]

States = list[Tensor]
Cell = Callable[[Any, Tensor, States], States]
"""Gives a cell's next hidden states, its output first, from the cell's weights, an input and the states before."""


def _lstm(cell: Any, x: Tensor, hidden: States) -> States:
    return _lstm_of(F.linear(x, cell.w_ih, cell.b_ih) + F.linear(hidden[0], cell.w_hh, cell.b_hh), hidden[1])


def _mlstm(cell: Any, x: Tensor, hidden: States) -> States:
    m = F.linear(x, cell.w_mih) * F.linear(hidden[0], cell.w_mhh)
    return _lstm_of(F.linear(x, cell.w_ih, cell.b_ih) + F.linear(m, cell.w_hh, cell.b_hh), hidden[1])


def _lstm_of(gates: Tensor, before: Tensor) -> States:
    enter, keep, new, out = gates.chunk(4, 1)
    now = torch.sigmoid(keep) * before + torch.sigmoid(enter) * torch.tanh(new)
    return [torch.sigmoid(out) * torch.tanh(now), now]


def _gru(cell: Any, x: Tensor, hidden: States) -> States:
    of_x = F.linear(x, cell.w_ih, cell.b_ih).chunk(3, 1)
    of_h = F.linear(hidden[0], cell.w_hh, cell.b_hh).chunk(3, 1)
    reset, update = torch.sigmoid(of_x[0] + of_h[0]), torch.sigmoid(of_x[1] + of_h[1])
    new = torch.tanh(of_x[2] + reset * of_h[2])
    return [new + update * (hidden[0] - new)]


def _relu(cell: Any, x: Tensor, hidden: States) -> States:
    return [torch.relu(F.linear(x, cell.w_ih, cell.b_ih) + F.linear(hidden[0], cell.w_hh, cell.b_hh))]


def _tanh(cell: Any, x: Tensor, hidden: States) -> States:
    return [torch.tanh(F.linear(x, cell.w_ih, cell.b_ih) + F.linear(hidden[0], cell.w_hh, cell.b_hh))]


class RNNCell(nn.Module):
    """One layer's weights and hidden states.

    Args:
        gate_multiplier: How many gates the cell has: 4, 3 or 1.
        input_size: The input's features.
        hidden_size: The cell's features.
        cell: What makes the next states.
        n_hidden_states: How many there are.
        bias: Whether gates have biases.
        output_size: The output's features; a projection makes them if they aren't the cell's.
    """

    def __init__(
        self,
        gate_multiplier: int,
        input_size: int,
        hidden_size: int,
        cell: Cell,
        n_hidden_states: int = 2,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        self.gate_multiplier, self.input_size, self.hidden_size = gate_multiplier, input_size, hidden_size
        self.cell, self.bias, self.n_hidden_states = cell, bias, n_hidden_states
        self.output_size = hidden_size if output_size is None else output_size
        self.gate_size = gate_multiplier * hidden_size
        self.w_ih = nn.Parameter(torch.empty(self.gate_size, input_size))
        self.w_hh = nn.Parameter(torch.empty(self.gate_size, self.output_size))
        if self.output_size != hidden_size:
            self.w_ho = nn.Parameter(torch.empty(self.output_size, hidden_size))
        self.b_ih = nn.Parameter(torch.empty(self.gate_size)) if bias else None
        self.b_hh = nn.Parameter(torch.empty(self.gate_size)) if bias else None
        self.hidden: list[Tensor | None] = [None] * n_hidden_states
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> RNNCell:
        """Return a cell of the same kind with weights of its own."""
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(
            self.gate_multiplier, size, self.hidden_size, self.cell, self.n_hidden_states, self.bias, self.output_size
        )

    def reset_parameters(self, gain: float = 1) -> None:
        """Draw new weights."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for p in self.parameters():
            nn.init.uniform_(p, -bound, bound)

    def init_hidden(self, bsz: int) -> None:
        """Make the states zeros, unless there are some of this batch size."""
        for index, state in enumerate(self.hidden):
            if state is None or state.size(0) != bsz:
                self.hidden[index] = self.w_ih.new_zeros(bsz, self.hidden_size if index else self.output_size)

    def reset_hidden(self, bsz: int) -> None:
        """Make the states zeros."""
        self.hidden = [None] * self.n_hidden_states
        self.init_hidden(bsz)

    def init_inference(self, bsz: int) -> None:
        """Make the states ready for a batch."""
        self.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Cut the states from the graph that they come from.

        Raises:
            AmpUsageError: There are none yet.
        """
        if any(state is None for state in self.hidden):
            raise AmpUsageError("there is no hidden state to detach yet: call the layer or init_hidden first.")
        self.hidden = [state.detach() for state in self.hidden if state is not None]

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Return the next states, the output first: (batch, in) -> (batch, out) and (batch, hidden)."""
        self.init_hidden(input.size(0))
        states = self.cell(self, input, [state.to(input) for state in self.hidden if state is not None])
        if self.output_size != self.hidden_size:
            states[0] = F.linear(states[0], self.w_ho)
        self.hidden = list(states)
        return tuple(states)


class mLSTMRNNCell(RNNCell):
    """A multiplicative LSTM's layer (arXiv:1609.07959)."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = False, output_size: int | None = None) -> None:
        super().__init__(4, input_size, hidden_size, _mlstm, 2, bias, output_size)
        self.w_mih = nn.Parameter(torch.empty(self.output_size, input_size))
        self.w_mhh = nn.Parameter(torch.empty(self.output_size, self.output_size))
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> RNNCell:
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(size, self.hidden_size, self.bias, self.output_size)


class _Layers(nn.Module):
    """Layers whose states are handled together."""

    def _layers(self) -> Iterable[Any]:
        return self.rnns  # type: ignore[return-value]

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for rnn in self._layers():
            rnn.reset_parameters()

    def init_hidden(self, bsz: int) -> None:
        """Make states zeros, unless there are some of this batch size."""
        for rnn in self._layers():
            rnn.init_hidden(bsz)

    def reset_hidden(self, bsz: int) -> None:
        """Make states zeros."""
        for rnn in self._layers():
            rnn.reset_hidden(bsz)

    def detach_hidden(self) -> None:
        """Cut states from the graph that they come from."""
        for rnn in self._layers():
            rnn.detach_hidden()

    def init_inference(self, bsz: int) -> None:
        """Make states ready for a batch."""
        for rnn in self._layers():
            rnn.init_inference(bsz)


class stackedRNN(_Layers):
    """Layers on top of each other.

    Args:
        inputRNN: The first layer, after which the others are made; or all of them.
        num_layers: How many there are.
        dropout: Kept, and without effect, as in apex.

    Example:
        >>> out, hidden = LSTM(3, 5, num_layers=2)(torch.ones(7, 2, 3))
        >>> out.shape, [state.shape for state in hidden]
        (torch.Size([7, 2, 5]), [torch.Size([2, 2, 5]), torch.Size([2, 2, 5])])
    """

    def __init__(self, inputRNN: RNNCell | list[RNNCell], num_layers: int = 1, dropout: float = 0) -> None:
        super().__init__()
        self.dropout = dropout
        if isinstance(inputRNN, RNNCell):
            rest = [inputRNN.new_like(inputRNN.output_size) for _ in range(num_layers - 1)]
            inputRNN = [inputRNN, *rest]
        if len(inputRNN) != num_layers:
            raise AmpUsageError(f"stackedRNN got {len(inputRNN)} layers, and num_layers={num_layers}.")
        self.nLayers = len(inputRNN)
        self.rnns = nn.ModuleList(inputRNN)

    def forward(self, input: Tensor, collect_hidden: bool = False, reverse: bool = False) -> tuple[Tensor, list[Any]]:
        """Return the last layer's outputs and all layers' states.

        Args:
            input: Shape (sequence, batch, in).
            collect_hidden: Return the states of every step, as lists, not of the last one.
            reverse: Start at the end of the sequence.
        """
        outputs: list[Tensor] = []
        steps: list[list[tuple[Tensor, ...]]] = []
        for x in reversed(input.unbind()) if reverse else input.unbind():
            states: list[tuple[Tensor, ...]] = []
            for rnn in self.rnns:
                states.append(rnn(x))
                x = states[-1][0]
            outputs.append(x)
            steps.append(states)
        if reverse:
            outputs.reverse()
        kept = (steps[::-1] if reverse else steps) if collect_hidden else steps[-1:]
        hidden = [
            [torch.stack([layer[number] for layer in states]) for states in kept] for number in range(len(steps[0][0]))
        ]
        return torch.stack(outputs), hidden if collect_hidden else [states[0] for states in hidden]


class bidirectionalRNN(_Layers):
    """Layers in both directions, outputs side by side.

    Args:
        inputRNN: The first layer, after which the others are made.
        num_layers: How many there are in each direction.
        dropout: Kept, and without effect, as in apex.
    """

    def __init__(self, inputRNN: RNNCell, num_layers: int = 1, dropout: float = 0) -> None:
        super().__init__()
        self.dropout = dropout
        self.fwd = stackedRNN(inputRNN, num_layers, dropout)
        self.bckwrd = stackedRNN(inputRNN.new_like(), num_layers, dropout)
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(self, input: Tensor, collect_hidden: bool = False) -> tuple[Tensor, tuple[Any, ...]]:
        """Return outputs and states: (sequence, batch, in) -> (sequence, batch, 2 * out)."""
        first, of_first = self.fwd(input, collect_hidden=collect_hidden)
        second, of_second = self.bckwrd(input, reverse=True, collect_hidden=collect_hidden)
        pairs = zip(of_first, of_second, strict=True)
        if collect_hidden:
            hidden: Any = [[torch.cat(both, -1) for both in zip(*pair, strict=True)] for pair in pairs]
        else:
            hidden = [torch.cat(pair, -1) for pair in pairs]
        return torch.cat([first, second], -1), tuple(hidden)


def _maker(name: str, first: Callable[[int, int, bool, int | None], RNNCell]) -> Callable[..., _Layers]:
    """Return what makes layers, given what makes the first one's cell."""

    def make(
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        output_size: int | None = None,
    ) -> _Layers:
        layers: Callable[..., _Layers] = bidirectionalRNN if bidirectional else stackedRNN
        return layers(first(input_size, hidden_size, bias, output_size), num_layers, dropout)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"Return layers of {name} cells; ``batch_first`` and ``dropout`` are without effect, as in apex."
    return make


def _cells(gates: int, cell: Cell, states: int) -> Callable[[int, int, bool, int | None], RNNCell]:
    return lambda into, hidden, bias, out: RNNCell(gates, into, hidden, cell, states, bias, out)


LSTM = _maker("LSTM", _cells(4, _lstm, 2))
GRU = _maker("GRU", _cells(3, _gru, 1))
ReLU = _maker("ReLU", _cells(1, _relu, 1))
Tanh = _maker("Tanh", _cells(1, _tanh, 1))
mLSTM = _maker("mLSTM", mLSTMRNNCell)
