"""Table 2: one-shot auditing of the Gaussian mechanism, and what a large signal does to it (Theorem 3.3's condition)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from coalmine.audit.gaussian_mechanism import GaussianMechanismAudit, Kind, audit_gaussian_mechanism
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon

DELTA = 1e-6
SIZES = {10**4: 100, 10**5: 316, 10**6: 1000, 10**7: 3162}  # k = √d
KINDS: tuple[Kind, Kind] = ("sphere", "rotated")
PAPER = {  # Table 2: mean ± std over 50 simulations
    (0.541, 10**4): (9.89, 0.71),
    (0.541, 10**5): (10.1, 0.41),
    (0.541, 10**6): (10.0, 0.23),
    (0.541, 10**7): (10.0, 0.10),
    (1.54, 10**4): (3.00, 0.46),
    (1.54, 10**5): (3.00, 0.31),
    (1.54, 10**6): (2.96, 0.15),
    (1.54, 10**7): (3.00, 0.08),
    (4.22, 10**4): (0.98, 0.41),
    (4.22, 10**5): (1.05, 0.23),
    (4.22, 10**6): (0.99, 0.14),
    (4.22, 10**7): (1.00, 0.07),
}
SIGNALS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)  # ‖X‖/√d


@dataclass(frozen=True)
class Cell:
    """One cell of Table 2: the paper's, and ours with its own canaries and with rotated ones."""

    paper: tuple[float, float]
    sphere: GaussianMechanismAudit
    rotated: GaussianMechanismAudit


def table(*, runs: int, seed: int, progress: Callable[[], None] | None = None) -> list[Cell]:
    """All 12 cells, `runs` simulations each."""
    cells = []
    for number, (noise, dim) in enumerate(PAPER):
        sphere, rotated = (
            audit_gaussian_mechanism(
                noise,
                dim=dim,
                canaries=SIZES[dim],
                delta=DELTA,
                runs=runs,
                kind=kind,
                seed=len(PAPER) * seed + number,  # cells share no draws
            )
            for kind in KINDS
        )
        cells.append(Cell(PAPER[noise, dim], sphere, rotated))
        if progress:
            progress()
    return cells


@dataclass(frozen=True)
class Signal:
    """What the audit reads when the data's sum has norm ‖X‖, and what dilution alone predicts."""

    ratio: float  # ‖X‖/√d
    predicted: float
    audit: GaussianMechanismAudit


def signal_study(*, runs: int, seed: int, noise: float = 0.541, dim: int = 10**6, canaries: int = 1000) -> list[Signal]:
    """Epsilon read against ‖X‖: Theorem 3.3 needs ‖X‖ = o(√d), since X lengthens the vector but not the canary's part.

    The standardised mean falls from 1/σ to 1/√(σ² + ‖X‖²/d).
    """
    return [
        Signal(
            ratio,
            gaussian_epsilon(Gaussian(0, 1), Gaussian(1 / math.hypot(noise, ratio), 1), delta=DELTA),
            audit_gaussian_mechanism(
                noise,
                dim=dim,
                canaries=canaries,
                delta=DELTA,
                runs=runs,
                seed=seed,
                signal_norm=ratio * math.sqrt(dim),
            ),
        )
        for ratio in SIGNALS
    ]
