"""`coalmine mechanism-epsilon`: analytical epsilon from noise, and noise from epsilon."""

import click

from coalmine.cli.options import COUNT, JSON, Command
from coalmine.cli.output import print_json, print_table, shown_number
from coalmine.estimators import mechanism


@click.command(cls=Command)
@click.option(
    "--noise-multiplier",
    type=float,
    multiple=True,
    metavar="Z",
    help="Noise std divided by the clip norm; repeatable.",
)
@click.option(
    "--epsilon",
    type=float,
    multiple=True,
    metavar="E",
    help="Epsilon for which to compute the noise multiplier instead; repeatable.",
)
@click.option("--delta", type=float, required=True, metavar="D", help="The delta of (epsilon, delta), in (0, 1).")
@click.option(
    "--participations",
    type=COUNT,
    default=1,
    show_default=True,
    metavar="R",
    help="Number of rounds that a client takes part in.",
)
@JSON
def mechanism_epsilon(
    noise_multiplier: tuple[float, ...], epsilon: tuple[float, ...], delta: float, participations: int, as_json: bool
) -> None:
    """Compute the analytical epsilon of given noise.

    The epsilon is that of the Gaussian mechanism; with --epsilon, the noise multiplier is computed instead. Nothing is
    simulated or audited. Sampling does not amplify privacy here, because the attacker is assumed to know in which
    rounds the client took part.
    """
    if bool(noise_multiplier) == bool(epsilon):
        raise click.UsageError("give either --noise-multiplier or --epsilon")
    noise, levels = list(noise_multiplier), list(epsilon)
    if noise:
        levels = [mechanism.mechanism_epsilon(z, delta=delta, participations=participations) for z in noise]
    else:
        noise = [mechanism.mechanism_noise(e, delta=delta, participations=participations) for e in levels]
    rows = list(zip(noise, levels, strict=True))
    if as_json:
        print_json(
            [{"noise_multiplier": z, "epsilon": e, "delta": delta, "participations": participations} for z, e in rows]
        )
    else:
        title = f"Gaussian mechanism, {participations} participation{'s' * (participations > 1)}, delta {delta:.4g}"
        print_table(
            ["noise multiplier", "analytical epsilon"],
            [[shown_number(z), shown_number(e)] for z, e in rows],
            title=title,
        )
