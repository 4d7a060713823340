import itertools
import json
import math

import pytest
from in_process import called
from scipy.stats import norm

from coalmine.cli import main as cli


def plan(*arguments: object) -> dict:
    done = called("plan", "--delta", "1e-6", *arguments, "--json")
    assert (done.stderr, done.returncode) == ("", 0)
    return json.loads(done.stdout)


def test_plan_gives_the_fewest_canaries_that_detect_an_epsilon():
    """The planned number of canaries detects that epsilon, and one canary fewer does not."""
    found = plan("--dim", 10_000, "--detect", 2)
    count = found["detect"]["canaries"]
    around = plan("--dim", 10_000, "--canaries", count, "--canaries", count - 1)["plans"]
    assert around[0]["detectable"] <= 2 * (1 + 2e-4) < around[1]["detectable"] * (1 + 4e-4)
    assert around[0]["canaries"] == count
    assert around[0]["unobserved"] == 10 * count
    assert found["plans"][0]["interval"]["epsilon"] == 2


def mechanism_mean(epsilon: float) -> float:
    """1/z for the noise multiplier z of a Gaussian mechanism at delta 1e-6, by bisection of its textbook delta."""
    low, high = 1e-3, 50.0
    while high - low > 1e-10:
        mean = (low + high) / 2
        found = norm.cdf(mean / 2 - epsilon / mean) - math.exp(epsilon) * norm.cdf(-mean / 2 - epsilon / mean)
        low, high = (low, mean) if found > 1e-6 else (mean, high)
    return high


@pytest.mark.parametrize(("dim", "claim"), [(1_000_000, 3), (1_000_000, 1), (10_000, 1)])
def test_the_canaries_that_decide_a_claim_have_90_percent_power(dim, claim):
    """A one-sided test of the mean at 0.2 %, with the null's std estimated from the directions without canaries."""

    def power(count: int) -> float:
        claimed, faulty = mechanism_mean(claim), mechanism_mean(2 * claim)
        spreads = [math.sqrt(1 / count + mean**2 / (2 * (dim - count))) for mean in (claimed, faulty)]
        return float(norm.sf((claimed + norm.isf(0.002) * spreads[0] - faulty) / spreads[1]))

    found = plan("--dim", dim, "--claim", claim, "--canaries", 100)
    count = found["claim"]["canaries"]
    assert power(count) >= 0.9 > power(count - 1)
    assert found["plans"][0]["power_against_claim"] == pytest.approx(power(100), abs=1e-6)
    assert found["plans"][0]["interval"]["epsilon"] == claim


def test_the_default_table_lists_the_usual_numbers_that_fit():
    found = plan("--dim", 700)
    assert [row["canaries"] for row in found["plans"]] == [100, 300]
    assert (found["detect"], found["claim"]) == (None, None)


def test_plan_says_when_no_number_of_canaries_is_enough():
    done = called("plan", "--dim", 1000, "--delta", "1e-6", "--claim", 0.01, "--canaries", 100)
    *_, precision, claim = done.stdout.splitlines()
    assert precision == (
        "no number of canaries up to half the dimension gives a 95 % interval within ±25 % of epsilon 0.01"
    )
    assert claim == (
        "no number of canaries would detect twice the claimed epsilon of 0.01 in 90 % of runs in this dimension"
    )


def test_plan_states_what_few_canaries_can_check_and_that_their_interval_is_wide():
    """Ten canaries can check a large claim but measure epsilon poorly: the plan says both."""
    done = called("plan", "--dim", 10**6, "--delta", "1e-6", "--claim", 16, "--canaries", 10)
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("│"))
    interval = row.split("│")[3].strip()
    claim = done.stdout.splitlines()[-1]
    assert claim == (
        "10 canaries would detect twice the claimed epsilon of 16 in 90 % of runs; their 95 % interval is still wide: "
        + interval
    )
    assert "decide" not in done.stdout


@pytest.mark.parametrize("epsilon", [3, 16])
def test_canaries_for_precision_are_the_fewest(epsilon):
    found = plan("--dim", 10**6, "--at", epsilon, "--canaries", 10)["precision"]
    assert (found["epsilon"], found["within"]) == (epsilon, 0.25)
    count = found["canaries"]
    enough, fewer = plan("--dim", 10**6, "--at", epsilon, "--canaries", count, "--canaries", count - 1)["plans"]

    def within(interval):
        return 0.75 * epsilon <= interval["low"] and interval["high"] <= 1.25 * epsilon

    assert within(enough["interval"])
    assert not within(fewer["interval"])


def test_more_canaries_detect_smaller_epsilons_with_narrower_intervals():
    """The error of the mean scales as 1/√k: four times the canaries nearly halve the smallest detectable epsilon."""
    found = plan("--dim", 10**5, "--at", 5, "--canaries", 100, "--canaries", 400, "--canaries", 1600)["plans"]
    for fewer, more in itertools.pairwise(found):
        assert more["detectable"] < 0.6 * fewer["detectable"]
        assert more["interval"]["width"] < fewer["interval"]["width"]
        assert more["interval"]["low"] < 5 < more["interval"]["high"]
        assert more["ceiling"] > fewer["ceiling"]


def test_the_table_prints_the_planned_numbers():
    done = called("plan", "--dim", "600", "--delta", "1e-6", "--detect", "5", "--claim", "4")
    for words in ("smallest detectable ε", "95 % interval at ε = 4", "power against claim 4", "canaries detect an"):
        assert words in done.stdout
    assert (done.stderr, done.returncode) == ("", 0)


def test_plan_answers_for_amplified_claims():
    scheme = ("--sampling", "poisson,probability=0.1,rounds=100", "--noise-multiplier", 1)
    arguments = ("plan", "--dim", 10_000, "--delta", "1e-5", "--claim", 7.05, *scheme)
    done = called(*arguments)
    assert (done.stderr, done.returncode) == ("", 0)
    *_, accounted, answer = done.stdout.splitlines()
    assert accounted == "noise multiplier 1: dp-accounting PLD gives epsilon 7.047, adjacency add or remove one"
    found = json.loads(called(*arguments, "--json").stdout)
    assert found["claim"]["sampling"] == {"scheme": "poisson", "probability": 0.1, "rounds": 100}
    assert (found["accounted"]["kind"], found["leg"]) == ("upper bound", "noise")
    assert found["canaries"] == max(found["legs"].values())
    decided = f"{found['canaries']} canaries decide the claimed epsilon of 7.05 in at least 90 % of honest runs"
    assert answer == f"{decided}; the noise leg needs the most"
    assert found["plans"] == []


def test_plan_says_what_a_number_of_canaries_decides_under_sampling():
    """A number below the planned one decides fewer than 90 % of honest runs, the planned one does not."""
    arguments = ("plan", "--dim", 10_000, "--delta", "1e-5", "--claim", 2.47)
    scheme = ("--sampling", "poisson,probability=0.05,rounds=40", "--noise-multiplier", 1)
    found = json.loads(called(*arguments, *scheme, "--canaries", 60, "--canaries", 80, "--json").stdout)
    few, enough = found["plans"]
    assert few["canaries"] < found["canaries"] <= enough["canaries"]
    assert few["decided"] < 0.9 <= enough["decided"]
    assert few["picks"] == pytest.approx(60 * 0.05 * 40)
    text = called(*arguments, *scheme, "--canaries", 60).stdout.splitlines()[-2]
    assert text == f"60 canaries are picked about 120 times and decide the claim in {few['decided']:.1%} of honest runs"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dim", "1000", "--canaries", "100", "--detect", "1"], "give either --canaries or --detect"),
        (["--dim", "1000", "--canaries", "999"], "canaries must be at most dim - 2, got 999"),
        (["--dim", "1000", "--canaries", "9"], "canaries must be at least 10, got 9"),
        (["--dim", "100", "--detect", "0.1"], "no number of canaries in 100 dimensions"),
        (["--dim", "11"], "--dim must be at least 12, got 11"),
        (["--dim", "1000", "--detect", "-1"], "--detect must be above 0, got -1"),
        (["--dim", "1000", "--claim", "nan"], "--claim must be finite, got nan"),
        (["--dim", "1000", "--at", "0"], "--at must be above 0, got 0"),
        (["--dim", "1000", "--delta", "1"], "delta must lie in (0, 1), got 1.0"),
        ([], "Missing option '--dim'"),
        *[
            (["--dim", "1e9", "--canaries", value], f"'--canaries': {value!r} is not a whole number.")
            for value in ("1e8.5", "1.5", "nan", "inf", "1e-3", "0x10", "")
        ],
        (["--dim", "1e9", "--canaries", "-1"], "canaries must be at least 10, got -1"),
        (["--dim", "1e999999999"], "'--dim': '1e999999999' has more than 24 digits."),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    done = called("plan", "--delta", "1e-6", *arguments)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert (done.stdout, done.returncode) == ("", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dim", "1000", "--sampling", "poisson,rounds=10"], "poisson needs probability="),
        (
            ["--dim", "1000", "--sampling", "sorted,rounds=10"],
            "must be one of poisson, random-allocation, shuffled, fixed",
        ),
        (["--dim", "1000", "--sampling", "shuffled,rounds=x"], "rounds must be a number, got 'x'"),
        (["--dim", "1000", "--sampling", "shuffled,rounds=0"], "rounds must be at least 1, got 0"),
        (["--dim", "1000", "--noise-multiplier", "1"], "--noise-multiplier belongs to a claim amplified by sampling"),
        (
            ["--dim", "1000", "--sampling", "shuffled,rounds=10"],
            "--sampling needs a claim: give --claim too",
        ),
        (
            ["--dim", "1000", "--claim", "1", "--sampling", "shuffled,rounds=10,size=3"],
            "shuffled has rounds, epochs, got 'size=3'",
        ),
        (
            ["--dim", "1000", "--claim", "1", "--sampling", "shuffled,rounds=10", "--detect", "1"],
            "--sampling only plans for a claim",
        ),
        (
            ["--dim", "1000", "--claim", "1", "--sampling", "shuffled,rounds=10", "--canaries", "9"],
            "canaries must be at least 10, got 9",
        ),
        (
            ["--dim", "1000", "--claim", "0", "--sampling", "shuffled,rounds=9"],
            "--claim must be above 0, got 0",
        ),
        (
            ["--dim", "1000", "--claim", "1", "--sampling", "poisson,probability=2,rounds=9"],
            "probability must lie in (0, 1], got 2",
        ),
    ],
)
def test_bad_input_about_amplified_claims_is_one_line_and_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "--delta", "1e-6", *arguments])
    said = capsys.readouterr()
    assert message in said.err
    assert (stop.value.code, said.err.count("\n"), said.out) == (2, 1, "")


def test_plot_writes_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    done = called("plan", "--dim", 10_000, "--delta", 1e-6, "--plot", tmp_path / "plan.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    for name in ("plan.txt", "plan.gif"):
        bad = called("plan", "--dim", 10_000, "--delta", 1e-6, "--canaries", 100, "--plot", tmp_path / name)
        assert bad.returncode == 2
        assert "must end in .png, .svg or .pdf" in bad.stderr


def test_a_hundred_million_canaries_are_planned_in_seconds():
    """Neither time nor memory grows with the number of canaries."""
    found = plan("--dim", "1e9", "--canaries", "1e8")["plans"][0]
    assert found["canaries"] == 10**8
    assert found["unobserved"] == 900_000_000
    assert 18 < found["ceiling"] < 19
    assert found["detectable"] < 0.01
