"""`python -m reproduction audit-gaussian-mechanism`: Algorithm 1 on simulated releases."""

import click

from coalmine.argument_checks import Floats
from coalmine.cli.options import COUNT, JSON, Command, Verbosity
from coalmine.cli.output import print_json, print_table, progress_bar, shown_number
from coalmine.evidence.gaussian_mechanism import Kind
from coalmine.evidence.gaussian_mechanism import audit_gaussian_mechanism as audit


@click.command(cls=Command)
@click.option(
    "--noise-multiplier",
    type=float,
    default=0.541,
    show_default=True,
    metavar="Z",
    help="Noise std divided by the norm of a canary.",
)
@click.option("--dim", type=COUNT, default=10_000, show_default=True, help="Dimension of the released vector.")
@click.option(
    "--canaries", type=COUNT, default=1000, show_default=True, help="Number of canaries; must be smaller than --dim."
)
@click.option("--delta", type=float, default=1e-6, show_default=True, help="The delta of (epsilon, delta).")
@click.option("--runs", type=COUNT, default=50, show_default=True, help="Number of independent releases to audit.")
@click.option(
    "--kind",
    type=click.Choice(["rotated", "sphere"]),
    default="rotated",
    show_default=True,
    help="Kind of canaries: orthonormal (rotated), or independent and uniform on the unit sphere (sphere).",
)
@click.option(
    "--signal-norm", type=float, default=0.0, show_default=True, help="Norm of the sum of the real data in the release."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the simulation; not a secret.")
@JSON
@click.pass_obj
def audit_gaussian_mechanism(
    verbosity: Verbosity,
    noise_multiplier: float,
    dim: int,
    canaries: int,
    delta: float,
    runs: int,
    kind: Kind,
    signal_norm: float,
    seed: int,
    as_json: bool,
) -> None:
    """Audit simulated releases (Algorithm 1).

    Each run releases one sum of all canaries with Gaussian noise, and estimates epsilon from the canaries' cosines. The
    estimates should agree with the analytical epsilon, which `coalmine epsilon` computes without an audit.
    `python -m reproduction table-2` repeats this in the settings of the paper's Table 2.
    """
    with progress_bar("auditing", total=runs, hidden=verbosity.quiet) as advance:
        found = audit(
            noise_multiplier,
            dim=dim,
            canaries=canaries,
            delta=delta,
            runs=runs,
            kind=kind,
            seed=seed,
            signal_norm=signal_norm,
            progress=lambda _: advance(),
        )
    if as_json:
        print_json(found.to_dict())
        return
    rows = [
        ["analytical", shown_number(found.analytical)],
        ["estimate with the null's std", _shown_spread(found.null)],
        ["estimate with a fitted std (the paper)", _shown_spread(found.fitted)],
    ]
    times = "1 run" if runs == 1 else f"{runs} runs"
    title = f"Gaussian mechanism, noise {noise_multiplier:g}, d = {dim:,}, {canaries:,} {kind} canaries, {times}"
    print_table(["", "epsilon"], rows, title=title)


def _shown_spread(values: Floats) -> str:
    """Mean ± standard deviation; for one value, the value."""
    return f"{values.mean():.2f}" if values.size == 1 else f"{values.mean():.2f} ± {values.std():.2f}"
