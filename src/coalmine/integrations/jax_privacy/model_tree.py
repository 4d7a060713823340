"""A model's pytree as arrays by name, as an audit takes them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class ModelTree:
    """The structure of a model, and the names of its arrays."""

    def __init__(self, params: Any) -> None:
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        if not leaves:
            raise ValueError("params must hold the arrays of the model, got an empty tree")
        self._structure: Any = structure
        self._names = [jax.tree_util.keystr(path, simple=True, separator="/") or "parameters" for path, _ in leaves]
        self.arrays: dict[str, Any] = dict(zip(self._names, (leaf for _, leaf in leaves), strict=True))

    @property
    def precision(self) -> str:
        """The types of the arrays."""
        return ", ".join(sorted({str(leaf.dtype) for leaf in self.arrays.values()}))

    def named(self, tree: Any) -> dict[str, Any]:
        """The arrays of a tree of this structure, by name."""
        return dict(zip(self._names, self._structure.flatten_up_to(tree), strict=True))

    def tree(self, arrays: Mapping[str, Any]) -> Any:
        """The inverse of `named`."""
        return self._structure.unflatten([arrays[name] for name in self._names])

    def copied(self) -> dict[str, Any]:
        """Copies of the arrays on the same devices: a step may overwrite the originals."""
        return {name: _copy(leaf) for name, leaf in self.arrays.items()}


def named_leaves(params: Any) -> dict[str, Any]:
    """The arrays of a pytree by their names: `parameters` for an `Audit.for_model` of your own."""
    return ModelTree(params).arrays


def _copy(leaf: Any) -> Any:
    return jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else np.array(leaf)
