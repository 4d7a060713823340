"""Lazy and narrow tensors, and lists of canaries that are none, are refused in one line that says what to do."""

import numpy as np
import pytest
import torch

from coalmine import Audit
from coalmine.canaries import RotatedCanaries

DIM = 100


def audit():
    return Audit(DIM, canaries=10, seed=b"0123456789abcdef", delta=1e-5)


def negated():
    lazy = torch.randn(DIM, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    return lazy


def fake():
    with torch._subclasses.FakeTensorMode():
        return torch.zeros(DIM)


STRANGE = {
    "negated": (negated, r"call \.resolve_neg\(\) first"),
    "float8": (
        lambda: torch.ones(DIM).to(torch.float8_e5m2),
        r"a tensor of torch\.float8_e5m2: call \.float\(\) first",
    ),
    "fake": (fake, "a fake tensor, which has no numbers"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_tensor_whose_numbers_cannot_be_read_is_refused(name):
    make, advice = STRANGE[name]
    with pytest.raises(ValueError, match=f"^model_delta must be a plain array, got .*{advice}$"):
        audit().observe_round(1, make(), present=[0])
    with pytest.raises(ValueError, match=f"^others must be a plain array, got .*{advice}$"):
        audit().observe_round(1, torch.ones(DIM), others=make(), present=[0])
    with pytest.raises(ValueError, match=f"^model must be a plain array, got .*{advice}$"):
        audit().observe_final(make())


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (STRANGE["fake"][0], "a fake tensor"),
        (STRANGE["float8"][0], "to hold a canary, got torch.float8_e5m2; convert it"),
    ],
)
def test_a_model_that_cannot_hold_canaries_is_refused(make, advice):
    with pytest.raises(ValueError, match=f"^weights must be .*{advice}"):
        Audit.for_model({"weights": make()}, canaries=10, seed=b"0123456789abcdef", delta=1e-5)


def test_a_model_may_hold_a_tensor_that_is_still_to_be_negated():
    model = {"weights": negated()}
    audit = Audit.for_model(model, canaries=10, seed=b"0123456789abcdef", delta=1e-5)
    audit.observe_round(1, model, present=[0])
    plain = Audit.for_model(model, canaries=10, seed=b"0123456789abcdef", delta=1e-5)
    plain.observe_round(1, {"weights": model["weights"].resolve_neg()}, present=[0])
    np.testing.assert_array_equal(next(audit.log.rounds()).cosines, next(plain.log.rounds()).cosines)


def test_canaries_cannot_be_made_of_8_bit_floats():
    with pytest.raises(ValueError, match="like must be of a floating-point dtype, at least 16 bits wide"):
        RotatedCanaries(10, DIM, seed=1).canary(0, like=torch.ones(1).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    "present",
    [b"\x00\x01", bytearray(b"\x00"), memoryview(b"\x00"), {0: 1}, "01"],
    ids=lambda value: type(value).__name__,
)
def test_bytes_text_and_dicts_are_no_list_of_canaries(present):
    with pytest.raises(TypeError, match="present must list canaries, got "):
        audit().observe_round(1, np.ones(DIM), present=present)
    with pytest.raises(TypeError, match="present must list canaries, got "):
        audit().updates(present, 1.0)
