"""The checks of one project, in its own process: writes what was found as JSON to standard output."""

import importlib
import json
import random
import sys
import time
import warnings

import numpy as np
import torch

from coalmine.testing import check_private
from studies.field.project import DELTA, Check


def measured(check: Check, noise: float) -> dict[str, object]:
    """The verdict on one claim with this share of the noise."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - of the packages under test
    torch.manual_seed(0)
    result = check_private(check.make(noise), epsilon=check.epsilon, delta=DELTA, **check.options)
    assert result.verdict is not None
    assert result.trainer is not None
    fault = result.trainer.check.likely_fault if result.trainer.check else None
    return {
        "verdict": str(result.verdict.outcome),
        "epsilon": result.epsilon,
        "reason": result.verdict.reason,
        "fault": fault,
    }


def main() -> None:
    """Run every check twice: as the package is, and with half the noise."""
    warnings.simplefilter("ignore")
    project = importlib.import_module(f"studies.field.{sys.argv[1]}").PROJECT
    rows = []
    for check in project.checks:
        start = time.monotonic()
        found = {"check": check.name, "claimed": check.epsilon, "expected": check.expected, "why": check.why}
        found |= {"as_is": measured(check, 1.0), "half_noise": measured(check, 0.5)}
        rows.append(found | {"seconds": round(time.monotonic() - start, 1)})
    print("\n" + json.dumps(rows))


if __name__ == "__main__":
    main()
