"""`coalmine mechanism`: noise to epsilon and back."""

import click

from coalmine.cli.output import print_json, print_table, shown_number
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise


@click.command()
@click.option(
    "--noise-multiplier", type=float, multiple=True, metavar="Z", help="Noise std over clip norm; repeatable."
)
@click.option(
    "--epsilon", type=float, multiple=True, metavar="E", help="Instead: the noise that gives this; repeatable."
)
@click.option("--delta", type=float, required=True, metavar="D", help="The delta of (epsilon, delta), in (0, 1).")
@click.option("--participations", type=int, default=1, show_default=True, help="Rounds that a client takes part in.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def mechanism(
    noise_multiplier: tuple[float, ...], epsilon: tuple[float, ...], delta: float, participations: int, as_json: bool
) -> None:
    """Analytical epsilon of the Gaussian mechanism, or the noise for a wanted epsilon.

    No amplification by sampling: the attacker knows in which rounds the client took part.
    """
    if bool(noise_multiplier) == bool(epsilon):
        raise click.UsageError("give either --noise-multiplier or --epsilon")
    noise, levels = list(noise_multiplier), list(epsilon)
    if noise:
        levels = [mechanism_epsilon(z, delta=delta, participations=participations) for z in noise]
    else:
        noise = [mechanism_noise(e, delta=delta, participations=participations) for e in levels]
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
