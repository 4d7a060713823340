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

from coalmine import Poisson, amplified_epsilon, epsilon_lower_bound, mechanism_noise
from coalmine.argument_checks import Floats
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.loss_law import LossLaw, poisson_laws, poisson_ratio
from coalmine.evidence.gaussian_bound import known_rounds_bound
from coalmine.evidence.gaussian_gate import GaussianGate
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_signal import NoiseSignal
from studies.results import Record, main_of, markdown_table, read_records, run_batches

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "published_audits.jsonl"
DOCS = ROOT / "docs" / "evidence" / "published.md"
SEEDS = 20
OPEN = GaussianGate(noise="", sampler="")
BENCH = "auditbench, arXiv 2606.12733"


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A published audit: its setting, its figures with their source, and ours, if Gaussian and for any law."""

    name: str
    setting: str
    epsilon: float
    theirs: str
    source: str
    run: Callable[[int], tuple[float, float]]


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


AUDITS = (
    Audit(
        name="DP-SGD in white box, simulated",
        setting="z = 3, q = 1/11, T = 2,200, δ = 1e-5; 5,000 canaries, half of them in",
        epsilon=float(amplified_epsilon(3.0, Poisson(1 / 11, rounds=2_200), 1e-5)),
        theirs="5.79 by its Gaussian fit (an estimate), 1.86 by Steinke",
        source=f"{BENCH}: simulation_one_run_auditing.ipynb, epoch 200",
        run=lambda seed: sampled(seed, canaries=2_500, noise=3.0, rate=1 / 11, rounds=2_200, delta=1e-5),
    ),
    *(
        Audit(
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
)


def work(name: str, seed: int) -> list[Record]:
    """One run of an audit."""
    audit = next(audit for audit in AUDITS if audit.name == name)
    if_gaussian, any_law = audit.run(zlib.crc32(f"{name}, {seed}".encode()))
    return [{"row": name, "seed": seed, "gaussian": if_gaussian, "any": any_law}]


def run(names: list[str], seeds: int, jobs: int) -> None:
    """Run what is missing."""
    done = {(each["row"], each["seed"]) for each in _records()}
    wanted = [(name, seed) for name in names for seed in range(min(seeds, SEEDS)) if (name, seed) not in done]
    run_batches(RESULTS, work, wanted, jobs)


def _records() -> list[Record]:
    return read_records(RESULTS, {audit.name for audit in AUDITS}, lambda record: (record["row"], record["seed"]))


def failures(names: list[str], seeds: int) -> list[str]:
    """Rows that are not complete."""
    found = _records()
    return [name for name in names if sum(each["row"] == name for each in found) < min(seeds, SEEDS)]


def tables() -> dict[str, str]:
    """The table of the page."""
    heads = ["audit", "setting", "true ε", "published", "ours if Gaussian", "ours for any law", "above ε", "source"]
    lines = [heads]
    for audit in AUDITS:
        found = [each for each in _records() if each["row"] == audit.name]
        if found:
            bounds, any_law = ([each[kind] for each in found] for kind in ("gaussian", "any"))
            above = [sum(value > audit.epsilon for value in values) for values in (bounds, any_law)]
            lines.append(
                [
                    *(audit.name, audit.setting, f"{audit.epsilon:.2f}", audit.theirs),
                    *(f"{np.mean(values):.2f} ({min(values):.2f} … {max(values):.2f})" for values in (bounds, any_law)),
                    f"{above[0]} and {above[1]} of {len(found)}",
                    audit.source,
                ]
            )
    return {"published": markdown_table(lines)}


if __name__ == "__main__":
    raise SystemExit(
        main_of(
            __doc__,
            results=RESULTS,
            page=DOCS,
            rows=[audit.name for audit in AUDITS],
            run=run,
            tables=tables,
            failures=failures,
        )
    )
