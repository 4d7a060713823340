"""Test an Optax transformation, or any object with `init` and `update`.

    release = transformation_release(optax.contrib.differentially_private_aggregate(1.0, 1.5, key))
    assert_private(release, epsilon=3.0, delta=1e-5, dim=5_000, aggregate="mean")

Only jax is imported: a transformation is a pair of functions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import jax
    from jax.flatten_util import ravel_pytree
except ImportError as error:
    raise ImportError("testing a transformation of Optax needs: pip install optax") from error

from coalmine.argument_checks import Floats, short_repr
from coalmine.testing.client_rows import Release, client_rows

__all__ = ["transformation_release"]


def transformation_release(
    transformation: Any, *, aggregate: Callable[[Any], Any] | None = None, params: Any = None
) -> Release:
    """A function from per-example gradients, one row each, to the gradient that the transformation returns.

    By default the transformation receives per-example gradients, with the examples on the first axis, as
    `optax.contrib.differentially_private_aggregate` expects them. If your own code clips and sums them first, and the
    transformation only adds noise, pass that code as `aggregate`: it takes per-example gradients and returns the input of
    the transformation. Pass the transformation up to its noise, without the learning rate, momentum or Adam that follow: a
    change of sign or scale of coordinates hides canaries.

    `params` is the model, a tree of arrays (default: one array of zeros in single precision). The state is kept from call
    to call, as in training, so that each call draws its own noise.
    """
    if not callable(getattr(transformation, "init", None)) or not callable(getattr(transformation, "update", None)):
        raise TypeError(f"transformation must have init and update, got {short_repr(transformation)}")
    return _Steps(transformation, aggregate, params)


class _Steps:
    """The transformation's steps so far."""

    def __init__(self, transformation: Any, aggregate: Callable[[Any], Any] | None, params: Any) -> None:
        self._transformation, self._aggregate, self._params = transformation, aggregate, params
        self._dim = None if params is None else ravel_pytree(params)[0].size
        self._state: Any = None

    def __call__(self, updates: Any) -> Floats:
        rows = client_rows(updates, dim=self._dim)
        if self._params is None:
            self._params, self._dim = jax.numpy.zeros(rows.shape[1]), rows.shape[1]
        flat, to_tree = ravel_pytree(self._params)
        if self._state is None:
            self._state = self._transformation.init(self._params)
        gradients = jax.vmap(to_tree)(jax.numpy.asarray(rows, dtype=flat.dtype))
        if self._aggregate is not None:
            gradients = self._aggregate(gradients)
        released, self._state = self._transformation.update(gradients, self._state, self._params)
        row = np.asarray(ravel_pytree(released)[0], dtype=np.float64)
        if row.shape != flat.shape:
            raise ValueError(
                f"the transformation must return one gradient of {flat.size} numbers, got {row.size}: it does not sum over "
                "examples; pass the code that clips and sums them as aggregate=…"
            )
        return row
