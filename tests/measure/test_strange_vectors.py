"""Vectors of every kind: measured like the same numbers in plain float64, or rejected with a one-line error."""

import warnings

import numpy as np
import pytest

from coalmine import Audit

torch = pytest.importorskip("torch")

DIM, CANARIES = 200, 12
VALUES = np.clip(np.random.default_rng(3).normal(size=DIM), -1.5, 1.5)
OWN = type("Own", (np.ndarray,), {})


def read_only(values):
    values = values.copy()
    values.setflags(write=False)
    return values


MEASURED = {
    "float32": lambda v: v.astype(np.float32),
    "float16": lambda v: v.astype(np.float16),
    "whole numbers": lambda v: np.round(100 * v).astype(np.int64),
    "strided": lambda v: np.repeat(v, 2)[::2],
    "big-endian": lambda v: v.astype(">f8"),
    "read-only": read_only,
    "of a class of its own": lambda v: v.view(OWN),
    "tensor": torch.from_numpy,
    "bfloat16": lambda v: torch.from_numpy(v).bfloat16(),
    "half": lambda v: torch.from_numpy(v).half(),
    "strided tensor": lambda v: torch.from_numpy(v).repeat_interleave(2)[::2],
    "with a gradient": lambda v: torch.from_numpy(v).clone().requires_grad_(True),
}
REFUSED = {
    "masked": lambda v: np.ma.masked_array(v, np.arange(DIM) % 3 == 0),
    "complex": lambda v: v.astype(complex),
    "truth values": lambda v: v > 0,
    "objects": lambda v: v.astype(object),
    "text": lambda v: v.astype(str),
    "dates": lambda v: v.astype("datetime64[s]"),
    "a list": lambda v: v.tolist(),
    "long double": lambda v: v.astype(np.longdouble),
    "two rows": lambda v: v.reshape(2, -1),
    "one number": lambda v: v[0],
    "too short": lambda v: v[:-1],
    "NaN": lambda v: np.where(np.arange(DIM) == 3, np.nan, v),
    "infinity": lambda v: np.where(np.arange(DIM) == 3, np.inf, v),
    "nothing": lambda v: None,
    "bytes": lambda v: memoryview(v.tobytes()),
    "complex tensor": lambda v: torch.from_numpy(v).to(torch.complex128),
    "truth tensor": lambda v: torch.from_numpy(v) > 0,
    "sparse": lambda v: torch.from_numpy(v).to_sparse(),
    "without memory": lambda v: torch.from_numpy(v).to("meta"),
}


def plain(vector):
    if isinstance(vector, torch.Tensor):
        return vector.detach().double().numpy()
    return np.asarray(vector).astype(np.float64)


def new_audit(kind):
    return Audit(DIM, canaries=CANARIES, seed=b"fuzzed", delta=1e-5, rounds=2, kind=kind)


def observed(kind, place, vector):
    """Norm and cosines of a vector that is given in one of three places."""
    audit = new_audit(kind)
    if place == "final":
        audit.observe_final(vector)
        return audit.log.final.norm, audit.log.final.cosines
    if place == "others":
        audit.observe_round(1, 5 * VALUES[::-1], present=[], others=vector)
        (item,) = audit.log.rounds()
        return item.residual_norm, item.residual_cosines
    audit.observe_round(1, vector, present=[0])
    (item,) = audit.log.rounds()
    return item.norm, item.cosines


@pytest.mark.parametrize("place", ["round", "others", "final"])
@pytest.mark.parametrize("kind", ["rotated", pytest.param("sphere", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MEASURED)
def test_unusual_vectors_are_measured_like_plain_float64(name, kind, place):
    vector = MEASURED[name](VALUES.copy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm, cosines = observed(kind, place, vector)
    values = 5 * VALUES[::-1] - plain(vector) if place == "others" else plain(vector)
    canaries = np.array([new_audit(kind).measurer.canaries.canary(i) for i in range(len(cosines))])
    assert norm == pytest.approx(np.linalg.norm(values), rel=1e-6)
    np.testing.assert_allclose(cosines, canaries @ values / np.linalg.norm(values), atol=2e-6)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (name, place)
        for name in REFUSED
        for place in ("round", "others", "final")
        if (name, place) != ("nothing", "others")  # `others` is optional
    ],
)
def test_invalid_vectors_are_rejected_with_one_line(name, place):
    vector = REFUSED[name](VALUES.copy())
    with pytest.raises(ValueError) as refused:
        observed("rotated", place, vector)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("delta", [VALUES.astype(np.float32), VALUES, torch.from_numpy(VALUES)])
@pytest.mark.parametrize("others", [1e60 * VALUES, torch.from_numpy(1e60 * VALUES)])
def test_others_that_float32_cannot_hold_give_no_warning_and_no_nan(delta, others):
    """Here nothing is left of the noise. The audit records that, and its law is measured without NaN."""
    audit = Audit(DIM, canaries=CANARIES, seed=1, delta=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audit.observe_round(1, delta, present=[6, 4, 11], others=others)
    (item,) = audit.log.rounds()
    assert item.law_follows is None or np.isfinite(item.law_follows).all()
