"""Test NVFlare filters: a site's update goes through them as its reply does.

    release = filter_release(SVTPrivacy())
    assert_private(release, epsilon=3.0, delta=1e-5, dim=5_000, clients=1)

A filter on a site protects that site's own reply, so the test has one client.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.filter import Filter
    from nvflare.apis.fl_context import FLContext
except ImportError as error:
    raise ImportError("testing an NVFlare filter needs: pip install 'coalmine[nvflare]'") from error

from coalmine.argument_checks import Floats, short_repr, whole_number
from coalmine.testing.client_rows import ModelArrays, Release, client_rows, joined

__all__ = ["filter_release"]


def filter_release(
    *filters: Filter, model: Mapping[str, npt.NDArray[Any]] | None = None, num_steps: int = 1
) -> Release:
    """A function from the sites' updates, one row each, to the sum of the filtered updates.

    `filters` run in this order, each with its own `process`, on a DXO of kind WEIGHT_DIFF. `model` maps names to arrays
    (default: one array). `num_steps` is the number of local steps that the DXO declares, by which some filters scale.

    A filter on a site protects that site's own reply, which the server sees. So test it with `clients=1`. With more rows
    the attacker sees only the sum of the filtered replies, and the noise of all sites hides each one.
    """
    if not filters or not all(isinstance(each, Filter) for each in filters):
        raise TypeError(f"filters must be filters of NVFlare, at least one, got {short_repr(filters)}")
    steps = whole_number("num_steps", num_steps, minimum=1)
    arrays = ModelArrays(model)

    def release(updates: Any) -> Floats:
        rows = client_rows(updates, dim=arrays.dim)
        return np.sum([_filtered(filters, arrays.split(row), steps) for row in rows], axis=0)

    return release


def _filtered(filters: tuple[Filter, ...], update: dict[str, npt.NDArray[Any]], steps: int) -> Floats:
    dxo = DXO(DataKind.WEIGHT_DIFF, data=update, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: steps})
    shareable, context = dxo.to_shareable(), FLContext()
    for each in filters:
        shareable = each.process(shareable, context)
    released = from_shareable(shareable).data
    if released.keys() != update.keys():
        raise ValueError(
            f"the filters must pass on every array, or canaries are incomplete: {', '.join(update)}; got "
            f"{', '.join(released) or 'none'}: leave the others out of model="
        )
    return joined({name: released[name] for name in update})
