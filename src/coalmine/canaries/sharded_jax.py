"""Canaries of a jax array that several devices hold: each device rotates its own part, and only scores are summed.

The parts are blocks, one after another in the order of the mesh, so the canaries are those of `BlockedCanaries` with as
many blocks of one size. Nothing of the model's size leaves a device.
"""

import math
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from coalmine.argument_checks import short_repr
from coalmine.canaries import rotation_jax
from coalmine.canaries.array_types import is_traced
from coalmine.canaries.blocked import LARGEST_BLOCK, BlockedCanaries, cut_into_blocks


class ShardedCanaries:
    """`count` orthonormal canaries for arrays that are sharded as `like` is, over all devices of its mesh.

    Each device holds one part of the array, of the same size, cut into blocks of at most 2^24 - 1 coordinates. Blocks are
    counted device by device, in the order of the mesh: `blocks` are the canaries of the parts one after another.
    `products` and `combine` also work under jit.
    """

    def __init__(self, count: int, like: Any, *, seed: SupportsIndex | bytes) -> None:
        self.sharding = _checked_sharding(like)
        self.shape = tuple(like.shape)
        mesh = self.sharding.mesh
        self._part = tuple(self.sharding.shard_shape(self.shape))
        sizes = cut_into_blocks(math.prod(self._part), LARGEST_BLOCK)
        self.blocks = BlockedCanaries(count, sizes * mesh.size, seed=seed)
        self._sizes = sizes
        self._spec = self.sharding.spec
        tables = [rotation_jax.draw_tables(rotation) for rotation in self.blocks._rotations]
        each = PartitionSpec(mesh.axis_names)  # one row of tables for each device
        self._tables = tuple(
            jax.tree.map(lambda *rows: _rows_on(mesh, each, np.stack(rows)), *tables[number :: len(sizes)])
            for number in range(len(sizes))
        )
        self._each = each
        self._products, self._cosines, self._combine = self._compiled()

    def __repr__(self) -> str:
        return f"ShardedCanaries(count={self.blocks.count}, shape={self.shape}, devices={self.sharding.mesh.size})"

    def products(self, array: Any) -> Any:
        """The products of an array with all canaries: float32, the same on every device."""
        return self._products(self._tables, self._checked(array))

    def cosines(self, array: Any) -> Any:
        """Cosines of all canaries with an array; NaN if it is zero or not finite."""
        return self._cosines(self._tables, self._checked(array))

    def combine(self, weights: Any, *, dtype: Any = jnp.float32) -> Any:
        """The sum of the canaries, each times its weight: an array that is sharded as the model's."""
        given = jnp.asarray(weights, jnp.float32)
        if given.shape != (self.blocks.count,):
            raise ValueError(f"weights must be one for each of {self.blocks.count} canaries, got shape {given.shape}")
        return self._combine(self._tables, given).astype(dtype)

    def _checked(self, array: Any) -> Any:
        if tuple(array.shape) != self.shape:
            raise ValueError(f"the array must have shape {self.shape}, got {tuple(array.shape)}")
        if not is_traced(array) and not array.sharding.is_equivalent_to(self.sharding, len(self.shape)):
            raise ValueError(f"the array must be sharded as {self.sharding.spec}, got {array.sharding}")
        return array.astype(jnp.float32)

    def _compiled(self) -> tuple[Any, Any, Any]:
        """The functions of `products`, `cosines` and `combine`; each takes the tables as its first argument."""
        everywhere, axes = PartitionSpec(), self.sharding.mesh.axis_names

        def cosines(tables: Any, array: Any) -> Any:
            def own(rows: Any, part: Any, scale: Any) -> tuple[Any, Any]:
                scaled = part / scale
                square = rotation_jax.squared_length(scaled.reshape(-1))
                return self._own_products(rows, scaled), jax.lax.psum(square, axes)

            largest = jnp.abs(array).max()
            scale = jnp.where(largest > 0, largest, 1)
            work = self._on_each(own, (self._each, self._spec, everywhere), (everywhere, everywhere))
            found, square = work(tables, array, scale)
            return found / jnp.sqrt(square)

        def own_sum(rows: Any, weights: Any) -> Any:
            parts = [
                rotation_jax.combine(_own_row(row), weights, dim=size) * float(share)
                for row, size, share in zip(rows, self._sizes, self.blocks.shares, strict=False)
            ]
            return jnp.concatenate(parts).reshape(self._part)

        return (
            jax.jit(self._on_each(self._own_products, (self._each, self._spec), everywhere)),
            jax.jit(cosines),
            jax.jit(self._on_each(own_sum, (self._each, everywhere), self._spec)),
        )

    def _own_products(self, rows: Any, part: Any) -> Any:
        """Of one device: the products of its blocks, summed over all devices."""
        flat, start, total = part.reshape(-1), 0, jnp.zeros(self.blocks.count, jnp.float32)
        for row, size, share in zip(rows, self._sizes, self.blocks.shares, strict=False):
            piece = rotation_jax.products(_own_row(row), flat[start : start + size], count=self.blocks.count)
            total, start = total + piece * float(share), start + size
        return jax.lax.psum(total, self.sharding.mesh.axis_names)

    def _on_each(self, work: Any, inputs: Any, outputs: Any) -> Any:
        return jax.shard_map(work, mesh=self.sharding.mesh, in_specs=inputs, out_specs=outputs)


def _checked_sharding(like: Any) -> NamedSharding:
    """The sharding of an array, refused unless every device of its mesh holds a part of its own."""
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"like must be a jax array with a NamedSharding, got {short_repr(like)}")
    parts = math.prod(like.shape) // max(math.prod(sharding.shard_shape(tuple(like.shape))), 1)
    if parts != sharding.mesh.size:
        raise ValueError(
            f"like must have a part of its own on each of {sharding.mesh.size} devices, got {sharding.spec} of "
            f"{tuple(like.shape)}, in {parts} parts; shard it over every axis of the mesh"
        )
    return sharding


def _rows_on(mesh: Any, spec: PartitionSpec, rows: Any) -> Any:
    """Rows of tables, one on each device."""
    return jax.device_put(rows, NamedSharding(mesh, spec))


def _own_row(table: Any) -> Any:
    """A device's own row, without the axis of the devices."""
    return jax.tree.map(lambda rows: rows[0], table)
