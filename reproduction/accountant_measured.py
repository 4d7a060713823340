"""Beyond the paper: an accountant's epsilon, amplified by sampling, compared with the measurement of one run."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import binom

from coalmine.argument_checks import count_of
from coalmine.audit import Audit
from coalmine.estimators.amplification import amplified_epsilon
from coalmine.estimators.sampling import Poisson, RandomAllocation
from coalmine.verdict.claim import Claim
from reproduction.experiment import Account, Experiment, Found, PaperCheck, Table, all_of, interval_shown, shown
from reproduction.experiment_options import Options
from reproduction.run_grid import Follow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMES = (Poisson(0.1, rounds=100), RandomAllocation(100))
NOISES = {"small": (0.6, 1.0, 2.0), "paper": (0.6, 0.8, 1.0, 1.5, 2.0)}
SIZES = {"small": (5_000, 1_000), "paper": (10_000, 1_000)}  # d, k
SEEDS = {"small": 1, "paper": 3}
DELTA = 1e-5
CLIENTS = 5_000
SIGNAL = 0.1  # std of the real clients' sum per coordinate, divided by that of the noise
LEVEL = 0.01  # level of the checks that count failures


def gather(options: Options, follow: Follow) -> Found:
    """The numbers of every loop; nothing else is stored."""
    dim, canaries = SIZES[options.scale]
    seeds = options.seeds or SEEDS[options.scale]
    return {
        "scale": options.scale,
        "missing": [],
        "dim": dim,
        "canaries": canaries,
        "seeds": seeds,
        "loops": [
            measure(scheme, noise, dim=dim, canaries=canaries, seed=seed)
            for scheme in SCHEMES
            for noise in NOISES[options.scale]
            for seed in range(seeds)
        ],
    }


def measure(scheme: Poisson | RandomAllocation, noise: float, *, dim: int, canaries: int, seed: int) -> dict[str, Any]:
    """One training loop with canaries, judged by the accountant's epsilon for its scheme and noise."""
    rng = np.random.default_rng([seed, int(1000 * noise), scheme.total_rounds, SCHEMES.index(scheme)])
    audit = Audit(dim, canaries=canaries, seed=b"amplification %d" % seed, delta=DELTA, sampling=scheme)
    expected = scheme.rate * (CLIENTS + canaries)  # divisor of the sums
    cohorts = _real_clients(scheme, rng)
    for number in range(1, scheme.total_rounds + 1):
        present = audit.canaries_in_round(number)
        others = SIGNAL * noise / expected * rng.normal(size=dim)
        release = others + audit.updates(present, clip_norm=1 / expected) + noise / expected * rng.normal(size=dim)
        audit.observe_round(
            number,
            release,
            present=present,
            others=others,
            noise_std=noise / expected,
            clip_norm=1 / expected,
            participants=int(cohorts[number - 1]) + len(present),
        )
    accounted = float(amplified_epsilon(noise, scheme, DELTA))
    claim = Claim(accounted, sampling=scheme, noise_multiplier=noise, sampler_observed=True)
    result = audit.result(claim=claim)
    assert result.verdict is not None
    measured = result["unknown-round"]
    return {
        "scheme": scheme.scheme,
        "title": str(scheme),
        "noise_multiplier": noise,
        "seed": seed,
        "accounted": accounted,
        "epsilon": measured.epsilon,
        "interval": list(measured.interval or ()),
        "lower_bound": measured.lower_bound,
        "all_iterates_bound": result["all-iterates"].lower_bound,
        "verdict": result.verdict.outcome.value,
    }


def _real_clients(scheme: Poisson | RandomAllocation, rng: np.random.Generator) -> np.ndarray:
    """The number of real clients in each round."""
    if isinstance(scheme, Poisson):
        return rng.binomial(CLIENTS, scheme.probability, size=scheme.rounds)
    return np.concatenate(rng.multinomial(CLIENTS, np.full(scheme.rounds, scheme.rate), size=scheme.epochs))


# Tables, checks, text and a plot: functions of the numbers alone


def _cells(found: Found) -> list[list[dict[str, Any]]]:
    """The loops of each scheme and noise."""
    keys = dict.fromkeys((loop["scheme"], loop["noise_multiplier"]) for loop in found["loops"])
    return [[loop for loop in found["loops"] if (loop["scheme"], loop["noise_multiplier"]) == key] for key in keys]


def _mean(loops: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([loop[name] for loop in loops]))


def _ends(loops: list[dict[str, Any]]) -> list[float]:
    return [float(end) for end in np.mean([loop["interval"] for loop in loops], axis=0)]


def _covers(loop: dict[str, Any]) -> bool:
    low, high = loop["interval"]
    return bool(low <= loop["accounted"] <= high)


def tables(found: Found) -> list[Table]:
    """A row for each scheme and noise: means over the seeds."""
    rows = []
    for loops in _cells(found):
        outcomes = Counter(loop["verdict"] for loop in loops)
        verdicts = ", ".join(name if len(loops) == 1 else f"{count} {name}" for name, count in outcomes.items())
        rows.append(
            (
                loops[0]["title"],
                f"{loops[0]['noise_multiplier']:g}",
                shown(loops[0]["accounted"]),
                shown(_mean(loops, "epsilon")),
                interval_shown(_ends(loops)),
                shown(_mean(loops, "lower_bound")),
                shown(_mean(loops, "all_iterates_bound")),
                verdicts,
            )
        )
    columns = (
        "sampling", "noise", "accountant's ε", "unknown-round", "95 % interval", "its bound", "Algorithm 3's bound",
        "verdict",
    )  # fmt: skip
    size = (
        f"d = {found['dim']:,}, {found['canaries']:,} canaries, delta {DELTA:g}, {count_of(found['seeds'], 'run')} each"
    )
    return [Table(f"Measured and accounted epsilon, {size}", columns, tuple(rows), left=1)]


def _rarely(claim: str, failures: int, total: int, rate: float) -> PaperCheck:
    """A check that fails if there are too many failures for this rate."""
    chance = float(binom.sf(failures - 1, total, rate))
    return PaperCheck(
        claim, chance > LEVEL, f"{failures} of {total} do not; by chance at least as many in {chance:.0%} of cases"
    )


def checks(found: Found) -> list[PaperCheck]:
    """The measurement agrees with the accountant, and the accountant's epsilon passes."""
    loops = found["loops"]
    named = [(f"{loops[0]['title']}, noise {loops[0]['noise_multiplier']:g}", loops) for loops in _cells(found)]
    return [
        _rarely(
            "95 % intervals of unknown-round cover the accountant's ε",
            sum(not _covers(loop) for loop in loops),
            len(loops),
            0.05,
        ),
        _rarely(
            "95 % lower bounds of unknown-round lie below the accountant's ε",
            sum(loop["lower_bound"] > loop["accounted"] for loop in loops),
            len(loops),
            0.05,
        ),
        all_of(
            "the bound of unknown-round is at least that of Algorithm 3",
            [(name, _mean(cell, "lower_bound") >= _mean(cell, "all_iterates_bound")) for name, cell in named],
            nothing="no loop is finished",
        ),
        all_of(
            "the accountant's ε passes as a claim",
            [(name, all(loop["verdict"] == "PASS" for loop in cell)) for name, cell in named],
            nothing="no loop is finished",
        ),
    ]


def conclusion(found: Found) -> str:
    """The conclusion as text."""
    ratios = [loop["epsilon"] / loop["accounted"] for loop in found["loops"]]
    shares = [_mean(cell, "lower_bound") / _mean(cell, "accounted") for cell in _cells(found)]
    passed = sum(loop["verdict"] == "PASS" for loop in found["loops"])
    return (
        f"In {len(ratios)} honest loops, one run measures between {min(ratios):.2f} and {max(ratios):.2f} times the "
        f"accountant's ε. Its lower bound is {min(shares):.0%} to {max(shares):.0%} of that ε. {passed} of {len(ratios)} "
        "claims pass. A claim passes only if the accounting, the noise and the sampler are as claimed."
    )


def draw(figure: "Figure", found: Found) -> None:
    """Plot epsilon against noise for each scheme; bounds of 0 are omitted."""
    cells = _cells(found)
    schemes = list(dict.fromkeys(cell[0]["scheme"] for cell in cells))
    axes = figure.subplots(1, len(schemes), squeeze=False)[0]
    for ax, scheme in zip(axes, schemes, strict=True):
        chosen = [cell for cell in cells if cell[0]["scheme"] == scheme]
        noises = [cell[0]["noise_multiplier"] for cell in chosen]
        means = [_mean(cell, "epsilon") for cell in chosen]
        ends = [_ends(cell) for cell in chosen]
        around = [
            [max(mean - low, 0.0) for mean, (low, _) in zip(means, ends, strict=True)],
            [max(high - mean, 0.0) for mean, (_, high) in zip(means, ends, strict=True)],
        ]
        accounted = [_mean(cell, "accounted") for cell in chosen]
        ax.plot(noises, accounted, "k--", lw=1, label="accountant's ε" if ax is axes[0] else None)
        label = "unknown-round, 95 % interval" if ax is axes[0] else None
        ax.errorbar(noises, means, yerr=around, fmt="o", ms=4, capsize=2, color="#1d63b8", label=label)
        for name, mark, colour, label in (
            ("lower_bound", "^", "#147a3d", "its lower bound"),
            ("all_iterates_bound", "x", "#b45309", "Algorithm 3's lower bound"),
        ):
            points = [(noise, _mean(cell, name)) for noise, cell in zip(noises, chosen, strict=True)]
            seen = [point for point in points if point[1] > 0]
            if seen:
                ax.plot(*zip(*seen, strict=True), mark, color=colour, label=label if ax is axes[0] else None)
        ax.set_yscale("log")
        ax.set_xlabel("noise multiplier")
        ax.set_title(chosen[0][0]["title"], fontsize=9)
    axes[0].set_ylabel("ε")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)


EXPERIMENT = Experiment(
    name="amplification",
    title="An accountant's ε, measured (beyond the paper)",
    takes=("seeds",),
    gather=gather,
    account=Account(tables, checks, conclusion, draw),
)
