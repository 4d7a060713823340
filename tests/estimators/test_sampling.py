"""Sampling schemes as settings."""

import pickle

import pytest

from coalmine.estimators.sampling import (
    FixedSize,
    Poisson,
    RandomAllocation,
    Shuffled,
    checked_sampling,
    sampling_from_dict,
    sampling_to_dict,
)

SCHEMES = [Poisson(0.1, 50), RandomAllocation(50, 2), Shuffled(50), FixedSize(5, 20, 50)]


@pytest.mark.parametrize("sampling", SCHEMES, ids=lambda sampling: sampling.scheme)
def test_a_scheme_survives_files_and_pickle(sampling):
    assert sampling_from_dict(sampling_to_dict(sampling)) == sampling
    assert pickle.loads(pickle.dumps(sampling)) == sampling
    assert hash(sampling) == hash(sampling_from_dict(sampling_to_dict(sampling)))
    assert checked_sampling(sampling) is sampling


def test_rates_and_rounds():
    assert [sampling.rate for sampling in SCHEMES] == [0.1, 0.02, 0.02, 0.25]  # type: ignore[attr-defined]
    assert [sampling.total_rounds for sampling in SCHEMES] == [50, 100, 50, 50]  # type: ignore[attr-defined]
    assert str(SCHEMES[0]) == "Poisson sampling with probability 0.1 in 50 rounds"
    assert str(SCHEMES[1]) == "random allocation over 2 epochs of 50 rounds"
    assert RandomAllocation(50) != Shuffled(50)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Poisson(0, 5), r"probability must lie in \(0, 1\], got 0"),
        (lambda: Poisson(1.5, 5), r"probability must lie in \(0, 1\], got 1.5"),
        (lambda: Poisson(0.5, 0), "rounds must be at least 1, got 0"),
        (lambda: RandomAllocation(2.5), "rounds must be a whole number, got 2.5"),
        (lambda: Shuffled(5, epochs=0), "epochs must be at least 1, got 0"),
        (lambda: FixedSize(6, 5, 1), "size must be at most the population of 5, got 6"),
        (lambda: sampling_from_dict({"scheme": "lottery"}), "scheme must be one of poisson, .*, got 'lottery'"),
        (lambda: sampling_from_dict({"scheme": "poisson", "probability": 0.1, "rounds": 5, "size": 3}), "'size'"),
    ],
)
def test_bad_settings_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
