"""The paper's two training runs as configs, and their substitutes for a quick look on two cores (Section 5)."""

from dataclasses import replace

from coalmine.simulation.config import (
    CanarySettings,
    ClaimSettings,
    EngineSettings,
    ParticipationSettings,
    PrivacySettings,
    RunConfig,
    TaskSettings,
)
from coalmine.simulation.engines import ClientSettings
from coalmine.simulation.server_optimizer import ServerSettings
from reproduction.experiment_options import Options

WORDS_USERS, CHARACTERS_USERS = 341_000, 3_383  # the paper's m of Stack Overflow and of EMNIST
WORDS_DELTA, CHARACTERS_DELTA = WORDS_USERS**-1.1, CHARACTERS_USERS**-1.1
CANARIES = 1_000  # per kind and per number of presentations
EXAMPLES = 16  # most examples of a Stack Exchange client per round: one step, since users take part repeatedly


def words(options: Options) -> RunConfig:
    """Next words with the LSTM of 4,050,748 parameters: 2,048 rounds of 167 clients, without noise.

    Stack Overflow has enough users for that. The 5,022 of Stack Exchange take part again after at least 30 rounds, which
    is the longest possible pause with 167 of them per round.
    """
    if options.small:
        return _small(options, delta=WORDS_DELTA)
    participation = ParticipationSettings(kind="limited", clients_per_round=167, separation=30)
    if options.originals:
        participation = ParticipationSettings(clients_per_round=167)
    rounds = options.rounds or 2048
    return RunConfig(
        rounds=rounds,
        evaluate_every=-(-rounds // 4),
        checkpoint_every=128,
        task=TaskSettings(
            name="stackoverflow" if options.originals else "stackexchange",
            max_examples_per_client=options.max_examples or EXAMPLES,
            data_dir=options.data_dir,
        ),
        participation=participation,
        client=ClientSettings(epochs=1, batch_size=16, learning_rate=1.0),
        server=ServerSettings(learning_rate=0.56, momentum=0.9),
        privacy=PrivacySettings(
            noise_multiplier=0.0, delta=WORDS_DELTA, clipping="adaptive", clip_norm=0.1, count_noise=167 / 20
        ),
        canaries=CanarySettings(count=CANARIES, unobserved=CANARIES),
        engine=EngineSettings(device=options.device),
    )


def characters(options: Options) -> RunConfig:
    """Handwriting with the CNN: 500 rounds of 34 clients, without noise.

    With the paper's 3,383 users that is five epochs; the 539 writers of MNIST take part about 31 times each.
    """
    if options.small:
        return _small(options, delta=CHARACTERS_DELTA)
    rounds = options.rounds or 500
    return RunConfig(
        rounds=rounds,
        evaluate_every=-(-rounds // 4),
        checkpoint_every=100,
        task=TaskSettings(
            name="emnist" if options.originals else "mnist-by-writer",
            max_examples_per_client=options.max_examples,
            data_dir=options.data_dir,
        ),
        participation=ParticipationSettings(clients_per_round=34),
        client=ClientSettings(epochs=1, batch_size=16, learning_rate=0.031),
        server=ServerSettings(learning_rate=1.0, momentum=0.9),
        privacy=PrivacySettings(
            noise_multiplier=0.0, delta=CHARACTERS_DELTA, clipping="adaptive", clip_norm=0.1, count_noise=34 / 20
        ),
        canaries=CanarySettings(count=CANARIES, unobserved=CANARIES),
        engine=EngineSettings(device=options.device),
    )


def with_noise(config: RunConfig, noise_multiplier: float) -> RunConfig:
    """The run with this noise, judged against the epsilon that the noise implies."""
    return replace(
        config,
        privacy=replace(config.privacy, noise_multiplier=noise_multiplier),
        claim=ClaimSettings(analytical=noise_multiplier > 0),
    )


def with_groups(config: RunConfig, presentations: tuple[int, ...], *, each: int) -> RunConfig:
    """The run with a group of `each` canaries for every number of presentations."""
    canaries = replace(config.canaries, count=each * len(presentations), presentations=presentations)
    return replace(config, canaries=canaries)


def with_canaries(config: RunConfig, count: int) -> RunConfig:
    """The run with this number of canaries."""
    return replace(config, canaries=replace(config.canaries, count=count))


def longer(config: RunConfig, options: Options) -> RunConfig:
    """At scale small, a longer run with room for many presentations; at scale paper, the run unchanged."""
    if not options.small:
        return config
    rounds = options.rounds or 2 * config.rounds
    return replace(
        config,
        rounds=rounds,
        evaluate_every=rounds,
        checkpoint_every=rounds,
        participation=replace(config.participation, clients_per_round=20),
    )


def _small(options: Options, *, delta: float) -> RunConfig:
    """100 rounds of 10 clients: few enough updates that the final model reveals something about a canary."""
    rounds = options.rounds or 100
    return RunConfig(
        rounds=rounds,
        evaluate_every=rounds,
        checkpoint_every=rounds,
        participation=ParticipationSettings(clients_per_round=10),
        client=ClientSettings(epochs=2, learning_rate=0.3),
        server=ServerSettings(learning_rate=0.5, momentum=0.9),
        privacy=PrivacySettings(noise_multiplier=0.0, delta=delta, clipping="adaptive", clip_norm=0.3, count_noise=0.5),
        canaries=CanarySettings(count=300, unobserved=CANARIES),
        engine=EngineSettings(device="cpu" if options.device == "auto" else options.device, threads=1),
    )
