"""How much privacy does a trained model give away? One training run, one epsilon, an honest error bar."""

import logging

from coalmine.audit import Audit
from coalmine.canaries import BlockedCanaries, RotatedCanaries, SphereCanaries
from coalmine.estimators.all_iterates import estimate_from_iterates
from coalmine.estimators.amplification import AmplifiedEpsilon, amplified_epsilon, amplified_noise
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.correlated import BandedNoise, TreeNoise, correlated_epsilon
from coalmine.estimators.final_model import estimate_from_final
from coalmine.estimators.gaussian_fit import EpsilonEstimate, epsilon_estimate
from coalmine.estimators.gaussians import Gaussian, gaussian_delta, gaussian_epsilon
from coalmine.estimators.literature.all_estimators import compare_estimators
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.estimators.normality import AndersonDarling, anderson_darling
from coalmine.estimators.null import CosineNull, conditional_null
from coalmine.estimators.planning import Plan, canaries_for_power, canaries_to_detect, plan_audit, power_against_claim
from coalmine.estimators.rates import epsilon_from_rates
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Shuffled
from coalmine.evidence.gaussian_mechanism import GaussianMechanismAudit, audit_gaussian_mechanism
from coalmine.log.run_directory import RunDirectory
from coalmine.log.seed_file import read_seed, write_seed
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.alarm import Alarm, ViolationError
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.verdict import Verdict
from coalmine.version import __version__

__all__ = [
    "Alarm",
    "AmplifiedEpsilon",
    "AndersonDarling",
    "Audit",
    "AuditResult",
    "AuditedItem",
    "BandedNoise",
    "BlockedCanaries",
    "Claim",
    "CosineNull",
    "EpsilonEstimate",
    "FixedSize",
    "Gaussian",
    "GaussianMechanismAudit",
    "LiteratureRow",
    "Plan",
    "Poisson",
    "RandomAllocation",
    "RotatedCanaries",
    "RunDirectory",
    "Shuffled",
    "SphereCanaries",
    "TreeNoise",
    "Verdict",
    "ViolationError",
    "__version__",
    "amplified_epsilon",
    "amplified_noise",
    "anderson_darling",
    "audit_gaussian_mechanism",
    "canaries_for_power",
    "canaries_to_detect",
    "compare_estimators",
    "conditional_null",
    "correlated_epsilon",
    "epsilon_estimate",
    "epsilon_from_rates",
    "epsilon_lower_bound",
    "estimate_from_final",
    "estimate_from_iterates",
    "gaussian_delta",
    "gaussian_epsilon",
    "mechanism_epsilon",
    "mechanism_noise",
    "plan_audit",
    "power_against_claim",
    "read_seed",
    "write_seed",
]

logging.getLogger("coalmine").addHandler(logging.NullHandler())
