"""`coalmine amplified-epsilon`: epsilon of a sampled mechanism from its noise, and noise from epsilon."""

import click

from coalmine.cli.options import JSON, Command
from coalmine.cli.output import print_json, print_table, shown_number
from coalmine.estimators import amplification
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling, Shuffled, sampling_to_dict

NEEDS = {
    "poisson": (Poisson, ("probability", "rounds"), ()),
    "random-allocation": (RandomAllocation, ("rounds",), ("epochs",)),
    "shuffled": (Shuffled, ("rounds",), ("epochs",)),
    "fixed-size": (FixedSize, ("size", "population", "rounds"), ()),
}


@click.command(cls=Command)
@click.option("--noise", type=float, metavar="Z", help="Noise multiplier: noise std divided by the clip norm.")
@click.option("--epsilon", type=float, metavar="E", help="Epsilon for which to compute the noise multiplier instead.")
@click.option("--delta", type=float, required=True, metavar="D", help="The delta of (epsilon, delta), in (0, 1).")
@click.option("--sampling", type=click.Choice(tuple(NEEDS)), required=True, help="How clients are chosen.")
@click.option("--probability", type=float, metavar="Q", help="Probability of each client in each round (poisson).")
@click.option(
    "--rounds", type=int, metavar="T", help="Rounds of the run; of one epoch for random-allocation and shuffled."
)
@click.option("--epochs", type=int, metavar="N", help="Number of epochs (random-allocation, shuffled).  [default: 1]")
@click.option("--size", type=int, metavar="M", help="Clients in each round (fixed-size).")
@click.option("--population", type=int, metavar="N", help="Clients to draw from (fixed-size).")
@JSON
def amplified_epsilon(
    noise: float | None, epsilon: float | None, delta: float, sampling: str, as_json: bool, **settings: float | None
) -> None:
    """Compute the epsilon that sampling amplifies.

    The attacker sees every round and does not know in which ones the client took part. With --epsilon, the noise
    multiplier is computed instead. Where no tight accountant is known, the answer is a range.
    """
    if (noise is None) == (epsilon is None):
        raise click.UsageError("give either --noise or --epsilon")
    scheme = _scheme(sampling, settings)
    z = amplification.amplified_noise(epsilon, scheme, delta) if noise is None else noise  # type: ignore[arg-type]
    found = amplification.amplified_epsilon(z, scheme, delta)
    if as_json:
        told = {"noise_multiplier": z, "delta": delta, "sampling": sampling_to_dict(scheme)}
        print_json(told | found.to_dict())
        return
    rows = [
        ["noise multiplier", shown_number(z)],
        ["epsilon, at most", shown_number(found.high)],
        ["epsilon, at least", shown_number(found.low)],
        ["kind", found.kind],
        ["accountant", found.accountant],
        ["adjacency", found.adjacency],
        *([["note", found.note]] if found.note else []),
    ]
    print_table(["", "value"], rows, title=f"{scheme}, delta {delta:.4g}")


def _scheme(sampling: str, settings: dict[str, float | None]) -> Sampling:
    """The scheme, or a usage error that names the option that is missing or does not belong to it."""
    kind, required, optional = NEEDS[sampling]
    given = {name: value for name, value in settings.items() if value is not None}
    missing = [f"--{name}" for name in required if name not in given]
    if missing:
        raise click.UsageError(f"--sampling {sampling} needs {' and '.join(missing)}")
    foreign = [f"--{name}" for name in given if name not in (*required, *optional)]
    if foreign:
        raise click.UsageError(f"--sampling {sampling} does not take {' or '.join(foreign)}")
    return kind(**given)
