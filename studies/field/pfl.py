"""pfl 0.6: a Gaussian mechanism, applied to the sum of users' statistics or to each user's own."""

from studies.field.project import Check, Project, part


def central(noise):
    return part("coalmine.testing.pfl", "mechanism_release")(
        part("pfl.privacy.privacy_mechanism", "CentrallyAppliedPrivacyMechanism")(gaussian(noise))
    )


def gaussian(noise):
    return part("pfl.privacy.gaussian_mechanism", "GaussianMechanism")(1.0, noise)


def local(noise):
    return part("coalmine.testing.pfl", "mechanism_release")(gaussian(noise))


PROJECT = Project(
    packages=("pfl==0.6.0", "multiprocess==0.70.18", "dill==0.4.0"), where="pfl/privacy/gaussian_mechanism.py",
    claim="`relative_noise_stddev`: the std of the noise relative to the clipping bound (docstring of GaussianMechanism)",
    checks=(
        Check(name="central", make=central, expected="PASS", options={"dim": 1_000, "aggregate": "sum"},
              why="each user is clipped, noise on the sum"),
        Check(name="local", make=local, expected="PASS", options={"dim": 1_000, "clients": 1, "aggregate": "sum"},
              why="each user is clipped, and gets noise"),
    ),
)  # fmt: skip
