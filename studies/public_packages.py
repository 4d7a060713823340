"""Values of jax-privacy and privacy-estimates for given scores; runs in an environment with these packages.

    python studies/public_packages.py < cases.json

Reads cases as JSON from standard input, each with a name, a method and the method's inputs. Writes a JSON object with the
values by name and the packages' versions to standard output. Does not import coalmine.
"""

import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
from jax_privacy.auditing import CanaryScoreAuditor, Explicit
from privacy_estimates import AttackResults, Beta, compute_eps_lo

SIGNIFICANCE = 0.05
PACKAGES = ("jax-privacy", "privacy-estimates")


def value(method: str, case: dict[str, Any]) -> float:
    """The package's function applied to a case's scores or to its counts of errors."""
    delta = case["delta"]
    if method.startswith("privacy-estimates"):
        return _of_counts(method, case, delta)
    auditor = CanaryScoreAuditor(np.array(case["observed"]), np.array(case["unobserved"]))
    if method == "jax-privacy epsilon_one_run":
        return float(auditor.epsilon_one_run(SIGNIFICANCE, delta))
    if method == "jax-privacy epsilon_one_run_fdp":
        return float(auditor.epsilon_one_run_fdp(SIGNIFICANCE, delta))
    if method == "jax-privacy epsilon_one_run, one threshold":
        strategy = Explicit(case["threshold"])
        return float(auditor.epsilon_one_run(SIGNIFICANCE, delta, threshold_strategy=strategy))
    if method == "jax-privacy epsilon_one_run_fdp, one threshold":
        strategy = Explicit(case["threshold"])
        return float(auditor.epsilon_one_run_fdp(SIGNIFICANCE, delta, threshold_strategy=strategy))
    if method == "jax-privacy epsilon_clopper_pearson, each threshold":  # the best of them, uncorrected
        found = (
            auditor.epsilon_clopper_pearson(
                SIGNIFICANCE, delta, one_sided=False, threshold_strategy=Explicit(threshold)
            )
            for threshold in sorted(set(case["observed"]))
        )
        return float(max(found))
    if method == "jax-privacy epsilon_from_gdp":  # scores of two values: three thresholds, whose correction is undone
        return float(auditor.epsilon_from_gdp(3 * SIGNIFICANCE, delta))
    raise ValueError(f"no package has {method!r}")


def _of_counts(method: str, case: dict[str, Any], delta: float) -> float:
    found = []
    for fn, count, fp, unobserved in case["counts"]:
        counts = AttackResults(FN=fn, FP=fp, TN=unobserved - fp, TP=count - fn)
        if method == "privacy-estimates Beta.eps_lo":
            found.append(Beta(counts).eps_lo(delta=delta, alpha=SIGNIFICANCE, xtol=1e-3))
        elif method == "privacy-estimates compute_eps_lo, beta":
            found.append(compute_eps_lo(counts, delta, SIGNIFICANCE, "beta"))
        else:
            raise ValueError(f"no package has {method!r}")
    return float(max(found))


def main() -> int:
    """Compute every case."""
    values = {case["name"]: value(case["method"], case) for case in json.load(sys.stdin)}
    versions = {name: version(name) for name in PACKAGES}
    json.dump({"values": values, "versions": versions}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
