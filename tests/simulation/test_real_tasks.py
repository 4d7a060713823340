"""The tasks that read files: small ones in every format, and the real data where available."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from formats import tff_hdf5

from coalmine.simulation import Steps, load_task, simulate
from coalmine.simulation.batches import draw_batches
from coalmine.simulation.config import CanarySettings, EngineSettings, RunConfig, TaskSettings
from coalmine.simulation.config_sources import task_defaults
from coalmine.simulation.population import Consecutive
from coalmine.simulation.tasks import tff_files
from coalmine.simulation.tasks.tff_files import order_of_test_clients, select_test_examples

DATA = os.environ.get("COALMINE_DATA_DIR")
needs_data = pytest.mark.skipif(not DATA, reason="COALMINE_DATA_DIR names no folder with the real data")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COALMINE_CACHE_DIR", str(tmp_path / "cache"))


def write(folder, names, train, test):
    """Write both files; a client is a dict of arrays or of lists of bytes."""
    folder.mkdir(exist_ok=True)
    for name, clients in zip(names, (train, test), strict=True):
        tff_hdf5(folder / name, clients)


def writers(counts, *, classes, seed):
    rng = np.random.default_rng(seed)
    return {
        client: {
            "pixels": rng.random((count, 28, 28), dtype=np.float32),
            "label": rng.integers(0, classes, count).astype(np.int32),
        }
        for client, count in counts.items()
    }


EMNIST = ("fed_emnist_train.h5", "fed_emnist_test.h5")
STACKOVERFLOW = ("stackoverflow_train.h5", "stackoverflow_test.h5")
EMNIST_DIGITS = ("fed_emnist_digitsonly_train.h5", "fed_emnist_digitsonly_test.h5")


def test_emnist_is_read(tmp_path):
    train = writers({"f1_2": 5, "f0_1": 3, "f2_0": 4}, classes=62, seed=1)
    test = writers({"f0_1": 2, "f1_2": 1, "f2_0": 1}, classes=62, seed=2)
    write(tmp_path / "emnist", EMNIST, train, test)
    for _ in range(2):  # first built, then memory-mapped
        task = load_task("emnist", data_dir=tmp_path)
        assert task.title == "Federated EMNIST"
        assert task.model.dim == 1_206_590
        assert [len(task.population.examples(client)) for client in range(3)] == [3, 5, 4]  # sorted by id
        second = task.population.examples(1)
        np.testing.assert_array_equal(task.train.inputs[second, 0].numpy(), train["f1_2"]["pixels"])  # not inverted
        assert task.train.labels[second].tolist() == train["f1_2"]["label"].tolist()
        assert task.train.inputs.shape == (12, 1, 28, 28)
        assert task.train.labels.dtype == torch.int64
        assert task.test.inputs.shape == (4, 1, 28, 28)
        assert sorted(task.test.labels.tolist()) == sorted(
            label for c in test.values() for label in c["label"].tolist()
        )
        assert task.unscored_labels == ()


def test_emnist_digits_is_read(tmp_path):
    train, test = (writers({"a": 3, "b": 2}, classes=10, seed=seed) for seed in (1, 2))
    write(tmp_path / "emnist", EMNIST_DIGITS, train, test)
    task = load_task("emnist-digits", data_dir=tmp_path)
    assert task.title == "Federated EMNIST, digits"
    assert task.model.dim == 1_199_882
    assert task.train.labels.tolist() == [*train["a"]["label"].tolist(), *train["b"]["label"].tolist()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": np.array([3, 62])}, r"writer a must have classes from 0 to 61, got 3 to 62"),
        ({"pixels": np.full((2, 28, 28), 255, np.float32)}, "writer a must have pixels from 0 to 1, got 255 to 255"),
        ({"pixels": np.full((2, 28, 28), np.nan, np.float32)}, "writer a must have pixels from 0 to 1, got nan"),
        ({"pixels": np.zeros((2, 8, 8), np.float32)}, "writer a must have pictures of 28 by 28, got 64 numbers"),
    ],
)
def test_invalid_characters_are_rejected(tmp_path, change, message):
    good = writers({"a": 2}, classes=62, seed=1)
    write(tmp_path / "emnist", EMNIST, {"a": good["a"] | change}, good)
    with pytest.raises(ValueError, match=message):
        load_task("emnist", data_dir=tmp_path)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


SENTENCES = {"ann": [b"how do i join", b"a b"], "bob": [b"the " * 30, b"unheard the"], "eve": [b"do"]}


def test_stack_overflow_is_read(tmp_path):
    clients = {
        client: {
            "tokens": sentences,
            "score": np.arange(len(sentences)),
            "title": [b"title"] * len(sentences),
        }
        for client, sentences in SENTENCES.items()
    }
    write(tmp_path / "stackoverflow", STACKOVERFLOW, clients, {"eve": clients["eve"]})
    with pytest.raises(FileNotFoundError, match=r"does not contain stackoverflow.word_count: run `coalmine data"):
        load_task("stackoverflow", data_dir=tmp_path)
    (tmp_path / "stackoverflow" / "stackoverflow.word_count").write_bytes(b"the 9\ndo 8\nhow 7\ni 6\n")
    task = load_task("stackoverflow", data_dir=tmp_path)
    assert task.title == "Stack Overflow"
    assert task.unscored_labels == (0, 5, 7)
    assert [task.population.examples(client).tolist() for client in range(3)] == [[0, 1], [2, 3], [4]]
    assert task.train.inputs[0].tolist() == [6, 3, 2, 4, 5, 7] + [0] * 14
    assert task.train.labels[0].tolist() == [3, 2, 4, 5, 7] + [0] * 15
    assert task.train.labels[2].tolist() == [1] * 20  # truncated, so without its end symbol
    assert task.train.inputs[2].tolist() == [6] + [1] * 19
    assert task.test.labels.tolist() == [[2, 7] + [0] * 18]
    assert task.train.inputs.dtype == torch.int16
    # inputs and labels share memory, shifted by one
    assert task.train.labels.data_ptr() == task.train.inputs.data_ptr() + 2


def test_the_stack_overflow_vocabulary_gives_the_papers_model(tmp_path):
    folder = tmp_path / "stackoverflow"
    folder.mkdir()
    write(folder, STACKOVERFLOW, {"a": {"tokens": [b"w9999 w10000"]}}, {"a": {"tokens": [b""]}})
    counts = b"".join(b"w%d %d\n" % (number, 20_000 - number) for number in range(12_000))
    (folder / "stackoverflow.word_count").write_bytes(counts)
    task = load_task("stackoverflow", data_dir=tmp_path)
    assert task.model.dim == 4_050_748
    assert task.train.labels[0, :3].tolist() == [10_000, 10_001, 10_003]
    assert task.unscored_labels == (0, 10_001, 10_003)


def test_another_vocabulary_gives_other_rows(tmp_path):
    folder = tmp_path / "stackoverflow"
    folder.mkdir()
    write(folder, STACKOVERFLOW, {"a": {"tokens": [b"x y"]}}, {"a": {"tokens": [b"y"]}})
    for counts, labels in ((b"x 2\ny 1\n", [1, 2, 5]), (b"y 2\nx 1\n", [2, 1, 5])):
        (folder / "stackoverflow.word_count").write_bytes(counts)
        assert load_task("stackoverflow", data_dir=tmp_path).train.labels[0, :3].tolist() == labels


def stackexchange_file(folder, users):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"client_id": user, "posts": [{"site": "s", "sentences": part} for part in parts]})
        for user, parts in users.items()
    ]
    (folder / "stackexchange_by_user.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def test_stack_exchange_trains_users_with_five_sentences_and_tests_the_others(tmp_path):
    users = {"b:2": [["x y"] * 3, ["y z"] * 2], "b:1": [["x"] * 7], "a:9": [["x only here"] * 4], "a:3": [["w"]]}
    stackexchange_file(tmp_path / "stackexchange", users)
    task = load_task("stackexchange", data_dir=tmp_path)
    assert [len(task.population.examples(client)) for client in range(len(task.population))] == [7, 5]  # b:1, b:2
    # only words of training users: x by two users, then y and z
    assert task.unscored_labels == (0, 4, 6)
    assert task.train.labels[7, :3].tolist() == [1, 2, 6]
    assert sorted(map(tuple, task.test.labels[:, :4].tolist())) == [(1, 4, 4, 6)] * 4 + [(4, 6, 0, 0)]
    assert task.title.startswith("stackexchange_by_user.jsonl.gz with sha256 ")


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"a": [["x"]]}, "must have users with at least 5 sentences, for training"),
        ({"a": [["x"] * 9]}, "and users with fewer, for testing"),
        ({"a": [[3] * 9]}, "line 1 must have a list of texts"),
    ],
)
def test_invalid_stack_exchange_files_are_rejected(tmp_path, users, message):
    stackexchange_file(tmp_path / "stackexchange", users)
    with pytest.raises(ValueError, match=message):
        load_task("stackexchange", data_dir=tmp_path)


SPEECHES = {"KING": [b"h" * 200, b"d"], "FOOL": [b"hd", b"dh", b"x~"]}


def test_shakespeare_is_read(tmp_path):
    train = {role: {"snippets": snippets} for role, snippets in SPEECHES.items()}
    names = ("shakespeare_train.h5", "shakespeare_test.h5")
    write(tmp_path / "shakespeare", names, train, {"KING": {"snippets": [b"d"]}})
    task = load_task("shakespeare", data_dir=tmp_path)
    assert task.title == "Shakespeare (TensorFlow Federated)"
    assert task.model.dim == 820_522
    assert task.unscored_labels == (0,)
    assert [len(task.population.examples(client)) for client in range(2)] == [3, 4]  # FOOL, KING
    assert task.train.inputs.shape == (7, 80)
    assert task.train.inputs[0, :4].tolist() == [88, 2, 1, 89]
    assert task.train.labels[2, :3].tolist() == [6, 87, 89]
    assert task.test.labels.tolist() == [[1, 89] + [0] * 78]


def test_last_fifth_of_each_role_is_for_testing(tmp_path):
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    roles = {"a": ["d"], "b": ["d", "h"], "c": ["l"] * 8 + ["p"] * 3}
    lines = [json.dumps({"client_id": role, "snippets": snippets}) for role, snippets in roles.items()]
    (folder / "shakespeare_by_role.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    task = load_task("shakespeare", data_dir=tmp_path)
    assert [len(task.population.examples(role)) for role in range(len(task.population))] == [1, 8]
    assert task.train.labels[:, 0].tolist() == [1] + [3] * 8
    assert sorted(task.test.labels[:, 0].tolist()) == [2, 4, 4, 4]


def test_test_examples_come_from_clients_in_a_fixed_order(monkeypatch):
    monkeypatch.setattr(tff_files, "TEST_EXAMPLES", 5)
    starts = np.array([0, 2, 4, 6, 8])
    order = order_of_test_clients(4)
    expected = [number for client in order for number in (2 * client, 2 * client + 1)][:5]
    assert select_test_examples(starts).tolist() == expected
    assert select_test_examples(np.array([0, 1, 3])).tolist() in ([0, 1, 2], [1, 2, 0])  # all, if fewer than wanted
    assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_missing_files_are_named(tmp_path):
    for name in ("emnist", "stackoverflow", "stackexchange", "shakespeare"):
        with pytest.raises(FileNotFoundError, match=f"does not contain .*: run `coalmine data {name}`"):
            load_task(name, data_dir=tmp_path)


def test_consecutive_clients_have_consecutive_examples():
    population = Consecutive(np.array([0, 3, 3, 7]))
    assert [population.examples(client).tolist() for client in range(len(population))] == [[0, 1, 2], [], [3, 4, 5, 6]]
    assert population.most_examples == 4


def test_cap_applies_after_shuffling_and_before_batching():
    owned = [np.arange(10), np.arange(100, 103)]
    for seed in range(20):
        batches = draw_batches(owned, epochs=1, batch_size=4, rng=np.random.default_rng(seed), max_examples=6)
        assert batches.counts.tolist() == [[4, 2], [3, 0]]
        assert len(set(batches.examples[0].ravel()[:6].tolist())) == 6
    first = {
        tuple(draw_batches(owned, epochs=1, batch_size=4, rng=np.random.default_rng(s), max_examples=6).examples[0, 0])
        for s in range(20)
    }
    assert len(first) == 20  # a different choice each time


def test_cap_on_examples_includes_all_epochs():
    owned = [np.arange(10), np.arange(100, 103)]
    batches = draw_batches(owned, epochs=3, batch_size=4, rng=np.random.default_rng(0), max_examples=14)
    assert batches.sizes.tolist() == [14, 9]
    assert batches.counts.tolist() == [[4, 4, 2, 4], [3, 3, 3, 0]]
    free = draw_batches(owned, epochs=3, batch_size=4, rng=np.random.default_rng(0))
    high = draw_batches(owned, epochs=3, batch_size=4, rng=np.random.default_rng(0), max_examples=30)
    np.testing.assert_array_equal(free.examples, high.examples)
    np.testing.assert_array_equal(free.examples[0, :3], batches.examples[0, :3])


def test_memory_of_a_large_client_is_bounded_by_the_cap():
    batches = draw_batches([np.arange(100_000)], epochs=2, batch_size=16, rng=np.random.default_rng(0), max_examples=64)
    assert batches.examples.shape == (1, 4, 16)


def test_clients_and_canaries_declare_no_more_than_the_cap():
    declared = []

    def weigh(examples):
        declared.append(examples.clone())
        return torch.ones_like(examples, dtype=torch.float32)

    for cap in (None, 2):
        config = RunConfig(
            rounds=2,
            canaries=CanarySettings(count=10),
            task=TaskSettings(max_examples_per_client=cap),
            engine=EngineSettings(jobs=1, threads=1),
        )
        declared.clear()
        simulate(config, steps=Steps(weigh=weigh))
        assert len(declared) == 4
        largest = max(int(examples.max()) for examples in declared)
        assert largest == (cap or load_task("digits").population.most_examples)


def test_the_defaults_are_the_papers_runs():
    """Section 5."""
    emnist = RunConfig.from_dict(task_defaults("emnist"))
    assert emnist.rounds * emnist.participation.clients_per_round == 5 * 3_400
    assert (emnist.client.learning_rate, emnist.client.batch_size, emnist.client.epochs) == (0.031, 16, 1)
    assert (emnist.server.optimizer, emnist.server.learning_rate, emnist.server.momentum) == ("sgd", 1.0, 0.9)
    assert (emnist.privacy.clipping, emnist.participation.kind) == ("adaptive", "shuffled")
    words = RunConfig.from_dict(task_defaults("stackoverflow"))
    assert (words.rounds, words.participation.clients_per_round) == (2048, 167)
    assert (words.client.learning_rate, words.server.learning_rate, words.server.momentum) == (1.0, 0.56, 0.9)
    assert words.task.max_examples_per_client is None


@pytest.mark.full
@needs_data
def test_the_real_stack_exchange_data_are_read():
    task = load_task("stackexchange", data_dir=Path(str(DATA)))
    assert task.title == "Stack Exchange, 15 sites"
    sizes = np.array([len(task.population.examples(client)) for client in range(len(task.population))])
    assert (len(sizes), sizes.sum(), sizes.min(), sizes.max()) == (5_022, 233_092, 5, 4_154)
    assert task.population.most_examples == 4_154
    assert len(task.test) == 241_796 - 233_092
    assert task.model.dim == 4_050_748
    labels = task.train.labels
    assert labels.min() == 0
    assert labels.max() == 10_003
    words = (labels > 0) & (labels != 10_003)
    assert ((labels == 10_001) & words).sum() / words.sum() == pytest.approx(0.035, abs=0.005)
    assert (task.train.inputs[:, 0] == 10_002).all()


@needs_data
def test_the_real_shakespeare_data_are_read_by_role():
    task = load_task("shakespeare", data_dir=Path(str(DATA)))
    assert task.title == "Shakespeare, 37 plays by role"
    assert len(task.population) == 1_132
    assert task.model.dim == 820_522
    assert len(task.test) == 10_000
    assert task.train.labels.max() == 89
    assert not (task.train.inputs == 87).any()  # every character is in the vocabulary
    assert (task.train.inputs == 88).sum() == sum(
        len(speeches) - -(-len(speeches) // 5) for speeches in speeches_of_roles() if len(speeches) > 1
    )


def speeches_of_roles():
    with gzip.open(Path(str(DATA)) / "shakespeare" / "shakespeare_by_role.jsonl.gz") as lines:
        return [json.loads(line)["snippets"] for line in lines]
