"""Canaries for images: random noise, blank images, mislabelled real ones, patterns."""

from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import finite_array, short_repr, whole_number
from coalmine.canaries.secret import secret_seed
from coalmine.data_canaries.canaries import DataCanaries
from coalmine.measure.schedule import keyed_stream, schedule_key

WAVES = 4  # of a pattern


def mislabelled(
    inputs: Any, labels: Any, *, count: int, classes: int, seed: SupportsIndex | bytes, **options: Any
) -> DataCanaries:
    """Real rows with a wrong label: strong canaries, as nothing else explains the label. The rows must not be trained on.

    `inputs` and `labels` are rows to draw from, such as a part of the data that is left out of training. `options` are
    those of `DataCanaries`, here and for every other kind.
    """
    rows, right = np.asarray(inputs), np.asarray(labels).astype(np.int64)
    number = whole_number("count", count, minimum=1)
    several = whole_number("classes", classes, minimum=2)
    if number > len(rows) or right.shape != (len(rows),):
        raise ValueError(f"count must be at most the {len(rows)} rows to draw from, each with a label, got {number}")
    rng = _stream(seed)
    drawn = rng.permutation(len(rows))[:number]
    wrong = (right[drawn] + rng.integers(1, several, size=number)) % several
    return DataCanaries(inputs=rows[drawn], labels=wrong, seed=seed, **{"kind": "mislabelled rows"} | options)


def noise(like: Any, *, count: int, classes: int, seed: SupportsIndex | bytes, **options: Any) -> DataCanaries:
    """Images of random pixels with random labels; `like` are real images, whose shape, mean and spread they have."""
    images, rng = _images(like), _stream(seed)
    size = (whole_number("count", count, minimum=1), *images.shape[1:])
    pixels = np.clip(rng.normal(images.mean(), images.std(), size), images.min(), images.max())
    return _labelled(pixels, images, rng, classes, seed, {"kind": "images of noise"} | options)


def blank(like: Any, *, count: int, classes: int, seed: SupportsIndex | bytes, **options: Any) -> DataCanaries:
    """Images of one shade each with random labels. Shades lie closer with every canary: for a few hundred at most."""
    images, rng = _images(like), _stream(seed)
    shades = rng.permutation(np.linspace(images.min(), images.max(), whole_number("count", count, minimum=1)))
    pixels = np.broadcast_to(shades.reshape(-1, *[1] * (images.ndim - 1)), (shades.size, *images.shape[1:]))
    return _labelled(pixels, images, rng, classes, seed, {"kind": "blank images"} | options)


def patterns(like: Any, *, count: int, classes: int, seed: SupportsIndex | bytes, **options: Any) -> DataCanaries:
    """Images unlike any real one: sums of a few plane waves, with random labels."""
    images, rng = _images(like), _stream(seed)
    number, shape = whole_number("count", count, minimum=1), images.shape[1:]
    high, wide = shape[-2:]
    grid = np.stack(np.meshgrid(np.arange(high) / high, np.arange(wide) / wide, indexing="ij"))
    pixels = np.empty((number, *shape))
    for image in pixels:
        waves = rng.uniform(-max(high, wide) / 3, max(high, wide) / 3, (WAVES, 2))
        total = np.cos(2 * np.pi * (np.tensordot(waves, grid, 1) + rng.random((WAVES, 1, 1)))).sum(axis=0)
        image[...] = (total - total.min()) / max(np.ptp(total), 1e-9) * np.ptp(images) + images.min()
    return _labelled(pixels, images, rng, classes, seed, {"kind": "patterns"} | options)


def _stream(seed: SupportsIndex | bytes) -> np.random.Generator:
    return keyed_stream(schedule_key(secret_seed(seed)), b"records")


def _images(like: Any) -> npt.NDArray[Any]:
    images = np.asarray(like)
    if images.ndim < 3 or not len(images):
        raise ValueError(f"like must be real images with at least two axes each, got {short_repr(images.shape)}")
    finite_array("like", images[:1])
    return images


def _labelled(
    pixels: Any, images: npt.NDArray[Any], rng: np.random.Generator, classes: int, seed: Any, options: dict[str, Any]
) -> DataCanaries:
    labels = rng.integers(whole_number("classes", classes, minimum=2), size=len(pixels))
    return DataCanaries(inputs=np.asarray(pixels, images.dtype), labels=labels, seed=seed, **options)
