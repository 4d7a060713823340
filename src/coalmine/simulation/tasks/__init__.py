"""The tasks: a data set, its split over clients, and the model."""

import os
from pathlib import Path

from coalmine.data.folders import data_folder
from coalmine.simulation.population import VirtualClients
from coalmine.simulation.tasks.image_tasks import digits, emnist, emnist_digits, fashion_mnist, mnist_by_writer
from coalmine.simulation.tasks.task import Task
from coalmine.simulation.tasks.text_tasks import shakespeare, stackexchange, stackoverflow

__all__ = ["TASKS", "Task", "load_task"]

# The function that reads a task's files, and their folder.
_READERS = {
    "mnist-by-writer": (mnist_by_writer, "mnist-by-writer"),
    "fashion-mnist": (fashion_mnist, "fashion-mnist"),
    "emnist": (emnist, "emnist"),
    "emnist-digits": (emnist_digits, "emnist"),
    "stackoverflow": (stackoverflow, "stackoverflow"),
    "stackexchange": (stackexchange, "stackexchange"),
    "shakespeare": (shakespeare, "shakespeare"),
}
TASKS = ("digits", *_READERS)


def load_task(name: str, *, clients: int | None = None, data_dir: Path | None = None) -> Task:
    """The task of this name, with its own clients or with `clients` virtual ones.

    A virtual client samples its examples from the pool by its index, so nothing is stored. There must be at least as many
    as the task has clients. `data_dir` defaults to the folder that COALMINE_DATA_DIR names, or to the one into
    which `coalmine data get` puts what it fetches.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    task = digits() if name == "digits" else _from_files(name, data_dir)
    own = len(task.population)
    if clients is None or clients == own:
        return task
    if clients < own:
        raise ValueError(f"task {name} has {own} clients, so task.clients must be at least {own}, got {clients}")
    return task.with_population(VirtualClients(clients, len(task.train), max(1, len(task.train) // own), seed=0))


def _from_files(name: str, data_dir: Path | None) -> Task:
    folder = data_folder(data_dir)
    if not folder.is_dir():
        if data_dir is None and not os.environ.get("COALMINE_DATA_DIR"):
            raise ValueError(
                f"task {name} reads files: fetch them by `coalmine data get {name}`, or say where they are by --data-dir or "
                "COALMINE_DATA_DIR (docs/how-to/data.md)"
            )
        raise FileNotFoundError(f"the data folder {folder} is not there")
    read, where = _READERS[name]
    return read(folder / where)
