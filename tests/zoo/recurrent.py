"""Recurrent networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.case import call, sequence, zoo


@zoo(sequence, listed=True)
class Lstm(nn.Module):
    """A bidirectional LSTM of two layers; states and outputs used."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, c) = self.lstm(torch.relu(self.inp(x)))
        return self.out(y), h + c


@zoo(sequence, listed=True)
class Gru(nn.Module):
    """Encoder and decoder GRU; the last state of one starts the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(8, 6, batch_first=True), nn.GRU(8, 6, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.encoder(x)
        y, _ = self.decoder(x.flip(1), state)
        return self.out(y)


@zoo(sequence)
class GruCellLoop(nn.Module):
    """A cell called once per step, outputs stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 6)
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(self.out(state))
        return torch.stack(outputs, 1)


@zoo(sequence)
class LstmCellDecoder(nn.Module):
    """Feeds its own arg-max back in: tokens computed, embedded, fed."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.embed, self.cell = nn.Linear(8, 6), nn.Embedding(9, 6), nn.LSTMCell(6, 6)
        self.vocab = nn.Linear(6, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = c = torch.tanh(self.start(x.mean(1)))
        token = torch.zeros(x.shape[0], dtype=torch.long)
        tokens, scores = [], []
        for _ in range(3):
            h, c = self.cell(self.embed(token), (h, c))
            scores.append(self.vocab(h))
            token = scores[-1].argmax(-1)
            tokens.append(token)
        return torch.stack(tokens, 1), torch.stack(scores, 1)


@zoo(lambda draw: call(draw.randn(3, 5, 8), torch.tensor([5, 3, 1])))
class PackedSequenceLstm(nn.Module):
    """pack_padded_sequence reads the lengths on the CPU; a PackedSequence goes through the LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.lstm, self.out = nn.Linear(8, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.inp(x), lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.lstm(packed)
        padded, sizes = pad_packed_sequence(y, batch_first=True)
        return self.out(padded) + sizes[:, None, None]


@zoo(sequence)
class ConvLstm(nn.Module):
    """Gates by one convolution, state of two tensors through time."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], 1, 8)
        for t in range(x.shape[1]):
            i, f, o, g = self.gates(torch.cat([x[:, t : t + 1], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.out(h)


@zoo(lambda draw: call(draw.ints(20, 9), torch.tensor([0, 4, 4])))
class EmbeddingBag(nn.Module):
    """Bags by offsets, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(20, 6, mode="sum"), nn.Linear(6, 3)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bag(ids, offsets)))


@zoo(sequence)
class VanillaRnnOptionalState(nn.Module):
    """nn.RNN, first without a state, then with the one it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(8, 8, batch_first=True, nonlinearity="relu"), nn.Linear(8, 2)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        y, state = self.rnn(x, state)
        y, state = self.rnn(y, state)
        return self.out(y[:, -1]) + state.sum()
