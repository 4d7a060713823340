"""Training with canaries: DP-FedAvg and DP-SGD on real data, in runs that can be resumed."""

from coalmine.simulation.config import RunConfig
from coalmine.simulation.dp_fedavg import Steps
from coalmine.simulation.tasks import load_task
from coalmine.simulation.training_run import resume, simulate, start

__all__ = ["RunConfig", "Steps", "load_task", "resume", "simulate", "start"]
