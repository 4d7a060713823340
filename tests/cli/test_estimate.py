import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from in_process import called
from scipy.stats import norm

from coalmine.cli.main import app

DIM, DELTA = 1_000_000, 1e-5
QUANTILES = norm.ppf((np.arange(1000) + 0.5) / 1000) / math.sqrt(DIM)


def coalmine(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-W", "error", "-m", "coalmine", *map(str, arguments)]
    done = subprocess.run(words, input=stdin, capture_output=True)
    return subprocess.CompletedProcess(words, done.returncode, done.stdout.decode(), done.stderr.decode())


def estimate(*arguments: object, stdin: bytes = b"", run=called) -> dict:
    done = run("estimate", *arguments, "--delta", DELTA, "--json", stdin=stdin)
    assert done.stderr == ""
    return json.loads(done.stdout) | {"exit_code": done.returncode}


def shifted(shift: float) -> np.ndarray:
    """1,000 cosines that lie on the quantiles of N(shift, 1), in units of the null's std."""
    return QUANTILES + shift / math.sqrt(DIM)


def honest_noise(epsilon: float, delta: float) -> float:
    """The noise multiplier of the Gaussian mechanism, by bisection of its textbook delta."""
    low, high = 0.01, 100.0
    while high - low > 1e-10:
        z = (low + high) / 2
        found = norm.cdf(1 / (2 * z) - epsilon * z) - math.exp(epsilon) * norm.cdf(-1 / (2 * z) - epsilon * z)
        low, high = (z, high) if found > delta else (low, z)
    return high


def text(lines: list[str]) -> bytes:
    return "\n".join(lines).encode() + b"\n"


def to_lines(values: np.ndarray) -> list[str]:
    return [repr(float(value)) for value in values]


@pytest.mark.parametrize(("shift", "fitted", "bound"), [(1, 4.393278, 2.924243), (2, 10.021311, 7.908868)])
def test_estimates_match_the_authors_code_for_a_closed_form_null(tmp_path, shift, fitted, bound):
    """The authors' code gives these for normal quantiles at significance 0.05; it uses a normal null at this dim."""
    np.save(tmp_path / "scores.npy", shifted(shift))
    found = estimate(tmp_path / "scores.npy", "--null-std", 1 / math.sqrt(DIM))
    assert found["paper"]["epsilon"] == pytest.approx(fitted, abs=2e-6)
    assert found["paper"]["lower_bound"] == pytest.approx(bound, abs=2e-6)
    assert found["lower_bound"] < found["paper"]["lower_bound"]
    assert found["interval"][0] < found["epsilon"] < found["interval"][1]
    assert found["ceiling"] == "inf"
    assert (found["verdict"], found["exit_code"]) == (None, 0)
    exact = estimate(tmp_path / "scores.npy", "--dim", DIM)
    assert exact["paper"]["epsilon"] == pytest.approx(fitted, abs=2e-6)
    assert exact["paper"]["lower_bound"] == pytest.approx(bound, abs=3e-4)  # the exact null's tail is lighter


@pytest.mark.parametrize(("shift", "bound"), [(1, 1.626726), (2, 3.771945)])
def test_estimates_match_the_authors_code_for_unobserved_scores(tmp_path, shift, bound):
    np.savez(tmp_path / "scores.npz", observed=shifted(shift), unobserved=QUANTILES)
    found = estimate(tmp_path / "scores.npz", "--method", "paper")
    assert found["lower_bound"] == found["paper"]["lower_bound"] == pytest.approx(bound, abs=2e-6)
    assert found["ceiling"] < 6.3
    assert found["unobserved"] == 1000


def as_npy(values: np.ndarray, **arguments: object) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **arguments)
    return file.getvalue()


def as_npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def as_parquet(**columns: object) -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


SCORES = shifted(1)[::10]
OTHERS = QUANTILES[::5]
LABELS = ["observed"] * SCORES.size + ["unobserved"] * OTHERS.size
ONE_SAMPLE = {
    "numbers.csv": lambda: text(to_lines(SCORES)),
    "header.csv": lambda: text(["# cosines of a run", "Cosine", *to_lines(SCORES), ""]),
    "byte-order-mark.csv": lambda: b"\xef\xbb\xbf" + text(["score", *to_lines(SCORES)]).replace(b"\n", b"\r\n"),
    "canary.csv": lambda: text(["canary,score", *(f"{i},{x}" for i, x in enumerate(to_lines(SCORES)))]),
    "row.npy": lambda: as_npy(SCORES),
    "column.npy": lambda: as_npy(SCORES[:, None]),
    "one.npz": lambda: as_npz(anything=SCORES),
    "column.parquet": lambda: as_parquet(canary=np.arange(SCORES.size), score=SCORES),
}
TWO_SAMPLES = {
    "label.csv": lambda: text(
        ["kind,score", *(f"{k},{x}" for k, x in zip(LABELS, to_lines(np.append(SCORES, OTHERS)), strict=True))]
    ),
    "unnamed-label.csv": lambda: text(
        [f"{x};{k}" for k, x in zip(LABELS, to_lines(np.append(SCORES, OTHERS)), strict=True)]
    ),
    "flag.csv": lambda: text(
        [
            "score,observed",
            *(f"{x},{int(k == 'observed')}" for k, x in zip(LABELS, to_lines(np.append(SCORES, OTHERS)), strict=True)),
        ]
    ),
    "pair.csv": lambda: text(
        [
            "observed,unobserved",
            *(f"{x},{y}" for x, y in zip(to_lines(SCORES) + [""] * SCORES.size, to_lines(OTHERS), strict=True)),
        ]
    ),
    "two.npz": lambda: as_npz(observed=SCORES, unobserved=OTHERS, rounds=np.arange(3)),
    "flag.parquet": lambda: as_parquet(
        score=np.append(SCORES, OTHERS), observed=[label == "observed" for label in LABELS]
    ),
    "pair.parquet": lambda: as_parquet(observed=[*SCORES, *[None] * SCORES.size], unobserved=OTHERS),
}


@pytest.fixture(scope="module")
def one_sample() -> dict:
    return estimate("-", "--dim", DIM, stdin=text(to_lines(SCORES)), run=coalmine)


@pytest.fixture(scope="module")
def two_samples(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("scores") / "unobserved.csv"
    file.write_bytes(text(["unobserved", *to_lines(OTHERS)]))
    return estimate("-", "--unobserved", file, stdin=as_npy(SCORES), run=coalmine)


@pytest.mark.parametrize("name", ONE_SAMPLE)
def test_every_format_gives_the_same_result(name, tmp_path, one_sample):
    (tmp_path / name).write_bytes(ONE_SAMPLE[name]())
    assert estimate(tmp_path / name, "--dim", DIM) == one_sample


@pytest.mark.parametrize("name", TWO_SAMPLES)
def test_one_file_may_hold_observed_and_unobserved_scores(name, tmp_path, two_samples):
    (tmp_path / name).write_bytes(TWO_SAMPLES[name]())
    assert estimate(tmp_path / name) == two_samples


def test_a_normal_null_equals_the_cosine_null_in_many_dimensions(one_sample):
    found = estimate("-", "--null-std", 1 / math.sqrt(DIM), stdin=as_npz(scores=SCORES))
    assert found["epsilon"] == pytest.approx(one_sample["epsilon"], rel=1e-9)
    assert found["lower_bound"] == pytest.approx(one_sample["lower_bound"], rel=1e-4)


def test_the_table_names_everything_and_calls_no_estimate_a_bound():
    done = called("estimate", "-", "--dim", DIM, "--delta", DELTA, "--confidence", 0.9, stdin=text(to_lines(SCORES)))
    for words in (
        "estimate",
        "interval, 90 %",
        "lower bound for any law, 90 %",
        "lower bound if scores are normal, 90 %",
        "floor",
        "Anderson-Darling",
        "variance: null",
    ):
        assert words in done.stdout
    assert "the paper's estimate (not a bound)" in done.stdout
    assert "the paper's ε_lo (not a bound)" in done.stdout
    assert done.returncode == 0


def judged(mean: float, *options: object, run=called) -> dict:
    scores = norm.ppf((np.arange(1000) + 0.5) / 1000) + mean
    return estimate("-", "--null-std", 1, *options, stdin=as_npy(scores), run=run)


def test_a_true_claim_passes_and_twice_the_noise_is_a_violation():
    z = honest_noise(3.0, DELTA)
    passed = judged(1 / z, "--claim", 3, "--known-others")
    assert (passed["verdict"], passed["exit_code"]) == ("PASS", 0)
    violated = judged(2 / z, "--claim", 3)
    assert (violated["verdict"], violated["exit_code"]) == ("VIOLATION", 1)
    assert "lower bound" in violated["reason"]


@pytest.mark.parametrize(("level", "verdict"), [(0.0023, "PASS"), (0.0017, "VIOLATION")])
def test_the_mean_is_tested_at_0_2_percent(level, verdict):
    """A mean whose one-sided p-value under the claim lies just above, and just below, 0.2 %."""
    mean = 1 / honest_noise(3.0, DELTA) + norm.isf(level) / math.sqrt(1000)
    assert judged(mean, "--claim", 3, "--known-others")["verdict"] == verdict


def test_scores_without_a_signal_confirm_no_claim():
    found = judged(0.0, "--claim", 3)
    assert (found["verdict"], found["exit_code"]) == ("UNDERPOWERED", 3)
    assert any("nothing was detected" in warning for warning in found["warnings"])


def test_a_low_mean_passes_only_with_known_others():
    """Half the claim's mean: either less leaks, or real updates dilute it; with known others it is the former."""
    mean = 0.5 / honest_noise(3.0, DELTA)
    found = judged(mean, "--claim", 3)
    assert found["verdict"] == "UNDERPOWERED"
    assert any("--known-others" in warning for warning in found["warnings"])
    assert "real updates could hide missing noise" in found["reason"]
    assert "`" not in found["reason"]  # no advice that only applies to Python code
    assert judged(mean, "--claim", 3, "--known-others")["verdict"] == "PASS"


def test_unobserved_scores_refute_a_claim_and_cannot_confirm_one():
    scores = as_npz(observed=shifted(2), unobserved=QUANTILES)
    refuted = estimate("-", "--claim", 1, stdin=scores)
    assert (refuted["verdict"], refuted["exit_code"]) == ("VIOLATION", 1)
    undecided = estimate("-", "--claim", 10, stdin=scores)
    assert (undecided["verdict"], undecided["exit_code"]) == ("UNDERPOWERED", 3)
    assert "cannot confirm" in undecided["reason"]
    assert "at most" in undecided["reason"]  # a bound from 1,000 and 1,000 scores stays below 10


def test_strong_orthonormal_canaries_get_a_note_with_the_right_null():
    """1,000 canaries of mean 1.85 null stds in R^10000: Σg² = 0.44 by design, so their null has variance 0.56/9000."""
    scores = (norm.ppf((np.arange(1000) + 0.5) / 1000) + 1.85) / 100
    (note,) = estimate("-", "--dim", 10_000, stdin=as_npy(scores))["warnings"]
    std = math.sqrt((1 - float(scores @ scores)) / 9000)
    assert f"--null-std {std:.6g} --null-dof 9000" in note


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dim", 1000, "--null-dof", 10), "--null-dof needs --null-std"),
        (("--dim", 1000, "--known-others"), "--known-others needs --claim"),
    ],
)
def test_options_without_effect_are_rejected(options, said):
    done = called("estimate", "-", *options, "--delta", DELTA, stdin=as_npy(SCORES))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_reversed_signs_and_a_wrong_null_get_a_note():
    scores = norm.ppf((np.arange(100) + 0.5) / 100) * 3 - 5
    warnings = " ".join(estimate("-", "--null-std", 1, stdin=as_npy(scores))["warnings"])
    assert "is the sign reversed?" in warnings
    assert "is this the right null" in warnings


GOOD = to_lines(SCORES)
BAD_FILES = {
    "empty.csv": (b"", "is empty"),
    "comments.csv": (b"# nothing\n\n", "is empty"),
    "header-only.csv": (b"score\n", "holds no scores"),
    "blank.csv": (text(["score", "", *GOOD[:20], "", *GOOD[20:], ""]), "line 23 of "),
    "underscores.csv": (text([*GOOD, "1_0"]), "score 101 of 101"),
    "nan.csv": (text([*GOOD, "nan"]), "must be finite, got nan (1 of 101 values)"),
    "infinite.npy": (as_npy(np.append(SCORES, np.inf)), "must be finite, got inf"),
    "constant.csv": (text(["0.1"] * 20), "all 20 observed scores are equal (0.1), so no Gaussian can be fitted"),
    "nine.csv": (text(GOOD[:9]), "at least 10 observed scores, got 9"),
    "text.csv": (text(["score", *GOOD, "many"]), "score 101 of 101"),
    "words.csv": (b"to be\nor not\n", "unclear meaning ('to be')"),
    "two-columns.csv": (text([f"{i},{x}" for i, x in enumerate(GOOD)]), "unclear meaning (column 1, column 2)"),
    "names.csv": (text(["loss,rank", *(f"{x},{x}" for x in GOOD)]), "unclear meaning ('loss', 'rank')"),
    "hole.csv": (text(["canary,score", *(f"1,{x}" for x in GOOD), "2,"]), "score 101 of 101"),
    "ragged.csv": (text(["canary,score", *(f"1,{x}" for x in GOOD), "2"]), "row 102 of"),
    "twice.csv": (text(["score,score", *(f"{x},{x}" for x in GOOD)]), "more than one column named 'score'"),
    "latin.csv": ("\xb5\n".encode("latin-1"), "UTF-8"),
    "unobserved.csv": (text(["unobserved", *GOOD]), "holds no observed scores"),
    "too-long.csv": (text(["0.1" * 100_000]), "not a table"),
    "large.csv": (text([*GOOD, "1e300"]), "at most 1e+60"),
    "tiny.csv": (text([f"{x:.6e}" for x in 1e-200 * SCORES]), "must differ by at least 1e-60, got"),
    "largest.npy": (as_npy(np.append(SCORES, 1e308)), "at most 1e+60"),
    "two.csv": (text(GOOD[:2]), "at least 10 observed scores, got 2"),
    "one.csv": (text(GOOD[:1]), "at least 10 observed scores, got 1"),
    "truncated.npy": (as_npy(SCORES)[:-100], "is damaged"),
    "header.npy": (as_npy(SCORES).replace(b"}", b" "), "is damaged"),
    "pickled.npy": (as_npy(np.array([*GOOD], dtype=object), allow_pickle=True), "holds Python objects"),
    "objects.npz": (as_npz(scores=np.array([*GOOD], dtype=object)), "holds Python objects"),
    "truncated.npz": (as_npz(scores=SCORES)[:-100], "is damaged"),
    "three.npz": (as_npz(a=SCORES, b=SCORES, c=SCORES), "one array, or arrays named observed and unobserved"),
    "no-arrays.npz": (as_npz(), "one array, or arrays named"),
    "square.npy": (as_npy(SCORES.reshape(10, 10)), "one row of scores, got shape (10, 10)"),
    "complex.npy": (as_npy(SCORES + 1j), "real numbers"),
    "nothing.npy": (as_npy(SCORES[:0]), "is empty"),
    "scores.txt": (text(GOOD), "must end in .csv, .npy, .npz, .parquet, got '.txt'"),
    "scores": (text(GOOD), "got 'no extension'"),
    "text.parquet": (text(GOOD), "not a parquet file"),
}

OWN_PROCESS = ("empty.csv", "objects.npz")


def assert_bad_input(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert message in done.stderr
    assert done.stderr.startswith("coalmine: ")
    assert done.stderr.count("\n") == 1
    assert (done.stdout, done.returncode) == ("", 2)


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_and_exit_code_2(name, tmp_path):
    content, message = BAD_FILES[name]
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    run = coalmine if name in OWN_PROCESS else called
    assert_bad_input(run("estimate", tmp_path / name, "--null-std", "0.001", "--delta", "1e-6"), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.csv", "--dim", "10"], "'nowhere.csv' does not exist"),
        (["/", "--dim", "10"], "'/' is a directory"),
        (["-", "--dim", "10"], "standard input is empty"),
        (["-"], "standard input is empty"),
        (["-", "--unobserved", "-"], "cannot both be standard input"),
        (["-", "--dim", "10", "--null-std", "1"], "give one of --dim, --unobserved and --null-std"),
    ],
)
def test_a_bad_source_is_one_line_and_exit_code_2(arguments, message):
    assert_bad_input(called("estimate", *arguments, "--delta", "1e-6"), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the scores of unobserved canaries are unknown"),
        (["--dim", "1"], "--dim must be at least 2, got 1"),
        (["--null-std", "0"], "--null-std must lie in"),
        (["--null-std", "0.001", "--claim", "-1"], "claim must be above 0"),
        (["--null-std", "0.001", "--delta", "2"], "delta must lie in (0, 1), got 2.0"),
        (["--null-std", "0.001", "--confidence", "1"], "confidence must lie in (0, 1), got 1.0"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(arguments, message):
    done = called("estimate", "-", "--delta", "1e-6", *arguments, stdin=as_npy(SCORES))
    assert_bad_input(done, message)


def test_dim_rejects_scores_that_are_not_cosines():
    done = called("estimate", "-", "--dim", "100", "--delta", "1e-6", stdin=as_npy(SCORES * DIM))
    assert_bad_input(done, "cosines in [-1, 1]")


@pytest.mark.full
def test_parquet_without_pyarrow_names_the_extra(tmp_path):
    Path(tmp_path / "scores.parquet").write_bytes(b"PAR1")
    code = "import sys; sys.modules['pyarrow'] = None; from coalmine.cli.main import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", code, "estimate", tmp_path / "scores.parquet", "--dim", "9", "--delta", "0.1"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert_bad_input(done, "pip install 'coalmine[parquet]'")


def test_ten_thousand_scores_take_less_than_a_second(tmp_path, capsys):
    scores = norm.ppf((np.arange(10_000) + 0.5) / 10_000) + 1
    np.savetxt(tmp_path / "scores.csv", scores)
    words = [
        "estimate",
        str(tmp_path / "scores.csv"),
        "--null-std",
        "1",
        "--delta",
        "1e-6",
        "--claim",
        "5",
        "--known-others",
    ]
    took = []
    for _ in range(3):
        start = time.process_time()
        assert app.main(words, standalone_mode=False) == 0
        took.append(time.process_time() - start)
    assert min(took) < 1


def test_damaged_numpy_files_are_one_line(tmp_path):
    """A Python 2 header is read without a warning, and a signalling NaN is rejected without one."""
    path = tmp_path / "old.npy"
    np.save(path, np.linspace(-1, 3, 12, dtype="<f4"))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(12,), ", b"(12L,),"))
    done = called("estimate", str(path), "--null-std", "1", "--delta", "1e-6")
    assert (done.returncode, done.stderr) == (0, "")
    path.write_bytes(content[:-4] + b"\x01\x00\xa0\x7f")
    done = called("estimate", str(path), "--null-std", "1", "--delta", "1e-6")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "finite" in done.stderr
