import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coalmine.canaries import philox

ONES = 2**64 - 1
# Random123's published answers for philox4x64, 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
    ((ONES,) * 4, (ONES,) * 2, (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


def signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_torch_reproduces_the_published_answers(counter, key, answer):
    counters = tuple(torch.tensor([signed(word)]) for word in counter)
    found = philox.philox_torch(counters, key[0] + (key[1] << 64))
    assert [int(word) % 2**64 for word in found] == list(answer)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_numpy_reproduces_the_published_answers(counter, key, answer):
    """`words` uses block, index, domain and dim as the four words of the counter."""
    block, index, domain, dim = counter
    found = philox.words(key[0] + (key[1] << 64), domain=domain, dim=dim, index=index, start=4 * block, count=4)
    assert found.tolist() == list(answer)


@given(st.integers(0, 2**128 - 1), st.integers(0, 2**40), st.integers(0, 2**30), st.integers(1, 100))
def test_numpy_and_torch_make_the_same_bits(key, index, block, count):
    where = {"domain": philox.SPHERE, "dim": 4_050_748, "index": index, "start": 4 * block, "count": count}
    torch_words = philox.torch_words(key, device=torch.device("cpu"), **where).numpy().view(np.uint64)
    assert (philox.words(key, **where) == torch_words).all()


def test_a_stream_can_start_at_any_block():
    key = philox.key_from_seed(3)
    whole = philox.words(key, domain=1, dim=10, index=2, count=1000)
    assert (philox.words(key, domain=1, dim=10, index=2, start=400, count=100) == whole[400:500]).all()


def test_every_domain_index_and_dim_has_its_own_stream():
    key = philox.key_from_seed(0)
    drawn = [
        int(word)
        for domain in range(1, 6)
        for index in range(4)
        for dim in (2, 3, 1000)
        for word in philox.words(key, domain=domain, dim=dim, index=index, count=64)
    ]
    assert len(set(drawn)) == len(drawn)


def test_integers_and_bytes_never_share_a_key():
    seeds = [0, 1, 255, 2**128 - 1, b"\0", b"\1", (1).to_bytes(16, "little"), (1).to_bytes(16, "big"), b"integer:"]
    assert len({philox.key_from_seed(seed) for seed in seeds}) == len(seeds)
    assert philox.key_from_seed(np.int64(1)) == philox.key_from_seed(1)
    assert philox.key_from_seed(bytearray(b"ab")) == philox.key_from_seed(b"ab")


@pytest.mark.parametrize("seed", [-1, 2**128, 1.5, "secret", None, b""])
def test_bad_seeds_are_rejected(seed):
    with pytest.raises(ValueError, match="seed must") as refused:
        philox.key_from_seed(seed)
    assert "secret" not in str(refused.value).replace("secrets", "")
    assert str(2**128) not in str(refused.value)


def test_the_bits_of_a_seed_never_change():
    """The bits of a seed are part of the public interface: records of finished audits depend on them."""
    drawn = philox.words(philox.key_from_seed(20240), domain=philox.SPHERE, dim=1000, index=7, count=4096)
    digest = hashlib.sha256(drawn.astype("<u8").tobytes()).hexdigest()
    assert digest == "00e5b7815ffdd6b3be734034d978bce2d81e388675379ddfc44d188455e3c040"


def test_normals_are_normal():
    """Kolmogorov-Smirnov on 100,000 draws: a false alarm has probability 1e-4 (the seed is fixed)."""
    drawn = philox.normals(philox.words(philox.key_from_seed(5), domain=1, dim=2, count=100_000))
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(drawn[0::2], drawn[1::2])[0, 1]) < 4.5 / np.sqrt(50_000)


def test_extreme_words_give_finite_normals_in_both_backends():
    extremes = np.array([0, 0, ONES, ONES, 0, ONES, ONES, 0], dtype=np.uint64)
    drawn = philox.normals(extremes)
    assert np.isfinite(drawn).all()
    np.testing.assert_allclose(philox.torch_normals(torch.from_numpy(extremes.view(np.int64))), drawn, atol=1e-14)
