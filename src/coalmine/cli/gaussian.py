"""`coalmine gaussian`: Algorithm 1 from the command line."""

import click

from coalmine.audit.gaussian_mechanism import Kind, audit_gaussian_mechanism
from coalmine.cli.output import print_json, print_table, progress_bar, shown_number, shown_spread


@click.command()
@click.option("--noise-multiplier", type=float, default=0.541, show_default=True, metavar="Z", help="Noise std.")
@click.option("--dim", type=int, default=10_000, show_default=True, help="Dimension of the released vector.")
@click.option("--canaries", type=int, default=1000, show_default=True, help="How many canaries, fewer than dim.")
@click.option("--delta", type=float, default=1e-6, show_default=True, help="The delta of (epsilon, delta).")
@click.option("--runs", type=int, default=50, show_default=True, help="Independent repetitions.")
@click.option("--kind", type=click.Choice(["rotated", "sphere"]), default="rotated", show_default=True)
@click.option("--signal-norm", type=float, default=0.0, show_default=True, help="Norm of the sum of the real data.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the simulation; not a secret.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
@click.pass_obj
def gaussian(
    settings: dict[str, bool],
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
    """Audit the Gaussian mechanism in one shot (Algorithm 1), with exactly drawn cosines."""
    with progress_bar("auditing", total=runs, hidden=settings["quiet"]) as advance:
        audit = audit_gaussian_mechanism(
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
        print_json(audit.to_dict())
        return
    rows = [
        ["analytical", shown_number(audit.analytical)],
        ["estimate, the null's std", shown_spread(audit.null)],
        ["estimate, fitted std (the paper)", shown_spread(audit.fitted)],
    ]
    times = "1 run" if runs == 1 else f"{runs} runs"
    title = f"Gaussian mechanism, noise {noise_multiplier:g}, d = {dim:,}, {canaries:,} {kind} canaries, {times}"
    print_table(["", "epsilon"], rows, title=title)
