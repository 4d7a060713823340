"""Faulty noise with standard deviation 1; each kind hides less than Gaussian noise, or nothing."""

import numpy as np

from studies.pipelines import Noise


def coin_flips(noise: Noise) -> np.ndarray:
    """Plus or minus one standard deviation."""
    return noise.rng.choice([-1.0, 1.0], noise.dim)


def uniform(noise: Noise) -> np.ndarray:
    """Between plus and minus √3 standard deviations."""
    return noise.rng.uniform(-np.sqrt(3), np.sqrt(3), noise.dim)


def truncated(limit: float):
    """A Gaussian without its tails, rescaled."""

    def draw(noise: Noise) -> np.ndarray:
        values = noise.normal()
        while (outside := np.abs(values) > limit).any():
            values[outside] = noise.rng.standard_normal(int(outside.sum()))
        return values / np.sqrt(np.mean(values**2))

    return draw


def on_grid(step: float):
    """A Gaussian rounded to a grid."""

    def draw(noise: Noise) -> np.ndarray:
        values = np.round(noise.normal() / step) * step
        return values / max(np.sqrt(np.mean(values**2)), 1e-9) if step > 1 else values / np.sqrt(1 + step**2 / 12)

    return draw


def laplace(noise: Noise) -> np.ndarray:
    """Laplace noise of the same standard deviation."""
    return noise.rng.laplace(scale=1 / np.sqrt(2), size=noise.dim)


def student(freedom: float):
    """Heavier tails, rescaled."""
    return lambda noise: noise.rng.standard_t(freedom, noise.dim) / np.sqrt(freedom / (freedom - 2))


def matched_kurtosis(noise: Noise) -> np.ndarray:
    """Uniform in five of seven coordinates, Laplace in the others: the fourth moment is a Gaussian's, the law is not."""
    values = uniform(noise)
    heavy = noise.rng.random(noise.dim) < 1.2 / (1.2 + 3.0)
    values[heavy] = laplace(noise)[heavy]
    return values


def larger_half(noise: Noise) -> np.ndarray:
    """Noise only where the signal is large, rescaled."""
    values = noise.normal() * np.sqrt(2)
    values[np.abs(noise.signal) < np.median(np.abs(noise.signal))] = 0.0
    return values


def times_signal(noise: Noise) -> np.ndarray:
    """Noise proportional to the signal."""
    values = noise.normal() * np.abs(noise.signal)
    return values / np.sqrt(np.mean(noise.signal**2))


def missing_share(share: float):
    """No noise on a fixed share of the coordinates."""

    def draw(noise: Noise) -> np.ndarray:
        bare = noise.kept.setdefault("bare", noise.rng.random(noise.dim) < share)
        return np.where(bare, 0.0, noise.normal() / np.sqrt(1 - share))

    return draw


def shared_halves(noise: Noise) -> np.ndarray:
    """Two layers of equal size share one draw."""
    half = noise.normal(noise.dim // 2)
    return np.concatenate([half, half, noise.normal(noise.dim - 2 * len(half))])


def negated_halves(noise: Noise) -> np.ndarray:
    """Two layers share one draw with opposite signs."""
    half = noise.normal(noise.dim // 2)
    return np.concatenate([half, -half, noise.normal(noise.dim - 2 * len(half))])


def neighbours(noise: Noise) -> np.ndarray:
    """One draw for two neighbouring coordinates."""
    return np.repeat(noise.normal(noise.dim // 2 + 1), 2)[: noise.dim]


def pool(noise: Noise) -> np.ndarray:
    """Pieces of a thousand numbers, cut at random offsets from one pool of the model's size."""
    source = noise.normal()
    piece = min(1000, noise.dim // 4)
    starts = range(0, noise.dim, piece)
    cut = [source[a : a + piece] for a in (noise.rng.integers(0, noise.dim - piece) for _ in starts)]
    return np.concatenate(cut)[: noise.dim]


def run_pool(noise: Noise) -> np.ndarray:
    """One slice per round, at a random offset, of a pool sampled once for the run."""
    source = noise.kept.setdefault("pool", noise.normal(3 * noise.dim))
    start = int(noise.rng.integers(0, 2 * noise.dim))
    return source[start : start + noise.dim]


def smoothed(noise: Noise) -> np.ndarray:
    """A moving average of two draws."""
    values = noise.normal(noise.dim + 1)
    return (values[1:] + values[:-1]) / np.sqrt(2)


def subspace(noise: Noise) -> np.ndarray:
    """Noise in a fixed half of the dimensions, rotated so that no single coordinate reveals it."""
    if "signs" not in noise.kept:
        noise.kept["signs"] = noise.rng.choice([-1.0, 1.0], noise.dim)
        noise.kept["order"] = noise.rng.permutation(noise.dim)
    spectrum = np.zeros(noise.dim)
    spectrum[noise.kept["order"][: noise.dim // 2]] = noise.normal(noise.dim // 2) * np.sqrt(2)
    from scipy.fft import idct

    return noise.kept["signs"] * idct(spectrum, norm="ortho")


def reused(noise: Noise) -> np.ndarray:
    """The same noise in every round."""
    return noise.kept.setdefault("noise", noise.normal())


def two_in_turn(noise: Noise) -> np.ndarray:
    """Two alternating draws."""
    return noise.kept.setdefault(noise.number % 2, noise.normal())


def partly_reused(share: float):
    """Noise of which a share of the variance is the same in every round."""

    def draw(noise: Noise) -> np.ndarray:
        common = noise.kept.setdefault("noise", noise.normal())
        return np.sqrt(share) * common + np.sqrt(1 - share) * noise.normal()

    return draw


def scaled(factor: float):
    """Gaussian noise, but too little or too much of it."""
    return lambda noise: factor * noise.normal()


def mixture(noise: Noise) -> np.ndarray:
    """A tenth of the coordinates with three times the noise, the others with less."""
    wide = noise.rng.random(noise.dim) < 0.1
    return noise.normal() * np.where(wide, 3.0, np.sqrt((1 - 0.9) / 0.9))


def skewed(noise: Noise) -> np.ndarray:
    """A centred gamma law."""
    return noise.rng.gamma(4.0, size=noise.dim) / 2 - 2


def sum_of_uniforms(noise: Noise) -> np.ndarray:
    """Nearly Gaussian, with bounded support."""
    return sum(uniform(noise) for _ in range(3)) / np.sqrt(3)


def some_rounds_only(draw, odd: int = 4):
    """Honest noise except in every few rounds."""
    return lambda noise: draw(noise) if noise.number % odd == 0 else noise.normal()


BROKEN_LAWS = {
    "coin flips": coin_flips,
    "uniform": uniform,
    "truncated at 1 std": truncated(1.0),
    "truncated at 3 std": truncated(3.0),
    "grid of 2 std": on_grid(2.0),
    "grid of 0.25 std": on_grid(0.25),
    "grid of 0.1 std": on_grid(0.1),
    "Laplace": laplace,
    "Student t, 5 dof": student(5.0),
    "Student t, 20 dof": student(20.0),
    "uniform and Laplace, kurtosis 3": matched_kurtosis,
    "mixture of two stds": mixture,
    "skewed (gamma)": skewed,
    "sum of three uniforms": sum_of_uniforms,
    "only on the larger half": larger_half,
    "times the signal": times_signal,
    "missing on 1 % of coordinates": missing_share(0.01),
    "two layers share a draw": shared_halves,
    "two layers, opposite signs": negated_halves,
    "one draw for two neighbours": neighbours,
    "moving average": smoothed,
    "pool, random offsets": pool,
    "one pool for the run": run_pool,
    "fixed half of the dimensions": subspace,
    "reused": reused,
    "two draws in turn": two_in_turn,
    "a tenth reused": partly_reused(0.1),
    "Laplace in every fourth round": some_rounds_only(laplace),
}
