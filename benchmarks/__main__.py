"""`make bench`: run every benchmark; each prints its ratios next to its bars. Exit code 1 if a bar is missed."""

import sys
from importlib import import_module

BENCHMARKS = [
    "gaussian_epsilon",
    "canaries",
    "blocked",
    "jax_canaries",
    "jax_privacy_step",
    "opacus_small",
    "trainer_step",
    "engine",
    "ranks",
    "text",
    "rounds_cuda",
    "ranks_cuda",
    "audit_share",
    "flower_round",
    "flower_federation",
    "result",
    "before",
    "alarm",
    "scores",
    "start",
]


def main() -> int:
    """Run all benchmarks and name the failed ones at the end."""
    missed = []
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        if import_module(f"benchmarks.{name}").main():
            missed.append(name)
    print(f"missed a bar: {', '.join(missed)}" if missed else "every bar met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
