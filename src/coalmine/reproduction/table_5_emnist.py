"""Section 5.1: a CNN of 1.2 million parameters on handwriting, from all iterates and from the final model."""

from functools import partial

from coalmine.reproduction import epsilon_table
from coalmine.reproduction.experiment import RUNS, Account, Experiment, Found
from coalmine.reproduction.experiment_options import Options
from coalmine.reproduction.paper import EMNIST
from coalmine.reproduction.run_grid import Follow, PlannedRun
from coalmine.reproduction.training_configs import characters


def plan(options: Options) -> list[PlannedRun]:
    """A run for each of the paper's noise multipliers."""
    return epsilon_table.grid(characters(options), tuple(EMNIST))


def gather(options: Options, follow: Follow) -> Found:
    """What the runs read."""
    return epsilon_table.gather(plan(options), options, follow)


EXPERIMENT = Experiment(
    name="emnist",
    title="ε against noise, handwriting (the paper: EMNIST)",
    takes=RUNS,
    plan=plan,
    gather=gather,
    account=Account(
        partial(epsilon_table.tables, paper=EMNIST),
        epsilon_table.checked,
        partial(epsilon_table.conclusion, paper=EMNIST, original="EMNIST"),
        partial(epsilon_table.draw, paper=EMNIST),
    ),
)
