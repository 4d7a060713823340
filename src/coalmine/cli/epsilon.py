"""`coalmine epsilon`: epsilon from noise, and noise from epsilon, of the Gaussian mechanism and of a sampled one."""

import click

from coalmine.cli.options import COUNT, JSON, Command
from coalmine.cli.output import print_json, print_table, shown_number
from coalmine.cli.sampling_option import SAMPLING
from coalmine.estimators import amplification, mechanism
from coalmine.estimators.sampling import Sampling, sampling_to_dict


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
    metavar="R",
    help="Number of rounds that a client takes part in, for an attacker who knows them.  [default: 1]",
)
@SAMPLING
@JSON
def epsilon(
    noise_multiplier: tuple[float, ...],
    epsilon: tuple[float, ...],
    delta: float,
    participations: int | None,
    sampling: Sampling | None,
    as_json: bool,
) -> None:
    """Compute the analytical epsilon of given noise.

    The epsilon is that of the Gaussian mechanism; with --epsilon, the noise multiplier is computed instead. Nothing is
    simulated or audited. The attacker is assumed to know in which rounds the client took part, so sampling does not
    amplify privacy.

    With --sampling the attacker sees every round but does not know in which ones the client took part. If no tight
    accountant is known, the answer is a range.
    """
    if bool(noise_multiplier) == bool(epsilon):
        raise click.UsageError("give either --noise-multiplier or --epsilon")
    if sampling is None:
        _print_mechanism(
            noise_multiplier, epsilon, delta, 1 if participations is None else participations, as_json=as_json
        )
        return
    if participations is not None:
        raise click.UsageError("--sampling hides the rounds of a client: omit --participations")
    if len(noise_multiplier + epsilon) > 1:
        raise click.UsageError("--sampling takes one --noise-multiplier or one --epsilon")
    _print_amplified(noise_multiplier, epsilon, delta, sampling, as_json=as_json)


def _print_mechanism(
    given_noise: tuple[float, ...],
    given_epsilons: tuple[float, ...],
    delta: float,
    participations: int,
    *,
    as_json: bool,
) -> None:
    noise, levels = list(given_noise), list(given_epsilons)
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


def _print_amplified(
    noise: tuple[float, ...], epsilons: tuple[float, ...], delta: float, scheme: Sampling, *, as_json: bool
) -> None:
    z = noise[0] if noise else amplification.amplified_noise(epsilons[0], scheme, delta)
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
