"""What is measured of one round, and of the final model."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SMALLEST_SQUARE, LARGEST_SQUARE = 1e-150, 1e150  # of a noise vector; its fourth powers can be summed
Singles = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One observed round: cosines of all canaries (observed first, then unobserved) and the norms that belong to them.

    `clip_norm` is the most that one client adds, in the units of the model delta if it was `clip_declared`. Canaries were
    sent `scale` times longer than that. `participants` is the number of clients that took part, if known. `norm` is the
    norm of the model delta, and `rest` that of its part orthogonal to the observed canaries. The `residual_` fields are the
    same for the model delta without all other updates. `block_rests` has `rest` block by block, if there are several
    blocks; without it the residual's norm is measured along the unobserved canaries. `chunk_rests` are norms of the noise
    in equal parts of the blocks, `block_sketches` sums of its entries, block by block, and `layer_rests` its norms layer by
    layer. `layer_others` are the norms of all other updates layer by layer (an upper bound if the model is replicated). The
    `law_` fields come from `noise_law.measure_law`, except for `law_coordinates`: a reading of the sums that follow each
    coordinate over the rounds (`coordinate_sums.Reading`), which some rounds have. `rounding` is the mean squared
    rounding error of release and `others`, and `lattice` the mean squared step if both are rounded; each is None if it
    was not measured. Cosines are stored in single precision, and every result is computed from those: a result can be
    derived again from the log, bit for bit.
    """

    number: int
    skipped: bool = False
    present: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    clip_norm: float = 1.0
    clip_declared: bool = False
    noise_std: float | None = None
    scale: float = 1.0
    participants: int | None = None
    norm: float = 0.0
    rest: float = 0.0
    cosines: Singles = field(default_factory=lambda: np.zeros(0, np.float32))
    block_rests: npt.NDArray[np.float64] | None = None
    residual_norm: float | None = None
    residual_rest: float | None = None
    residual_cosines: Singles | None = None
    residual_block_rests: npt.NDArray[np.float64] | None = None
    chunk_rests: npt.NDArray[np.float64] | None = None
    block_sketches: Singles | None = None
    layer_rests: npt.NDArray[np.float64] | None = None
    layer_others: npt.NDArray[np.float64] | None = None
    rounding: float | None = None
    lattice: float | None = None
    law_moments: npt.NDArray[np.float64] | None = None
    law_lags: npt.NDArray[np.float64] | None = None
    law_counts: npt.NDArray[np.int64] | None = None
    law_zeros: npt.NDArray[np.int64] | None = None
    law_spectrum: npt.NDArray[np.float64] | None = None
    law_grid: npt.NDArray[np.float64] | None = None
    law_tail: Singles | None = None
    law_follows: npt.NDArray[np.float64] | None = None
    law_peaks: npt.NDArray[np.int32] | None = None
    law_coordinates: npt.NDArray[np.float64] | None = None
    scores: dict[str, Singles] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Final:
    """The final model: cosines with it and, if the initial model is known, with their difference.

    `block_rests` are the norms orthogonal to the observed canaries, block by block, if there are several blocks.
    `layer_moves` are the norms of the difference layer by layer, or of all of it if the layers are not known.
    `law_coordinates` is the last reading of the sums that follow each coordinate, if no round has it. `sha256` is that of
    the model's numbers (`model_sha256`), unless the model is in several blocks.
    """

    norm: float
    cosines: Singles
    block_rests: npt.NDArray[np.float64] | None = None
    update_norm: float | None = None
    update_cosines: Singles | None = None
    update_block_rests: npt.NDArray[np.float64] | None = None
    layer_moves: npt.NDArray[np.float64] | None = None
    law_coordinates: npt.NDArray[np.float64] | None = None
    sha256: str | None = None
