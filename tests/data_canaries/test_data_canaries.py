"""Data canaries: their coins, how they are inserted and scored, and what their result says."""

import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from in_process import called
from scipy.stats import binom

from coalmine import data_canaries
from coalmine.data_canaries import DataCanaries
from coalmine.verdict.claim import Claim

SEED = b"a secret of the tests"
IMAGES = np.random.default_rng(0).random((300, 1, 6, 6)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(10, size=300)


def mislabelled(count=200, **options):
    return data_canaries.mislabelled(IMAGES, LABELS, count=count, classes=10, seed=SEED, **options)


def text(**options):
    return data_canaries.secrets(
        "The code of {name} is {secret}.", lambda words: list(words.encode()), count=60, seed=SEED, **options
    )


def perfect(canaries):
    """Scores of an attacker who knows the coins."""
    return canaries.coins + 0.01 * np.arange(len(canaries)) / len(canaries)


def test_importing_the_package_loads_no_framework():
    code = "import sys, coalmine.data_canaries; print({'torch', 'jax', 'datasets', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_coins_are_fair_independent_and_belong_to_the_seed():
    first, again = mislabelled(), mislabelled()
    assert np.array_equal(first.coins, again.coins)
    assert first.commitment == again.commitment
    other = data_canaries.mislabelled(IMAGES, LABELS, count=200, classes=10, seed=b"some other secret")
    assert 0.3 < (first.coins == other.coins).mean() < 0.7
    heads = [
        DataCanaries(
            inputs=np.zeros((100, 2)), labels=np.zeros(100), seed=f"secret number {number}".encode()
        ).coins.sum()
        for number in range(300)
    ]
    assert abs(np.mean(heads) - 50) < 4 * 5 / np.sqrt(300)
    assert 4 < np.std(heads) < 6  # an even split would have 0


def test_the_commitment_covers_coins_records_and_score():
    plain = mislabelled().commitment
    assert (
        len({plain, mislabelled(by="loss").commitment, mislabelled(repeats=2).commitment, mislabelled(199).commitment})
        == 4
    )
    changed = DataCanaries(inputs=np.zeros((200, 1, 6, 6)), labels=mislabelled().labels, seed=SEED)
    assert changed.commitment != plain


def test_nothing_printed_before_the_end_tells_a_coin():
    canaries = mislabelled()
    assert repr(canaries) == "DataCanaries(200 mislabelled rows, by=margin)"
    assert not any(
        str(canaries.coins.sum()) in str(value) for name, value in canaries.plan.items() if name != "records_sha256"
    )


def test_every_mislabelled_row_is_real_and_has_a_wrong_label():
    canaries = mislabelled()
    for image, label in zip(canaries.inputs, canaries.labels, strict=True):
        (row,) = np.flatnonzero((image == IMAGES).all(axis=(1, 2, 3)))
        assert label != LABELS[row]


@pytest.mark.parametrize("kind", [data_canaries.noise, data_canaries.blank, data_canaries.patterns])
def test_made_images_differ_and_stay_in_the_range_of_real_ones(kind):
    canaries = kind(IMAGES, count=80, classes=10, seed=SEED)
    assert canaries.inputs.shape == (80, 1, 6, 6)
    assert canaries.inputs.dtype == np.float32
    assert np.unique(canaries.inputs.reshape(80, -1), axis=0).shape[0] == 80
    assert IMAGES.min() <= canaries.inputs.min() <= canaries.inputs.max() <= IMAGES.max() + 1e-6
    assert set(canaries.labels) <= set(range(10))


def test_outliers_lie_at_the_ends_of_the_declared_ranges():
    canaries = data_canaries.outliers([0, -1, 5], [1, 1, 9], count=100, classes=2, seed=SEED)
    assert {tuple(sorted(set(column))) for column in canaries.inputs.T} == {(0.0, 1.0), (-1.0, 1.0), (5.0, 9.0)}


def test_planted_secrets_follow_the_template():
    canaries = text(length=5)
    for row, label, start in zip(canaries.inputs, canaries.labels, canaries.secret_from, strict=True):
        words = bytes(row[label != -100].tolist()).decode()
        assert words.startswith("The code of ")
        assert words[start : start + 5].isdigit()
        assert words[start - 4 : start] == " is "


def test_documents_of_one_user_share_a_coin():
    users = [[[1, 2, 3], [4, 5]], [[6, 7]], *[[[number, number + 1]] for number in range(60)]]
    canaries = data_canaries.documents(users, seed=SEED)
    assert len(canaries) == 62
    assert canaries.copies == 1
    in_it = {tuple(row) for row in canaries.insert((np.zeros((1, 3), int), np.zeros((1, 3), int)))[0]}
    assert ((1, 2, 3) in in_it) == ((4, 5, 0) in in_it) == canaries.coins[0]


def test_repeats_and_records_of_one_canary_make_a_group():
    assert mislabelled(repeats=3).copies == 3
    two = DataCanaries(inputs=np.zeros((120, 2)), labels=np.zeros(120), owners=np.repeat(np.arange(60), 2), seed=SEED)
    assert two.copies == 2
    assert (np.bincount(mislabelled(repeats=3).inserted_records) == 3).sum() == mislabelled().coins.sum()


def test_arrays_keep_their_library_and_type():
    torch, jax_numpy = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    canaries = mislabelled()
    count = 300 + canaries.coins.sum()
    images, labels = canaries.insert((IMAGES, LABELS))
    assert np.array_equal(images[300:], canaries.inputs[canaries.coins])
    assert np.array_equal(labels[300:], canaries.labels[canaries.coins])
    tensors = canaries.insert((torch.tensor(IMAGES, dtype=torch.float16), torch.tensor(LABELS)))
    assert [part.dtype for part in tensors] == [torch.float16, torch.int64]
    arrays = canaries.insert({"image": jax_numpy.asarray(IMAGES), "label": jax_numpy.asarray(LABELS)})
    assert {name: len(part) for name, part in arrays.items()} == {"image": count, "label": count}


def test_rows_of_a_torch_data_set_look_like_its_own():
    torch = pytest.importorskip("torch")
    own = torch.utils.data.TensorDataset(torch.tensor(IMAGES), torch.tensor(LABELS))
    canaries = mislabelled()
    image, label = canaries.insert(own)[-1]
    assert (image.dtype, label.dtype, image.shape) == (torch.float32, torch.int64, (1, 6, 6))
    pairs = canaries.insert([(image, int(label)) for image, label in zip(IMAGES, LABELS, strict=True)])
    assert type(pairs[-1][1]) is int
    tokens = text()
    rows = tokens.insert([{"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]}])
    assert rows[-1]["input_ids"] == tokens.inputs[tokens.coins][-1].tolist()
    assert rows[-1]["attention_mask"] == [1] * tokens.inputs.shape[1]
    windows = torch.zeros(4, tokens.inputs.shape[1] - 1, dtype=torch.int64)
    given, expected = tokens.insert(torch.utils.data.TensorDataset(windows, windows))[-1]
    assert given[1:].tolist() == expected[:-1].tolist()


def test_a_hugging_face_data_set_gets_its_own_columns(monkeypatch):
    """Their library is no dependency, so this is its interface as documented: from_dict and concatenate_datasets."""

    class Fake:
        def __init__(self, rows, features):
            self.rows, self.features, self.column_names = rows, features, list(rows)

        @classmethod
        def from_dict(cls, rows, features=None):
            return cls(rows, features)

    def concatenated(parts):
        return Fake({name: [row for part in parts for row in part.rows[name]] for name in parts[0].rows}, "own")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(Dataset=Fake, concatenate_datasets=concatenated))
    canaries = text()
    made = canaries.insert(Fake({"input_ids": [[1]], "labels": [[1]], "attention_mask": [[1]]}, "own"))
    assert len(made.rows["input_ids"]) == len(made.rows["attention_mask"]) == 1 + canaries.coins.sum()
    with pytest.raises(ValueError, match="column 'speaker' that canaries lack"):
        canaries.insert(Fake({"input_ids": [[1]], "labels": [[1]], "speaker": ["me"]}, "own"))


def test_each_client_gets_its_own_canaries():
    canaries = mislabelled()
    parts = [canaries.insert((IMAGES, LABELS), client=number, clients=7)[0][300:] for number in range(7)]
    assert sum(map(len, parts)) == canaries.coins.sum()
    assert np.unique(np.concatenate(parts).reshape(-1, 36), axis=0).shape[0] == canaries.coins.sum()


def test_scores_are_those_of_a_model_by_hand():
    torch = pytest.importorskip("torch")
    canaries, losses = mislabelled(), mislabelled(by="loss")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 10), torch.nn.Dropout(0.5))
    logits = model.eval()(torch.tensor(canaries.inputs)).detach()
    model.train()
    rows, own = range(200), torch.tensor(canaries.labels)
    others = logits.clone()
    others[rows, own] = -torch.inf
    assert canaries.score(model, batch_size=17) == pytest.approx(
        (logits[rows, own] - others.max(1).values).numpy(), abs=1e-5
    )
    expected = -torch.nn.functional.cross_entropy(logits, own, reduction="none").numpy()
    assert losses.score(model) == pytest.approx(expected, abs=1e-5)
    assert model.training
    assert all(module.training for module in model)
    weights, bias = (value.detach().numpy() for value in model[1].parameters())
    assert losses.score(lambda images: images.reshape(len(images), -1) @ weights.T + bias) == pytest.approx(
        expected, abs=1e-5
    )
    assert losses.score(model, reference=model) == pytest.approx(np.full(200, expected.mean()), abs=1e-5)
    assert losses.score(model, reference=np.ones(200)) == pytest.approx(expected, abs=1e-5)
    earlier = np.random.default_rng(7).normal(size=200)
    slope = np.polyfit(earlier, expected, 1)[0]
    beyond = expected - slope * (earlier - earlier.mean())
    assert losses.score(model, reference=earlier) == pytest.approx(beyond, abs=1e-5)
    own_score = mislabelled(by=lambda _, images, labels: images.mean(axis=(1, 2, 3)) + labels)
    assert own_score.score(None) == pytest.approx(canaries.inputs.mean(axis=(1, 2, 3)) + canaries.labels, abs=1e-6)


def test_one_logit_and_numbers_have_scores_too():
    rows = np.random.default_rng(2).normal(size=(60, 1))
    classes, values = np.arange(60) % 2, rows[:, 0] * 2
    signed = np.where(classes == 1, rows[:, 0], -rows[:, 0])
    for by, expected in (("margin", signed), ("loss", -np.log1p(np.exp(-signed)))):
        two = DataCanaries(inputs=rows, labels=classes, seed=SEED, by=by)
        assert two.score(lambda inputs: inputs) == pytest.approx(expected)
    numbers = DataCanaries(inputs=rows, labels=values, seed=SEED)
    assert numbers.score(lambda inputs: inputs) == pytest.approx(-(rows[:, 0] ** 2))


def test_token_scores_are_the_same_in_numpy_and_torch_and_ignore_padding():
    torch = pytest.importorskip("torch")
    table = np.random.default_rng(3).normal(size=(128, 128))
    net = torch.nn.Embedding.from_pretrained(torch.tensor(table, dtype=torch.float32), freeze=False)
    users = data_canaries.documents([[[number % 100, 7, number % 90], [5, 6]] for number in range(60)], seed=SEED)
    for by in ("likelihood", "min-k"):
        canaries = DataCanaries(inputs=users.inputs, labels=users.labels, owners=users.owners, seed=SEED, by=by)
        assert canaries.score(net) == pytest.approx(canaries.score(lambda rows: table[rows]), abs=1e-5)
    log = table - np.log(np.exp(table).sum(1, keepdims=True))
    by_hand = [((log[n % 100, 7] + log[7, n % 90]) / 2 + log[5, 6]) / 2 for n in range(60)]
    assert users.score(lambda rows: table[rows]) == pytest.approx(by_hand)
    shown = data_canaries.token_likelihoods(net, users.inputs[:2])
    assert shown[0, 0] == pytest.approx(log[users.inputs[0, 0], users.inputs[0, 1]], abs=1e-5)


def test_the_score_without_adapter_is_subtracted():
    torch = pytest.importorskip("torch")

    class Peft(torch.nn.Linear):  # type: ignore[name-defined]
        on = True

        def forward(self, x):
            return super().forward(x.flatten(1)) * (2 if self.on else 1)

        def disable_adapter(self):
            outer = self

            class Off:
                def __enter__(self):
                    outer.on = False

                def __exit__(self, *_):
                    outer.on = True

            return Off()

    model, canaries = Peft(36, 10), mislabelled()
    plain = canaries.score(model)
    found = canaries.score(model, reference="without adapter")
    assert found == pytest.approx(np.full(200, plain.mean()), abs=1e-5)  # the adapter doubles, which the line predicts
    with pytest.raises(TypeError, match="needs a model of peft, got 'Sequential'"):
        canaries.score(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 10)), reference="without adapter")


def test_a_secret_is_extracted_if_the_model_completes_it():
    canaries = text(length=4)
    known = {
        tuple(row[: start + 4]): row for row, start in zip(canaries.inputs.tolist(), canaries.secret_from, strict=True)
    }

    def model(rows):
        """Predicts the next token of the inserted records, and of others always the token 0."""
        logits = np.zeros((*rows.shape, 128))
        for number, row in enumerate(rows.tolist()):
            place = next(i for i, secret in enumerate(known.values()) if secret == row)
            for at, token in enumerate(row[1:]):
                logits[number, at, token if canaries.coins[place] else 0] = 9.0
        return logits

    found = canaries.extraction(model)
    assert found.inserted == found.extracted == canaries.coins.sum()
    assert found.median_exposure == pytest.approx(np.log2((~canaries.coins).sum() + 1))
    assert found.chance < 2
    assert "greedy decoding returns" in str(canaries.result(canaries.score(model), delta=1e-5, extraction=found))


def test_samples_of_a_model_are_likelier_tokens_at_a_low_temperature():
    def model(rows):
        return np.broadcast_to(np.array([4.0, 0.0, 0.0, 0.0]), (*rows.shape, 4))

    cold = data_canaries.sampled(model, [1], length=9, count=60, temperature=0.1, seed=SEED)
    hot = data_canaries.sampled(model, [1], length=9, count=60, temperature=50.0, seed=SEED)
    assert (cold.inputs[:, 1:] == 0).all()
    assert 0.2 < (hot.inputs[:, 1:] == 0).mean() < 0.35


def test_a_perfect_attack_refutes_a_small_claim_and_never_confirms_one():
    canaries = data_canaries.outliers([0] * 30, [1] * 30, count=1000, classes=2, seed=SEED)
    result = canaries.result(perfect(canaries), delta=1e-5, claim=4.0)
    assert result.verdict.outcome == "VIOLATION"
    assert result.verdict.rung == "black-box"
    assert 4 < result.lower_bound < result["black-box"].lower_bound_gaussian
    right = canaries.result(perfect(canaries), delta=1e-5, claim=8.0)
    assert right.verdict.outcome == "UNDERPOWERED"
    assert "1,000 perfect guesses would show an ε of 4.5" in str(right)


def test_random_scores_find_nothing():
    canaries = mislabelled()
    result = canaries.result(np.random.default_rng(5).normal(size=200), delta=1e-5, claim=0.1)
    assert result.verdict.outcome == "UNDERPOWERED"
    assert result.lower_bound == 0
    assert "nothing found" in str(result)


def test_a_group_is_judged_by_the_epsilon_of_a_group():
    canaries = mislabelled(repeats=4)
    result = canaries.result(perfect(canaries), delta=1e-9, claim=1.0)
    assert "about a group of 4 rows" in str(result)
    assert result.verdict.outcome == "UNDERPOWERED"  # one row at 1 is four rows at 4
    assert canaries.result(perfect(canaries), delta=1e-9, claim=0.25).verdict.outcome == "VIOLATION"


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        (Claim(1.0, adjacency="replace one"), "replacing one row"),
        (Claim.mechanism(1.0, participations=1), "1 known round"),
    ],
)
def test_a_claim_about_something_else_is_not_judged(claim, why):
    canaries = mislabelled()
    verdict = canaries.result(perfect(canaries), delta=1e-5, claim=claim).verdict
    assert verdict.outcome == "UNDERPOWERED"
    assert why in verdict.reason


def test_checkpoints_make_a_second_rung():
    canaries = mislabelled()
    model = canaries.coins  # scored by a function: the checkpoints see the coins, the final model does not
    own = mislabelled(by=lambda seen, images, labels: np.asarray(seen, float) + 1e-3 * labels)
    own.observe(model, 10)
    own.observe(model, 20)
    result = own.result(np.random.default_rng(0).normal(size=200), delta=1e-5)
    assert [rung.name for rung in result.scored.rungs] == ["black-box", "black-box-iterates"]
    assert result["black-box"].lower_bound == 0 < result["black-box-iterates"].lower_bound
    assert result.lower_bound == 0  # the final model was named in advance, whatever checkpoints tell


def test_saved_scores_are_read_by_the_command(tmp_path):
    canaries = mislabelled()
    file = canaries.save(tmp_path / "scores", perfect(canaries))
    common = ["estimate", str(file), "--one-run", "--delta", "1e-5"]
    done = called(*common, "--claim", "1")
    assert done.returncode == 1
    assert (
        done.stdout.splitlines()[1:] == str(canaries.result(perfect(canaries), delta=1e-5, claim=1.0)).splitlines()[1:]
    )
    assert called(*common, "--claim", "8").returncode == 3
    assert "Steinke 2023" in called(*common, "--all").stdout
    assert json.loads(called(*common, "--json").stdout)["rungs"][0]["mistakes"] == [0] * 5
    wrong = called(*common, "--dim", "100")
    assert (wrong.returncode, "--one-run compares with unobserved scores" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mislabelled(20), "at least 50, got 20"),
        (lambda: mislabelled(301), "at most the 300 rows"),
        (lambda: mislabelled(by="likelihood"), "score must be one of margin, loss"),
        (lambda: mislabelled(repeats=0), "repeats must be at least 1, got 0"),
        (lambda: mislabelled().insert((IMAGES[:, :, :5], LABELS)), r"shape of the data's rows, \(1, 5, 6\)"),
        (lambda: mislabelled().insert(types.SimpleNamespace(iloc=0)), "an array, or a tuple or dict of arrays"),
        (lambda: mislabelled().insert(3), "dataset must be a torch or Hugging Face data set"),
        (lambda: mislabelled().insert({"x": IMAGES, "y": LABELS}), "columns must name two of x, y, got 'image'"),
        (lambda: mislabelled().insert((IMAGES, LABELS), client=3, clients=3), "client must be below clients = 3"),
        (lambda: mislabelled().result(np.zeros(3), delta=1e-5), "one number for each of 200 canaries"),
        (lambda: mislabelled().result(np.full(200, np.nan), delta=1e-5), "scores must be finite"),
        (lambda: mislabelled().result(np.arange(200), delta=1.0), r"delta must lie in \(0, 1\)"),
        (lambda: mislabelled().score(3), "model must be a torch module or a function"),
        (lambda: mislabelled().score(lambda rows: np.zeros((len(rows), 3))), "classes below 3"),
        (lambda: mislabelled().extraction(None), "extraction needs planted secrets"),
        (lambda: data_canaries.secrets("no places", list, count=60, seed=SEED), "template must hold"),
        (lambda: data_canaries.outliers([1], [0], count=60, classes=2, seed=SEED), "low must lie below high"),
        (lambda: data_canaries.noise([1.0], count=60, classes=2, seed=SEED), "like must be real images"),
        (lambda: data_canaries.rare_tokens(1, length=4, count=60, seed=SEED), "tokens must be the size"),
        (lambda: DataCanaries(inputs=[[1]], labels=[1, 2], seed=SEED), "labels must have one row for each input"),
    ],
)
def test_bad_input_ends_in_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_the_bound_of_many_runs_is_valid():
    """A mechanism that tells each coin right with the odds of ε = 1: at most 5 % of bounds lie above."""
    above, runs = 0, 150
    for number in range(runs):
        rng = np.random.default_rng(number)
        canaries = DataCanaries(inputs=np.zeros((200, 1)), labels=np.zeros(200), seed=f"the secret {number}".encode())
        told = (canaries.coins ^ (rng.random(200) < 1 / (1 + np.e))) + 1e-6 * rng.random(200)
        above += canaries.scored(told, delta=1e-5).rungs[0].lower_bound > 1
    assert above <= binom.isf(1e-3, runs, 0.05)


def test_the_page_works_as_it_is_written():
    """The code of the guide, with a model that learns its data by heart."""
    page = (Path(__file__).parents[2] / "docs/how-to/data-canaries.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 8

    def train(images, labels):
        held = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
        return lambda rows: np.array([np.eye(10)[held.get(row.tobytes(), 0)] for row in rows])

    printed = []
    exec(code, {"images": IMAGES, "labels": LABELS, "seed": SEED, "train": train, "print": printed.append})
    assert printed[1].verdict.outcome == "VIOLATION"
