"""How precisely an engine multiplies matrices on a GPU; weights and everything that is summed are fp32 in any case."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("auto", "fp32", "tf32")


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Within: products of matrices in fp32 or, where the GPU can, with factors rounded to tf32 (10 bits)."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
