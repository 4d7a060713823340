"""The claim of a Flower run: a number, a Claim, or Flower's own privacy settings.

Flower's settings are known by their attributes, because `flwr.supercore.privacy_accounting` may move.
"""

from typing import Any

from coalmine.verdict.claim import Claim

SETTINGS = ("target_delta", "neighboring_relation", "sampling_method", "max_epsilon")  # of Flower's PrivacyConfig


def read_claim(claim: Any, delta: float | None) -> Claim | None:
    """A claim from a Claim, a number, a PrivacyConfig, or an accountant with such a config: then its `max_epsilon`."""
    config = getattr(claim, "config", claim)
    if not all(hasattr(config, name) for name in SETTINGS):
        return Claim.of(claim)
    name = type(config).__name__
    if config.max_epsilon is None:
        raise ValueError(f"a {name} without max_epsilon claims no epsilon: give it max_epsilon, or pass claim=3.0")
    if delta is not None and config.target_delta != delta:
        raise ValueError(
            f"target_delta of the {name} must be the audit's delta, {delta:g}, got {config.target_delta:g}"
        )
    sampling, adjacency = (
        getattr(value, "value", value) for value in (config.sampling_method, config.neighboring_relation)
    )
    if sampling != "no-amplification" or adjacency != "add-or-remove-one":
        raise ValueError(
            f"a {name} as a claim must be for no-amplification and add-or-remove-one, got {sampling} and {adjacency}: state "
            f"the scheme, as in claim=Claim({config.max_epsilon:g}, sampling=FixedSize(10, population=100, rounds=40))"
        )
    return Claim(config.max_epsilon)
