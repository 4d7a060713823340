"""Section 5.1: a CNN of 1.2 million parameters on handwriting, from all iterates and from the final model."""

from functools import partial

from coalmine.reproduction import epsilon_table
from coalmine.reproduction.bases import characters
from coalmine.reproduction.experiment import RUNS, Experiment, Found
from coalmine.reproduction.paper import EMNIST
from coalmine.reproduction.runs import Follow, PlannedRun
from coalmine.reproduction.setting import Setting


def plan(setting: Setting) -> list[PlannedRun]:
    """A run for each of the paper's noise multipliers."""
    return epsilon_table.grid(characters(setting), tuple(EMNIST))


def gather(setting: Setting, follow: Follow) -> Found:
    """What the runs read."""
    return epsilon_table.gather(plan(setting), setting, follow)


EXPERIMENT = Experiment(
    name="emnist",
    title="ε against noise, handwriting (the paper: EMNIST)",
    takes=RUNS,
    plan=plan,
    gather=gather,
    tables=partial(epsilon_table.tables, paper=EMNIST),
    checks=epsilon_table.checked,
    words=partial(epsilon_table.said, paper=EMNIST, original="EMNIST"),
    draw=partial(epsilon_table.draw, paper=EMNIST),
)
