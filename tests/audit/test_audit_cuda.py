"""A deferred audit on a CUDA device, which measures a round while training goes on."""

import numpy as np
import pytest
import torch

from coalmine.audit import Audit
from coalmine.measure.noise_law import NoiseParts, measure_law

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DIM = 20_000


@pytest.mark.parametrize("layers", [None, [("first", 4_000), ("second", 16_000)]])
def test_a_deferred_audit_records_the_same_numbers(layers):
    """Also if the vectors are overwritten right afterwards, and in a round that releases nothing."""
    kind = {"canaries": 500, "unobserved": 500, "seed": 1, "delta": 1e-6, "rounds": 6, "presentations": 2}
    audits = [Audit(DIM, layers=layers, deferred=deferred, **kind) for deferred in (True, False)]
    generator = torch.Generator("cuda").manual_seed(1)
    for number in range(1, 7):
        present = audits[0].canaries_in_round(number)
        others, noise = (torch.randn(DIM, device="cuda", generator=generator) for _ in range(2))
        total, _ = (audit.updates(present, 1.0, like=others) for audit in audits)
        model_delta = (others + total + noise) / 100 if number != 4 else torch.zeros_like(noise)
        for audit in audits:
            audit.observe_round(
                number, model_delta, present=present, others=others / 100, noise_std=0.01, clip_norm=1.0
            )
        model_delta.zero_()
    assert audits[0].last_round == 6
    for (_, later), (_, at_once) in zip(*(audit.log.records() for audit in audits), strict=True):
        assert later.skipped == at_once.skipped == (later.number == 4)
        if later.skipped:
            continue
        np.testing.assert_allclose(later.cosines, at_once.cosines, atol=1e-7)
        np.testing.assert_allclose(later.residual_cosines, at_once.residual_cosines, atol=1e-7)
        assert later.rest == pytest.approx(at_once.rest, rel=1e-6)
        if layers:
            np.testing.assert_allclose(later.layer_rests, at_once.layer_rests, rtol=1e-6)
            np.testing.assert_allclose(later.layer_others, at_once.layer_others, rtol=1e-6)
        np.testing.assert_allclose(later.law_moments, at_once.law_moments, rtol=1e-5)
        np.testing.assert_allclose(later.law_lags, at_once.law_lags, atol=1e-6)
        assert np.abs(later.law_counts - at_once.law_counts).sum() <= 4  # values on the edge of a cell


def test_a_vector_that_is_not_finite_is_rejected_when_it_is_recorded():
    audit = Audit(DIM, canaries=100, seed=1, delta=1e-6, deferred=True)
    audit.observe_round(1, torch.full((DIM,), float("nan"), device="cuda"), present=[])
    with pytest.raises(ValueError, match="model_delta must be finite"):
        audit.flush()
    assert audit.last_round == 0


@pytest.mark.parametrize("dim", [20_000, 1_200_000])
def test_the_noise_law_is_the_same_on_device_and_host(dim):
    noise = torch.randn(dim, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    parts = NoiseParts.of([("a", 5_000), ("b", 5_000), ("c", 10), ("d", dim - 10_010)], dim)
    there = measure_law(noise, noise + 1, parts, full=True, exact=True)
    here = measure_law(noise.cpu(), noise.cpu() + 1, parts, full=True, exact=True)
    assert there.keys() == here.keys()
    for name in ("law_moments", "law_lags", "law_spectrum", "law_tail"):
        np.testing.assert_allclose(there[name], here[name], rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(there["law_grid"], here["law_grid"], atol=1e-4)
    assert np.abs(there["law_counts"] - here["law_counts"]).sum() <= 1e-4 * dim
    assert abs(there["law_zeros"][0] - here["law_zeros"][0]) <= 2
