"""Test a privacy mechanism of pfl: the clipping of each user, and the noise on their sum.

    release = mechanism_release(CentrallyAppliedPrivacyMechanism(GaussianMechanism(1.0, 1.5)))
    assert_private(release, epsilon=3.0, delta=1e-5, dim=5_000, aggregate="sum")

pfl needs an older dp-accounting than Flower, so it needs its own environment.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from pfl.common_types import Population
    from pfl.context import CentralContext, UserContext
    from pfl.hyperparam import get_param_value
    from pfl.internal.ops.selector import get_default_framework_module
    from pfl.metrics import Metrics
    from pfl.postprocessor.base import Postprocessor
    from pfl.stats import MappedVectorStatistics
except ImportError as error:
    raise ImportError(
        "testing a mechanism of pfl needs its own environment with: pip install 'coalmine[pfl]'"
    ) from error

from coalmine.argument_checks import Floats, short_repr
from coalmine.testing.client_rows import ModelArrays, Release, client_rows

__all__ = ["mechanism_release"]


def mechanism_release(mechanism: Postprocessor, *, model: Mapping[str, npt.NDArray[Any]] | None = None) -> Release:
    """A function from the users' updates, one row each, to the sum that the mechanism releases.

    `postprocess_one_user` runs on each row, and `postprocess_server` on their sum, with seeds from numpy's global stream, as
    in pfl's own simulations. `model` maps names to arrays (default: one array).

    Without `CentrallyAppliedPrivacyMechanism` around it, a mechanism adds its noise to every user's update. It then protects
    each user's update, so test it with `clients=1`.
    """
    if not isinstance(mechanism, Postprocessor):
        raise TypeError(f"mechanism must be a postprocessor of pfl, got {short_repr(mechanism)}")
    return _Iterations(mechanism, ModelArrays(model))


class _Iterations:
    """The mechanism's central iterations so far."""

    def __init__(self, mechanism: Postprocessor, arrays: ModelArrays) -> None:
        self._mechanism, self._arrays, self._iteration = mechanism, arrays, 0

    def __call__(self, updates: Any) -> Floats:
        rows = client_rows(updates, dim=self._arrays.dim, clip_norm=_clip_norm(self._mechanism))
        ops = get_default_framework_module()
        total = None
        for index, row in enumerate(rows):
            tensors = {name: ops.to_tensor(values) for name, values in self._arrays.split(row).items()}
            context = UserContext(num_datapoints=1, seed=_seed(), user_id=f"user-{index}")
            one, _ = self._mechanism.postprocess_one_user(stats=MappedVectorStatistics(tensors), user_context=context)
            total = one if total is None else total + one
        central: Any = CentralContext(
            current_central_iteration=self._iteration,
            do_evaluation=False,
            cohort_size=len(rows),
            population=Population.TRAIN,
            algorithm_params=None,
            model_train_params=None,
            seed=_seed(),
        )
        self._iteration += 1
        released, _ = self._mechanism.postprocess_server(
            stats=total, central_context=central, aggregate_metrics=Metrics()
        )
        _, parts = released.get_weights()
        return np.concatenate([_numbers(part) for part in parts])


def _numbers(tensor: Any) -> Floats:
    values = tensor.detach().cpu() if hasattr(tensor, "detach") else tensor
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _seed() -> int:
    return int(np.random.randint(0, 2**32 - 1))  # noqa: NPY002 - pfl draws its seeds from this stream


def _clip_norm(mechanism: Any) -> float | None:
    """The clip norm of a mechanism that clips the Euclidean norm; None for others."""
    inner = getattr(mechanism, "underlying_mechanism", mechanism)
    bound = getattr(inner, "clipping_bound", None)
    return None if bound is None or getattr(inner, "_order", 2) != 2 else float(get_param_value(bound))
