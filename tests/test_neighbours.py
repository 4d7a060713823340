"""Words of other libraries: whoever types one in a call, a config or an option learns what it is called here."""

import inspect

import numpy as np
import pytest

from coalmine import Audit, Claim, Poisson, amplified_epsilon, mechanism_epsilon
from coalmine.cli.sampling_option import SchemeType
from coalmine.simulation.config import RunConfig
from coalmine.testing import check_private

AUDIT = {"canaries": 10, "delta": 1e-5, "seed": 1}
CALLS = {
    "rounds": (lambda: Audit(100, **AUDIT, steps=5), lambda: Audit(100, **AUDIT, epochs=5)),
    "claim": (lambda: Audit(100, **AUDIT, target_epsilon=5.0), lambda: Audit(100, **AUDIT).result(target_epsilon=5.0)),
    "noise_std": (lambda: Audit(100, **AUDIT).observe_round(1, np.zeros(100), present=[], sigma=1.0),),
    "probability": (lambda: Poisson(sample_rate=0.1, rounds=10),),
    "sampling": (lambda: Claim(3.0, sample_rate=0.1), lambda: amplified_epsilon(1.0, sample_rate=0.1, delta=1e-5)),
    "noise_multiplier": (
        lambda: mechanism_epsilon(sigma=1.0, delta=1e-5),
        lambda: RunConfig.from_dict({"privacy": {"sigma": 1.0}}),
    ),
    "clients_per_round": (lambda: RunConfig.from_dict({"participation": {"sample_rate": 0.1}}),),
    "epsilon": (lambda: check_private(np.sum, dim=100, target_epsilon=3.0, delta=1e-5, clip_norm=1.0),),
}


@pytest.mark.parametrize(("here", "call"), [(here, call) for here, calls in CALLS.items() for call in calls])
def test_a_word_of_another_library_is_answered_with_the_one_here(here, call):
    with pytest.raises((TypeError, ValueError), match=f": here it is {here}$"):
        call()


def test_the_settings_of_a_scheme_are_suggested_too():
    with pytest.raises(Exception, match=r"got 'sample_rate=0\.1': here it is probability"):
        SchemeType().convert("poisson,sample_rate=0.1,rounds=10", None, None)


def test_other_unknown_words_and_the_signature_stay_as_they_are():
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        Audit(100, **AUDIT, nonsense=1)
    assert "canaries" in inspect.signature(Audit).parameters
    assert list(inspect.signature(mechanism_epsilon).parameters) == ["noise_multiplier", "delta", "participations"]
