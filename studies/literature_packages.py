"""coalmine's rows of published estimators compared with the functions of public packages, on the same scores.

    python -m studies.literature_packages

jax-privacy and privacy-estimates are installed once into a separate environment under studies/out; about 800 MB, no CUDA.
The results are stored in studies/out/literature_packages.json: coalmine's numbers are recomputed each time, a package's
only for new scores. A line reports each difference above its tolerance.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from coalmine.argument_checks import Floats
from coalmine.estimators.literature.jagielski2020 import jagielski2020_row
from coalmine.estimators.literature.mahloujifar import f_dp_epsilon, mahloujifar_row
from coalmine.estimators.literature.nasr import nasr_row
from coalmine.estimators.literature.steinke import one_run_epsilon, steinke_row
from coalmine.estimators.literature.zanella_beguelin import posterior_epsilon, zanella_beguelin_row
from studies.other_frameworks import make_environment

ROOT = Path(__file__).parents[1]
HOME = ROOT / "studies" / "out" / "packages-venv"
FOUND = ROOT / "studies" / "out" / "literature_packages.json"
PINS = ("jax-privacy==2.0.0", "privacy-estimates==0.1.0.post1")
SOLVED = 1e-5  # jax-privacy solves for epsilon to 1e-6
CLOSED = 1e-8  # no solver, no quadrature: rounding only
QUADRATURE = 5e-3  # privacy-estimates at xtol 1e-3: a probability to 5e-4, over a density of at least 0.1
SHARED = (1 - 0.05 / 2) ** 2  # confidence at which our two rates fail with 2.5 % each, like theirs at 95 %
QUANTILES, FIGURES = "10,000 normal quantiles, shift", (1, 2, 4)
COUNTS = [(3, 10, 2, 10), (0, 10, 1, 10), (60, 100, 5, 100), (30, 200, 40, 200), (500, 1_000, 10, 1_000)]

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One number of coalmine, and how a package computes the same."""

    row: str
    method: str
    scores: str  # description
    ours: float
    tolerance: float
    inputs: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.row} / {self.method} / {self.scores}"

    @property
    def digest(self) -> str:
        """Digest of everything that determines the package's number."""
        text = json.dumps([PINS, self.method, self.inputs])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cases() -> Iterator[Case]:
    """Every comparison: deterministic quantiles, random scores of several laws, and counts of errors."""
    for words, observed, unobserved in _score_sets():
        yield from _one_run_cases(words, observed, unobserved)
    for words, observed, unobserved in _small_sets():
        yield _of_scores(
            "Jagielski 2020, best threshold", "jax-privacy epsilon_clopper_pearson, each threshold", words,
            jagielski2020_row(observed, unobserved, delta=1e-6, confidence=SHARED).value, CLOSED, observed, unobserved,
        )  # fmt: skip
    yield from _count_cases()


def _score_sets() -> Iterator[tuple[str, Floats, Floats]]:
    quantiles = norm.ppf((np.arange(10_000) + 0.5) / 10_000)
    for shift in FIGURES:
        yield f"{QUANTILES} {shift}", quantiles + shift, quantiles
    rng = np.random.default_rng(20_240_611)
    for mean in (0.0, 0.5, 1.5, 3.0):
        yield f"1,000 normal draws, shift {mean}", rng.normal(mean, 1, 1_000), rng.normal(size=1_000)
    yield "1,000 Laplace draws, shift 2.0", rng.laplace(2.0, 1, 1_000), rng.laplace(size=1_000)


def _small_sets() -> Iterator[tuple[str, Floats, Floats]]:
    rng = np.random.default_rng(7)
    for shift, count, others in ((0.0, 300, 300), (1.0, 200, 700), (3.0, 400, 250)):
        yield f"{count} against {others} draws, shift {shift}", rng.normal(shift, 1, count), rng.normal(size=others)


def _one_run_cases(words: str, observed: Floats, unobserved: Floats) -> Iterator[Case]:
    threshold = float(np.quantile(observed, 0.6))
    right, wrong = int(np.sum(observed >= threshold)), int(np.sum(unobserved >= threshold))
    total, delta = observed.size + unobserved.size, 1e-6
    one_run, f_dp = "jax-privacy epsilon_one_run", "jax-privacy epsilon_one_run_fdp"
    pairs = (
        ("Steinke 2023, ROC hull", one_run, steinke_row(observed, unobserved, delta=delta).value),
        ("Mahloujifar 2024, ROC hull", f_dp, mahloujifar_row(observed, unobserved, delta=delta).value),
        (
            "one_run_epsilon, behind Steinke 2023",
            f"{one_run}, one threshold",
            one_run_epsilon(right + wrong, wrong, delta=delta, total=total),
        ),
        (
            "f_dp_epsilon, behind Mahloujifar 2024",
            f"{f_dp}, one threshold",
            f_dp_epsilon(right + wrong, wrong, delta=delta, total=total),
        ),
    )
    for row, method, ours in pairs:
        more = {"threshold": threshold} if "one threshold" in method else {}
        yield _of_scores(row, method, words, ours, SOLVED, observed, unobserved, **more)


def _of_scores(
    row: str,
    method: str,
    words: str,
    ours: float | None,
    tolerance: float,
    observed: Floats,
    unobserved: Floats,
    **more: Any,
) -> Case:
    assert ours is not None
    inputs = {"observed": observed.tolist(), "unobserved": unobserved.tolist(), "delta": 1e-6, **more}
    return Case(row=row, method=method, scores=words, ours=ours, tolerance=tolerance, inputs=inputs)


def _count_cases() -> Iterator[Case]:
    delta = 1e-5
    for counts in COUNTS:
        words = "{} of {} and {} of {} errors".format(*counts)
        observed, unobserved = _two_valued(*counts)
        yield Case(
            row="posterior_epsilon, behind Zanella-Béguelin 2023",
            method="privacy-estimates Beta.eps_lo",
            scores=words,
            ours=posterior_epsilon(*counts, delta=delta, quantile=0.05),
            tolerance=QUADRATURE,
            inputs={"counts": [counts], "delta": delta},
        )
        ours = jagielski2020_row(observed, unobserved, delta=delta, confidence=SHARED).value
        assert ours is not None
        yield Case(
            row="Jagielski 2020, best threshold",
            method="privacy-estimates compute_eps_lo, beta",
            scores=words,
            ours=ours,
            tolerance=CLOSED,
            inputs={"counts": [counts], "delta": delta},
        )
    for counts in COUNTS[2:]:  # with fewer, bounds are worse than chance, which jax-privacy counts as a leak
        observed, unobserved = _two_valued(*counts)
        words = "scores 0 and 1, {} of {} and {} of {} errors".format(*counts)
        ours = nasr_row(observed, unobserved, delta=1e-6, confidence=SHARED).value
        yield _of_scores(
            "Nasr 2023, best threshold", "jax-privacy epsilon_from_gdp", words, ours, SOLVED, observed, unobserved
        )
    rng = np.random.default_rng(11)
    observed, unobserved = rng.normal(1.5, 1, 25), rng.normal(size=40)
    ours = zanella_beguelin_row(observed, unobserved, delta=delta).value
    assert ours is not None
    each = [(int(np.sum(observed < t)), 25, int(np.sum(unobserved >= t)), 40) for t in observed]
    yield Case(
        row="Zanella-Béguelin 2023, best threshold",
        method="privacy-estimates Beta.eps_lo",
        scores="25 against 40 draws, shift 1.5",
        ours=ours,
        tolerance=QUADRATURE,
        inputs={"counts": each, "delta": delta},
    )


def _two_valued(fn: int, count: int, fp: int, unobserved: int) -> tuple[Floats, Floats]:
    """Scores of 0 and 1 with these numbers of errors at their single threshold."""
    return np.repeat([0.0, 1.0], [fn, count - fn]), np.repeat([0.0, 1.0], [unobserved - fp, fp])


def compare() -> Result:
    """Every case with both values; the packages' come from their own environment, unless already stored."""
    asked, kept = list(cases()), read_found()
    known = {row["digest"]: row["theirs"] for row in kept["rows"]} if kept else {}
    new = [case for case in asked if case.digest not in known]
    if new:
        values = _answers(new)
        known |= {case.digest: values[case.name] for case in new}
    rows = [
        {
            "row": case.row,
            "method": case.method,
            "scores": case.scores,
            "ours": case.ours,
            "theirs": known[case.digest],
            "tolerance": case.tolerance,
            "digest": case.digest,
        }
        for case in asked
    ]
    return {"packages": list(PINS), "rows": rows}


def _answers(asked: list[Case]) -> dict[str, float]:
    """The packages' values by the cases' names."""
    text = json.dumps([{"name": case.name, "method": case.method, **case.inputs} for case in asked])
    python, script = make_environment(HOME, *PINS), ROOT / "studies" / "public_packages.py"
    answer: Result = json.loads(
        subprocess.run([python, script], input=text, check=True, capture_output=True, text=True).stdout
    )
    installed = [f"{name}=={version}" for name, version in answer["versions"].items()]
    if installed != list(PINS):
        raise OSError(f"{HOME} holds {', '.join(installed)}, not {', '.join(PINS)}; delete it")
    values: dict[str, float] = answer["values"]
    return values


def read_found() -> Result | None:
    """The stored results of the last comparison."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else None


def differing(found: Result) -> list[str]:
    """A line for each case that differs by more than its tolerance; NaN differs from every number."""
    return [
        f"{row['row']} reads {row['ours']:.7g}, {row['method']} {row['theirs']:.7g} ({row['scores']}): they may differ "
        f"by {row['tolerance']:g}"
        for row in found["rows"]
        if not abs(row["ours"] - row["theirs"]) <= row["tolerance"]
    ]


def grouped(found: Result) -> list[tuple[str, str, int, float, float]]:
    """Row, method, number of cases, largest difference and tolerance of each pair."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for row in found["rows"]:
        groups.setdefault((row["row"], row["method"]), []).append(row)
    return [
        (*pair, len(rows), max(abs(row["ours"] - row["theirs"]) for row in rows), rows[0]["tolerance"])
        for pair, rows in groups.items()
    ]


def main() -> int:
    """Compare, store the results and print the differences; 1 if there are any or a package is not available."""
    try:
        found = compare()
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        print(f"jax-privacy and privacy-estimates: nothing was compared ({said[-1] if said else error})", flush=True)
        return 1
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    FOUND.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{', '.join(found['packages'])}: {len(found['rows'])} numbers on the same scores")
    for row, method, count, largest, tolerance in grouped(found):
        print(f"  {row} | {method} | {count} cases | largest difference {largest:.1e}, at most {tolerance:g}")
    lines = differing(found)
    print("\n".join(f"differ: {line}" for line in lines) or "  none differs by more than it may", flush=True)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
