"""`coalmine reproduce`: the paper's tables, ours beside theirs."""

from pathlib import Path

import click

from coalmine.cli.gaussian import as_dict
from coalmine.cli.output import print_json, print_table, progress_bar, shown_number, shown_spread, write_json
from coalmine.reproduction import gaussian as table_2


@click.group()
def reproduce() -> None:
    """Reproduce the paper's tables, ours beside theirs."""


@reproduce.command()
@click.option("--runs", type=click.IntRange(1), default=50, show_default=True, help="Simulations a cell.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON to this file too.")
@click.pass_obj
def gaussian(settings: dict[str, bool], runs: int, seed: int, as_json: bool, out: Path | None) -> None:
    """Table 2: the Gaussian mechanism, d = 10^4 to 10^7, both variances; and epsilon against the norm of the data."""
    with progress_bar("Table 2", total=len(table_2.PAPER), hidden=settings["quiet"]) as advance:
        cells = table_2.table(runs=runs, seed=seed, progress=advance)
    signals = table_2.signal_study(runs=runs, seed=seed)
    found = {
        "table_2": [
            {"paper": list(cell.paper), "sphere": as_dict(cell.sphere), "rotated": as_dict(cell.rotated)}
            for cell in cells
        ],
        "signal": [{"ratio": s.ratio, "predicted": s.predicted, "audit": as_dict(s.audit)} for s in signals],
    }
    if out:
        write_json(out, found)
    if as_json:
        print_json(found)
        return
    print_table(
        [
            "noise",
            "d",
            "k",
            "true ε",
            "paper",
            "its canaries, null std",
            "its canaries, fitted std",
            "rotated, null std",
        ],
        [
            [
                f"{cell.sphere.noise_multiplier:g}",
                f"{cell.sphere.dim:.0e}",
                str(cell.sphere.canaries),
                shown_number(cell.sphere.analytical, 3),
                f"{cell.paper[0]:.2f} ± {cell.paper[1]:.2f}",
                shown_spread(cell.sphere.null),
                shown_spread(cell.sphere.fitted),
                shown_spread(cell.rotated.null),
            ]
            for cell in cells
        ],
        title=f"Table 2, {runs} runs a cell, delta 1e-6: the printed figures are those of the null's std",
    )
    print_table(
        ["‖X‖/√d", "dilution alone", "read"],
        [[f"{s.ratio:g}", shown_number(s.predicted, 3), shown_spread(s.audit.null)] for s in signals],
        title="Epsilon against the norm of the data (Theorem 3.3 needs ‖X‖ = o(√d)), true ε 10, d = 1e6, 1,000 canaries",
    )
