"""One rank of the tests of `reduce_over`: sums and errors, then sums until a rank is lost. Prints lines of JSON."""

import hashlib
import json
import time

import numpy as np
from torch import distributed
from torch_ranks import start_rank

from coalmine.integrations.torch_distributed import reduce_over


def numbers_of(rank):
    """Numbers of very different sizes, whose sum depends on the order in its last bits."""
    rng = np.random.default_rng(rank)
    return rng.normal(size=11_003) * 10 ** rng.uniform(-12, 12, size=11_003)


def sums(rank, size):
    reduce = reduce_over()
    total = reduce(numbers_of(rank))
    expected = sum(numbers_of(other) for other in range(size))
    sizes = sum(np.abs(numbers_of(other)) for other in range(size))
    found = {
        "rank": reduce.rank,
        "size": reduce.size,
        "dtype": str(total.dtype),
        "digest": hashlib.sha256(total.tobytes()).hexdigest(),
        "error": float(np.max(np.abs(total - expected) / sizes)),
        "empty": reduce(np.zeros(0)).size,
    }
    members = [0, 2]
    group = distributed.new_group(members)
    if rank in members:
        own = reduce_over(group, timeout=120)
        found["pair"] = [own.rank, own.size, *own(np.array([1.0 + rank]))]
    else:
        found["outside"] = message_of(lambda: reduce_over(group))
    found["lengths"] = message_of(lambda: reduce(np.zeros(3 if rank else 4)))
    found["after"] = list(reduce(np.array([float(rank)])))
    return found


def message_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def lose(timeout):
    """Sum until another rank is lost, and return the error."""
    reduce = reduce_over(timeout=timeout)
    reduce(np.ones(1))
    print("summing", flush=True)
    while True:
        time.sleep(0.01)
        try:
            reduce(np.ones(100))
        except ConnectionError as error:
            return {"error": str(error)}


if __name__ == "__main__":
    rank, size, (timeout,) = start_rank()
    print(json.dumps(sums(rank, size)), flush=True)
    print(json.dumps(lose(float(timeout))), flush=True)
