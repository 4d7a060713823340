"""The cost of canaries in accuracy over several seeds, on handwriting, where runs are short enough for many pairs."""

from reproduction.experiment import Account, Experiment, Found
from reproduction.experiment_options import RUNS, Options
from reproduction.run_grid import Follow, PlannedRun
from reproduction.table_3_accuracy import (
    Pair,
    checks,
    conclusion_of_ours,
    draw,
    few_canaries,
    gather_pairs,
    pairs_of,
    runs_of,
    tables_of_ours,
)
from reproduction.training_configs import characters, with_canaries

SEEDS, SMALL_SEEDS = 10, 3  # 50 pairs at the paper's size, enough for an interval within 0.2 points
FEW = 50  # 0.3 % of 34 · 500 slots


def pairs(options: Options) -> list[Pair]:
    """The CNN's run at the noise multipliers of Table 3."""
    base = few_canaries(options) if options.small else with_canaries(characters(options), FEW)
    return pairs_of(base, seeds=options.seeds or (SMALL_SEEDS if options.small else SEEDS))


def plan(options: Options) -> list[PlannedRun]:
    """Both runs of every pair."""
    return runs_of(pairs(options))


def gather(options: Options, follow: Follow) -> Found:
    """The numbers of the finished pairs."""
    return gather_pairs(pairs(options), options, follow)


EXPERIMENT = Experiment(
    name="cost",
    title="The cost of canaries in accuracy, handwriting (not in the paper)",
    takes=(*RUNS, "seeds"),
    plan=plan,
    gather=gather,
    account=Account(tables_of_ours, checks, conclusion_of_ours, draw),
)
