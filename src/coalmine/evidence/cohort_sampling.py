"""The sampling scheme of a training run, from the settings of its cohorts."""

from coalmine.estimators.sampling import FixedSize, Poisson, Sampling, Shuffled

SAMPLED = ("poisson", "fixed", "shuffled")  # kinds of participation with a sampling scheme


def cohort_size(clients_per_round: int, *, population: int, extra: int) -> int:
    """The size of a cohort with `extra` canaries besides the clients: larger, so that the sampling rate stays the same."""
    return -(-clients_per_round * (population + extra) // population)


def cohort_sampling(kind: str, *, clients_per_round: int, population: int, extra: int, rounds: int) -> Sampling | None:
    """The sampling scheme of clients and canaries; None for a kind without a scheme.

    `extra` canaries are sampled with the `population` clients. An unfinished last epoch of shuffling counts as a whole one:
    that can only raise epsilon.
    """
    everyone, size = population + extra, cohort_size(clients_per_round, population=population, extra=extra)
    if kind == "poisson":
        return Poisson(clients_per_round / population, rounds)
    if kind == "fixed":
        return FixedSize(size, everyone, rounds)
    if kind == "shuffled":
        epoch = -(-everyone // size)
        return Shuffled(epoch, -(-rounds // epoch))
    return None
