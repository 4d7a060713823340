"""Options for a sampling scheme, for commands about epsilons amplified by sampling."""

from collections.abc import Callable, Mapping

import click

from coalmine.cli.options import Decorated
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling, Shuffled

NEEDS = {
    "poisson": (Poisson, ("probability", "rounds"), ()),
    "random-allocation": (RandomAllocation, ("rounds",), ("epochs",)),
    "shuffled": (Shuffled, ("rounds",), ("epochs",)),
    "fixed-size": (FixedSize, ("size", "population", "rounds"), ()),
}


def sampling_options(*, required: bool) -> Callable[[Decorated], Decorated]:
    """The option --sampling and the options of its schemes; `read_scheme` converts them to a scheme."""
    options = (
        click.option(
            "--sampling", type=click.Choice(tuple(NEEDS)), required=required, help="Sampling scheme of the clients."
        ),
        click.option(
            "--probability", type=float, metavar="Q", help="Probability that a client is in a round (poisson)."
        ),
        click.option(
            "--rounds",
            type=int,
            metavar="T",
            help="Number of rounds of the run, or of one epoch (random-allocation, shuffled).",
        ),
        click.option(
            "--epochs", type=int, metavar="N", help="Number of epochs (random-allocation, shuffled).  [default: 1]"
        ),
        click.option("--size", type=int, metavar="M", help="Number of clients in each round (fixed-size)."),
        click.option("--population", type=int, metavar="N", help="Number of clients to sample from (fixed-size)."),
    )

    def decorate(function: Decorated) -> Decorated:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def read_scheme(sampling: str, settings: Mapping[str, float | None]) -> Sampling:
    """The scheme, or a usage error that names a missing or superfluous option."""
    kind, required, optional = NEEDS[sampling]
    given = {name: value for name, value in settings.items() if value is not None}
    missing = [f"--{name}" for name in required if name not in given]
    if missing:
        raise click.UsageError(f"--sampling {sampling} needs {' and '.join(missing)}")
    foreign = [f"--{name}" for name in given if name not in (*required, *optional)]
    if foreign:
        raise click.UsageError(f"--sampling {sampling} does not take {' or '.join(foreign)}")
    return kind(**given)
