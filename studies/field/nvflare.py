"""NVFlare 2.9: privacy filters of a site."""

from studies.field.project import Check, Project, part

FILTERS = "nvflare.app_common.filters"


def percentile(noise):
    del noise  # the filter adds none
    made = part(f"{FILTERS}.percentile_privacy", "PercentilePrivacy")(percentile=10, gamma=0.01)
    return part("coalmine.testing.nvflare", "filter_release")(made)


def sparse_vector(noise):
    made = part(f"{FILTERS}.svt_privacy", "SVTPrivacy")(epsilon=0.1, noise_var=0.1 / noise)
    return part("coalmine.testing.nvflare", "filter_release")(made)


ONE = {"dim": 1_000, "clients": 1}
PROJECT = Project(
    packages=("nvflare==2.9.0",), where="nvflare/app_common/filters",
    claim="PercentilePrivacy: “largest percentile to share” as privacy; SVTPrivacy: `epsilon` (their docstrings)",
    checks=(
        Check(name="PercentilePrivacy", make=percentile, expected="not PASS", options=ONE,
              why="no noise; not established: no ε is claimed"),
        Check(name="SVTPrivacy", make=sparse_vector, epsilon=0.1, expected="VIOLATION", options=ONE,
              why="`epsilon` is for the choice of coordinates alone: evidence/nvflare-svt has attacks made for it"),
    ),
)  # fmt: skip
