"""Options that name a sampling scheme, for commands about amplified epsilons."""

from collections.abc import Callable
from typing import Any

import click

from coalmine.cli.options import Decorated, topic
from coalmine.estimators.sampling import SCHEMES, Sampling

FIELDS = {  # the options of each scheme; those in brackets may be left out
    "poisson": ("probability", "rounds"),
    "random_allocation": ("rounds", "[epochs]"),
    "shuffled": ("rounds", "[epochs]"),
    "fixed_size": ("size", "population", "rounds"),
}
NAMES = ("probability", "rounds", "epochs", "size", "population")


def sampling_options(title: str) -> Callable[[Decorated], Decorated]:
    """The options `--sampling`, `--probability`, `--rounds`, `--epochs`, `--size` and `--population`."""
    return topic(
        title,
        click.option(
            "--sampling",
            type=click.Choice([name.replace("_", "-") for name in SCHEMES]),
            help="Sampling scheme that amplifies the epsilon.",
        ),
        click.option("--probability", type=float, metavar="Q", help="Probability of a client's joining a round."),
        click.option("--rounds", type=int, metavar="T", help="Rounds of the run, or of one epoch."),
        click.option("--epochs", type=int, metavar="N", help="Number of epochs.  [default: 1]"),
        click.option("--size", type=int, metavar="N", help="Clients of a round, for fixed-size sampling."),
        click.option("--population", type=int, metavar="N", help="Clients to draw from, for fixed-size sampling."),
    )


def read_sampling(sampling: str | None, **values: Any) -> Sampling | None:
    """The scheme that the options name; None without `--sampling`."""
    given = {name: value for name, value in values.items() if value is not None}
    if sampling is None:
        if given:
            raise click.UsageError(f"--{min(given, key=NAMES.index)} belongs to a scheme: give --sampling too")
        return None
    name = sampling.replace("-", "_")
    required = [field for field in FIELDS[name] if not field.startswith("[")]
    allowed = [field.strip("[]") for field in FIELDS[name]]
    for field in required:
        if field not in given:
            raise click.UsageError(f"--sampling {sampling} needs --{field}")
    for field in given:
        if field not in allowed:
            known = ", ".join(f"--{each}" for each in allowed)
            raise click.UsageError(f"--{field} does not belong to --sampling {sampling}, which takes {known}")
    kind: Any = SCHEMES[name]
    scheme: Sampling = kind(**given)
    return scheme
