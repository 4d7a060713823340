"""What a person sees of an audited training: the line at its start, the bar with the running verdict, the dashboards."""

import io
import re
import sys
import types

import numpy as np
import pytest
from statements import visible_text

from coalmine import Audit, Claim, mechanism_epsilon
from coalmine.integrations.framework_audit import FrameworkAudit
from coalmine.integrations.recorder import FinishedRun, Trainer
from coalmine.integrations.setup import set_up_audit
from coalmine.log.run_directory import RunDirectory
from coalmine.report.document import report_text
from coalmine.report.statement import read_statement

DIM, CANARIES, ROUNDS, DELTA = 2_000, 100, 12, 1e-5
CLAIM = float(mechanism_epsilon(1.0, delta=DELTA))


class ToyAudit(FrameworkAudit):
    """An integration of a loop that adds noise of its own size."""

    trainer = Trainer("toy", "numpy", "client")

    def finish(self, *, claim=None, task=None):
        return self.conclude(claim, FinishedRun(noise=1.0), task=task)


def trained(noise=1.0, *, claim=CLAIM, rounds=ROUNDS, directory=None, planned=ROUNDS, **follow):
    core = Audit(DIM, canaries=CANARIES, seed=b"toy", delta=DELTA, rounds=ROUNDS, claim=claim, directory=directory)
    audit = ToyAudit(core, privacy={"noise_multiplier": 1.0, "clip_norm": 1.0})
    audit.follow(planned, **follow)
    rng = np.random.default_rng(1)
    for number in range(1, rounds + 1):
        present = core.canaries_in_round(number)
        release = core.updates(present, 1.0) + noise * rng.normal(size=DIM)
        core.observe_round(number, release, present=present, others=np.zeros(DIM), noise_std=1.0, clip_norm=1.0)
        audit.recorder.add_round(number, canaries=len(present), loss=0.5)
    with audit:
        return audit.finish()


def test_a_line_at_each_end_says_what_to_store(tmp_path, capsys):
    trained(directory=tmp_path / "run", claim=Claim(CLAIM, unit="hospital"))
    printed = capsys.readouterr()
    assert printed.out == ""
    line, opening, last = printed.err.splitlines()
    assert line.startswith("coalmine audits 12 rounds with 100 canaries; claim: ε ≤ 4.377 at δ 1e-5 for one hospital; ")
    commitment = re.search(r"store this commitment elsewhere: (\w{64})$", line)[1]
    assert commitment in (tmp_path / "run" / "audit" / "record.json").read_text()
    assert f"written to {tmp_path / 'run'}; " in line
    first = re.fullmatch(r"coalmine has recorded round 1; store this opening elsewhere: (\w{32})", opening)[1]
    assert RunDirectory(tmp_path / "run").map_rounds().opening == first
    digest = re.fullmatch(r"coalmine has written the result; store this log digest elsewhere: (\w{32})", last)[1]
    assert RunDirectory(tmp_path / "run").read_result()["log_digest"] == digest


def test_a_unit_is_named_once_and_said_everywhere(tmp_path, capsys):
    result, run = trained(directory=tmp_path / "run", unit="hospital"), tmp_path / "run"
    assert "for one hospital; " in capsys.readouterr().err
    assert result.claim.unit == result.trainer.privacy_unit == "hospital"
    assert "for one hospital" in str(result).splitlines()[0]
    statement = read_statement(run)
    page = visible_text(report_text([run]))
    assert "as if it were a hospital" in page
    assert "for a client" not in page
    assert "for a hospital that takes part once" in statement.items["evidence.verdict"].text
    assert statement.items["guarantee.unit"].text == "one hospital, with everything that it contributes"


def test_a_unit_without_a_claim_names_what_was_measured(capsys):
    assert "hospital" in str(trained(claim=None, unit="hospital"))


@pytest.mark.parametrize("bad", ["", " ", "two\nlines", 5, "x" * 61])
def test_a_unit_that_cannot_stand_in_a_sentence_is_refused(bad):
    with pytest.raises(ValueError, match="unit must name what is protected, such as"):
        set_up_audit([("w", DIM)], canaries=CANARIES, seed=b"toy", delta=DELTA, unit=bad)


@pytest.mark.parametrize("own", [False, True])
def test_a_claim_that_states_another_unit_is_refused_before_anything_is_written(own, tmp_path):
    terms = {"canaries": CANARIES, "seed": b"toy", "delta": DELTA, "claim": Claim(CLAIM, unit="user")}
    given = {"audit": Audit(DIM, **terms)} if own else {**terms, "directory": tmp_path / "run"}
    with pytest.raises(ValueError, match="unit must be the one that the claim states, 'user', got 'hospital'"):
        set_up_audit([("w", DIM)], unit="hospital", **given)
    assert not (tmp_path / "run").exists()


def test_a_training_without_claim_or_directory_says_so(capsys):
    trained(claim=None, planned=None)
    line = capsys.readouterr().err
    assert line == (
        "coalmine audits this training with 100 canaries; no claim, so nothing can pass; nothing is written "
        "(directory= keeps a report)\n"
    )


def test_nothing_is_said_if_progress_is_false(capsys):
    trained(progress=False)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("noise", "verdict"), [(1.0, "nothing refutes the claim so far"), (0.3, "VIOLATION since round 1")]
)
def test_a_bar_in_a_terminal_has_the_verdict_so_far(noise, verdict, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    trained(noise)
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", sys.stderr.getvalue())
    assert "12/12" in shown
    assert verdict in shown


def test_no_bar_is_drawn_into_a_file(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    trained()
    assert sys.stderr.getvalue().count("\n") == 1
    assert "\x1b" not in sys.stderr.getvalue()


def test_a_notebook_has_the_bar_of_tqdm(monkeypatch):
    bars = []

    class Bar:
        def __init__(self, **settings):
            self.n, self.texts, self.settings = settings["initial"], [], settings
            bars.append(self)

        def set_postfix_str(self, text, refresh):
            self.texts.append(text)

        def update(self, count):
            self.n += count

        def close(self):
            self.closed = True

    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Bar))
    trained()
    (bar,) = bars
    assert (bar.n, bar.settings["total"], bar.closed) == (ROUNDS, ROUNDS, True)
    assert set(bar.texts) == {"nothing refutes the claim so far"}


def test_dashboards_get_each_round_and_the_result(monkeypatch, tmp_path):
    logged = []
    run = types.SimpleNamespace(define_metric=lambda *_, **__: None, log=logged.append)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    events = []
    writer = types.SimpleNamespace(add_scalar=lambda *scalar: events.append(scalar), flush=lambda: None)
    folders = []
    board = types.SimpleNamespace(SummaryWriter=lambda folder: (folders.append(folder), writer)[1])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    result = trained(directory=tmp_path / "run", log_to=["tensorboard", "wandb"])
    assert folders == [str(tmp_path / "run" / "tensorboard")]
    assert ("coalmine/loss", 0.5, 12) in events
    assert ("coalmine/claimed epsilon", CLAIM, 12) in events
    measured = result["known-others"].headline.estimate.epsilon
    assert ("coalmine/epsilon/known-others", measured, 12) in events
    assert {"coalmine/epsilon/known-others": measured, "coalmine/round": 12} in logged
    assert sum(name == "coalmine/loss" for name, *_ in events) == ROUNDS


def test_an_unknown_dashboard_is_one_line():
    with pytest.raises(
        ValueError, match=r"log_to must be one or more of tensorboard, mlflow, wandb, got 'tensorbord'$"
    ):
        trained(log_to="tensorbord")
