"""Published audits beside coalmine's, in their own settings: the study behind docs/evidence/published.md.

    python -m studies.published_audits                 20 seeds of each row; minutes
    python -m studies.published_audits --write-docs    write the table from finished runs

A setting is simulated exactly: the scores of the attacker follow the law of the mechanism that was audited. A finished seed
is one line of studies/out/published_audits.jsonl, and is not run again.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from coalmine import (
    Audit,
    Poisson,
    Shuffled,
    TreeNoise,
    amplified_epsilon,
    epsilon_lower_bound,
    mechanism_epsilon,
    mechanism_noise,
)
from coalmine.argument_checks import Floats
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.loss_law import LossLaw, poisson_laws, poisson_ratio
from coalmine.estimators.sequential import information, log_evidence, standard_score
from coalmine.evidence.gaussian_bound import known_rounds_bound
from coalmine.evidence.gaussian_gate import GaussianGate
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.verdict.alarm import EVIDENCE_LEVEL
from studies.results import Record, main_of, markdown_table, read_records, run_batches

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "published_audits.jsonl"
DOCS = ROOT / "docs" / "evidence" / "published.md"
SEEDS = 20
OPEN = GaussianGate(noise="", sampler="")
BENCH = "auditbench, arXiv 2606.12733"
POISSON = float(amplified_epsilon(1.0, Poisson(0.01, rounds=100), 1e-5))


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published audit: its setting, its figures with their source, and ours, if Gaussian and for any law."""

    name: str
    setting: str
    epsilon: float
    theirs: str
    source: str
    run: Callable[[int], tuple[float, ...]]


def sampled(seed: int, *, canaries: int, noise: float, rate: float, rounds: int, delta: float) -> tuple[float, float]:
    """unknown-round under Poisson sampling: the accountant at the limit of the noise, and the bound from loss ratios."""
    rng, scheme = np.random.default_rng(seed), Poisson(rate, rounds=rounds)
    ratios, times, sums = np.zeros(canaries), np.zeros(canaries, dtype=np.int64), np.zeros(canaries)
    for _ in range(rounds):
        picked = rng.random(canaries) < rate
        scores = rng.standard_normal(canaries) + picked / noise
        ratios += poisson_ratio(scores, noise=noise, probability=rate)
        times += picked
        sums += picked * scores
    groups = [
        Scores(
            rung="known-others",
            observed=sums[times == number] / math.sqrt(number),
            unobserved=np.zeros(0),
            presentations=int(number),
        )
        for number in np.unique(times[times > 0])
    ]
    least = NoiseSignal.of(groups).lower_limit(0.95)
    absent = _absent(noise, rate, rounds)
    return amplified_epsilon(1 / least, scheme, delta).low, epsilon_lower_bound(ratios, null=absent, delta=delta)


@cache
def _absent(noise: float, rate: float, rounds: int) -> LossLaw:
    return poisson_laws(noise=noise, probability=rate, rounds=rounds, dof=math.inf)[0]


def gaussian(seed: int, *, canaries: int, epsilon: float, delta: float) -> tuple[float, float]:
    """known-others for a Gaussian mechanism, a tree's noise included once it is whitened."""
    rng = np.random.default_rng(seed)
    scores: Floats = rng.standard_normal(canaries) + 1 / float(mechanism_noise(epsilon, delta=delta))
    group = Scores(rung="known-others", observed=scores, unobserved=np.zeros(0), presentations=1)
    bound = known_rounds_bound([group], 1.0, OPEN, delta).lower_bound
    return bound or 0.0, epsilon_lower_bound(scores, null=Gaussian(0.0, 1.0), delta=delta)


def tree(seed: int, *, canaries: int, rounds: int, epsilon: float, delta: float) -> tuple[float, float, float]:
    """A whole run without real clients under a tree's noise, for a client of mean strength; and the paper's estimate."""
    noise, dim = TreeNoise(rounds=rounds), 4 * canaries
    rng = np.random.default_rng(seed)
    audit = Audit(dim, canaries=canaries, unobserved=canaries, seed=seed, delta=delta, rounds=rounds, noise=noise)
    strength = float(np.mean([noise.strength([number]) for number in range(1, rounds + 1)]))
    scale = math.sqrt(strength) * float(mechanism_noise(epsilon, delta=delta))
    nodes: dict[int, Floats] = {}
    for number in range(1, rounds + 1):
        nodes[number] = scale * rng.standard_normal(dim)
        drawn = nodes[number] - sum(nodes.pop(child) for child in noise.children(number))
        present = audit.canaries_in_round(number)
        release = audit.updates(present, 1.0) + drawn
        audit.observe_round(
            number,
            release,
            present=present,
            others=np.zeros(dim),
            noise_std=scale * noise.std(number),
            clip_norm=1.0,
        )
    result = audit.result()
    top, andrew = result["known-others"].headline, result["all-iterates"].headline
    assert math.isclose(top.sensitivity or 0.0, math.sqrt(strength), rel_tol=0.02), top.sensitivity
    return top.lower_bound_gaussian or 0.0, top.lower_bound, andrew.estimate.epsilon


def shuffled(seed: int, *, canaries: int, noise: float, rounds: int, delta: float) -> tuple[float, float]:
    """One epoch of fixed batches, each canary in one: the low end of shuffling's range at the limit of the noise."""
    scores: Floats = np.random.default_rng(seed).standard_normal(canaries) + 1 / noise
    group = Scores(rung="known-others", observed=scores, unobserved=np.zeros(0), presentations=1)
    least = NoiseSignal.of([group]).lower_limit(0.95)
    return amplified_epsilon(1 / least, Shuffled(rounds), delta).low, math.nan


AUDITS = (
    Published(
        name="DP-SGD in white box, simulated",
        setting="z = 3, q = 1/11, T = 2,200, δ = 1e-5; 5,000 canaries, half of them in",
        epsilon=float(amplified_epsilon(3.0, Poisson(1 / 11, rounds=2_200), 1e-5)),
        theirs="5.79 by its Gaussian fit (an estimate), 1.86 by Steinke",
        source=f"{BENCH}: simulation_one_run_auditing.ipynb, epoch 200",
        run=lambda seed: sampled(seed, canaries=2_500, noise=3.0, rate=1 / 11, rounds=2_200, delta=1e-5),
    ),
    *(
        Published(
            name=f"DP-FTRL, a tree, ε = {epsilon:g}",
            setting="2,500 leaves, one for each canary, δ = 1e-5; 5,000 canaries, half of them in",
            epsilon=epsilon,
            theirs=theirs,
            source=f"{BENCH}: fig/ftrl/auditing_comparison_final.csv",
            run=lambda seed, epsilon=epsilon: gaussian(seed, canaries=2_500, epsilon=epsilon, delta=1e-5),
        )
        for epsilon, theirs in (
            (1.0, "0.74 by its box, 0.85 by f-DP, 0.64 by Steinke"),
            (2.0, "2.27 by its box, above the truth; 1.84 by f-DP, 1.51 by Steinke"),
            (4.0, "4.32 by its box, above the truth; 2.50 by f-DP, 1.92 by Steinke"),
            (8.0, "7.40 by its box, 4.44 by f-DP, 3.04 by Steinke"),
        )
    ),
    Published(
        name="DP-FTRL, a tree of 128 leaves, a whole run",
        setting="2,500 canaries, each in one round, and no real clients; δ = 1e-5, ε of a client of mean strength",
        epsilon=8.0,
        theirs="the estimate of Andrew 2024, from the largest cosine of a canary",
        source=f"the method of arXiv 2302.03098 on the same runs, as in {BENCH}",
        run=lambda seed: tree(seed, canaries=2_500, rounds=128, epsilon=8.0, delta=1e-5),
    ),
    Published(
        name="shuffling accounted as Poisson sampling",
        setting=f"z = 1, 100 batches, one epoch, δ = 1e-5: {POISSON:.2f} is claimed; 2,500 canaries in one run",
        epsilon=amplified_epsilon(1.0, Shuffled(100), 1e-5).low,
        theirs="up to 4 times the claim, from a million models, in other settings",
        source="arXiv 2411.10614 (abstract)",
        run=lambda seed: shuffled(seed, canaries=2_500, noise=1.0, rounds=100, delta=1e-5),
    ),
    *(
        Published(
            name=f"an abstract Gaussian mechanism, {canaries:,} canaries",
            setting=f"z = 1, δ = 1e-5; {canaries:,} canaries, all of them in, against the known null",
            epsilon=float(mechanism_epsilon(1.0, delta=1e-5)),
            theirs="3.76, assuming the mechanism's family; how many canaries is not known to us",
            source="arXiv 2509.08704",
            run=lambda seed, canaries=canaries: gaussian(
                seed, canaries=canaries, epsilon=float(mechanism_epsilon(1.0, delta=1e-5)), delta=1e-5
            ),
        )
        for canaries in (1_000, 10_000)
    ),
)


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Noise that is too small by `factor`, under a claim about one step with one canary in each, as published."""

    claim: float
    factor: float
    theirs: str = "–"

    @property
    def name(self) -> str:
        """The row's name."""
        return f"rounds to detection, ε ≤ {self.claim:g}, noise / {self.factor:g}"


DETECTIONS = (
    Detection(claim=0.1, factor=3_000, theirs="75 on average, for SGD without noise"),
    Detection(claim=0.01, factor=30_000, theirs="60 on average, for SGD without noise"),
    Detection(claim=0.1, factor=10),
    Detection(claim=1.0, factor=2),
)


def rounds_to_alarm(seed: int, *, claim: float, factor: float, most: int = 20_000) -> float:
    """The round in which the alarm's evidence reaches its level, inf if not in `most`; one canary in each round."""
    claimed, dof = float(mechanism_noise(claim, delta=1e-5)), 1e6
    scores = np.random.default_rng(seed).standard_normal(most) + factor / claimed
    weight = float(information(1, dof, claimed))
    total = np.cumsum(math.sqrt(weight) * standard_score(scores, dof, 1 / claimed))
    reached = log_evidence(total, weight * np.arange(1, most + 1)) >= -math.log(EVIDENCE_LEVEL)
    return float(reached.argmax() + 1) if reached.any() else math.inf


NAMES = [*(each.name for each in AUDITS), *(each.name for each in DETECTIONS)]


def work(name: str, seed: int) -> list[Record]:
    """One run of an audit."""
    number = zlib.crc32(f"{name}, {seed}".encode())
    for each in DETECTIONS:
        if each.name == name:
            return [
                {"row": name, "seed": seed, "rounds": rounds_to_alarm(number, claim=each.claim, factor=each.factor)}
            ]
    audit = next(audit for audit in AUDITS if audit.name == name)
    return [{"row": name, "seed": seed} | dict(zip(("gaussian", "any", "theirs"), audit.run(number), strict=False))]


def run(names: list[str], seeds: int, jobs: int) -> None:
    """Run what is missing."""
    done = {(each["row"], each["seed"]) for each in _records()}
    wanted = [(name, seed) for name in names for seed in range(min(seeds, SEEDS)) if (name, seed) not in done]
    run_batches(RESULTS, work, wanted, jobs)


def _records() -> list[Record]:
    return read_records(RESULTS, set(NAMES), lambda record: (record["row"], record["seed"]))


def failures(names: list[str], seeds: int) -> list[str]:
    """Rows that are not complete."""
    found = _records()
    return [name for name in names if sum(each["row"] == name for each in found) < min(seeds, SEEDS)]


def tables() -> dict[str, str]:
    """The tables of the page."""
    heads = ["audit", "setting", "true ε", "published", "ours if Gaussian", "ours for any law", "above ε", "source"]
    lines, records = [heads], _records()
    for audit in AUDITS:
        found = [each for each in records if each["row"] == audit.name]
        if found:
            bounds, any_law, theirs = (
                [each.get(kind, math.nan) for each in found] for kind in ("gaussian", "any", "theirs")
            )
            above = [sum(value > audit.epsilon for value in values) for values in (bounds, any_law)]
            same = "" if math.isnan(theirs[0]) else f": {_range(theirs)}"
            lines.append(
                [
                    *(audit.name, audit.setting, f"{audit.epsilon:.2f}", f"{audit.theirs}{same}"),
                    *(_range(values) for values in (bounds, any_law)),
                    f"{above[0]} and {above[1]} of {len(found)}",
                    audit.source,
                ]
            )
    rounds = [["claim for one step, δ = 1e-5", "noise is smaller by", "published", "our rounds, median", "range"]]
    for each in DETECTIONS:
        found = [record["rounds"] for record in records if record["row"] == each.name]
        if found:
            ends = f"{min(found):,.0f} … {max(found):,.0f}"
            rounds.append([f"ε ≤ {each.claim:g}", f"{each.factor:g}", each.theirs, f"{np.median(found):,.0f}", ends])
    return {"published": markdown_table(lines), "detection": markdown_table(rounds)}


def _range(values: list[float]) -> str:
    return "–" if math.isnan(values[0]) else f"{np.mean(values):.2f} ({min(values):.2f} … {max(values):.2f})"


if __name__ == "__main__":
    raise SystemExit(
        main_of(
            __doc__,
            results=RESULTS,
            page=DOCS,
            rows=NAMES,
            run=run,
            tables=tables,
            failures=failures,
        )
    )
