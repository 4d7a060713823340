"""Random bits that are the same on every machine: Philox4x64-10 (Salmon et al., SC 2011).

A counter-based generator: a key and a counter of four 64-bit words give four random words, so any part of a stream
can be computed where it is needed. The key is a hash of the seed. The counter is (block, index, domain, dim), where the
first word counts blocks of four words. So every index in every domain of every dim has its own stream.
"""

import hashlib
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.canaries.secret import SecretBytes, SecretInt, secret_seed

if TYPE_CHECKING:
    import torch

Words = npt.NDArray[np.uint64]

SPHERE, SHUFFLE, INSERT, OPENING_SIGNS, CLOSING_SIGNS, SAMPLED_PLACES = range(1, 7)  # domains

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
_MASK = 2**64 - 1


def key_from_seed(seed: SupportsIndex | bytes) -> SecretInt:
    """The 128-bit Philox key of a seed: BLAKE2b of its bytes, tagged so that no integer collides with any bytes.

    Errors never show the seed: whoever has it can make every canary.
    """
    seed = secret_seed(seed)
    if isinstance(seed, bytes):
        if not seed:
            raise ValueError("seed must not be empty bytes; draw one with secrets.token_bytes(16)")
        tagged = SecretBytes(b"bytes:" + seed)
    else:
        if not 0 <= seed < 2**128:
            size = "a negative integer" if seed < 0 else f"one of {seed.bit_length()} bits"
            raise ValueError(f"seed must be an integer from 0 to 2**128 - 1, got {size}; pass longer secrets as bytes")
        tagged = SecretBytes(b"integer:" + seed.to_bytes(16, "little"))
    digest = hashlib.blake2b(tagged, digest_size=16, person=b"coalmine.canary").digest()
    return SecretInt.from_bytes(digest, "little")


def words(key: int, *, domain: int, dim: int, index: int = 0, start: int = 0, count: int) -> Words:
    """Words `start` to `start + count` of a stream; `start` is a multiple of 4, the number of words per counter."""
    counter = start // 4 + (index << 64) + (domain << 128) + (dim << 192)
    # numpy steps the counter before it makes a block, so it starts one below.
    generator = np.random.Philox(key=key, counter=(counter - 1) % 2**256)
    return generator.random_raw(count)


def torch_words(
    key: int, *, domain: int, dim: int, index: int = 0, start: int = 0, count: int, device: "torch.device"
) -> "torch.Tensor":
    """The same words as `words`, computed on `device`; int64 holds a word's bits, since torch hardly supports uint64."""
    import torch

    block = torch.arange(start // 4, start // 4 + -(-count // 4), dtype=torch.int64, device=device)
    counter = (block, *(torch.full_like(block, word) for word in (index, domain, dim)))
    return torch.stack(philox_torch(counter, key), dim=1).flatten()[:count]


def philox_torch(
    counter: tuple["torch.Tensor", ...], key: int
) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """Philox4x64-10 of four int64 tensors (bits of unsigned words)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 64
    for _ in range(ROUNDS):
        high0, low0 = _wide_product(c0, MULTIPLIERS[0])
        high1, low1 = _wide_product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ _signed(k0), low1, high0 ^ c3 ^ _signed(k1), low0
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word


def _wide_product(a: "torch.Tensor", b: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    """High and low word of an unsigned 128-bit product, by 32-bit limbs; int64 products wrap, as they must."""
    half = 2**32 - 1
    a_high, a_low = (a >> 32) & half, a & half
    b_high, b_low = b >> 32, b & half
    cross = a_high * b_low + (((a_low * b_low) >> 32) & half)
    middle = a_low * b_high + (cross & half)
    return a_high * b_high + ((cross >> 32) & half) + ((middle >> 32) & half), a * _signed(b)


def normals(bits: Words) -> Floats:
    """Standard normals in float64, one per word, from pairs of words by Box-Muller with 53-bit uniforms."""
    uniforms = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(1.0 - uniforms[0::2]))  # 1 - u lies in (0, 1]: its log is finite
    angle = (2.0 * np.pi) * uniforms[1::2]
    result = np.empty_like(uniforms)
    np.multiply(radius, np.cos(angle), out=result[0::2])
    np.multiply(radius, np.sin(angle), out=result[1::2])
    return result


def torch_normals(bits: "torch.Tensor") -> "torch.Tensor":
    """`normals` of int64 words, on their device."""
    import torch

    uniforms = ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53
    radius = torch.sqrt(-2.0 * torch.log(1.0 - uniforms[0::2]))
    angle = (2.0 * np.pi) * uniforms[1::2]
    return torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=1).flatten()
