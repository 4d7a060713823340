"""Text models: the hand-written engine against autograd, one client at a time."""

import numpy as np
import pytest
import torch

from coalmine.simulation.batches import draw_batches
from coalmine.simulation.engines import client_engine
from coalmine.simulation.engines.fast.lstm_clients import LstmTogether
from coalmine.simulation.engines.fast.packing import buckets, halves, pack, pad
from coalmine.simulation.engines.plain.engine import ClientSettings, Examples
from coalmine.simulation.engines.plain.one_by_one import OneByOne
from coalmine.simulation.engines.plain.vectorized import VectorizedTogether
from coalmine.simulation.models import Recurrent, recurrent, word_lstm

STRUCTURES = [Recurrent(24, 5, (7,), (4, 24)), Recurrent(24, 5, (7, 6), (24,))]


@pytest.fixture(scope="module")
def sentences() -> Examples:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 24, (150, 9), generator=generator)
    lengths = torch.randint(1, 9, (150,), generator=generator)
    tokens[torch.arange(9) > lengths.unsqueeze(1)] = 0
    return Examples(tokens[:, :-1].to(torch.int16), tokens[:, 1:].to(torch.int16))


def batches(sizes=(3, 40, 1, 16, 17, 5, 33, 8), batch_size=8):
    rng = np.random.default_rng(5)
    owned = [rng.choice(150, size, replace=False) for size in sizes]
    return draw_batches(owned, epochs=1, batch_size=batch_size, rng=rng)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_ragged_sentences_train_as_if_one_client_at_a_time(structure, momentum, sentences):
    model = recurrent("small", structure, length=8)
    vector = model.initial(torch.Generator().manual_seed(1)).mul_(2)
    client = ClientSettings(learning_rate=0.5, momentum=momentum, batch_size=8)
    alone = torch.cat([row.clone() for row in OneByOne(model, sentences, client).updates(vector, batches())])
    widened = LstmTogether(model, sentences, client, memory_limit=1.0)
    widened.align = 4  # as on a GPU
    for engine in (
        widened,
        LstmTogether(model, sentences, client, memory_limit=1.0),
        LstmTogether(model, sentences, client, memory_limit=3 * 4 * (3 * model.dim + 8 * model.activations) / 2**30),
        VectorizedTogether(model, sentences, client, memory_limit=1.0),
    ):
        together = torch.cat([row.clone() for row in engine.updates(vector, batches())])
        assert torch.linalg.vector_norm(alone) > 0.1
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=2e-6)


def test_padding_does_not_change_the_loss(sentences):
    """Additional padding gives the same loss, because padding is not counted."""
    model = word_lstm(20)
    parameters = model.split(model.initial(torch.Generator().manual_seed(1)))
    longer = [torch.nn.functional.pad(part, (0, 3)) for part in (sentences.inputs, sentences.labels)]
    plain = model.loss(model.logits(parameters, sentences.inputs, ()), sentences.labels)
    torch.testing.assert_close(model.loss(model.logits(parameters, longer[0], ()), longer[1]), plain)


def test_packing_contains_every_symbol_once(sentences):
    drawn = batches()
    lengths = (sentences.labels != 0).sum(dim=1).numpy()
    packed = pack(lengths, drawn.examples[:, 0], drawn.counts[:, 0])
    wanted = {
        (int(example), position)
        for row, count in zip(drawn.examples[:, 0], drawn.counts[:, 0], strict=True)
        for example in row[:count]
        for position in range(lengths[example])
    }
    assert set(zip(packed.example.tolist(), packed.position.tolist(), strict=True)) == wanted
    assert sum(packed.sizes) == packed.symbols.sum() == len(packed.by_client)
    assert torch.equal(packed.by_client[packed.by_position], torch.arange(len(packed.by_client)))
    came_before = packed.before >= 0
    here, there = packed.by_client[came_before], packed.before[came_before]
    assert (packed.example[here] == packed.example[there]).all()
    assert (packed.position[here] == packed.position[there] + 1).all()


def test_padding_puts_every_symbol_in_its_clients_row(sentences):
    """Including sentences without symbols and clients without sentences."""
    lengths = (sentences.labels != 0).sum(dim=1).numpy()
    lengths[::7] = 0
    drawn = batches(sizes=(3, 40, 1, 0, 16, 17, 5, 33, 8))
    packed = pack(lengths, drawn.examples[:, 0], drawn.counts[:, 0])
    parts = list(buckets(packed.symbols))
    padding = pad(packed, parts)
    assert padding.index is not None  # otherwise nothing is tested
    owners = padding.pad_rows(packed.owner[packed.by_client].unsqueeze(1) + 1, zero=True)
    shares = padding.pad_rows(packed.shares.unsqueeze(1), zero=True)
    for some, own, share in zip(parts, owners, shares, strict=True):
        for client, row, parts_of_one in zip(range(some.start, some.stop), own, share, strict=True):
            count = int(packed.symbols[client])
            assert row.flatten().tolist() == [client + 1] * count + [0] * (len(row) - count)
            assert float(parts_of_one.sum()) == pytest.approx(1.0 if count else 0.0)


def test_buckets_hold_adjacent_clients_of_similar_size():
    symbols = np.array([320, 320, 300, 250, 249, 100, 90, 10, 9, 1])
    parts = [symbols[some] for some in buckets(symbols)]
    assert np.concatenate(parts).tolist() == symbols.tolist()
    assert all(part.min() >= 0.6 * part.max() for part in parts)


def test_a_text_model_selects_its_engine(sentences):
    model, client = word_lstm(20), ClientSettings()
    assert client_engine("auto", model, sentences, client).description.startswith("one by one")
    assert client_engine("together", model, sentences, client).description == "together, written out for LSTMs, fp32"


def test_steps_with_few_sentences_are_separated_from_full_ones():
    counts = np.array([16, 16, 9, 8, 2])
    assert [counts[some].tolist() for some in halves(counts)] == [[16, 16, 9], [8, 2]]
    assert list(halves(counts[:2])) == [slice(0, 2)]


def test_work_counts_every_symbol_three_times_and_its_padding(sentences):
    """Counted by hand for forward pass, backward pass and gradients."""
    engine = LstmTogether(word_lstm(20), sentences, ClientSettings(batch_size=8), memory_limit=1.0)
    drawn = batches()
    needed, computed = engine.work(drawn)
    lengths = (sentences.labels != 0).sum(dim=1).numpy()
    present = np.arange(8) < drawn.counts[:, :, None]
    assert needed == 3 * (lengths[drawn.examples] * present).sum()
    assert needed < computed < 3 * (drawn.counts > 0).sum() * 8 * 8


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_uninitialised_memory_does_not_reach_an_update(momentum, sentences):
    """Deterministic mode fills new tensors with NaN, which would show in an update."""
    model, client = word_lstm(20), ClientSettings(learning_rate=0.5, momentum=momentum, batch_size=8)
    vector = model.initial(torch.Generator().manual_seed(1))
    torch.use_deterministic_algorithms(True)
    try:
        (rows,) = LstmTogether(model, sentences, client, memory_limit=1.0).updates(vector, batches())
    finally:
        torch.use_deterministic_algorithms(False)
    assert rows.isfinite().all()


def test_clients_without_counted_labels_have_a_zero_update(sentences):
    """No labels at all, rows of padding only, and in fp64."""
    model, client = word_lstm(20), ClientSettings(batch_size=8)
    vector = model.initial(torch.Generator().manual_seed(1)).double()
    blank = Examples(torch.cat([torch.ones_like(sentences.inputs[:1]), sentences.inputs]),
                     torch.cat([torch.zeros_like(sentences.labels[:1]), sentences.labels]))  # fmt: skip
    rng = np.random.default_rng(1)
    nothing = draw_batches([np.zeros(0, np.int64)] * 2, epochs=1, batch_size=8, rng=rng)
    padding = draw_batches([np.zeros(1, np.int64)], epochs=1, batch_size=8, rng=rng)
    mixed = draw_batches([np.zeros(1, np.int64), np.arange(1, 4)], epochs=1, batch_size=8, rng=rng)
    engine = LstmTogether(model, blank, client, memory_limit=1.0)
    for drawn in (nothing, padding):
        assert all(not rows.any() for rows in engine.updates(vector, drawn))
    (rows,) = engine.updates(vector, mixed)
    expected = torch.cat(list(OneByOne(model, blank, client).updates(vector, mixed)))
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-8)
