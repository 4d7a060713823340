"""The sampling scheme of a training run, from the settings of its cohorts."""

from typing import Any

from coalmine.estimators.sampling import FixedSize, Poisson, Sampling, Shuffled

SAMPLED = ("poisson", "fixed", "shuffled")  # kinds of participation that an accountant has a name for


def cohort_size(clients_per_round: int, *, population: int, extra: int) -> int:
    """Participants of a round with `extra` canaries beside the clients: it grows so that the rate per participant stays."""
    return -(-clients_per_round * (population + extra) // population)


def cohort_sampling(kind: str, *, clients_per_round: int, population: int, extra: int, rounds: int) -> Sampling | None:
    """The scheme by which everybody takes part, as an accountant names it; None for a kind that has no name.

    `extra` are canaries that are sampled beside the `population` clients. A last epoch of shuffling that is not finished
    counts as a whole one: that can only raise epsilon.
    """
    everybody, size = population + extra, cohort_size(clients_per_round, population=population, extra=extra)
    if kind == "poisson":
        return Poisson(clients_per_round / population, rounds)
    if kind == "fixed":
        return FixedSize(size, everybody, rounds)
    if kind == "shuffled":
        epoch = -(-everybody // size)
        return Shuffled(epoch, -(-rounds // epoch))
    return None


def configured_sampling(config: dict[str, Any], *, population: int, canaries: int) -> Sampling | None:
    """The same from a run's config, as TOML holds it; ValueError or TypeError where it cannot be."""
    participation, pattern = config["participation"], config["canaries"]["pattern"]
    return cohort_sampling(
        participation["kind"],
        clients_per_round=participation["clients_per_round"],
        population=population,
        extra=canaries if pattern == "clients" else 0,
        rounds=config["rounds"],
    )
