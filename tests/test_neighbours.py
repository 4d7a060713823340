"""Words of other libraries: whoever types one in a call, a config or an option learns what it is called here."""

import inspect
from typing import Any

import numpy as np
import pytest

from coalmine import Audit, Claim, Poisson, amplified_epsilon, mechanism_epsilon
from coalmine.cli.sampling_option import SchemeType
from coalmine.simulation.config import RunConfig
from coalmine.testing import check_private

AUDIT: dict[str, Any] = {"canaries": 10, "delta": 1e-5, "seed": 1}
ROUND: dict[str, Any] = {"present": [], "model_delta": np.zeros(100), "round_number": 1}
CALLS: list[tuple[str, Any, dict[str, Any]]] = [
    ("rounds", lambda **words: Audit(100, **AUDIT, **words), {"steps": 5}),
    ("rounds", lambda **words: Audit(100, **AUDIT, **words), {"epochs": 5}),
    ("claim", lambda **words: Audit(100, **AUDIT, **words), {"target_epsilon": 5.0}),
    ("claim", lambda **words: Audit(100, **AUDIT).result(**words), {"target_epsilon": 5.0}),
    ("noise_std", lambda **words: Audit(100, **AUDIT).observe_round(**ROUND, **words), {"sigma": 1.0}),
    ("probability", lambda **words: Poisson(rounds=10, **words), {"sample_rate": 0.1}),
    ("sampling", lambda **words: Claim(3.0, **words), {"sample_rate": 0.1}),
    ("sampling", lambda **words: amplified_epsilon(1.0, delta=1e-5, **words), {"sample_rate": 0.1}),
    ("noise_multiplier", lambda **words: mechanism_epsilon(delta=1e-5, **words), {"sigma": 1.0}),
    ("noise_multiplier", lambda **words: RunConfig.from_dict({"privacy": words}), {"sigma": 1.0}),
    ("clients_per_round", lambda **words: RunConfig.from_dict({"participation": words}), {"sample_rate": 0.1}),
    ("epsilon", lambda **words: check_private(np.sum, dim=100, delta=1e-5, **words), {"target_epsilon": 3.0}),
]


@pytest.mark.parametrize(("here", "call", "words"), CALLS)
def test_a_word_of_another_library_is_answered_with_the_one_here(here, call, words):
    with pytest.raises((TypeError, ValueError), match=f": here it is {here}$"):
        call(**words)


def test_the_settings_of_a_scheme_are_suggested_too():
    with pytest.raises(Exception, match=r"got 'sample_rate=0\.1': here it is probability"):
        SchemeType().convert("poisson,sample_rate=0.1,rounds=10", None, None)


def test_other_unknown_words_and_the_signature_stay_as_they_are():
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        Audit(100, **AUDIT | {"nonsense": 1})
    assert "canaries" in inspect.signature(Audit).parameters
    assert list(inspect.signature(mechanism_epsilon).parameters) == ["noise_multiplier", "delta", "participations"]
