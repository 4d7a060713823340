"""The layout of the symbols of one step of several clients: by position for an LSTM, by client for the gradients.

The host only counts sentences. Tensors with one entry per symbol are made on the model's device from these counts, so that
little is transferred and the GPU does not wait for the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coalmine.simulation.population import Indices

BUCKET = 0.6  # clients with at least this share of the longest one's symbols are padded to it
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Packed:
    """The symbols of one step of several clients, ordered by position and by client.

    By position, all first symbols come first, and sentences are sorted by length, longest first, so that those that
    continue are always the first rows. `by_client` and `by_place` map between the two orders.
    """

    example: Tensor  # by position: the symbol's example
    place: Tensor  # its position there
    owner: Tensor  # its client
    by_client: Tensor  # index in the order by position of each symbol in the order by client
    by_place: Tensor  # the inverse
    before: Tensor  # by client: index by position of the previous symbol; −1 at the beginning
    shares: Tensor  # by client: one over the client's symbols
    sizes: list[int]  # symbols at each position
    symbols: Indices  # number of symbols of each client
    starts: Indices  # where each client's symbols begin


def pack(lengths: Indices, examples: Indices, counts: Indices, device: torch.device = CPU) -> Packed:
    """Pack the first `counts` examples of each row; `lengths` are those of all examples."""
    client, slot = np.nonzero(np.arange(examples.shape[1]) < counts[:, None])
    example = examples[client, slot]
    order = np.argsort(-lengths[example], kind="stable")
    client, example = client[order], example[order]
    long = lengths[example]
    places = int(long.max(initial=1))
    sizes = np.searchsorted(-long, -np.arange(places), side="left")  # sentences longer than a position
    offsets = np.cumsum(sizes) - sizes
    by_length = np.bincount(client * (places + 1) + long, minlength=len(counts) * (places + 1))
    by_length = by_length.reshape(len(counts), places + 1)
    shorter = np.cumsum(by_length, axis=1)[:, :-1]  # a client's sentences that ended before a position
    going_on = by_length.sum(axis=1, keepdims=True) - shorter
    symbols = going_on.sum(axis=1)
    starts = np.cumsum(symbols) - symbols
    begins = starts[:, None] + np.cumsum(going_on, axis=1) - going_on  # where a client's symbols of a position begin
    return _spread(device, client, example, _rank(client, len(counts)), sizes, offsets, symbols, starts, begins)


def _rank(client: Indices, clients: int) -> Indices:
    """The rank of each sentence within its client."""
    rank, grouped = np.empty_like(client), np.argsort(client, kind="stable")
    own = np.bincount(client, minlength=clients)
    rank[grouped] = np.arange(len(client)) - np.repeat(np.cumsum(own) - own, own)
    return rank


def _spread(
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

    At each position the first of a client's sentences continue, so a symbol's rank there is that of its sentence.
    """
    clients, of_example, ranks, repeats, first, own, begin = to_device(
        [client, example, rank, sizes, offsets, symbols, begins.ravel()], device
    )
    total = int(symbols.sum())
    number = torch.arange(total, device=device)
    place = torch.repeat_interleave(repeats, output_size=total)
    row = number - first[place]
    owner = clients[row]
    by_place = begin[owner * len(sizes) + place] + ranks[row]
    by_client = torch.empty_like(by_place).scatter_(0, by_place, number)
    before = (first[place - 1] + row).masked_fill_(place == 0, -1)
    return Packed(
        example=of_example[row],
        place=place,
        owner=owner,
        by_client=by_client,
        by_place=by_place,
        before=before[by_client],
        shares=torch.repeat_interleave(own.clamp(min=1).double().reciprocal(), own, output_size=total),
        sizes=sizes.tolist(),
        symbols=symbols,
        starts=starts,
    )


def halves(counts: Indices) -> Iterator[slice]:
    """Clients, most sentences first, in two parts: those with more than half of the largest number, and the rest."""
    cut = int((counts > counts[0] // 2).sum()) if len(counts) else 0
    yield from (some for some in (slice(0, cut), slice(cut, len(counts))) if some.stop > some.start)


def buckets(symbols: Indices) -> Iterator[slice]:
    """Slices of adjacent clients in which the shortest has nearly as many symbols as the longest."""
    start, fewest, most = 0, 0, 0
    for number, own in enumerate(symbols.tolist()):
        fewest, most = (min(fewest, own), max(most, own)) if number > start else (own, own)
        if fewest < BUCKET * most:
            yield slice(start, number)
            start, fewest, most = number, own, own
    if len(symbols):
        yield slice(start, len(symbols))


Padded = list[Tensor]  # for each bucket clients × symbols × numbers


@dataclass(frozen=True)
class Padding:
    """The map from symbols ordered by client to one matrix per client, padded to the longest of its bucket."""

    index: Tensor | None  # the symbol at each entry, all buckets in a row; None without padding
    absent: Tensor | None  # entries without a symbol
    shapes: list[tuple[int, int]]

    def places(self, order: Tensor) -> Tensor:
        """The index for `of` of rows in another order."""
        return order if self.index is None else order[self.index]

    def of(self, rows: Tensor, places: Tensor | None = None, *, zero: bool = False) -> Padded:
        """The rows by bucket and client; padding is zero with `zero`, else arbitrary."""
        places = self.index if places is None else places
        taken = rows if places is None else rows[places]
        if zero and self.absent is not None:
            taken = taken.masked_fill_(self.absent.unsqueeze(1), 0.0)
        pieces = torch.split(taken, [clients * most for clients, most in self.shapes])
        return [piece.view(*shape, *rows.shape[1:]) for piece, shape in zip(pieces, self.shapes, strict=True)]


def pad(packed: Packed, parts: Sequence[slice]) -> Padding:
    """The padding of these buckets."""
    shapes = [(some.stop - some.start, max(int(packed.symbols[some].max()), 1)) for some in parts]
    widths = np.repeat([most for _, most in shapes], [clients for clients, _ in shapes])
    total = int(widths.sum())
    if total == packed.symbols.sum():
        return Padding(None, None, shapes)
    device = packed.place.device
    repeats, first, symbols, starts = to_device(
        [widths, np.cumsum(widths) - widths, packed.symbols, packed.starts], device
    )
    client = torch.repeat_interleave(repeats, output_size=total)
    place = torch.arange(total, device=device) - first[client]
    absent = place >= symbols[client]
    return Padding((starts[client] + place).masked_fill_(absent, 0), absent, shapes)


def to_device(arrays: Sequence[Indices], device: torch.device) -> Sequence[Tensor]:
    """Integer arrays on a device, sent in one asynchronous transfer."""
    whole = torch.from_numpy(np.concatenate(arrays))
    if device.type != "cpu":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return torch.split(whole, [len(array) for array in arrays])
