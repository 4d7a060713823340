"""What canaries cost in accuracy, over seeds: on handwriting, where runs are short enough for many pairs."""

from coalmine.reproduction.accuracy import (
    Pair,
    checks,
    draw,
    few_canaries,
    gather_pairs,
    pairs_of,
    runs_of,
    said_of_ours,
    tables_of_ours,
)
from coalmine.reproduction.bases import characters, with_canaries
from coalmine.reproduction.experiment import RUNS, Experiment, Found
from coalmine.reproduction.runs import Follow, PlannedRun
from coalmine.reproduction.setting import Setting

SEEDS, SMALL_SEEDS = 10, 3  # 50 pairs at the paper's size: enough for an interval within 0.2 points
FEW = 50  # of 34 · 500 slots: 0.3 %


def pairs(setting: Setting) -> list[Pair]:
    """The CNN's run at the noise multipliers of Table 3."""
    base = few_canaries(setting) if setting.small else with_canaries(characters(setting), FEW)
    return pairs_of(base, seeds=setting.seeds or (SMALL_SEEDS if setting.small else SEEDS))


def plan(setting: Setting) -> list[PlannedRun]:
    """Both runs of every pair."""
    return runs_of(pairs(setting))


def gather(setting: Setting, follow: Follow) -> Found:
    """What the finished pairs came to."""
    return gather_pairs(pairs(setting), setting, follow)


EXPERIMENT = Experiment(
    name="cost",
    title="What canaries cost in accuracy, handwriting (not in the paper)",
    takes=(*RUNS, "seeds"),
    plan=plan,
    gather=gather,
    tables=tables_of_ours,
    checks=checks,
    words=said_of_ours,
    draw=draw,
)
