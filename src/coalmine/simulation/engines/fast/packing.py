"""The layout of the symbols of one step of several clients: by position for an LSTM, by client for the gradients.

The host only counts sentences. Tensors with one entry per symbol are made on the model's device from these counts. So
little data is transferred, and the GPU does not wait for the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coalmine.simulation.population import Indices

BUCKET = 0.6  # a client is padded to the longest one of its bucket if it has at least this share of its symbols
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Packed:
    """The symbols of one step of several clients, ordered by position and by client.

    In the order by position, all first symbols come first. Sentences are sorted by length, longest first, so that those that
    continue are always the first rows. `by_client` and `by_position` map between the two orders.
    """

    example: Tensor  # by position: the symbol's example
    position: Tensor  # by position: the symbol's position in it
    owner: Tensor  # by position: the symbol's client
    by_client: Tensor  # for each symbol in the order by client, its index in the order by position
    by_position: Tensor  # the inverse
    before: Tensor  # by client: the index by position of the previous symbol; −1 at the beginning
    shares: Tensor  # by client: one over the client's symbols
    sizes: list[int]  # symbols at each position
    symbols: Indices  # number of symbols of each client
    starts: Indices  # index of each client's first symbol


def pack(lengths: Indices, examples: Indices, counts: Indices, device: torch.device = CPU) -> Packed:
    """Pack the first `counts` examples of each row; `lengths` has the lengths of all examples."""
    client, slot = np.nonzero(np.arange(examples.shape[1]) < counts[:, None])
    example = examples[client, slot]
    order = np.argsort(-lengths[example], kind="stable")
    client, example = client[order], example[order]
    own_lengths = lengths[example]
    positions = int(own_lengths.max(initial=1))
    sizes = np.searchsorted(-own_lengths, -np.arange(positions), side="left")  # sentences longer than a position
    offsets = np.cumsum(sizes) - sizes
    by_length = np.bincount(client * (positions + 1) + own_lengths, minlength=len(counts) * (positions + 1))
    by_length = by_length.reshape(len(counts), positions + 1)
    shorter = np.cumsum(by_length, axis=1)[:, :-1]  # a client's sentences that end before a position
    continuing = by_length.sum(axis=1, keepdims=True) - shorter
    symbols = continuing.sum(axis=1)
    starts = np.cumsum(symbols) - symbols
    # The index of each client's first symbol at each position.
    begins = starts[:, None] + np.cumsum(continuing, axis=1) - continuing
    return _expand(device, client, example, _ranks(client, len(counts)), sizes, offsets, symbols, starts, begins)


def _ranks(client: Indices, clients: int) -> Indices:
    """The rank of each sentence within its client."""
    rank, grouped = np.empty_like(client), np.argsort(client, kind="stable")
    own = np.bincount(client, minlength=clients)
    rank[grouped] = np.arange(len(client)) - np.repeat(np.cumsum(own) - own, own)
    return rank


def _expand(
    device: torch.device,
    client: Indices,
    example: Indices,
    rank: Indices,
    sizes: Indices,
    offsets: Indices,
    symbols: Indices,
    starts: Indices,
    begins: Indices,
) -> Packed:
    """Expand counts of sentences to symbols, on the device.

    At each position the first of a client's sentences continue, so a symbol has the same rank there as its sentence.
    """
    clients, of_example, ranks, repeats, first, own, begin = to_device(
        [client, example, rank, sizes, offsets, symbols, begins.ravel()], device
    )
    total = int(symbols.sum())
    number = torch.arange(total, device=device)
    position = torch.repeat_interleave(repeats, output_size=total)
    row = number - first[position]
    owner = clients[row]
    by_position = begin[owner * len(sizes) + position] + ranks[row]
    by_client = torch.empty_like(by_position).scatter_(0, by_position, number)
    before = (first[position - 1] + row).masked_fill_(position == 0, -1)
    return Packed(
        example=of_example[row],
        position=position,
        owner=owner,
        by_client=by_client,
        by_position=by_position,
        before=before[by_client],
        shares=torch.repeat_interleave(own.clamp(min=1).double().reciprocal(), own, output_size=total),
        sizes=sizes.tolist(),
        symbols=symbols,
        starts=starts,
    )


def halves(counts: Indices) -> Iterator[slice]:
    """Split clients, sorted by sentences, into those with more than half of the largest number and the rest."""
    cut = int((counts > counts[0] // 2).sum()) if len(counts) else 0
    yield from (part for part in (slice(0, cut), slice(cut, len(counts))) if part.stop > part.start)


def buckets(symbols: Indices) -> Iterator[slice]:
    """Slices of adjacent clients; in each, the smallest number of symbols is at least BUCKET times the largest."""
    start, fewest, most = 0, 0, 0
    for client, count in enumerate(symbols.tolist()):
        fewest, most = (min(fewest, count), max(most, count)) if client > start else (count, count)
        if fewest < BUCKET * most:
            yield slice(start, client)
            start, fewest, most = client, count, count
    if len(symbols):
        yield slice(start, len(symbols))


Padded = list[Tensor]  # per bucket: clients × symbols × values


@dataclass(frozen=True)
class Padding:
    """Maps symbols ordered by client to one matrix per client, padded to the longest client of its bucket."""

    index: Tensor | None  # the symbol at each entry, for all buckets in sequence; None without padding
    absent: Tensor | None  # entries without a symbol
    shapes: list[tuple[int, int]]

    def index_for(self, order: Tensor) -> Tensor:
        """The index that `pad_rows` needs for rows in another order."""
        return order if self.index is None else order[self.index]

    def pad_rows(self, rows: Tensor, index: Tensor | None = None, *, zero: bool = False) -> Padded:
        """The rows by bucket and client; `zero` fills the padding with zeros, otherwise it is arbitrary."""
        index = self.index if index is None else index
        padded = rows if index is None else rows[index]
        if zero and self.absent is not None:
            padded = padded.masked_fill_(self.absent.unsqueeze(1), 0.0)
        pieces = torch.split(padded, [clients * most for clients, most in self.shapes])
        return [piece.view(*shape, *rows.shape[1:]) for piece, shape in zip(pieces, self.shapes, strict=True)]


def pad(packed: Packed, parts: Sequence[slice]) -> Padding:
    """The padding for these buckets."""
    shapes = [(part.stop - part.start, max(int(packed.symbols[part].max()), 1)) for part in parts]
    widths = np.repeat([most for _, most in shapes], [clients for clients, _ in shapes])
    total = int(widths.sum())
    if total == packed.symbols.sum():
        return Padding(None, None, shapes)
    device = packed.position.device
    repeats, first, symbols, starts = to_device(
        [widths, np.cumsum(widths) - widths, packed.symbols, packed.starts], device
    )
    client = torch.repeat_interleave(repeats, output_size=total)
    position = torch.arange(total, device=device) - first[client]
    absent = position >= symbols[client]
    return Padding((starts[client] + position).masked_fill_(absent, 0), absent, shapes)


def to_device(arrays: Sequence[Indices], device: torch.device) -> Sequence[Tensor]:
    """Integer arrays on a device, copied in one asynchronous transfer."""
    joined = torch.from_numpy(np.concatenate(arrays))
    if device.type != "cpu":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return torch.split(joined, [len(array) for array in arrays])
