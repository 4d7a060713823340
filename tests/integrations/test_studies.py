"""Studies of the integrations and of verdicts fail if a requirement is missed; needs none of their stored results."""

import importlib
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from requires import require

ROOT = Path(__file__).parents[2]
if not (ROOT / "studies" / "verdicts.py").exists():
    pytest.skip("the studies are in the repository, not in the package", allow_module_level=True)
flower, verdicts, others, opacus, svt, every = (
    importlib.import_module(f"studies.{name}")
    for name in ("flower_coverage", "verdicts", "other_frameworks", "opacus_faults", "nvflare_svt", "__main__")
)


def coverage(**changes):
    """Perfect lines for each seed of the Flower study; `changes` maps a case to changes of its lines."""
    good = {"covers": True, "dilution": 1.0, "verdict": "PASS", "epsilon": 11.4}
    lines = [good | {"case": case, "seed": seed} for case, seeds in flower.CASES.items() for seed in seeds]
    for line in lines:
        line |= {"verdict": "VIOLATION"} if line["case"] == "adam" else {}
        line |= next((c for name, c in changes.items() if name == line["case"]), {})
    return lines


def test_flower_coverage_fails_if_a_requirement_is_missed():
    lines = coverage()
    assert flower.failures(lines) == []
    for missed in range(3):
        lines[missed]["covers"] = False  # server-side clipping
        assert bool(flower.failures(lines)) == (missed == 2)
    assert flower.failures(lines) == ["server: 17 of 20 intervals cover the truth, 18 must"]
    assert flower.failures(coverage(client={"dilution": 1.1})) == [
        "client: a dilution gauge reads 1.100, below 1.1 it must be"
    ]
    assert flower.failures(coverage(client={"dilution": math.nan}))
    assert flower.failures(coverage(adam={"verdict": "PASS"})) == ["adam: VIOLATION in 0 of 20"]
    assert "client: 19 of 20 seeds were run" in flower.failures([x for x in coverage() if x["seed"] != 1001])
    assert len(flower.failures([])) >= 3


def test_flower_runs_have_different_seeds():
    seeds = [seed for case in flower.CASES.values() for seed in case]
    assert len(seeds) == len(set(seeds)) == 60


def outcomes(violations=0, amplified=0):
    """Every batch of the study of verdicts; the first batch of each row has the errors."""
    lines = []
    for job, value, batch in verdicts.jobs():
        cell, size = verdicts._name(job, value), verdicts.BATCH if job is verdicts.model_batch else verdicts.LOOPS
        wrong = 0 if batch else violations
        found = {"mechanism PASS": size - wrong, "mechanism VIOLATION": wrong}
        if job is verdicts.model_batch:
            found |= {"amplified on known rungs VIOLATION": 0 if batch else amplified}
        lines.append({"cell": cell, "batch": batch, "outcomes": found})
    return lines


def test_verdicts_fail_if_a_requirement_is_missed():
    assert verdicts.failures(outcomes(2)) == []
    assert verdicts.failures(outcomes(3)) == ["all loops: a true claim is VIOLATION in 6 of 500 runs, 1% may be"]
    bad = verdicts.failures(outcomes(26))
    assert "score model, claim 3: a true claim is VIOLATION in 26 of 2,500 runs, 1% may be" in bad
    assert len(bad) == 5
    assert len(verdicts.failures(outcomes(amplified=1))) == 4
    assert verdicts.failures(outcomes()[1:]) == ["1 of 60 batches were not run"]


def test_other_frameworks_fail_if_a_requirement_is_missed():
    covering = {"interval": [10.4, 16.2]}
    good = {"rounds": 5, "presentations": 5, "verdict": "PASS", "gauges": {"layers": {}}}
    rungs = {"known-round": covering, "known-others": covering}
    assert others.failures("pfl", good | {"adversaries": rungs}) == []
    missing = others.failures("pfl", good | {"adversaries": {"known-round": covering}})
    assert missing == ["known-others: nan … nan does not cover 11.5"]
    assert others.failures("pfl", good | {"adversaries": rungs, "gauges": {}}) == ["no tensor has a noise gauge"]
    beside = rungs | {"known-round": {"interval": [12.0, 16.2]}}
    assert others.failures("pfl", good | {"adversaries": beside}) == ["known-round: 12 … 16.2 does not cover 11.5"]
    assert len(others.failures("pfl", good | {"adversaries": rungs, "verdict": "VIOLATION", "rounds": 4})) == 2
    good = {"rounds": 3, "presentations": 3, "verdict": None, "adversaries": {"all-iterates": {"mean": 0.3165}}}
    assert others.failures("nvflare", good) == []
    assert others.failures("nvflare", good | {"adversaries": {"all-iterates": {"mean": 0.2}}})
    assert others.failures("nvflare", good | {"adversaries": {}})


@pytest.mark.parametrize("code", [0, 1])
def test_a_missed_requirement_fails_the_command(code, monkeypatch, tmp_path, capsys):
    """For every study here, and therefore for `python -m studies`, which names it."""
    found = coverage() if code == 0 else coverage(adam={"verdict": "PASS"})
    monkeypatch.setattr(flower, "read", lambda: found)
    monkeypatch.setattr(flower, "RESULTS", tmp_path / "out" / "lines.jsonl")
    assert flower.main() == code
    monkeypatch.setattr(verdicts, "read", lambda: outcomes(amplified=code))
    monkeypatch.setattr(verdicts, "RESULTS", tmp_path / "out" / "lines.jsonl")
    monkeypatch.setattr(sys, "argv", ["verdicts", "--jobs", "1"])
    assert verdicts.main() == code
    rungs = {name: {"interval": [1.0, 20.0], "epsilon": 11.4} for name in ("known-round", "known-others")}
    rungs["all-iterates"] = {"mean": 1 / math.sqrt(10), "epsilon": 1.0}
    examples = {"pfl": (5, "PASS" if code == 0 else "VIOLATION"), "nvflare": (3, None)}
    monkeypatch.setattr(others, "OUT", tmp_path / "out")
    monkeypatch.setattr(
        others,
        "try_example",
        lambda name: {
            "rounds": examples[name][0],
            "presentations": examples[name][0],
            "verdict": examples[name][1],
            "adversaries": rungs,
            "gauges": {"layers": {}},
        },
    )
    monkeypatch.setattr(others, "run_tests", lambda name: True)
    monkeypatch.setattr(others, "next_flower_passes", lambda: True)
    assert others.main() == code
    assert capsys.readouterr().out.count("every bar met") == 3 * (1 - code)
    monkeypatch.setattr(every, "STUDIES", [["-c", f"import sys; sys.exit({code})"]])
    assert every.main() == code
    assert ("failed: -c" in capsys.readouterr().out) == bool(code)


def readings(**changes):
    """Perfect lines for each case of the study of SVTPrivacy; the first one has the changes."""
    good = {"epsilon": 0.1, "ledger": 50.1, "estimate": 4.7, "bound": 2.1, "composed": 4.6}
    lines = [good | {"attack": attack, "dim": dim} for attack, dim, _, _ in svt.CASES]
    lines[0] |= changes
    return lines


def test_svt_study_fails_if_a_requirement_is_missed():
    assert svt.failures(readings()) == []
    assert svt.failures(readings()[1:]) == ["5 of 6 cases were run"]
    assert svt.failures(readings(bound=0.9)) == ["the first bound is 0.90, not ten times the parameter 0.1"]
    assert svt.failures(readings(estimate=6.0)) == ["zero-out, d = 5,000: the estimate 6.00 is far from 4.60"]
    assert len(svt.failures(readings(estimate=math.nan))) == 1
    beyond = svt.failures(readings(bound=51.0))
    assert beyond == ["zero-out, d = 5,000: the bound 51.00 is above the filter's own total 50.10"]


def test_svt_attack_is_the_log_likelihood_ratio_of_laplace_noise():
    """Against scipy's density; coordinates with value 0 were not released and carry no information."""
    from scipy.stats import laplace

    reply, present, absent = np.array([0.3, 0.0, -2.0]), np.array([1.0, 1.0, -1.0]), np.array([0.0, 0.5, 1.0])
    expected = sum(
        laplace.logpdf(y - a, scale=3.0) - laplace.logpdf(y - b, scale=3.0)
        for y, a, b in [(0.3, 1.0, 0.0), (-2.0, -1.0, 1.0)]
    )
    assert svt.log_likelihood_ratio(reply, present, absent, 3.0) == pytest.approx(expected)


@pytest.mark.parametrize("study", [flower, verdicts, others, opacus, svt])
def test_each_study_is_listed_in_the_runner(study):
    assert study.__name__ in [word for line in every.STUDIES for word in line]


@pytest.mark.full
def test_opacus_study_reproduces_the_table_in_the_guide():
    """Run again, the study gives the table in docs/evidence/opacus.md: the same words, and numbers up to rounding."""
    require("opacus")
    found = opacus.run_all()
    assert opacus.failures(found) == []
    page = (ROOT / "docs" / "evidence" / "opacus.md").read_text()
    shown = page.partition(opacus.BEGIN)[2].partition(opacus.END)[0]
    number = r"\d+\.?\d*"
    again = opacus.table(found)
    assert re.sub(number, "#", shown.strip()) == re.sub(number, "#", again)
    values = [float(text) for text in re.findall(number, shown)]
    assert values == pytest.approx([float(text) for text in re.findall(number, again)], rel=0.02)
    assert opacus.failures([line | {"verdict": "UNDERPOWERED"} for line in found]) != []
    assert opacus.failures([line | {"accountant": 30.0} for line in found]) != []
