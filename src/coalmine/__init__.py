"""How much privacy does a trained model give away? One training run, one epsilon, an honest error bar."""

import logging

from coalmine.audit.audit import Audit
from coalmine.audit.gaussian_mechanism import GaussianMechanismAudit, audit_gaussian_mechanism
from coalmine.audit.result import AuditResult
from coalmine.audit.run_directory import RunDirectory
from coalmine.audit.verdict import Claim, Verdict
from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.estimators.amplification import last_iterate_epsilon, shuffled_epsilon, subsampled_epsilon
from coalmine.estimators.gaussians import Gaussian, gaussian_delta, gaussian_epsilon
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.estimators.normality import AndersonDarling, anderson_darling
from coalmine.estimators.null import CosineNull, conditional_null
from coalmine.estimators.rates import epsilon_from_rates
from coalmine.version import __version__

__all__ = [
    "AndersonDarling",
    "Audit",
    "AuditResult",
    "Claim",
    "CosineNull",
    "Gaussian",
    "GaussianMechanismAudit",
    "RotatedCanaries",
    "RunDirectory",
    "SphereCanaries",
    "Verdict",
    "__version__",
    "anderson_darling",
    "audit_gaussian_mechanism",
    "conditional_null",
    "epsilon_from_rates",
    "gaussian_delta",
    "gaussian_epsilon",
    "last_iterate_epsilon",
    "mechanism_epsilon",
    "mechanism_noise",
    "shuffled_epsilon",
    "subsampled_epsilon",
]

logging.getLogger("coalmine").addHandler(logging.NullHandler())
