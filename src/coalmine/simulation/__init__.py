"""Training with canaries: DP-FedAvg and DP-SGD on real data, in runs that survive."""

from coalmine.simulation.config import RunConfig
from coalmine.simulation.run import RunOutcome, resume, simulate, start
from coalmine.simulation.tasks import load_task
from coalmine.simulation.training import Steps

__all__ = ["RunConfig", "RunOutcome", "Steps", "load_task", "resume", "simulate", "start"]
