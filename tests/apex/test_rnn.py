"""apex.RNN against torch's recurrent layers with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpamp.apex import rnn
from mpamp.apex.errors import AmpUsageError

PAIRS = {
    "LSTM": (rnn.LSTM, lambda *a, **k: nn.LSTM(*a, **k)),
    "GRU": (rnn.GRU, lambda *a, **k: nn.GRU(*a, **k)),
    "Tanh": (rnn.Tanh, lambda *a, **k: nn.RNN(*a, nonlinearity="tanh", **k)),
    "ReLU": (rnn.ReLU, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)),
}
X = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1))


def copied(layers, theirs, suffix=""):
    with torch.no_grad():
        for number, cell in enumerate(layers.rnns):
            for name in ("w_ih", "w_hh", "b_ih", "b_hh"):
                if getattr(cell, name) is not None:
                    kind = "weight" if name.startswith("w") else "bias"
                    getattr(cell, name).copy_(getattr(theirs, f"{kind}_{name[2:]}_l{number}{suffix}"))


def states(given):
    return list(given) if isinstance(given, tuple) else [given]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("bias", [True, False])
def test_layers_are_torchs(name, bias):
    ours, theirs = PAIRS[name]
    layers, wanted = ours(3, 4, num_layers=2, bias=bias), theirs(3, 4, num_layers=2, bias=bias)
    copied(layers, wanted)
    out, hidden = layers(X)
    torch.testing.assert_close(out, wanted(X)[0])
    for mine, other in zip(hidden, states(wanted(X)[1]), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", PAIRS)
def test_both_directions(name):
    ours, theirs = PAIRS[name]
    layers, wanted = ours(3, 4, num_layers=1, bidirectional=True), theirs(3, 4, bidirectional=True)
    copied(layers.fwd, wanted)
    copied(layers.bckwrd, wanted, "_reverse")
    out, hidden = layers(X)
    torch.testing.assert_close(out, wanted(X)[0])
    for mine, other in zip(hidden, states(wanted(X)[1]), strict=True):
        torch.testing.assert_close(mine[0], torch.cat([other[0], other[1]], -1))
    _, collected = layers(X, collect_hidden=True)
    assert (len(collected[0]), collected[0][0].shape) == (5, (1, 2, 8))


def test_states_are_kept_between_calls():
    layers = rnn.LSTM(3, 4, num_layers=2)
    whole, _ = layers(X)
    layers.reset_hidden(2)
    first, _ = layers(X[:2])
    layers.detach_hidden()
    second, _ = layers(X[2:])
    torch.testing.assert_close(torch.cat([first, second]), whole)
    second.sum().backward()
    assert layers.rnns[0].w_ih.grad is not None
    assert layers(X[:, :1])[0].shape == (5, 1, 4)  # another batch size starts anew
    with pytest.raises(AmpUsageError, match="init_hidden"):
        rnn.GRU(3, 4, 1).detach_hidden()


def test_collected_states_are_those_of_each_step():
    layers = rnn.GRU(3, 4, num_layers=2)
    out, (collected,) = layers(X, collect_hidden=True)
    assert [state.shape for state in collected] == [(2, 2, 4)] * 5
    torch.testing.assert_close(torch.stack([state[1] for state in collected]), out)


@pytest.mark.parametrize("make", [rnn.LSTM, rnn.mLSTM])
def test_projections(make):
    layers = make(3, 4, num_layers=2, output_size=5)
    out, hidden = layers(X)
    assert (out.shape, hidden[0].shape, hidden[1].shape) == ((5, 2, 5), (2, 2, 5), (2, 2, 4))
    out.sum().backward()
    assert all(p.grad is not None for p in layers.parameters())
    bound = 0.5
    layers.reset_parameters()
    assert max(p.abs().max().item() for p in layers.parameters()) <= bound


def test_multiplicative_lstm():
    layers = rnn.mLSTM(3, 4, num_layers=1)
    (cell,) = layers.rnns
    h = c = torch.zeros(2, 4)
    for x in X:
        m = (x @ cell.w_mih.T) * (h @ cell.w_mhh.T)
        i, f, g, o = (x @ cell.w_ih.T + cell.b_ih + m @ cell.w_hh.T + cell.b_hh).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    out, hidden = layers(X)
    torch.testing.assert_close(out[-1], h)
    torch.testing.assert_close(hidden[1][0], c)


def test_layers_given_one_by_one():
    cells = rnn.LSTM(3, 4, num_layers=2).rnns
    assert rnn.stackedRNN(list(cells), num_layers=2).nLayers == 2
    with pytest.raises(AmpUsageError, match="num_layers"):
        rnn.stackedRNN(list(cells), num_layers=3)
    layers = rnn.LSTM(3, 4, num_layers=1)
    layers.init_inference(7)
    assert layers.rnns[0].hidden[0].shape == (7, 4)
    layers.init_hidden(2)
    assert layers.rnns[0].hidden[0].shape == (2, 4)
