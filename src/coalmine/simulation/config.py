"""A run's settings: frozen and validated; the same in Python, in a TOML file and in a run directory."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import torch

from coalmine.argument_checks import (
    delta_array,
    hint_of,
    nonnegative,
    one_number,
    one_of,
    short_repr,
    unit_interval,
    whole_number,
)
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.evidence.cohort_sampling import SAMPLED
from coalmine.log.seed_file import DEMO_SEED, read_seed
from coalmine.measure.settings import MOST_ROUNDS
from coalmine.simulation.clipping import CLIPPINGS, AdaptiveClipping, Clipping, FixedClipping
from coalmine.simulation.engines import ENGINES, PRECISIONS, ClientSettings
from coalmine.simulation.noise_addition import NOISES, noise_law
from coalmine.simulation.participation import PARTICIPATIONS
from coalmine.simulation.server_optimizer import ServerSettings
from coalmine.simulation.tasks import TASKS

LEVELS = ("client", "example")
PATTERNS = ("spread", "clients", "replace")
DIVISORS = ("actual", "expected")
FEWEST_CANARIES = 10
LARGEST_CLIP = 1e30  # leaves single precision room for sums and products
MOST_THREADS = MOST_WORKERS = 1_024
MOST_CLIENTS = 100_000_000
REPLACED_SHARE = 0.1  # default share of the clients that canaries replace


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The task, and the unit of privacy: clients (DP-FedAvg) or single examples (DP-SGD)."""

    name: str = "digits"
    level: str = "client"
    clients: int | None = None  # default: the task's own; more are virtual
    max_examples_per_client: int | None = None  # per round, epochs included; resampled in every round
    data_dir: str | None = None

    def __post_init__(self) -> None:
        one_of("task.name", self.name, TASKS)
        one_of("task.level", self.level, LEVELS)
        if self.clients is not None:
            if whole_number("task.clients", self.clients, minimum=1) > MOST_CLIENTS:
                raise ValueError(f"task.clients must be at most {MOST_CLIENTS:,}, got {short_repr(self.clients)}")
            if self.level == "example":
                raise ValueError("task.clients has no meaning at level example, where every example is a client")
        if self.max_examples_per_client is not None:
            whole_number("task.max_examples_per_client", self.max_examples_per_client, minimum=1)
            if self.level == "example":
                raise ValueError("task.max_examples_per_client has no meaning at level example")


@dataclass(frozen=True, kw_only=True)
class ParticipationSettings:
    """The sampling of clients. `clients_per_round` is an average under Poisson sampling."""

    kind: str = "shuffled"
    clients_per_round: int = 50
    separation: int = 1  # for kind "limited": rounds between two check-ins
    rounds_file: str | None = None  # for kind "file"

    def __post_init__(self) -> None:
        one_of("participation.kind", self.kind, PARTICIPATIONS)
        whole_number("participation.clients_per_round", self.clients_per_round, minimum=1)
        whole_number("participation.separation", self.separation, minimum=1)
        if (self.kind == "file") != (self.rounds_file is not None):
            raise ValueError("participation.rounds_file must be given with kind file, and only then")
        if self.separation != 1 and self.kind != "limited":
            raise ValueError("participation.separation must be given with kind limited only")


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """Clip and noise. `noise_multiplier` covers everything released in a round, including an adaptive clip's count.

    With `noise` tree it applies to one node; with banded noise, to ζ where the columns of C have length 1.
    """

    noise_multiplier: float = 0.5
    noise: str = (
        "gaussian"  # fresh in each round; or correlated between rounds: "tree" (DP-FTRL) or "banded" (matrices)
    )
    bands: int | None = None  # for noise "banded": number of bands of the factorisation
    restart: int | None = None  # for noise "tree": rounds per tree; default: all
    delta: float = 1e-6
    clipping: str = "fixed"  # the same clip norm in every round; or "adaptive" to the updates
    clip_norm: float = 0.5  # largest norm of an update; for an adaptive clip: its first value
    quantile: float = 0.5
    clip_rate: float = 0.2
    count_noise: float | None = None  # default: participants per round / 20
    divide_by: str | None = None  # default: the expected number under Poisson sampling, otherwise the actual one

    def __post_init__(self) -> None:
        nonnegative("privacy.noise_multiplier", self.noise_multiplier)
        one_of("privacy.noise", self.noise, NOISES)
        if (self.noise == "banded") != (self.bands is not None):
            raise ValueError("privacy.bands must be given with noise banded, and only then")
        if self.restart is not None and self.noise != "tree":
            raise ValueError("privacy.restart must be given with noise tree only")
        for name in ("bands", "restart"):
            if getattr(self, name) is not None:
                whole_number(f"privacy.{name}", getattr(self, name), minimum=1)
        delta_array(one_number("privacy.delta", self.delta))
        one_of("privacy.clipping", self.clipping, CLIPPINGS)
        if not 0 < one_number("privacy.clip_norm", self.clip_norm) <= LARGEST_CLIP:
            raise ValueError(f"privacy.clip_norm must be above 0 and at most {LARGEST_CLIP:g}, got {self.clip_norm}")
        unit_interval("privacy.quantile", self.quantile)
        nonnegative("privacy.clip_rate", self.clip_rate)
        if self.count_noise is not None:
            nonnegative("privacy.count_noise", self.count_noise)
        if self.divide_by is not None:
            one_of("privacy.divide_by", self.divide_by, DIVISORS)

    def clipping_of(self, participants: float) -> Clipping:
        """The clipping for rounds with this many participants."""
        if self.clipping == "fixed":
            return FixedClipping(self.clip_norm, self.noise_multiplier)
        count_noise = participants / 20 if self.count_noise is None else self.count_noise
        return AdaptiveClipping(self.clip_norm, self.noise_multiplier, self.quantile, self.clip_rate, count_noise)


@dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """The canaries: `spread` over the run as in Section 5.3, sampled like `clients`, or replacing clients (`replace`).

    Replaced clients are given by a count or a fraction. With a fraction, the count is None until `with_count` sets it.
    """

    count: int = cast(int, None)  # default: 1000; a config never holds None
    replace_fraction: float | None = None  # of the clients, for pattern "replace"; default: 0.1 if count is not set
    unobserved: int | None = None
    kind: str = "rotated"
    presentations: tuple[int, ...] = (1,)  # for pattern "spread"; several numbers make groups
    pattern: str = "spread"
    scale: float = 10.0  # canaries send vectors of this many clip norms, so that clipping is audited too
    seed_file: str | None = None

    def __post_init__(self) -> None:
        one_of("canaries.pattern", self.pattern, PATTERNS)
        self._set_count_or_fraction()
        one_of("canaries.kind", self.kind, ("rotated", "sphere"))
        if not one_number("canaries.scale", self.scale) >= 1:
            raise ValueError(
                f"canaries.scale must be at least 1, got {self.scale}: a canary sends its clip norm or more"
            )
        if not self.presentations:
            raise ValueError("canaries.presentations must name at least one number")
        for times in self.presentations:
            whole_number("canaries.presentations", times, minimum=1)
        if self.pattern != "spread" and self.presentations != (1,):
            raise ValueError(
                f"canaries.presentations follow from the clients' pattern, so they cannot be {self.presentations}"
            )

    def _set_count_or_fraction(self) -> None:
        """Reject a count together with a fraction; without either, set the default of the pattern."""
        if self.replace_fraction is not None:
            unit_interval("canaries.replace_fraction", self.replace_fraction)
            if self.pattern != "replace":
                raise ValueError(
                    f"canaries.replace_fraction must be given with pattern replace only, got pattern {self.pattern}; "
                    "give a count"
                )
            if self.count is not None:
                raise ValueError(
                    f"give either canaries.count or canaries.replace_fraction, not both, got {self.count} and "
                    f"{self.replace_fraction:g}"
                )
        elif self.count is None and self.pattern == "replace":
            object.__setattr__(self, "replace_fraction", REPLACED_SHARE)
        elif self.count is None:
            object.__setattr__(self, "count", 1000)
        if self.count is not None:
            whole_number("canaries.count", self.count, minimum=FEWEST_CANARIES)

    def with_count(self, clients: int) -> "CanarySettings":
        """The same settings with a count instead of a fraction of `clients`, rounded down."""
        if self.replace_fraction is None:
            return self
        count = math.floor(Fraction(str(self.replace_fraction)) * clients)  # exact in decimals: 0.29 of 100 is 29
        if count < FEWEST_CANARIES:
            raise ValueError(
                f"canaries.replace_fraction {self.replace_fraction:g} of {clients} clients must be at least "
                f"{FEWEST_CANARIES} canaries, got {count}; use a larger fraction, or more clients"
            )
        return dataclasses.replace(self, count=count, replace_fraction=None)


@dataclass(frozen=True, kw_only=True)
class ClaimSettings:
    """The claimed epsilon, which the verdict judges; without a claim there is no verdict.

    `analytical` claims the mechanism's epsilon, for an attacker who knows a client's rounds. `accountant` claims the
    accountant's epsilon, which is amplified because sampling hides those rounds. `amplified` says that a claimed number is
    the accountant's, `mechanism` that it is the mechanism's; without either, a number counts sampling if Poisson sampling
    picks the canaries too. `stop_on_violation` stops the training in the round that refutes the claim.
    """

    epsilon: float | None = None
    analytical: bool = False
    accountant: bool = False
    amplified: bool = False
    mechanism: bool = False
    stop_on_violation: bool = False

    def __post_init__(self) -> None:
        if self.epsilon is not None and not one_number("claim.epsilon", self.epsilon) > 0:
            raise ValueError(f"claim.epsilon must be above 0, got {self.epsilon}")
        if (self.epsilon is not None) + self.analytical + self.accountant > 1:
            raise ValueError("claim one of: an epsilon, the analytical one, the accountant's")
        if self.amplified and self.epsilon is None:
            raise ValueError("claim.amplified belongs to a claimed number: give claim.epsilon too")
        if self.mechanism and (self.epsilon is None or self.amplified):
            raise ValueError("claim.mechanism belongs to a claimed number without claim.amplified: give claim.epsilon")
        if self.stop_on_violation and self.epsilon is None and not self.computed:
            raise ValueError("claim.stop_on_violation needs a claim that a round can refute: give claim.epsilon too")

    @property
    def counts_on_sampling(self) -> bool:
        """Whether the claim relies on amplification by sampling."""
        return self.accountant or self.amplified

    @property
    def computed(self) -> bool:
        """Whether coalmine computes the claimed epsilon."""
        return self.analytical or self.accountant


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the clients are trained. `memory_limit` is in GiB; 0 threads means one per core.

    `jobs` is the number of workers: processes, called ranks, that share the clients of every round. 0 means one per core if
    clients train one by one on a CPU, else one. A run keeps its numbers of workers and threads, since sums in another order
    round differently. `precision`, fp32 or tf32, applies to matrix products in the clients' training on a GPU; weights,
    sums, clip and noise are always fp32.
    """

    name: str = "auto"  # "together" in batches, or "one-by-one"; auto picks the faster
    device: str = "auto"
    jobs: int = 0  # processes that share the clients of a round (--workers)
    threads: int = 0
    memory_limit: float | None = None  # default: 1 on a CPU, half of the memory of a GPU
    precision: str = "auto"

    def __post_init__(self) -> None:
        one_of("engine.name", self.name, ENGINES)
        if whole_number("engine.jobs", self.jobs, minimum=0) > MOST_WORKERS:
            raise ValueError(f"engine.jobs (--workers) must be at most {MOST_WORKERS:,}, got {short_repr(self.jobs)}")
        if whole_number("engine.threads", self.threads, minimum=0) > MOST_THREADS:
            raise ValueError(f"engine.threads must be at most {MOST_THREADS:,}, got {self.threads:,}")
        one_of("engine.precision", self.precision, PRECISIONS)
        if self.memory_limit is not None and not one_number("engine.memory_limit", self.memory_limit) > 0:
            raise ValueError(f"engine.memory_limit must be above 0, got {self.memory_limit}")

    def resolved(self) -> "EngineSettings":
        """The settings with this machine's device, threads, memory and precision, so that a resumed run keeps them."""
        device = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError):
            raise ValueError(f"engine.device {device!r} is not available; use auto or cpu") from None
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"engine.device must be auto, cpu or cuda, got {device!r}")
        on_gpu = torch.device(device).type == "cuda"
        if on_gpu and torch.device(device).index not in (None, torch.cuda.current_device()):
            raise ValueError(
                f"engine.device must be the current GPU, got {device}: select it by CUDA_VISIBLE_DEVICES and use cuda"
            )
        memory = torch.cuda.get_device_properties(device).total_memory / 2**31 if on_gpu else 1.0
        return dataclasses.replace(
            self,
            device=device,
            threads=self.threads or torch.get_num_threads(),
            memory_limit=self.memory_limit or memory,
            precision=("tf32" if on_gpu else "fp32") if self.precision == "auto" else self.precision,
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run, except the secret canary seed: only the name of its file is stored."""

    rounds: int = 100
    seed: int = 1  # for the training: initial model, sampling, noise
    evaluate_every: int = 10
    checkpoint_every: int = 10
    baseline: bool = False  # also train the same model without DP and without canaries, and report its accuracy
    task: TaskSettings = field(default_factory=TaskSettings)
    participation: ParticipationSettings = field(default_factory=ParticipationSettings)
    client: ClientSettings = field(default_factory=lambda: ClientSettings(epochs=2, learning_rate=0.3))
    server: ServerSettings = field(default_factory=ServerSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    canaries: CanarySettings = field(default_factory=CanarySettings)
    claim: ClaimSettings = field(default_factory=ClaimSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        if whole_number("rounds", self.rounds, minimum=1) > MOST_ROUNDS:
            raise ValueError(f"rounds must be at most {MOST_ROUNDS:,}, got {short_repr(self.rounds)}")
        whole_number("seed", self.seed, minimum=0)
        whole_number("evaluate_every", self.evaluate_every, minimum=1)
        whole_number("checkpoint_every", self.checkpoint_every, minimum=1)
        if max(self.canaries.presentations) > self.rounds:
            raise ValueError(
                f"canaries.presentations must be at most rounds = {self.rounds}, got {max(self.canaries.presentations)}"
            )
        if self.claim.computed and not self.privacy.noise_multiplier:
            raise ValueError("without noise the computed epsilon is infinite, so it cannot be claimed: claim a number")
        most = self.participation.clients_per_round
        if self.participation.kind != "file" and self.engine.jobs > most:
            raise ValueError(
                f"engine.jobs (--workers) must be at most participation.clients_per_round = {most:,}, since each trains "
                f"some of a round's clients, got {self.engine.jobs:,}"
            )
        self.noise_law()
        if self.claim.counts_on_sampling:
            self._check_accountable()

    @property
    def claim_counts_sampling(self) -> bool:
        """Whether the claimed number counts amplification: by its own word, or because the pipeline's accountant does."""
        privacy, bare = self.privacy, self.claim.epsilon is not None and not self.claim.mechanism
        poisson = (
            self.participation.kind == "poisson" and self.divisor == "expected" and self.canaries.pattern != "spread"
        )
        plain = privacy.noise == "gaussian" and privacy.clipping != "adaptive" and privacy.noise_multiplier > 0
        return self.claim.counts_on_sampling or (bare and poisson and plain)

    def _check_accountable(self) -> None:
        """Check that an accountant can amplify epsilon by the sampling of this run."""
        if self.privacy.noise != "gaussian":
            raise ValueError(
                f"amplification by sampling is not supported for noise {self.privacy.noise}: claim the analytical epsilon"
            )
        if self.participation.kind not in SAMPLED:
            raise ValueError(
                f"amplification is not supported for participation {self.participation.kind}: use poisson, or claim the "
                "analytical epsilon"
            )
        if self.participation.kind == "poisson" and self.divisor != "expected":
            raise ValueError(
                "a claim that counts on Poisson sampling must hide how many take part, got privacy.divide_by = "
                f"{self.divisor}: use expected"
            )

    @property
    def divisor(self) -> str:
        """The divisor of sums: the actual number of participants, or the expected one, which hides the actual number."""
        return self.privacy.divide_by or ("expected" if self.participation.kind == "poisson" else "actual")

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values for TOML, without those that are None."""
        return _to_plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """The inverse of to_dict. Raises ValueError for an unknown name or an invalid value."""
        return _build(cls, {name: value for name, value in values.items() if name != "schema_version"}, "")

    def noise_law(self) -> CorrelatedNoise | None:
        """The correlation of the noise across rounds; None for independent noise."""
        settings, momentum = self.privacy, self.server.momentum
        return noise_law(
            settings.noise, rounds=self.rounds, bands=settings.bands, restart=settings.restart, momentum=momentum
        )

    def canary_seed(self) -> int | bytes:
        """The secret from the seed file; without a file, a public demo seed that depends on `seed`."""
        if self.canaries.seed_file is None:
            return DEMO_SEED + self.seed
        return read_seed(Path(self.canaries.seed_file))


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        pairs = ((part.name, getattr(value, part.name)) for part in dataclasses.fields(value))
        return {name: _to_plain(item) for name, item in pairs if item is not None}
    return list(value) if isinstance(value, tuple) else value


def _build(cls: Any, values: Mapping[str, Any], section: str) -> Any:
    types_of = typing.get_type_hints(cls)
    unknown = sorted(values.keys() - types_of.keys())
    if unknown:
        owner = section.removesuffix(".") or "it"
        hint = hint_of(unknown[0], types_of)
        raise ValueError(f"a config has no {section}{unknown[0]}{hint or f'; {owner} has ' + ', '.join(types_of)}")
    return cls(**{name: _convert(types_of[name], value, f"{section}{name}") for name, value in values.items()})


def _convert(kind: Any, value: Any, name: str) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a section, got {short_repr(value)}")
        return _build(kind, value, f"{name}.")
    if typing.get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(typing.get_args(kind)[0], item, name) for item in items)
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        return one_number(name, value)
    if not isinstance(value, tuple(options)) or (isinstance(value, bool) and bool not in options):
        expected = " or ".join(option.__name__ for option in options if option is not types.NoneType)
        raise ValueError(f"{name} must be {expected}, got {short_repr(value)}")
    return value
