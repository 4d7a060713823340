"""Section 5: a word LSTM of 4.05 million parameters, one presentation, from all iterates and from the final model."""

from functools import partial

from coalmine.reproduction import epsilon_table
from coalmine.reproduction.experiment import RUNS, Account, Experiment, Found
from coalmine.reproduction.experiment_options import Options
from coalmine.reproduction.paper import STACK_OVERFLOW
from coalmine.reproduction.run_grid import Follow, PlannedRun
from coalmine.reproduction.training_configs import words


def plan(options: Options) -> list[PlannedRun]:
    """A run for each of the paper's noise multipliers."""
    return epsilon_table.grid(words(options), tuple(STACK_OVERFLOW))


def gather(options: Options, follow: Follow) -> Found:
    """What the runs read."""
    return epsilon_table.gather(plan(options), options, follow)


EXPERIMENT = Experiment(
    name="stackoverflow",
    title="ε against noise, next words (the paper: Stack Overflow)",
    takes=RUNS,
    plan=plan,
    gather=gather,
    account=Account(
        partial(epsilon_table.tables, paper=STACK_OVERFLOW),
        epsilon_table.checked,
        partial(epsilon_table.conclusion, paper=STACK_OVERFLOW, original="Stack Overflow"),
        partial(epsilon_table.draw, paper=STACK_OVERFLOW),
    ),
)
