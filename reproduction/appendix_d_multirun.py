"""Appendix D: one run with 1,000 canaries against ten runs with 100 each, fifty times over, on a small model.

Both designs have the same real clients, each of whom takes part once, as in the paper, and a participant always has the same
weight: they only differ in the number of other canaries in a run. A finished repeat is one line of a file in the
experiment's folder and is not trained again.
"""

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from coalmine.audit import Audit
from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.evidence.ladder import Scores, ladder
from coalmine.log.files import write_atomically
from coalmine.simulation.config import (
    CanarySettings,
    EngineSettings,
    ParticipationSettings,
    PrivacySettings,
    RunConfig,
    TaskSettings,
)
from coalmine.simulation.engines import ClientSettings
from coalmine.simulation.server_optimizer import ServerSettings
from coalmine.simulation.training_run import prepared
from reproduction.experiment import Account, Experiment, Found, PaperCheck, Table, no_runs, shown
from reproduction.experiment_options import Options
from reproduction.run_grid import Follow, OutOfTimeError
from reproduction.training_configs import WORDS_DELTA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISES = (0.05, 0.2)
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
CANARIES, PIECES = 1_000, 10
REPEATS, SMALL_REPEATS = 50, 3
CLOSE = 0.2
CLIENTS, ROUNDS = 9_000, 200
FULL_ROUND = (CLIENTS + CANARIES) / ROUNDS  # participants per round with all canaries


def config(noise_multiplier: float, canaries: int, seed: int) -> RunConfig:
    """200 rounds of 45 clients and a number of canaries; each of the 9,000 clients and each canary takes part once.

    Sums are divided by the participants of a round, and the server's step compensates for a smaller number of canaries.
    """
    participants = (CLIENTS + canaries) / ROUNDS
    return RunConfig(
        rounds=ROUNDS,
        seed=seed,
        evaluate_every=ROUNDS,
        task=TaskSettings(clients=CLIENTS),
        participation=ParticipationSettings(clients_per_round=CLIENTS // ROUNDS),
        client=ClientSettings(epochs=1, learning_rate=0.3),
        server=ServerSettings(learning_rate=participants / FULL_ROUND, momentum=0.9),
        privacy=PrivacySettings(
            noise_multiplier=noise_multiplier, delta=WORDS_DELTA, clip_norm=0.3, divide_by="expected"
        ),
        canaries=CanarySettings(count=canaries, unobserved=10),
        engine=EngineSettings(device="cpu", threads=1),
    )


class _FinalModelOnly(Audit):
    """An audit that skips rounds, which would take a third of the time of such a small model."""

    def observe_round(self, *_: Any, **__: Any) -> None:
        pass


def final_scores(asked: RunConfig) -> Scores:
    """The canaries' standardised cosines with the final model of one run, trained in memory."""
    asked = replace(asked, engine=asked.engine.resolved())
    with prepared(asked, None, None) as training:
        training.audit = _FinalModelOnly(
            training.task.model.dim,
            canaries=asked.canaries.count,
            unobserved=10,
            seed=asked.canary_seed(),
            delta=WORDS_DELTA,
        )
        state = training.initial_state()
        for _ in training.rounds(state):
            pass
        training.audit.observe_final(state.model_vector, initial=training.initial_vector())
        return next(item for item in ladder(training.audit.log, training.audit.settings) if item.rung == "final")


def repeat(noise_multiplier: float, number: int) -> dict[str, Any]:
    """Epsilon from one run with all canaries, and from ten runs with a tenth of them each."""
    seed = 1_000 * (1 + number) + 100 * NOISES.index(noise_multiplier)
    together = final_scores(config(noise_multiplier, CANARIES, seed))
    apart = [final_scores(config(noise_multiplier, CANARIES // PIECES, seed + piece)) for piece in range(1, PIECES + 1)]
    pooled = np.concatenate([scores.observed for scores in apart])
    return {
        "noise_multiplier": noise_multiplier,
        "repeat": number,
        "one": _epsilon(together.observed, together),
        "ten": _epsilon(pooled, apart[0]),
    }


def _epsilon(observed: Any, like: Scores) -> float:
    """The paper's estimate for scores with null N(0, 1)."""
    assert like.null is not None
    return epsilon_estimate(observed, null=like.null, delta=WORDS_DELTA, variance="fitted", confidence=None).epsilon


def repeats(options: Options) -> list[dict[str, Any]]:
    """Every requested repeat, and whether it is finished."""
    done = {(line["noise_multiplier"], line["repeat"]) for line in _read(options.file("multirun", "jsonl"))}
    numbers = range(options.seeds or (SMALL_REPEATS if options.small else REPEATS))
    return [
        {"noise": noise, "repeat": number, "done": (noise, number) in done} for number in numbers for noise in NOISES
    ]


def gather(options: Options, follow: Follow) -> Found:
    """Train the missing repeats and return all finished ones."""
    path = options.file("multirun", "jsonl")
    _cut_torn_line(path)
    options.out.mkdir(parents=True, exist_ok=True)
    for line in _results(_waiting(options), options):
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    if left := _waiting(options):
        raise OutOfTimeError(f"{len(left)} repeats were not started")
    asked = repeats(options)
    numbers = {item["repeat"] for item in asked}
    kept = [line for line in _read(path) if line["repeat"] in numbers]
    return {
        "scale": options.scale,
        "repeats": sorted(kept, key=lambda line: (line["noise_multiplier"], line["repeat"])),
        "missing": [f"noise {item['noise']:g}, repeat {item['repeat']}" for item in asked if not item["done"]],
    }


def _waiting(options: Options) -> list[tuple[float, int]]:
    """The requested repeats that are not finished."""
    asked = [(item["noise"], item["repeat"]) for item in repeats(options) if not item["done"]]
    return [pair for pair in asked if options.wanted(pair[0])]


def _results(waiting: list[tuple[float, int]], options: Options) -> Iterator[dict[str, Any]]:
    """Train one repeat after another; after the time limit, running repeats finish and no other one is started."""
    if options.jobs == 1 or len(waiting) < 2:
        for place, pair in enumerate(waiting):
            if place and options.over:
                return
            yield repeat(*pair)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rest = iter(waiting)
    with ProcessPoolExecutor(options.jobs) as pool:
        running = {pool.submit(repeat, *pair) for pair in islice(rest, options.jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            if not options.over:
                running |= {pool.submit(repeat, *pair) for pair in islice(rest, len(done))}
            yield from (future.result() for future in done)


def _cut_torn_line(path: Path) -> None:
    """Remove a last line torn by a kill, to which the next line would be appended."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        write_atomically(path, whole)


def _read(path: Path) -> list[dict[str, Any]]:
    """The complete lines."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # torn by a kill: that repeat is trained again
            continue
    return found


def _values(found: Found, noise: float, key: str) -> list[float]:
    return [line[key] for line in found["repeats"] if line["noise_multiplier"] == noise]


def tables(found: Found) -> list[Table]:
    """Quantiles of the estimate in both designs."""
    rows = []
    for noise in NOISES:
        for key, label in (("one", f"1 × {CANARIES:,}"), ("ten", f"{PIECES} × {CANARIES // PIECES}")):
            values = _values(found, noise, key)
            if values:
                marks = np.quantile(values, QUANTILES)
                rows.append((f"{noise:g}", label, str(len(values)), *(shown(float(mark)) for mark in marks)))
    columns = ("noise", "runs × canaries", "repeats", *(f"{mark:g}" for mark in QUANTILES))
    return [
        Table("Quantiles of ε_est-final over repeats (the paper prints them as a figure)", columns, tuple(rows), left=2)
    ]


def checks(found: Found) -> list[PaperCheck]:
    """The two designs agree to within a fifth, as far as this many repeats can decide."""
    differences = [(noise, difference(found, noise)) for noise in NOISES]
    known = [(noise, item) for noise, item in differences if item is not None]
    claim = f"1 × 1,000 and 10 × 100 canaries give the same mean ε to within {CLOSE:.0%}"
    detail = "; ".join(f"noise {noise:g}: {low:+.0%} to {high:+.0%} (95 % interval)" for noise, (_, low, high) in known)
    if not known:
        return [PaperCheck(claim, None, "no two repeats are finished")]
    apart = any(low > CLOSE or high < -CLOSE for _, (_, low, high) in known)
    close = all(low >= -CLOSE and high <= CLOSE for _, (_, low, high) in known)
    return [PaperCheck(claim, False if apart else True if close else None, detail)]


def difference(found: Found, noise: float) -> tuple[float, float, float] | None:
    """Relative difference between the estimates of ten runs and of one: its mean and 95 % interval (Welch's t)."""
    one, ten = (np.array(_values(found, noise, key)) for key in ("one", "ten"))
    if min(one.size, ten.size) < 2:
        return None
    squares = np.array([values.var(ddof=1) / values.size for values in (one, ten)])
    free = squares.sum() ** 2 / (squares**2 / (np.array([one.size, ten.size]) - 1)).sum()
    half = float(stdtrit(free, 0.975)) * math.sqrt(float(squares.sum()))
    gap, scale = float(ten.mean() - one.mean()), float(one.mean())
    return gap / scale, (gap - half) / scale, (gap + half) / scale


def draw(figure: "Figure", found: Found) -> None:
    """Plot the quantiles of both designs side by side."""
    axes = figure.subplots(1, len(NOISES), squeeze=False)[0]
    for ax, noise in zip(axes, NOISES, strict=True):
        for key, label, mark in (
            ("one", f"1 × {CANARIES:,}", "o-"),
            ("ten", f"{PIECES} × {CANARIES // PIECES}", "s--"),
        ):
            values = _values(found, noise, key)
            if values:
                ax.plot(QUANTILES, np.quantile(values, QUANTILES), mark, ms=4, label=label if ax is axes[0] else None)
        ax.set_title(f"noise {noise:g}")
        ax.set_xlabel("quantile")
    axes[0].set_ylabel("ε_est-final")
    figure.legend(loc="outside right center")


def conclusion(found: Found) -> str:
    """The conclusion as text."""
    parts = []
    for noise in NOISES:
        item = difference(found, noise)
        if item is not None:
            parts.append(f"{item[0]:+.0%} at noise {noise:g} (95 % interval {item[1]:+.0%} to {item[2]:+.0%})")
    return (
        f"Trained on a small model of 9,610 parameters: the digits of scikit-learn over {CLIENTS:,} virtual clients, each "
        f"in one of {ROUNDS} rounds; {CANARIES:,} canaries are {CANARIES / (CLIENTS + CANARIES):.0%} of all participants. "
        f"The mean estimate of ten runs differs from that of one run by {', '.join(parts) or 'an unknown amount so far'}. "
        "The paper's figure has no numbers to compare with."
    )


EXPERIMENT = Experiment(
    name="multirun",
    title="One run with 1,000 canaries against ten with 100 (Appendix D)",
    takes=("seeds", "jobs", "minutes"),
    plan=no_runs,
    gather=gather,
    repeats=repeats,
    account=Account(tables, checks, conclusion, draw),
)
