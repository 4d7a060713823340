"""`coalmine amplified-epsilon`: epsilon of a sampled mechanism from its noise, and noise from epsilon."""

import click

from coalmine.cli.options import JSON, Command
from coalmine.cli.output import print_json, print_table, shown_number
from coalmine.cli.sampling_options import read_scheme, sampling_options
from coalmine.estimators import amplification
from coalmine.estimators.sampling import sampling_to_dict


@click.command(cls=Command)
@click.option(
    "--noise-multiplier", "noise", type=float, metavar="Z", help="Noise multiplier: noise std divided by the clip norm."
)
@click.option("--epsilon", type=float, metavar="E", help="Epsilon for which to compute the noise multiplier instead.")
@click.option("--delta", type=float, required=True, metavar="D", help="The delta of (epsilon, delta), in (0, 1).")
@sampling_options(required=True)
@JSON
def amplified_epsilon(
    noise: float | None, epsilon: float | None, delta: float, sampling: str, as_json: bool, **settings: float | None
) -> None:
    """Compute the epsilon of a mechanism with sampling.

    The attacker sees every round but does not know in which ones the client took part. With --epsilon, the noise
    multiplier is computed instead. If no tight accountant is known, the answer is a range.
    """
    scheme = read_scheme(sampling, settings)
    if noise is not None and epsilon is None:
        z = noise
    elif epsilon is not None and noise is None:
        z = amplification.amplified_noise(epsilon, scheme, delta)
    else:
        raise click.UsageError("give either --noise-multiplier or --epsilon")
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
