"""Claims that rely on Flower's sampling of fixed-size cohorts, tested with the canaries that Flower samples."""

import logging
import re
from dataclasses import replace

import pytest
from requires import require

require("flwr")
from flower_training import SEED, LoopGrid, client_app, fedavg, initial_arrays, new_audit, run, server_side  # noqa: E402

from coalmine import Claim, FixedSize, Poisson, amplified_epsilon  # noqa: E402
from coalmine.integrations.flower import audited, canary_mod  # noqa: E402

DIM, REAL, CANARIES, ROUNDS, SIZE = 400, 10, 90, 40, 10
POISSON, FIXED = Poisson(0.1, rounds=ROUNDS), FixedSize(SIZE, REAL + CANARIES, ROUNDS)
POISSON_CLAIM = Claim(amplified_epsilon(2.0, POISSON, 1e-5), sampling=POISSON)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, logger="flwr")


def sampled(mode, *, noise=2.0, **settings):
    """Forty rounds with ten of a hundred nodes, ninety of them canaries."""
    inner = fedavg(fraction_train=SIZE / (REAL + CANARIES))
    audit = new_audit(canaries=CANARIES, dim=DIM, unobserved=200)
    configs = [{}] * REAL + [{"canary-id": i} for i in range(CANARIES)]
    if mode == "client":
        settings = {"seed": SEED} | settings
    if mode == "extra":
        configs = [{}] * (REAL + CANARIES)
    strategy = audited(server_side(SIZE, noise=noise, inner=inner), audit=audit, mode=mode, **settings)
    mods = [canary_mod] if mode == "client" else []
    run(strategy, LoopGrid(client_app(mods), configs), rounds=ROUNDS, arrays=initial_arrays(DIM))
    return strategy.audit


def named():
    return {REAL + 1 + index: index for index in range(CANARIES)}


@pytest.fixture(scope="module", params=["client", "replace"])
def trained(request):
    return sampled(request.param, **({"canary_nodes": named()} if request.param == "replace" else {}))


def test_cohort_sizes_are_recorded(trained):
    assert {item.participants for item in trained.log.rounds()} == {SIZE}


def test_a_poisson_claim_names_the_scheme_to_account_for(trained):
    """Flower draws cohorts of one size, whose epsilon is above the claim. The population is estimated from the picks."""
    result = trained.finish(claim=POISSON_CLAIM)
    assert (result.verdict.outcome, result.verdict.part) == ("VIOLATION", "sampling"), result.verdict.reason
    assert re.search(r"fixed-size sampling of 10 of (9|10)\d in 40 rounds", result.verdict.reason)


def test_the_claim_passes_when_restated(trained):
    """Restated with the upper end of the range for fixed-size sampling."""
    accounted = amplified_epsilon(2.0, FIXED, 1e-5)
    assert accounted.low < accounted.high
    result = trained.finish(claim=Claim(accounted, sampling=FIXED))
    assert result.verdict.outcome == "PASS", result.verdict.reason
    assert result.claim.sampler_observed
    assert result.claim.noise_multiplier == 2.0


def test_the_noise_of_the_strategy_is_what_is_accounted(trained):
    """Half of the lower end is below the lower end of the range at the noise that the wrapper states."""
    low = amplified_epsilon(2.0, FIXED, 1e-5).low
    result = trained.finish(claim=Claim(low / 2, sampling=FIXED))
    assert (result.verdict.outcome, result.verdict.part) == ("VIOLATION", "accounting")


def test_extra_canaries_do_not_observe_the_sampler():
    audit = sampled("extra")
    result = audit.finish(claim=replace(POISSON_CLAIM, sampler_observed=True))
    assert result.legs["sampling"].code == "sampler not observed"


def test_nodes_with_several_canaries_do_not_observe_the_sampler():
    """They alternate between canaries, so a canary's rounds are not those of its node."""
    several = {REAL + 1 + node: [2 * node, 2 * node + 1] for node in range(CANARIES // 2)}
    result = sampled("replace", canary_nodes=several).finish(claim=POISSON_CLAIM)
    assert result.legs["sampling"].code == "sampler not observed"


def test_a_fraction_of_the_nodes_is_designated_before_sampling():
    """Otherwise the first cohorts would consist of canaries."""
    audit = sampled("replace", canary_nodes=1.0)
    present = [item.present.size for item in audit.log.rounds()]
    assert max(present) <= SIZE
    assert 0.8 * SIZE < sum(present) / ROUNDS < SIZE
