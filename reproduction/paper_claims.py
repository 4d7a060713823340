"""The claims checked at the end of every experiment with runs."""

import itertools
from collections.abc import Sequence
from typing import Any

from reproduction.experiment import PaperCheck, all_of, interval_shown, shown
from reproduction.run_numbers import RunNumbers, rung

WITHOUT_NOISE = "no run with noise is finished"


def covers_analytical(readings: Sequence[RunNumbers]) -> PaperCheck:
    """The 99 % interval of known-others contains the analytical epsilon of the updates' share of the noise."""
    cases = []
    for reading, row in _rows(readings, "known-others"):
        low, high = row["interval_99"] or (0.0, 0.0)
        name = f"{_named(reading, row)} {interval_shown(row['interval_99'])} against {shown(row['analytical'], 4)}"
        cases.append((name, row["interval_99"] is not None and low <= row["analytical"] <= high))
    claim = "the 99 % interval of known-others contains the analytical ε of the updates' noise, at every noise > 0"
    return all_of(claim, cases, nothing=WITHOUT_NOISE)


def bounds_hold(readings: Sequence[RunNumbers]) -> PaperCheck:
    """No valid lower bound, of any rung, exceeds the analytical epsilon."""
    cases = []
    for reading, row in _rows(readings):
        limit = max(other["analytical"] for other in reading["rows"]) if _pooled(row) else row["analytical"]
        name = f"{_named(reading, row)} {shown(row['lower_bound'])} against {shown(limit)}"
        cases.append((name, row["lower_bound"] <= limit))
    return all_of("no valid lower bound exceeds the analytical ε, on any rung", cases, nothing=WITHOUT_NOISE)


def final_falls(readings: Sequence[RunNumbers]) -> PaperCheck:
    """ε-final falls with noise until it reaches the floor.

    Estimates have an error: an increase counts as a failure only if the two 95 % intervals are disjoint. From the least
    to the most noise the estimate must fall or end below the floor.
    """
    claim = "ε-final falls with noise until it reaches the floor"
    found = [(reading, rung(reading, "final")) for reading in sorted(readings, key=_noise)]
    rows = [(reading, row) for reading, row in found if row is not None]
    if len(rows) < 2:
        return PaperCheck(claim, None, "fewer than two noise levels are finished")
    cases = []
    for (_, before), (reading, row) in itertools.pairwise(rows):
        apart = bool(row["interval"] and before["interval"] and row["interval"][0] > before["interval"][1])
        cases.append((f"noise {_noise(reading):g} up to {shown(row['epsilon'])}", not apart or _at_floor(row)))
    first, last = rows[0][1], rows[-1][1]
    name = f"{shown(first['epsilon'])} with the least noise, {shown(last['epsilon'])} with the most"
    cases.append((name, last["epsilon"] < first["epsilon"] or _at_floor(last)))
    return all_of(claim, cases, nothing="")


def final_below_all(readings: Sequence[RunNumbers]) -> PaperCheck:
    """The final model leaks less than all iterates, wherever these leak anything."""
    cases = []
    for reading in readings:
        final, every = rung(reading, "final"), rung(reading, "all-iterates")
        if final and every and not _at_floor(every):
            name = f"noise {_noise(reading):g}: {shown(final['epsilon'])} against {shown(every['epsilon'])}"
            cases.append((name, final["epsilon"] < every["epsilon"]))
    return all_of("ε-final lies below ε-all", cases, nothing="all-iterates detected nothing")


def known_others_falls(readings: Sequence[RunNumbers]) -> PaperCheck:
    """Epsilon falls with noise on the rung that the analytical epsilon describes."""
    found = [(reading, rung(reading, "known-others")) for reading in sorted(readings, key=_noise)]
    rows = [(reading, row) for reading, row in found if row is not None]
    cases = [
        (f"noise {_noise(reading):g}: {shown(row['epsilon'])}", row["epsilon"] < before["epsilon"])
        for (_, before), (reading, row) in itertools.pairwise(rows)
    ]
    return all_of("ε of known-others falls with noise", cases, nothing="fewer than two noise levels are finished")


def grows_with_presentations(readings: Sequence[RunNumbers]) -> PaperCheck:
    """ε-final grows from the fewest to the most presentations, and no decrease exceeds the intervals."""
    cases = []
    for reading in readings:
        rows = [row for row in reading["rows"] if row["rung"] == "final" and row["presentations"]]
        rows.sort(key=lambda row: row["presentations"])
        if len(rows) < 2:
            continue
        steps = all(
            not (row["interval"] and before["interval"] and row["interval"][1] < before["interval"][0])
            for before, row in itertools.pairwise(rows)
        )
        risen = rows[-1]["epsilon"] > rows[0]["epsilon"] or _at_floor(rows[-1])
        values = ", ".join(shown(row["epsilon"]) for row in rows)
        cases.append((f"{reading['task']}, noise {_noise(reading):g}: {values}", steps and risen))
    return all_of("ε-final grows with presentations", cases, nothing="no run with groups is finished")


def _rows(readings: Sequence[RunNumbers], name: str | None = None) -> list[tuple[RunNumbers, dict[str, Any]]]:
    """Rows of the runs with noise."""
    return [
        (reading, row)
        for reading in readings
        if _noise(reading) > 0
        for row in reading["rows"]
        if name is None or row["rung"] == name
    ]


def _pooled(row: dict[str, Any]) -> bool:
    """Whether the row pools canaries of different presentations: the largest number determines the limit."""
    return row["presentations"] is None


def _at_floor(row: dict[str, Any]) -> bool:
    return bool(row["epsilon"] <= row["floor"])


def _noise(reading: RunNumbers) -> float:
    return float(reading["noise_multiplier"])


def _named(reading: RunNumbers, row: dict[str, Any]) -> str:
    times = "" if row["presentations"] is None else f" {row['presentations']}×"
    return f"noise {_noise(reading):g}, {row['rung']}{times}:"
