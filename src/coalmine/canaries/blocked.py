"""Canaries of a model in blocks: each block has its own rotation, so no array of the model's size is ever needed.

Canary i is the concatenation over blocks b of √(d_b/d)·q_{b,i}, with q_{b,·} the orthonormal canaries of block b. Canaries
stay orthonormal, and the projection of a vector on an absent one has variance ‖v‖²/d however its norm is spread over the
blocks. With one block they equal `RotatedCanaries` bit for bit.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn, SupportsIndex

import numpy as np

from coalmine.argument_checks import Floats, whole_number
from coalmine.canaries import rotation_numpy
from coalmine.canaries.array_types import (
    checked_jax_vector,
    checked_vector,
    euclidean_norm,
    is_jax,
    is_tensor,
    same_kind,
    working_dtype,
)
from coalmine.canaries.base import checked_indices, rescaled, usable
from coalmine.canaries.philox import key_from_seed
from coalmine.canaries.rotation import Rotation, draw_rotation
from coalmine.canaries.secret import SecretBytes, SecretInt

LARGEST_BLOCK = (1 << 24) - 1  # a transform is cheapest just below a power of two


def cut_into_blocks(dim: int, most: int = LARGEST_BLOCK) -> tuple[int, ...]:
    """Sizes of the fewest blocks of at most `most` coordinates each: nearly equal, and none if `dim` is 0."""
    count = -(-dim // most)
    return tuple(dim // count + (number < dim % count) for number in range(count))


class BlockedCanaries:
    """`count` orthonormal vectors, in blocks of these `sizes`.

    A process that holds only some of a model's blocks passes the number of its `first` block, counted over all processes,
    and the total `dim` of all blocks. `products` and `combine` take one block, counted from this process's first.

        >>> canaries = BlockedCanaries(3, [1000, 2000], seed=7)
        >>> total = np.concatenate([canaries.combine(block, [0, 2]) for block in (0, 1)])
        >>> abs(canaries.cosines(total)).round(3)
        array([0.707, 0.   , 0.707])
    """

    def __init__(
        self,
        count: int,
        sizes: Sequence[int],
        *,
        seed: SupportsIndex | bytes,
        first: int = 0,
        dim: int | None = None,
    ) -> None:
        self.count = whole_number("count", count, minimum=1)
        self.sizes = tuple(whole_number("the size of a block", size, minimum=2) for size in sizes)
        self.dim = whole_number("dim", sum(self.sizes) if dim is None else dim, minimum=2)
        if self.sizes and self.count > min(self.sizes):
            raise ValueError(f"count must be at most the smallest block, got {self.count} in one of {min(self.sizes)}")
        if sum(self.sizes) > self.dim:
            raise ValueError(f"dim must be at least the total size of the blocks, {sum(self.sizes)}, got {self.dim}")
        key = key_from_seed(seed)
        alone = len(self.sizes) == 1 and self.sizes[0] == self.dim
        keys = [key if alone else block_key(key, first + number) for number in range(len(self.sizes))]
        self._rotations = [draw_rotation(size, own) for size, own in zip(self.sizes, keys, strict=True)]
        self._devices: dict[Any, Any] = {}

    def __repr__(self) -> str:  # without the keys, from which every canary can be made
        return f"BlockedCanaries(count={self.count}, dim={self.dim}, blocks={len(self.sizes)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "BlockedCanaries cannot be copied or pickled: the copy would carry the secret key; "
            "make it again from the seed where it is needed"
        )

    @property
    def shares(self) -> Floats:
        """√(d_b/d) of each block: the norm of a canary's part in it."""
        return np.sqrt(np.array(self.sizes, dtype=np.float64) / self.dim)

    def products(self, block: int, vector: Any) -> Any:
        """Inner products of a block's vector with its unit canaries q_b: float64, on the vector's device.

        Multiply by the block's share for the products with the canaries. For a jax array they are in its working
        precision. On a GPU the call does not wait for the result. Do not use the products of a vector near the limits
        of float32: see `slow_products`.
        """
        rotation = self._rotation(block)
        if is_jax(vector):
            return self._jax_products(rotation, checked_jax_vector(vector, self.sizes[block]))
        checked: Any = checked_vector(vector, self.sizes[block])
        if is_tensor(checked) and checked.device.type != "cpu":
            return self._on(checked.device).products(rotation, checked, self.count)
        products = rotation_numpy.products(rotation, checked.numpy() if is_tensor(checked) else checked, self.count)
        self._forget(rotation)
        doubles = products.astype(np.float64)
        return same_kind(doubles, checked.double()[:0]) if is_tensor(checked) else doubles

    def room(self, block: int, like: Any) -> Any:
        """A buffer for a block's vector, which `products` overwrites instead of copying; None on a CPU."""
        if not is_tensor(like) or like.device.type == "cpu" or like.dtype.itemsize != 4:
            return None
        return self._on(like.device).room(self._rotations[block])

    def slow_products(self, block: int, vector: Any) -> Floats:
        """As `products` for a vector of any norm, on the host; ValueError if it is not finite."""
        checked: Any = checked_vector(np.asarray(vector) if is_jax(vector) else vector, self.sizes[block])
        host = checked.cpu().numpy() if is_tensor(checked) else checked
        if not host.any():
            return np.zeros(self.count)
        if usable(euclidean_norm(host)):
            return np.asarray(self.products(block, host))
        largest = float(np.abs(host).max())
        return np.asarray(self.products(block, rescaled(host))) * largest

    def combine(self, block: int, indices: Sequence[int], *, like: Any = None, unit: bool = False) -> Any:
        """One block of the sum of the canaries at `indices`: of the kind, device and dtype of `like`, else float64.

        With `unit`, the sum of the block's unit canaries q_b, without the factor of the block's share.
        """
        template = np.empty(0) if like is None else like
        rotation, numbers = self._rotation(block), checked_indices(indices, self.count)
        share = float(self.shares[block])
        if is_jax(template):
            total = self._jax_sum(rotation, numbers, template)
            return (total if unit else total * share).astype(template.dtype)
        if is_tensor(template) and template.device.type != "cpu":
            total = self._on(template.device).combine(rotation, numbers, working_dtype(template))
        else:
            dtype = np.float64 if template.dtype.itemsize > 4 else np.float32
            total = rotation_numpy.combine(rotation, numbers, dtype)
            self._forget(rotation)
        if not unit and (len(self.sizes) > 1 or self.sizes[0] < self.dim):
            total *= share
        return same_kind(total, template)

    def cosines(self, vector: Any) -> Floats:
        """Cosines of all canaries with one vector of all blocks, if this process holds them all."""
        checked: Any = checked_vector(np.asarray(vector) if is_jax(vector) else vector, self.dim)
        host = checked.cpu().numpy() if is_tensor(checked) else checked
        if not usable(euclidean_norm(host)):
            host = rescaled(host)
        pieces, norm = np.split(host, np.cumsum(self.sizes)[:-1]), euclidean_norm(host)
        products = sum(
            share * self.slow_products(b, p) for b, (share, p) in enumerate(zip(self.shares, pieces, strict=True))
        )
        return np.asarray(products) / norm

    def _jax_products(self, rotation: Rotation, vector: Any) -> Any:
        from coalmine.canaries import rotation_jax

        own = rotation_jax.working(vector)
        if not rotation_jax.on_cpu(vector):
            return rotation_jax.products(self._jax_tables(rotation, vector), own, count=self.count)
        products = rotation_numpy.products(rotation, np.asarray(own), self.count)
        self._forget(rotation)
        return rotation_jax.placed(products, vector)

    def _jax_sum(self, rotation: Rotation, indices: list[int], like: Any) -> Any:
        from coalmine.canaries import rotation_jax

        dtype = np.float64 if like.dtype.itemsize > 4 else np.float32
        if rotation_jax.on_cpu(like):
            total = rotation_numpy.combine(rotation, indices, dtype)
            self._forget(rotation)
            return rotation_jax.placed(total, like)
        weights = np.zeros(self.count, dtype)
        weights[indices] = 1.0
        tables = self._jax_tables(rotation, like)
        return rotation_jax.combine(tables, rotation_jax.placed(weights, like), dim=rotation.dim)

    def _jax_tables(self, rotation: Rotation, like: Any) -> Any:
        from coalmine.canaries.rotation_jax import DeviceTables

        return self._devices.setdefault("jax", DeviceTables()).of(rotation, like)

    def _rotation(self, block: int) -> Rotation:
        if not 0 <= block < len(self.sizes):
            raise ValueError(f"block must lie in 0..{len(self.sizes) - 1}, got {block}")
        return self._rotations[block]

    def _forget(self, rotation: Rotation) -> None:
        """Keep the signs of one block at a time in memory; drawing them again is fast."""
        if len(self._rotations) > 1:
            for stage in rotation.stages:
                stage.forget_signs()

    def _on(self, device: Any) -> Any:
        from coalmine.canaries.rotation_torch import BlockRotations

        if device not in self._devices:
            self._devices[device] = BlockRotations(device)
        return self._devices[device]


def block_key(key: int, number: int) -> SecretInt:
    """The key of a block's rotation, counted from 0 over all processes."""
    text = SecretBytes(key.to_bytes(16, "little") + number.to_bytes(8, "little"))
    return SecretInt.from_bytes(hashlib.blake2b(text, digest_size=16, person=b"coalmine.block").digest(), "little")
