"""The comparison with CANIFE (Section 5.3): DP-SGD on Fashion-MNIST, one epoch, audited by crafted and by random canaries.

The scores of trained runs are stored in a file, and the numbers are computed from them.
"""

import io
import json
import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import binom

from coalmine.argument_checks import Floats
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.estimators.gaussians import Gaussian, gaussian_delta
from coalmine.estimators.literature.canife import canife_epsilon, round_epsilons
from coalmine.estimators.literature.thresholds import error_counts
from coalmine.estimators.literature.zanella_beguelin import posterior_epsilon
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.null import CosineNull
from coalmine.log.files import write_atomically
from coalmine.simulation.config import EngineSettings
from coalmine.simulation.tasks import load_task
from reproduction.canife.comparison import Comparison, Trained, train
from reproduction.experiment import Account, Experiment, Found, PaperCheck, Table, all_of, no_runs, shown
from reproduction.experiment_options import Options
from reproduction.paper import CANIFE_ANALYTICAL
from reproduction.run_grid import Follow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = {"canife": (0.88, 0.12), "lower_bound": (1.82, 0.46), "ours": (6.8, 1.1)}  # mean, std over 50 runs
CONFIDENCE = 0.95
UNSTATED = ((0.05, 0.0), (1.5, 0.0), (0.25, 0.5), (0.1, 0.8), (0.05, 0.9))  # other learning rates and momenta
PER_ROUND = {
    "clopper_pearson": "Clopper-Pearson",
    "credible": "credible interval",
}
RENYI = "one participation, Rényi"
TICKS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)


def comparison(options: Options) -> Comparison:
    """50 runs as in the paper; at scale small three, with fewer canaries, a smaller pool and fewer steps of crafting."""
    plan = Comparison(rounds=options.rounds)
    if options.small:
        crafting = replace(plan.crafting, pool_size=256, design_steps=400)
        plan = replace(plan, runs=3, canaries=250, crafting=crafting)
    return plan if options.seeds is None else replace(plan, runs=options.seeds)


def gather(options: Options, follow: Follow) -> Found:
    """The numbers of all runs, trained now or earlier."""
    plan = comparison(options)
    others = [
        replace(plan, learning_rate=rate, momentum=momentum, crafted=False, runs=max(1, plan.runs // 5))
        for rate, momentum in UNSTATED
    ]
    kept = _trained([plan, *others], options)
    return readings(kept[0], plan) | {
        "accountants": accountants(plan, kept[0]),
        "unstated": [_unstated(trained, other) for trained, other in zip(kept, [plan, *others], strict=True)],
        "seconds": sum(trained.seconds for trained in kept),
        "scale": options.scale,
    }


def _trained(plans: Sequence[Comparison], options: Options) -> list[Trained]:
    """The scores of each plan, from its file if it was trained before."""
    task, kept = None, []
    for plan in plans:
        name = "canife-scores" if plan.crafted else f"canife-scores-{plan.learning_rate:g}-{plan.momentum:g}"
        path = options.file(name, "npz")
        trained = load(path, plan)
        if trained is None:
            device = EngineSettings(device=options.device).resolved().device
            data_dir = None if options.data_dir is None else Path(options.data_dir)
            task = task or load_task("fashion-mnist", data_dir=data_dir).to(device)
            trained = train(task, plan, device=device)
            save(path, trained, plan)
        kept.append(trained)
    return kept


def save(path: Path, trained: Trained, plan: Comparison) -> None:
    """Write the scores of all runs to a file, together with their settings."""
    file = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(getattr(trained, name), dtype=np.float32) for name in _NUMBERS}
    arrays |= {"plan": np.array(json.dumps(asdict(plan))), "device": np.array(trained.device)}
    np.savez_compressed(file, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, file.getvalue())


def load(path: Path, plan: Comparison) -> Trained | None:
    """The scores trained with this plan, or None if there are none or only others."""
    if not path.is_file():
        return None
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            if json.loads(str(file["plan"])) != json.loads(json.dumps(asdict(plan))):
                return None
            found: dict[str, Any] = {name: np.asarray(file[name], dtype=np.float64) for name in _NUMBERS}
            found |= {"dim": int(file["dim"]), "examples": int(file["examples"]), "seconds": float(file["seconds"])}
            return Trained(**found, device=str(file["device"]))
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} does not hold scores of this comparison ({error}); remove it to train again"
        ) from None


_NUMBERS = tuple(name for name in Trained.__dataclass_fields__ if name != "device")


# Numbers


def readings(trained: Trained, plan: Comparison) -> Found:
    """Every estimate of every run."""
    delta = 1 / trained.examples
    rounds = trained.data_norms.shape[1]
    probability = plan.crafting.batch_size / trained.examples
    noise = plan.crafting.noise_multiplier
    crafted = {name: _crafted(trained, name, delta=delta, probability=probability, rounds=rounds) for name in PER_ROUND}
    pairs = list(zip(trained.observed, trained.unobserved, strict=True))
    others = [
        epsilon_estimate(scores, null=CosineNull(trained.dim), delta=delta, confidence=0.99)
        for scores in trained.known_others
    ]
    return {
        "plan": asdict(plan),
        "dim": trained.dim,
        "examples": trained.examples,
        "rounds": rounds,
        "delta": delta,
        "device": "cpu" if trained.device == "cpu" else "cuda",
        "trained_on": trained.device,
        "accuracy": trained.accuracy.tolist(),
        "data_norms": trained.data_norms.mean(axis=0)[:: max(rounds // 10, 1)].tolist(),
        "analytical": float(mechanism_epsilon(noise, delta=delta)),
        "canife": crafted,
        "crafting": {
            "audited_rounds": list(plan.crafting.audited(rounds)),
            "norms": trained.norms.tolist(),
            "interference": trained.interference.mean(axis=(0, 1)).tolist(),
            "score_means": _moments(np.mean, trained),
            "score_stds": _moments(np.std, trained),
            "sample": [round(float(value), 2) for value in trained.canary],
        },
        "ours": [_iterates(seen, unseen, delta) for seen, unseen in pairs],
        "lower_bound": [_bound(seen, unseen, delta, "paper") for seen, unseen in pairs],
        "valid_bound": [_bound(seen, unseen, delta, "simultaneous") for seen, unseen in pairs],
        "known_others": [estimate.epsilon for estimate in others],
        "known_others_99": [
            [estimate.interval.low, estimate.interval.high] for estimate in others if estimate.interval is not None
        ],
        "scores": {
            "observed": _summary(trained.observed, trained.dim),
            "unobserved": _summary(trained.unobserved, trained.dim),
        },
    }


def _unstated(trained: Trained, plan: Comparison) -> dict[str, Any]:
    """The paper's two numbers with this learning rate and momentum, which the paper does not state."""
    delta = 1 / trained.examples
    pairs = list(zip(trained.observed, trained.unobserved, strict=True))
    return {
        "learning_rate": plan.learning_rate,
        "momentum": plan.momentum,
        "runs": plan.runs,
        "accuracy": trained.accuracy.tolist(),
        "data_norm": float(trained.data_norms.mean()),
        "lower_bound": [_bound(seen, unseen, delta, "paper") for seen, unseen in pairs],
        "ours": [_iterates(seen, unseen, delta) for seen, unseen in pairs],
    }


def _iterates(observed: Floats, unobserved: Floats, delta: float) -> float:
    """The paper's estimate from the largest cosines over rounds (Algorithm 3)."""
    return epsilon_estimate(observed, null=unobserved, delta=delta, variance="fitted", confidence=None).epsilon


def _bound(observed: Floats, unobserved: Floats, delta: float, method: str) -> float:
    return epsilon_lower_bound(observed, null=unobserved, delta=delta, confidence=CONFIDENCE, method=method)


def _summary(cosines: Floats, dim: int) -> dict[str, float]:
    """Mean and std of the largest cosines, in units of an unobserved cosine's std."""
    return {"mean": float(cosines.mean() * math.sqrt(dim)), "std": float(cosines.std(axis=1).mean() * math.sqrt(dim))}


def _moments(moment: Callable[..., Floats], trained: Trained) -> dict[str, float]:
    """Moments of the crafted canaries' scores within an audited round, averaged over rounds and runs."""
    return {
        "observed": float(moment(trained.crafted_observed, axis=2).mean()),
        "unobserved": float(moment(trained.crafted_unobserved, axis=2).mean()),
    }


def _crafted(trained: Trained, name: str, *, delta: float, probability: float, rounds: int) -> dict[str, Any]:
    """Epsilon of each audited round, of the whole run by composition, and their ceilings."""
    scores = trained.crafted_observed.shape[2]
    tables = zip(trained.crafted_observed, trained.crafted_unobserved, strict=True)
    per_round = [_per_round(observed, unobserved, name, delta) for observed, unobserved in tables]

    def composed(epsilons: Sequence[float]) -> float:
        return canife_epsilon(epsilons, delta=delta, sampling_probability=probability, rounds=rounds)

    def ceiling(count: int) -> dict[str, float]:
        apart = np.repeat([[1.0], [0.0]], count, axis=1)
        most = _per_round(apart[:1], apart[1:], name, delta)
        return {"scores": count, "per_round": most[0], "composed": composed(most)}

    return {
        "per_round": per_round,
        "composed": [composed(epsilons) for epsilons in per_round],
        "ceilings": [ceiling(scores), ceiling(max(scores // 2, 10))],
    }


def _per_round(observed: Floats, unobserved: Floats, name: str, delta: float) -> list[float]:
    if name == "clopper_pearson":
        return round_epsilons((observed, unobserved), delta=delta, confidence=CONFIDENCE).tolist()
    return [
        credible_epsilon(present, absent, delta=delta) for present, absent in zip(observed, unobserved, strict=True)
    ]


def credible_epsilon(observed: Floats, unobserved: Floats, *, delta: float) -> float:
    """The lower end of epsilon's 95 % credible interval at the threshold with the fewest errors."""
    present, absent = np.sort(observed), np.sort(unobserved)
    false_negatives, false_positives = error_counts(present, absent)
    best = (false_negatives / present.size + false_positives / absent.size).argmin()
    return posterior_epsilon(
        int(false_negatives[best]),
        present.size,
        int(false_positives[best]),
        absent.size,
        delta=delta,
        quantile=1 - CONFIDENCE,
    )


def accountants(plan: Comparison, trained: Trained) -> list[dict[str, Any]]:
    """The analytical epsilon by accountant and delta, and the delta at which each gives the paper's 34.5."""
    examples, rounds = trained.examples, trained.data_norms.shape[1]
    return analytical(
        plan.crafting.noise_multiplier,
        probability=plan.crafting.batch_size / examples,
        rounds=rounds,
        examples=examples,
    )


def analytical(noise: float, *, probability: float, rounds: int, examples: int) -> list[dict[str, Any]]:
    """The same, from plain numbers."""
    deltas = {"1/m": 1 / examples, "m^-1.1": examples**-1.1, "1e-5": 1e-5, "1e-6": 1e-6}
    exact = {name: float(mechanism_epsilon(noise, delta=delta)) for name, delta in deltas.items()}
    there = float(gaussian_delta(Gaussian(0, 1), Gaussian(1 / noise, 1), epsilon=CANIFE_ANALYTICAL))
    rows = [{"accountant": "one participation, exact", "epsilon": exact, "delta": there}]
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    once: Any = GaussianDpEvent(noise)
    sampled: Any = PoissonSampledDpEvent(probability, once)
    found: list[tuple[str, Any]] = [
        (RENYI, RdpAccountant().compose(once)),
        ("Poisson sampling, Rényi", RdpAccountant().compose(sampled, rounds)),
        ("Poisson sampling, PLD", PLDAccountant().compose(sampled, rounds)),
    ]
    for name, accountant in found:
        epsilons = {label: float(accountant.get_epsilon(delta)) for label, delta in deltas.items()}
        rows.append({"accountant": name, "epsilon": epsilons, "delta": float(accountant.get_delta(CANIFE_ANALYTICAL))})
    return rows


# Tables, checks, text and a plot: functions of the numbers alone


def tables(found: Found) -> list[Table]:
    """Our values next to the paper's, the ceilings of each method for a round, and the accountants that give 34.5."""
    rows = [
        _line(f"CANIFE, rounds by {words}", found["canife"][name]["composed"], PAPER["canife"])
        for name, words in PER_ROUND.items()
    ]
    rows += [
        _line("ε_lo, the paper's lower bound", found["lower_bound"], PAPER["lower_bound"]),
        _line("the valid lower bound", found["valid_bound"], None),
        _line("ours: the paper's estimate, all iterates", found["ours"], PAPER["ours"]),
        _line("known-others, the adversary of the analytical ε", found["known_others"], None),
        ("analytical ε, one participation, exact", shown(found["analytical"]), "-"),
    ]
    renyi = _renyi(found)
    rows.append(("analytical ε, one participation, Rényi", shown(renyi), shown(CANIFE_ANALYTICAL)))
    ceilings = []
    for name, words in PER_ROUND.items():
        whole, half = found["canife"][name]["ceilings"]
        read = _spread([value for run in found["canife"][name]["per_round"] for value in run])
        ceilings.append((words, read, shown(whole["per_round"]), shown(whole["composed"]), shown(half["composed"])))
    scores = found["canife"]["credible"]["ceilings"][0]["scores"]
    deltas = list(found["accountants"][0]["epsilon"])
    books = [
        (row["accountant"], *(shown(row["epsilon"][name], 4) for name in deltas), f"{row['delta']:.2g}")
        for row in found["accountants"]
    ]
    unstated = [
        (
            f"{row['learning_rate']:g}",
            f"{row['momentum']:g}",
            str(row["runs"]),
            _spread(row["accuracy"]),
            shown(row["data_norm"]),
            _spread(row["lower_bound"]),
            _spread(row["ours"]),
        )
        for row in found["unstated"]
    ]
    runs, delta = len(found["ours"]), found["delta"]
    return [
        Table(
            f"Mean ± std over {runs} runs, delta 1/{found['examples']:,}", ("", "ours", "the paper's"), tuple(rows), 1
        ),
        Table(
            f"CANIFE's ε of a round, and its ceiling with {scores} scores with the canary and as many without",
            ("", "ε of a round", "ceiling", "composed ceiling", "with half the scores"),
            tuple(ceilings),
            1,
        ),
        Table(
            f"Analytical ε at noise {found['plan']['crafting']['noise_multiplier']:g}, {found['rounds']} rounds (delta "
            f"{delta:.3g} is 1/m)",
            ("accountant", *deltas, f"delta of {CANIFE_ANALYTICAL}"),
            tuple(books),
            1,
        ),
        Table(
            "Not stated in the paper: learning rate and momentum",
            ("rate", "momentum", "runs", "accuracy", "‖X‖", "ε_lo", "ours, all iterates"),
            tuple(unstated),
        ),
    ]


def _line(name: str, values: Sequence[float], paper: tuple[float, float] | None) -> tuple[str, str, str]:
    return name, _spread(values), "-" if paper is None else f"{paper[0]} ± {paper[1]}"


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return shown(values[0]) if values else "-"
    return f"{shown(float(np.mean(values)))} ± {shown(float(np.std(values)), 2)}"


def _renyi(found: Found) -> float:
    return next(float(row["epsilon"]["1/m"]) for row in found["accountants"] if row["accountant"] == RENYI)


def checks(found: Found) -> list[PaperCheck]:
    """The claims that the comparison must support at every scale."""
    renyi = _renyi(found)
    start, crafted, trained_on = found["crafting"]["interference"]
    detail = f"mean |cosine| {start:.3f} before, {crafted:.4f} after with the pool, {trained_on:.4f} with training data"
    intervals, truth = found["known_others_99"], found["analytical"]
    missed = sum(not low <= truth <= high for low, high in intervals)
    chance = float(binom.sf(missed - 1, len(intervals), 0.01))
    bounds = [(f"run {place}: {shown(value)}", value <= truth) for place, value in enumerate(found["valid_bound"], 1)]
    return [
        PaperCheck(
            f"Rényi accounting of one participation at delta 1/m gives the paper's {CANIFE_ANALYTICAL}",
            round(renyi, 1) == CANIFE_ANALYTICAL,
            shown(renyi, 4),
        ),
        PaperCheck(
            "a crafted canary is far more orthogonal to the pool than a sample is", crafted < start / 10, detail
        ),
        PaperCheck(
            "the 99 % interval of known-others misses the analytical ε in no more runs than chance explains (at 1 %)",
            chance > 0.01,
            f"missed in {missed} of {len(intervals)} runs, {shown(truth)} by {_spread(found['known_others'])}",
        ),
        all_of("no valid lower bound exceeds the analytical ε", bounds, nothing="no run is finished"),
        *(_below(found, name, words) for name, words in PER_ROUND.items()),
    ]


def _below(found: Found, name: str, words: str) -> PaperCheck:
    """The paper's claim: CANIFE's estimate lies below a lower bound."""
    composed, claim = found["canife"][name]["composed"], f"CANIFE, rounds by {words}, lies below ε_lo"
    detail = f"{_spread(composed)} against {_spread(found['lower_bound'])}"
    return PaperCheck(claim, bool(np.mean(composed) < np.mean(found["lower_bound"])), detail)


def conclusion(found: Found) -> str:
    """The conclusion as text."""
    crafting, scores = found["crafting"], found["scores"]
    noise = found["plan"]["crafting"]["noise_multiplier"]
    means, stds = crafting["score_means"], crafting["score_stds"]
    ceilings = {name: found["canife"][name]["ceilings"][0] for name in PER_ROUND}
    renyi = _renyi(found)
    parts = [
        f"At delta = 1/{found['examples']:,} one participation has an ε of {shown(found['analytical'])} exactly and of "
        f"{shown(renyi)} by Rényi accounting; the paper prints {CANIFE_ANALYTICAL}.",
        f"The scores of an audited round are {means['unobserved']:.2f} ± {stds['unobserved']:.3f} without the crafted "
        f"canary and {means['observed']:.2f} ± {stds['observed']:.3f} with it; noise alone gives 0 and 1 ± {noise:g}.",
    ]
    if max(stds.values()) < 1.25 * noise:
        parts.append(
            "So the canary is almost ideal. CANIFE's estimate is low because few scores say little about a round, and "
            "because its composition assumes that a client is in a round only by chance."
        )
    parts.append(
        f"With Clopper-Pearson bounds and {ceilings['credible']['scores']} scores on each side, it can be at most "
        f"{shown(ceilings['clopper_pearson']['composed'])}, below the paper's {PAPER['canife'][0]}; with the credible "
        f"interval at most {shown(ceilings['credible']['composed'])}."
    )
    parts.append(
        f"Our largest cosines are {scores['observed']['mean']:.2f} ± {scores['observed']['std']:.2f} for observed and "
        f"{scores['unobserved']['mean']:.2f} ± {scores['unobserved']['std']:.2f} for unobserved canaries, in units of one "
        f"cosine's std. Maxima are not Gaussian: the estimate that fits Gaussians is {_spread(found['ours'])}, while the "
        f"analytical ε is {shown(found['analytical'])}. Test accuracy {_spread(found['accuracy'])}."
    )
    return " ".join(parts)


def draw(figure: "Figure", found: Found) -> None:
    """Plot every run's estimates next to the paper's, and a crafted canary."""
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    rows: list[tuple[str, list[float], tuple[float, float] | None]] = [
        (f"CANIFE, {words}", found["canife"][name]["composed"], PAPER["canife"]) for name, words in PER_ROUND.items()
    ]
    rows += [
        ("ε_lo, the paper's bound", found["lower_bound"], PAPER["lower_bound"]),
        ("valid bound", found["valid_bound"], None),
        ("ours, all iterates", found["ours"], PAPER["ours"]),
        ("known-others", found["known_others"], None),
    ]
    for place, (_, values, paper) in enumerate(reversed(rows)):
        left.plot(values, [place] * len(values), "|", ms=12, color="#1d63b8", label="our runs" if place == 0 else None)
        if paper:
            named = place == len(rows) - 1
            left.errorbar(
                paper[0], place - 0.3, xerr=paper[1], fmt="x", color="#b45309", label="the paper's" if named else None
            )
    left.axvline(found["analytical"], color="0.3", lw=1, label="analytical")
    left.set_xscale("log")
    ticks = [tick for tick in TICKS if left.get_xlim()[0] <= tick <= left.get_xlim()[1]]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_xticks([], minor=True)
    left.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    left.set_xlabel("ε")
    side = math.isqrt(len(found["crafting"]["sample"]))
    right.imshow(np.reshape(found["crafting"]["sample"][: side * side], (side, side)), cmap="gray")
    right.set_title("a crafted canary")
    right.set_axis_off()
    figure.legend(loc="outside lower center", ncols=3)


EXPERIMENT = Experiment(
    name="canife",
    title="CANIFE's crafted canaries against random ones (Section 5.3)",
    takes=("device", "data_dir", "rounds", "seeds"),
    plan=no_runs,
    gather=gather,
    account=Account(tables, checks, conclusion, draw),
)
