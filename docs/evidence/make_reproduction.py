"""docs/evidence/reproduction.md and its pictures, from what `python -m reproduction` wrote.

    python -m docs.evidence.make_reproduction              from docs/evidence/reproduction/*.json
    python -m docs.evidence.make_reproduction FOLDER…      take the JSON files of these folders first

Every number on the page comes from those files. Of an experiment's two scales the paper's is shown where there is one.
"""

import re
import shutil
import sys
from pathlib import Path

from coalmine.data.catalogue import DATASETS
from reproduction.command import EXPERIMENTS
from reproduction.experiment import Experiment, Found, Table, load_experiment, save_figure
from reproduction.experiment_options import Options
from reproduction.run_numbers import read_json
from reproduction.training_configs import CHARACTERS_USERS, characters, words

HERE = Path(__file__).parent
FOLDER = HERE / "reproduction"
NAMES = ("table-2", *EXPERIMENTS)
FILES = re.compile(rf"({'|'.join(NAMES)})(-small|-paper(-[0-9]+-examples)?)|table-2")  # what the page is made of
HEAD = """# The paper, reproduced

*One-shot Empirical Privacy Estimation for Federated Learning* (Andrew et al., ICLR 2024) has many
tables and figures. Do we get the same numbers? Do its claims hold? A few experiments ask what the paper did not.

One command for each table and figure, in a clone with the extras `simulation` and `report`:

    python -m reproduction NAME --scale small                 a quick look, minutes on two cores
    python -m reproduction NAME --scale paper --plan          the runs at the paper's size, and how far they are
    python -m reproduction NAME --scale paper --device cuda --data-dir D --out DIR

Runs of paper size resume where a kill or `--minutes` stopped them. `--only 0.0496,0.2317` trains some noise
multipliers only. Experiments with the same `--out` share their runs. Each writes `NAME-SCALE.json` with every number,
a picture, and for each claim whether it holds. With `--rounds`, `--max-examples` or `--originals` the files are named
after them too. This page is made of those files by `python -m docs.evidence.make_reproduction`.

A *claim* is a statement of the paper, or of ours, that the numbers can refute:

SUMMARY

The sections below say it for each experiment. Other data stand in for the paper's, so mostly sizes
and directions can be compared, not numbers.

## What stands in for what

The paper's data are Stack Overflow and federated EMNIST. Neither was ever read here. The loaders for them are tested
on small files in their formats ([data](../how-to/data.md)), and `--originals` trains on them where you have them.
Stack Exchange (15 sites) stands in for Stack Overflow, and MNIST by NIST writer for EMNIST. Results name them so.
Models, rounds, clients per round, learning rates, momentum and adaptive clipping are the paper's.

- Stack Exchange has USERS users, where Stack Overflow has as many as ROUNDS rounds of CLIENTS take. So they come
  again, at the earliest APART rounds later. They train on at most SENTENCES sentences a round (`--max-examples`),
  which is one step. A canary still takes part once, so the audit measures what it measures in the paper. A client
  takes part more often.
- MNIST by NIST writer has WRITERS writers where the paper has PAPERS users. WRITE of them take part in each of PAGES
  rounds. These are five epochs of the paper's users.
- delta is m^-1.1 with the paper's m, not with the number of users who stand in.
- Canaries send ten times the clip norm. An adaptive clip counts them as too long and settles a little higher.
- At scale small everything but `canife` is trained on scikit-learn's digits, which come with it. That shows the same
  directions. Nothing there is to be compared with the paper's numbers. `canife` needs Fashion-MNIST at both scales
  ([data](../how-to/data.md)).

`known-others` should meet the analytical ε *of updates*. An adaptive clip's noisy count is a release too, and takes
its share of the noise. So the updates have a little more.
"""
QUESTIONS = {
    "table-2": "Does the estimate find the ε of a Gaussian mechanism whose ε is known?",
    "accuracy": "How much accuracy do canaries cost when the model predicts next words?",
    "cost": "How much accuracy do canaries cost when the model reads handwriting?",
    "stackoverflow": "How does the measured ε fall with the noise when the model predicts next words?",
    "emnist": "How does the measured ε fall with the noise when the model reads handwriting?",
    "presentations": "How does the measured ε grow with the number of rounds that a canary takes part in?",
    "normality": "The paper's estimate assumes that cosines are normal. Are they?",
    "multirun": "Is one run with 1,000 canaries as good as ten runs with 100 each?",
    "canife": "How do random canaries compare with those that CANIFE crafts?",
    "beyond": "What do correlated noise, pauses between check-ins, more canaries and sampling change?",
    "amplification": "Does an audit of one run meet the ε that an accountant computes for sampled rounds?",
    "errata": "Which numbers in the paper do not follow from its text?",
}


def make(*folders: Path) -> None:
    """The page, after taking over what is in these folders."""
    FOLDER.mkdir(exist_ok=True)
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            if FILES.fullmatch(path.stem):
                shutil.copyfile(path, FOLDER / path.name)
    parts = [_head(), *(_section(name) for name in NAMES)]
    (HERE / "reproduction.md").write_text("\n".join(part for part in parts if part), encoding="utf-8")


def _head() -> str:
    """The beginning, with the sizes that the configs have and a line for each experiment."""
    options = Options(out=FOLDER, scale="paper")
    words_run, characters_run = words(options), characters(options)
    sizes = {
        "USERS": DATASETS["stackexchange"].users,
        "ROUNDS": words_run.rounds,
        "CLIENTS": words_run.participation.clients_per_round,
        "APART": words_run.participation.separation,
        "SENTENCES": words_run.task.max_examples_per_client,
        "WRITERS": DATASETS["mnist-by-writer"].users,
        "PAPERS": CHARACTERS_USERS,
        "WRITE": characters_run.participation.clients_per_round,
        "PAGES": characters_run.rounds,
    }
    text = HEAD.replace("SUMMARY", markdown(_summary()))
    for name, size in sizes.items():
        text = re.sub(rf"\b{name}\b", f"{size:,}", text)
    return text


def _summary() -> Table:
    """What was run at which size, how long it trained, and how many of its claims hold."""
    rows = []
    for name in NAMES:
        path = _file(name)
        if path is None:
            rows.append((f"`{name}`", "not run", "-", "-", "-"))
            continue
        found = read_json(path)
        outcomes = [check.outcome for check in load_experiment(name).account.checks(found)]
        counts = [f"{outcomes.count(word)} {word}" for word in dict.fromkeys(outcomes)]
        minutes = f"{found['seconds'] / 60:.1f}" if found.get("seconds") else "-"
        rows.append((f"`{name}`", _scale(found), found.get("machine") or "-", minutes, ", ".join(counts)))
    return Table("", ("experiment", "scale", "on", "minutes of training", "claims"), tuple(rows), left=3)


def _file(name: str) -> Path | None:
    """The numbers of an experiment, those of the paper's size where they are there."""
    paths = (FOLDER / f"{stem}.json" for stem in (f"{name}-paper", name, f"{name}-small"))
    return next((path for path in paths if path.is_file()), None)


def _scale(found: Found) -> str:
    """That of the numbers; the first files of Table 2 did not say theirs."""
    return str(found.get("scale", "paper"))


def _section(name: str) -> str:
    """One experiment; empty where it was never run."""
    path = _file(name)
    if path is None:
        return ""
    experiment = load_experiment(name)
    found = read_json(path)
    lines = [
        f"## {experiment.title}",
        "",
        f"{QUESTIONS[name]} {experiment.account.conclusion(found)}",
        "",
        _made_by(experiment, found, path),
        "",
    ]
    others = sorted(other for other in FOLDER.glob(f"{name}-paper-*.json") if FILES.fullmatch(other.stem))
    lines += [line for other in others for line in (_longer(other), "")]
    if experiment.account.draw is not None:
        picture = path.with_suffix(".png")
        save_figure(picture, experiment, found)
        lines += [f"![{experiment.title}](reproduction/{picture.name})", ""]
    for table in experiment.account.tables(found):
        if table.rows:
            lines += [f"{table.title}:", "", markdown(table), ""]
    checks = tuple((check.outcome, check.claim, check.detail) for check in experiment.account.checks(found))
    lines += [markdown(Table("", ("outcome", "claim", "numbers"), checks, left=3))]
    return "\n".join(lines) + "\n"


def _longer(path: Path) -> str:
    """What came of some of the runs of paper size when clients trained on more examples a round."""
    found, most = read_json(path), path.stem.split("-")[-2]
    noises = ",".join(f"{reading['noise_multiplier']:g}" for reading in found["readings"])
    accuracies = ", ".join(
        f"{reading['accuracy']:.1%} at noise {reading['noise_multiplier']:g} "
        f"(clip norm at the end {reading['clip_norms'][-1]:.3g})"
        for reading in found["readings"]
    )
    command = f"python -m reproduction {found['name']} --scale paper --only {noises} --max-examples {most}"
    return (
        f"Clients that train on up to {most} examples a round, `{command}`: {accuracies}, "
        f"{found['seconds'] / 60:.1f} minutes on {found['machine']}; numbers in [{path.name}](reproduction/{path.name})."
    )


def _made_by(experiment: Experiment, found: Found, path: Path) -> str:
    """The command, on what it ran, and for how long."""
    text = f"`python -m reproduction {experiment.name} --scale {_scale(found)}`"
    if found.get("seconds"):
        text += f": {found['seconds'] / 60:.1f} minutes of training"
        text += f" on {found['machine']}" if found.get("machine") else ""
        text += ", runs shared with other experiments counted in each" if found.get("readings") else ""
    text += f"; numbers in [{path.name}](reproduction/{path.name})."
    if _scale(found) == "small" and (found.get("readings") or found.get("pairs")):
        text += " A quick look at the directions: the paper's size was not run."
    if found.get("missing"):
        text += f" Not finished: {len(found['missing'])} runs."
    return text


def markdown(table: Table) -> str:
    """A table in Markdown: words to the left, numbers to the right."""
    sides = [":--" if place < table.left else "--:" for place in range(len(table.columns))]
    lines = [f"| {' | '.join(table.columns)} |", f"|{'|'.join(sides)}|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in table.rows])


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:]))
