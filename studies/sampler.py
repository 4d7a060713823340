"""How the sampling gauge classifies honest and broken samplers, and how often it is right.

python -m studies.sampler --jobs 2       about 20 minutes on two free cores; the tables of docs/evidence/sampling.md
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
from coalmine.estimators.sampler_tests import SamplerReading, read_sampler
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling, Shuffled

Table = np.ndarray  # rounds × people, True for a participant; the canaries come first
POPULATION = 3  # people per canary, including the canary


def coins(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """Poisson sampling."""
    return rng.random((rounds, people)) < rate


def allocated(rng: np.random.Generator, people: int, rounds: int, length: int) -> Table:
    """Random allocation in epochs of `length` rounds."""
    epochs = -(-rounds // length)
    table = np.zeros((epochs * length, people), dtype=bool)
    for epoch in range(epochs):
        table[epoch * length + rng.integers(length, size=people), np.arange(people)] = True
    return table[:rounds]


def cut(order: np.ndarray, length: int) -> Table:
    """One epoch of cohorts cut from this order of all people."""
    table = np.zeros((length, len(order)), dtype=bool)
    table[np.arange(len(order)) * length // len(order), order] = True
    return table


def shuffled(rng: np.random.Generator, people: int, rounds: int, length: int) -> Table:
    """Cohorts cut from a new order in each epoch."""
    return np.concatenate([cut(rng.permutation(people), length) for _ in range(-(-rounds // length))])[:rounds]


def same_order(rng: np.random.Generator, people: int, rounds: int, length: int) -> Table:
    """The same order in every epoch."""
    return np.tile(cut(rng.permutation(people), length), (-(-rounds // length), 1))[:rounds]


def same_batches(rng: np.random.Generator, people: int, rounds: int, length: int) -> Table:
    """Cohorts formed once, then shuffled as a whole in each epoch."""
    once = cut(rng.permutation(people), length)
    return np.concatenate([once[rng.permutation(length)] for _ in range(-(-rounds // length))])[:rounds]


def fixed_size(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """The same number of people in each round, sampled without replacement."""
    table = np.zeros((rounds, people), dtype=bool)
    size = round(people * rate)
    for row in table:
        row[rng.permutation(people)[:size]] = True
    return table


def with_replacement(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """The same number of draws in each round, with replacement; a person drawn twice takes part once."""
    table = np.zeros((rounds, people), dtype=bool)
    for row in table:
        row[rng.integers(people, size=round(people * rate))] = True
    return table


def in_every_step(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """A share of the rows in every step and the others less often, so that the mean rate is as claimed."""
    share = min(0.1, rate / 2)
    often = rng.random(people) < share
    rates = np.where(often, 1.0, (rate - share) / (1 - share))
    return rng.random((rounds, people)) < rates


def same_steps(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """All people in the same steps."""
    return np.repeat(rng.random((rounds, 1)) < rate, people, axis=1)


def groups_of_ten(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """People in groups of ten that are sampled together."""
    return np.repeat(rng.random((rounds, -(-people // 10))) < rate, 10, axis=1)[:, :people]


def blocks(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """A coin for each block of five rounds."""
    return np.repeat(rng.random((-(-rounds // 5), people)) < rate, 5, axis=0)[:rounds]


def sticky(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """Participants stay for the next round with probability one half; the rate is as claimed."""
    table = np.empty((rounds, people), dtype=bool)
    table[0] = rng.random(people) < rate
    for t in range(1, rounds):
        table[t] = rng.random(people) < np.where(table[t - 1], 0.5, 0.5 * rate / (1 - rate))
    return table


def drift(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """The rate doubles in the second half; the mean rate is as claimed."""
    rates = np.where(np.arange(rounds) < rounds // 2, 2 / 3, 4 / 3) * rate
    return rng.random((rounds, people)) < rates[:, None]


def weighted(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """Half of the rows at 1.5 times the rate, the other half at half the rate."""
    return rng.random((rounds, people)) < rate * np.where(rng.random(people) < 0.5, 1.5, 0.5)


def alternating(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """Two groups, each in every second round at twice the rate."""
    groups = rng.random(people) < 0.5
    return (rng.random((rounds, people)) < 2 * rate) & (groups == (np.arange(rounds)[:, None] % 2 == 0))


def either_group(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """Two groups, one of which is chosen at random for each round, at twice the rate."""
    groups = rng.random(people) < 0.5
    return (rng.random((rounds, people)) < 2 * rate) & (groups == (rng.random((rounds, 1)) < 0.5))


def spaced(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """No one takes part again within half of 1/rate rounds; the rate is as claimed."""
    wait = int(0.5 / rate)
    coin = 1 / (1 / rate - wait)
    table, free = np.zeros((rounds, people), dtype=bool), rng.integers(0, wait + 1, size=people)
    for t in range(rounds):
        table[t] = (free <= t) & (rng.random(people) < coin)
        free[table[t]] = t + 1 + wait
    return table


def first_half(rng: np.random.Generator, people: int, rounds: int, length: int) -> Table:
    """Random allocation to the first half of each epoch."""
    half = length // 2
    empty = np.zeros((length - half, people), dtype=bool)
    parts = [(allocated(rng, people, half, half), empty) for _ in range(rounds // length)]
    return np.concatenate([table for pair in parts for table in pair])


def restarted(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """Poisson sampling that starts again from its seed after three fifths of the run."""
    first = coins(rng, people, rounds * 3 // 5, rate)
    return np.concatenate([first, first])[:rounds]


def same_seed_twice(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """Two workers that share a seed: each row of one is always sampled together with a row of the other."""
    half = coins(rng, people // 2, rounds, rate)
    return np.concatenate([half, half], axis=1)


def contiguous(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """A range of rows from a random start in each round."""
    start = rng.integers(people, size=(rounds, 1))
    return (np.arange(people) - start) % people < round(people * rate)


def one_row(rng: np.random.Generator, people: int, rounds: int, rate: float) -> Table:
    """One row in every second step."""
    table = coins(rng, people, rounds, rate)
    table[:, 0] = rng.random(rounds) < max(0.5, rate)
    return table


def epoch(rate: float) -> int:
    """Rounds of an epoch at this rate."""
    return round(1 / rate)


EPOCHS = {"shuffled", "random_allocation or shuffled"}
# under a Poisson claim: the sampler, whether cohort sizes are given, and the correct names
BROKEN: dict[str, tuple[Callable[..., Table], bool, set[str]]] = {
    "shuffling": (lambda g, n, t, q: shuffled(g, n, t, epoch(q)), True, {"shuffled"}),
    "shuffling, cohort sizes unknown": (lambda g, n, t, q: shuffled(g, n, t, epoch(q)), False, EPOCHS),
    "random allocation": (lambda g, n, t, q: allocated(g, n, t, epoch(q)), True, {"random_allocation"}),
    "Poisson, 3 times the rate": (lambda g, n, t, q: coins(g, n, t, 3 * q), True, {"poisson"}),
    "Poisson, 1.5 times the rate": (lambda g, n, t, q: coins(g, n, t, 1.5 * q), True, {"poisson"}),
    "some rows in every step": (in_every_step, False, {"uneven"}),
    "all in the same steps": (same_steps, False, {"clumped"}),
    "groups of ten": (groups_of_ten, False, {"clumped"}),
    "same order in every epoch": (lambda g, n, t, q: same_order(g, n, t, epoch(q)), False, {"repeated order"}),
    "batches formed once": (lambda g, n, t, q: same_batches(g, n, t, epoch(q)), False, {"clumped"}),
    "blocks of 5 adjacent rounds": (blocks, False, {"adjacent rounds"}),
    "staying for a second round": (sticky, False, {"adjacent rounds"}),
    "round-robin": (lambda g, n, t, q: same_order(g, n, t, epoch(q)), True, {"repeated order"}),
    "rate doubles half-way": (drift, False, {"changing rate"}),
    "fixed size": (fixed_size, True, {"fixed_size"}),
    "with replacement": (with_replacement, True, {"fixed_size"}),
    "weighted 1.5 and 0.5": (weighted, False, {"uneven"}),
    "two alternating groups": (alternating, False, {"repeated order"}),
    "one of two groups by a coin": (either_group, False, {"clumped"}),
    "never twice within half an epoch": (spaced, False, {"spaced"}),
    "restarted with the same seed": (restarted, False, {"repeated order"}),
    "two workers with one seed": (same_seed_twice, False, {"clumped"}),
    "a contiguous range of rows": (contiguous, False, {"clumped"}),
    "one row in every second step": (one_row, False, {"uneven"}),
}
SETTINGS = [(1_000, 100, 0.1), (100, 300, 0.02), (20, 200, 0.05), (1_000, 1_000, 0.01)]
SMALL = [(10, 3, 0.5), (20, 20, 0.05), (100, 50, 0.01), (10, 30, 0.3)]
ALLOCATIONS = [(1_000, 200, 1), (100, 20, 10), (20, 10, 5), (10, 50, 2), (1_000, 20, 10)]  # canaries, rounds, epochs


def reading(table: Table, canaries: int, sampling: Sampling, sizes: bool) -> SamplerReading:
    """The gauge's reading of the canaries, who come first."""
    present = [np.flatnonzero(row[:canaries]) for row in table]
    told = table.sum(axis=1) if sizes else None
    return read_sampler(present, np.arange(1, len(table) + 1), canaries, sampling, told)


def broken(arguments: tuple[str, tuple[int, int, float], int]) -> str:
    """The gauge's name for one broken sampler under a Poisson claim, or "passed"."""
    name, (k, rounds, rate), seed = arguments
    make, sizes, _ = BROKEN[name]
    table = make(np.random.default_rng((seed, 1)), k * (POPULATION if sizes else 1), rounds, rate)
    found = reading(table, k, Poisson(rate, rounds), sizes)
    return "passed" if found.passed else found.seen


def broken_epochs(arguments: tuple[str, tuple[int, int, int], int]) -> str:
    """The gauge's name for one broken sampler under a claim of random allocation."""
    name, (k, length, epochs), seed = arguments
    rng, rounds = np.random.default_rng((seed, 2)), length * epochs
    sizes = name == "shuffling"
    table = EPOCH_BROKEN[name][0](rng, k * (POPULATION if sizes else 1), rounds, length)
    found = reading(table, k, RandomAllocation(length, epochs), sizes)
    return "passed" if found.passed else found.seen


EPOCH_BROKEN: dict[str, tuple[Callable[..., Table], set[str]]] = {
    "shuffling": (shuffled, {"shuffled"}),
    "same order in every epoch": (same_order, {"repeated order"}),
    "batches formed once": (same_batches, {"clumped"}),
    "Poisson": (lambda g, n, t, r: coins(g, n, t, 1 / r), {"poisson"}),
    "all in the same steps": (lambda g, n, t, r: np.repeat(allocated(g, 1, t, r), n, axis=1), {"clumped", "repeated order"}),
    "the first half of each epoch": (first_half, {"changing rate"}),
}  # fmt: skip


def honest(arguments: tuple[str, tuple[int, int, float], float, int]) -> SamplerReading:
    """The gauge's reading of one honest sampler under a true claim."""
    scheme, (k, rounds, rate), share, seed = arguments
    rng, length = np.random.default_rng((seed, 3)), int(rate)
    people = k if share == 0 else k * POPULATION  # a share of 0: there are only canaries
    claim: Sampling
    if scheme == "Poisson":
        present = [np.flatnonzero(row) for row in coins(rng, k, rounds, share * rate)]
        sizes = [len(row) + int(rng.binomial(people - k, share * rate)) for row in present]
        claim = Poisson(rate, rounds)
    elif scheme == "fixed size":
        size = max(round(people * rate), 1)
        counts = rng.hypergeometric(k, people - k, size, size=rounds)
        present, sizes = [rng.permutation(k)[:count] for count in counts], [size] * rounds
        claim = FixedSize(size, people, rounds)
    else:
        make, claim = (
            (shuffled, Shuffled(rounds, length))
            if scheme == "shuffling"
            else (allocated, RandomAllocation(rounds, length))
        )
        table = make(rng, people, rounds * length, rounds)
        present, sizes = [np.flatnonzero(row[:k]) for row in table], table.sum(axis=1).tolist()
    return read_sampler(present, np.arange(1, len(present) + 1), k, claim, sizes)


def alarms_of(arguments: tuple[str, tuple[int, int, float], float, int]) -> str:
    """The tests that fail for one honest sampler."""
    return ", ".join(test.name for test in honest(arguments).failed)


def honest_cases() -> list[tuple[str, tuple[int, int, float], float]]:
    """Scheme, setting (rounds per epoch and epochs, for schemes with epochs), and the share of the claimed rate."""
    cases = [("Poisson", setting, share) for setting in SETTINGS + SMALL for share in (1.0, 0.9, 0.5)]
    cases += [("fixed size", setting, share) for setting in SETTINGS + SMALL for share in (1.0, 0.0)]
    cases += [("shuffling", setting, share) for setting in ALLOCATIONS for share in (1.0, 0.0)]
    return cases + [("random allocation", setting, 1.0) for setting in ALLOCATIONS]


def main() -> int:
    """Print the tables; 1 if honest samplers raise too many alarms."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--honest", type=int, default=2_000, help="Number of runs of each honest sampler.")
    options.add_argument("--broken", type=int, default=100, help="Number of runs of each broken sampler.")
    told = options.parse_args()
    fine = True
    with ProcessPoolExecutor(told.jobs) as pool:
        if told.broken:
            print(
                "\n| claimed Poisson, but | "
                + " | ".join(f"k = {k:,}, T = {t:,}, q = {q:g}" for k, t, q in SETTINGS)
                + " |"
            )
            print("|---" * (1 + len(SETTINGS)) + "|")
            for name, (_, _, right) in BROKEN.items():
                row = []
                for setting in SETTINGS:
                    runs = [
                        (name, setting, seed) for seed in range(told.broken // (5 if setting == SETTINGS[-1] else 1))
                    ]
                    seen = Counter(pool.map(broken, runs, chunksize=10))
                    row.append(described(seen, right))
                print(f"| {name} | " + " | ".join(row) + " |", flush=True)
            settings = [(1_000, 200, 1), (1_000, 20, 10), (100, 20, 10)]
            print(
                "\n| claimed random allocation, but | "
                + " | ".join(f"k = {k:,}, {e} × {t} rounds" for k, t, e in settings)
                + " |"
            )
            print("|---" * (1 + len(settings)) + "|")
            for name, (_, right) in EPOCH_BROKEN.items():
                row = []
                for case in settings:
                    seen = Counter(
                        pool.map(broken_epochs, [(name, case, seed) for seed in range(told.broken)], chunksize=10)
                    )
                    row.append(described(seen, right))
                print(f"| {name} | " + " | ".join(row) + " |", flush=True)
        if told.honest:
            print("\n| honest | setting | share of the claimed rate | alarms | which |\n|---|---|---|---|---|")
            for scheme, setting, share in honest_cases():
                count = told.honest // 5 if setting == SETTINGS[-1] else told.honest  # a reading takes 0.1 s there
                runs = [(scheme, setting, share, seed) for seed in range(count)]
                failed = Counter(pool.map(alarms_of, runs, chunksize=20))
                alarms = count - failed.pop("", 0)
                which = ", ".join(f"{name}: {times}" for name, times in failed.items())
                print(f"| {scheme} | {setting} | {share:g} | {alarms} of {count} | {which} |", flush=True)
                fine &= alarms <= 0.003 * count + 4 * np.sqrt(0.003 * count)
    return not fine


def described(seen: Counter[str], right: set[str]) -> str:
    """The shares that were detected and correctly named, and the names of the rest."""
    total, good = sum(seen.values()), sum(seen[name] for name in right)
    rest = ", ".join(f"{name} {count}" for name, count in seen.items() if name not in right)
    return f"{good} of {total}" + (f" ({rest})" if rest else "")


if __name__ == "__main__":
    sys.exit(main())
