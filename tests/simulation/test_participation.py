import numpy as np
import pytest

from coalmine.simulation import participation as participation_module
from coalmine.simulation.cohorts import plan_cohorts
from coalmine.simulation.config import RunConfig
from coalmine.simulation.config_sources import merged
from coalmine.simulation.participation import (
    FixedSizeCohorts,
    LimitedCheckIns,
    PoissonCohorts,
    ShuffledEpochs,
    read_rounds,
    write_rounds,
)
from coalmine.simulation.randomness import numpy_stream


def config(**changes) -> RunConfig:
    return RunConfig.from_dict(merged(RunConfig().to_dict(), changes))


def no_canaries(round_number: int) -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


def test_shuffled_epochs_include_each_client_once_in_a_new_order():
    participation = ShuffledEpochs(23, 5, seed=1)
    rounds = [participation.participants(number) for number in range(1, 11)]
    assert [len(present) for present in rounds] == [5, 5, 5, 5, 3] * 2
    first, second = np.concatenate(rounds[:5]), np.concatenate(rounds[5:])
    assert sorted(first) == sorted(second) == list(range(23))
    assert first.tolist() != second.tolist()


def test_the_order_of_an_epoch_is_sampled_once(monkeypatch):
    """A round's participants are a slice of its epoch's order, which is not sampled again in every round."""
    participation, drawn = ShuffledEpochs(23, 5, seed=1), []

    def counted(seed: int, purpose: str, epoch: int) -> np.random.Generator:
        drawn.append(epoch)
        return numpy_stream(seed, purpose, epoch)

    monkeypatch.setattr(participation_module, "numpy_stream", counted)
    for number in (1, 2, 3, 4, 5, 6, 7, 10, 3, 12):
        epoch, place = divmod(number - 1, 5)
        order = numpy_stream(1, "shuffled epochs", epoch).permutation(23)
        present = participation.participants(number)
        assert present.tolist() == order[5 * place : 5 * place + 5].tolist()
        present[:] = 0  # a caller's changes do not affect the next round
    assert drawn == [0, 1, 0, 2]


def test_poisson_rounds_have_the_binomial_law():
    """Sizes of 2,000 rounds have the mean and variance of Binomial(40, 0.3), and all clients the same rate."""
    participation = PoissonCohorts(40, 0.3, seed=1)
    rounds = [participation.participants(number) for number in range(1, 2001)]
    sizes = np.array([len(present) for present in rounds])
    variance = 40 * 0.3 * 0.7
    assert abs(sizes.mean() - 12) < 4 * np.sqrt(variance / 2000)
    assert abs(sizes.var() - variance) < 4 * variance * np.sqrt(2 / 2000)
    times = np.bincount(np.concatenate(rounds), minlength=40)
    assert np.abs(times - 600).max() < 4.5 * np.sqrt(2000 * 0.3 * 0.7)
    assert all(len(set(present.tolist())) == len(present) for present in rounds)


def test_fixed_size_samples_independently_in_each_round():
    participation = FixedSizeCohorts(30, 7, seed=1)
    rounds = [frozenset(participation.participants(number).tolist()) for number in range(1, 30)]
    assert {len(present) for present in rounds} == {7}
    assert len(set(rounds)) == len(rounds)


@pytest.mark.parametrize("separation", [1, 2, 4])
def test_check_ins_are_separated_by_the_configured_rounds(separation):
    participation = LimitedCheckIns(29, 7, separation, seed=1)
    rounds = [participation.participants(number) for number in range(1, 60)]
    last: dict[int, int] = {}
    gaps = []
    for number, present in enumerate(rounds):
        assert len(set(present.tolist())) == 7
        gaps += [number - last[client] for client in present.tolist() if client in last]
        last.update(dict.fromkeys(present.tolist(), number))
    assert min(gaps) == separation
    assert len(last) == 29


def test_check_ins_do_not_depend_on_the_order_of_calls():
    whole = LimitedCheckIns(29, 7, 3, seed=1)
    rounds = {number: whole.participants(number).tolist() for number in range(1, 21)}
    other = LimitedCheckIns(29, 7, 3, seed=1)
    for number in (13, 13, 14, 2, 20, 1):
        assert other.participants(number).tolist() == rounds[number]


@pytest.mark.parametrize(
    "participation",
    [ShuffledEpochs(50, 8, 3), PoissonCohorts(50, 0.2, 3), FixedSizeCohorts(50, 8, 3), LimitedCheckIns(50, 8, 3, 3)],
)
def test_rounds_are_determined_by_the_seed(participation):
    kind, values = type(participation), [getattr(participation, name) for name in participation.__match_args__]
    values = values[:4] if kind is LimitedCheckIns else values
    assert participation.participants(5).tolist() == kind(*values).participants(5).tolist()
    assert participation.participants(5).tolist() != kind(*values[:-1], 4).participants(5).tolist()


def test_a_rounds_file_survives_a_round_trip(tmp_path):
    path = tmp_path / "rounds.txt"
    rounds = [np.array([3, 1]), np.array([], dtype=np.int64), np.array([10, 2])]
    write_rounds(path, rounds, clients=10)
    assert path.read_text() == "3 1\n\ncanary:0 2\n"
    read = read_rounds(path, clients=10, canaries=1)
    assert [present.tolist() for present in read.rounds] == [[3, 1], [], [10, 2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2\n1 10\n", "line 2: '10' is not one of the 10 clients, counted from 0"),
        ("1 x\n", "line 1: 'x' is not one of the 10 clients"),
        ("1 -2\n", "line 1: '-2' is not one of"),
        ("canary:3\n", "line 1: 'canary:3' is not one of the 3 canaries"),
        ("4 4\n", "line 1: a participant is listed twice"),
        ("", "has no rounds"),
        (b"\xff\xfe", "must be a rounds file, .*, got a file that is not text"),
        (None, "must be readable"),
    ],
)
def test_the_error_for_a_bad_rounds_file_names_the_line(tmp_path, text, message):
    path = tmp_path / "rounds.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read_rounds(path, clients=10, canaries=3)


def test_spread_canaries_are_added_to_the_clients():
    cohorts = plan_cohorts(config(rounds=4, canaries={"count": 40}), 200, lambda number: np.arange(number))
    cohort = cohorts.of_round(3)
    assert cohort.canaries.tolist() == [0, 1, 2]
    assert len(cohort.clients) == 50
    assert cohorts.expected_size == 50 + 40 / 4


def test_canaries_sampled_like_clients_take_part_once_per_epoch():
    cohorts = plan_cohorts(config(canaries={"count": 100, "pattern": "clients"}), 200, no_canaries)
    epoch = [cohorts.of_round(number) for number in range(1, 5)]
    assert [len(cohort) for cohort in epoch] == [75] * 4
    assert sorted(np.concatenate([cohort.canaries for cohort in epoch])) == list(range(100))
    assert sorted(np.concatenate([cohort.clients for cohort in epoch])) == list(range(200))
    assert cohorts.expected_size == 75


def test_replacing_canaries_keeps_the_other_clients():
    cohorts = plan_cohorts(config(canaries={"count": 50, "pattern": "replace"}), 200, no_canaries)
    epoch = [cohorts.of_round(number) for number in range(1, 5)]
    assert [len(cohort) for cohort in epoch] == [50] * 4
    assert sorted(np.concatenate([cohort.canaries for cohort in epoch])) == list(range(50))
    clients = np.concatenate([cohort.clients for cohort in epoch])
    assert len(set(clients.tolist())) == 150
    with pytest.raises(ValueError, match=r"canaries.count must be below the number of clients, 200"):
        plan_cohorts(config(canaries={"count": 200, "pattern": "replace"}), 200, no_canaries)


def test_a_rounds_file_lists_canaries_sampled_like_clients(tmp_path):
    path = tmp_path / "rounds.txt"
    path.write_text("3 canary:7 4\n" * 2)
    named = {"kind": "file", "rounds_file": str(path)}
    canaries = {"count": 10, "pattern": "clients"}
    cohort = plan_cohorts(config(rounds=2, participation=named, canaries=canaries), 20, no_canaries).of_round(2)
    assert (cohort.clients.tolist(), cohort.canaries.tolist()) == ([3, 4], [7])
    with pytest.raises(ValueError, match="has 2 rounds, but the run needs 3"):
        plan_cohorts(config(rounds=3, participation=named, canaries=canaries), 20, no_canaries)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShuffledEpochs(5, 6, 1), "clients_per_round must be at most the population, 5, got 6"),
        (lambda: FixedSizeCohorts(5, 0, 1), "clients_per_round must be at least 1, got 0"),
        (lambda: PoissonCohorts(5, 1.5, 1), r"probability must lie in \(0, 1\), got 1.5"),
        (lambda: LimitedCheckIns(20, 7, 3, 1), "7 clients per round, 3 rounds apart, need 21 clients, got 20"),
    ],
)
def test_invalid_participation_is_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("content", ["7c1f0e35a9b84d2296d3e8f4b05a6c1d\n", "12345678901234567890\n"])
def test_a_seed_file_in_the_place_of_a_rounds_file_is_not_printed(tmp_path, content):
    path = tmp_path / "seed"
    path.write_text(content)
    with pytest.raises(ValueError, match="line 1: word 1 is not one of the 5 clients, counted from 0") as error:
        read_rounds(path, clients=5)
    assert content.strip() not in str(error.value)
