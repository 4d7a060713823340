"""The tasks. A task is a data set, its split over clients, and a model."""

import os
from pathlib import Path

from coalmine.argument_checks import one_of
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

    The index of a virtual client determines its sample of the examples. `clients` must be at least the number of the task's
    own clients. `data_dir` defaults to the folder in COALMINE_DATA_DIR, or else to the folder of `coalmine data`.
    """
    one_of("task", name, TASKS)
    task = digits() if name == "digits" else _from_files(name, data_dir)
    own_clients = len(task.population)
    if clients is None or clients == own_clients:
        return task
    if clients < own_clients:
        raise ValueError(
            f"task {name} has {own_clients} clients, so task.clients must be at least {own_clients}, got {clients}"
        )
    return task.with_population(
        VirtualClients(clients, len(task.train), max(1, len(task.train) // own_clients), seed=0)
    )


def _from_files(name: str, data_dir: Path | None) -> Task:
    folder = data_folder(data_dir)
    if not folder.is_dir():
        if data_dir is None and not os.environ.get("COALMINE_DATA_DIR"):
            raise ValueError(
                f"task {name} reads files: fetch them with `coalmine data {name}`, or give their folder with --data-dir "
                "or COALMINE_DATA_DIR (docs/how-to/data.md)"
            )
        raise FileNotFoundError(f"the data folder {folder} does not exist")
    read, subfolder = _READERS[name]
    return read(folder / subfolder)
