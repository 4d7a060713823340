"""The wrapped strategy: its clip, its noise, and how it averages."""

import copy
from fractions import Fraction
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from coalmine.argument_checks import nonnegative, positive

SERVER_CLIP = (DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyServerSideAdaptiveClipping)
CLIENT_CLIP = (DifferentialPrivacyClientSideFixedClipping, DifferentialPrivacyClientSideAdaptiveClipping)
DROPPING = (Krum, MultiKrum, Bulyan, FedTrimmedAvg, FedMedian, QFedAvg)


class Wrapped:
    """The user's strategy as the audit sees it.

    `private` is Flower's own wrapper for differential privacy, wherever it is in the chain, or None. `innermost` is the
    strategy that averages. Clip norm and noise are read from `private` unless the user gives them.
    """

    def __init__(self, strategy: Strategy, *, clip_norm: float | None, noise_multiplier: float | None) -> None:
        chain: list[Any] = [strategy]
        while (inner := getattr(chain[-1], "strategy", None)) is not None:
            chain.append(inner)
        self.strategy, self.innermost = strategy, chain[-1]
        self.private: Any = next((each for each in chain if isinstance(each, (*SERVER_CLIP, *CLIENT_CLIP))), None)
        if self.private is None and clip_norm is None:
            raise ValueError(
                "no DifferentialPrivacy… wrapper was found: give clip_norm, the length of a canary's update"
            )
        self._clip_norm = None if clip_norm is None else positive("clip_norm", clip_norm)
        self._noise = None if noise_multiplier is None else nonnegative("noise_multiplier", noise_multiplier)

    def copied(self, *, silent: bool = False) -> "Wrapped":
        """A copy that aggregates as this one would, without the user's metrics and, if `silent`, without Flower's noise."""
        twin = Wrapped(copy.deepcopy(self.strategy), clip_norm=self._clip_norm, noise_multiplier=self._noise)
        if hasattr(twin.innermost, "train_metrics_aggr_fn"):
            twin.innermost.train_metrics_aggr_fn = lambda *_: MetricRecord()
        if silent and twin.private is not None:
            twin.private.noise_multiplier = 0.0
        return twin

    @property
    def names(self) -> list[str]:
        """The names of the outermost and of the innermost strategy."""
        return [type(self.strategy).__name__, type(self.innermost).__name__]

    @property
    def clip_norm(self) -> float:
        """The clip norm of the next round. Aggregation changes an adaptive one."""
        return float(self.private.clipping_norm) if self._clip_norm is None else self._clip_norm

    @property
    def noise_multiplier(self) -> float | None:
        """The stated noise in the sum of updates, over the clip norm; None if none is stated."""
        if self._noise is not None or self.private is None:
            return self._noise
        return float(self.private.noise_multiplier)

    @property
    def is_flowers_own(self) -> bool:
        """Whether the whole chain consists of Flower's own classes, whose aggregation does nothing else."""
        each: Any = self.strategy
        kinds: list[type] = []
        while each is not None:
            kinds.append(type(each))
            each = getattr(each, "strategy", None)
        return all(kind.__module__.partition(".")[0] == "flwr" for kind in kinds)

    @property
    def adds_noise(self) -> bool:
        """Whether Flower's wrapper adds noise, sized for equal weights."""
        return self.private is not None and bool(self.noise_multiplier)

    @property
    def clips_on_server(self) -> bool:
        """Whether the server clips replies."""
        return isinstance(self.private, SERVER_CLIP)

    @property
    def clips_on_clients(self) -> bool:
        """Whether clients must clip."""
        return isinstance(self.private, CLIENT_CLIP)

    @property
    def is_adaptive(self) -> bool:
        """Whether the clip norm follows the clients' updates."""
        return hasattr(self.private, "clip_norm_lr")

    @property
    def has_accountant(self) -> bool:
        """Whether Flower's accountant runs, which demands equal weights."""
        return getattr(self.private, "accountant", None) is not None

    @property
    def is_linear(self) -> bool:
        """Whether it averages like FedAvg."""
        return getattr(type(self.innermost), "aggregate_train", None) is FedAvg.aggregate_train

    @property
    def ignores_weights(self) -> bool:
        """Whether it averages without the clients' weights, and may drop replies."""
        return isinstance(self.innermost, DROPPING)

    @property
    def weight_key(self) -> str:
        """The name of the metric that holds a reply's weight."""
        return str(getattr(self.innermost, "weighted_by_key", "num-examples"))

    @property
    def demands_equal_records(self) -> bool:
        """Whether all replies must have the same records and metrics, as FedAvg demands."""
        return hasattr(self.innermost, "weighted_by_key")

    def why_no_others(self, *, known_others: bool) -> str | None:
        """Why the real clients' part of a round cannot be subtracted from it; None if it can."""
        if not known_others:
            return "known_others=False was given"
        if self.private is None:
            return "without a DifferentialPrivacy… wrapper the server cannot tell updates from noise added on clients"
        if not self.is_linear:
            name = type(self.innermost).__name__
            return (
                f"{name} does not average linearly, so the real clients' part cannot be subtracted from the new model"
            )
        return None

    def aggregate(
        self, server_round: int, replies: list[Message], growth: Fraction | float
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Its aggregation. Extra and dropped replies change a client's share by 1/`growth`, and the noise with it.

        So their ratio is the same as without the audit, even if the user's `num_sampled_clients` is wrong.
        """
        if not replies:
            return None, None
        if growth == 1 or self.private is None:
            return self.strategy.aggregate_train(server_round, replies)
        configured = self.private.num_sampled_clients
        scaled = float(configured * growth)
        self.private.num_sampled_clients = int(scaled) if scaled.is_integer() else scaled
        try:
            return self.strategy.aggregate_train(server_round, replies)
        finally:
            self.private.num_sampled_clients = configured

    @property
    def state(self) -> dict[str, float]:
        """The numbers that a checkpoint must hold."""
        return {} if self.private is None else {"clipping_norm": float(self.private.clipping_norm)}

    def resume(self, state: dict[str, float], done: int) -> list[str]:
        """Restore those numbers after `done` rounds, and return warnings about what is not restored."""
        if self.private is not None and "clipping_norm" in state:
            self.private.clipping_norm = state["clipping_norm"]
        warnings = []
        if not self.is_linear:
            name = type(self.innermost).__name__
            warnings.append(f"the state of {name} is not saved: it starts again after round {done}")
        if self.has_accountant:
            warnings.append(
                f"Flower's accountant starts again after round {done}: its epsilon is for later rounds only"
            )
        return warnings

    @property
    def spent(self) -> Any:
        """Epsilon and delta by Flower's accountant; None without one."""
        return self.private.privacy_spent() if hasattr(self.private, "privacy_spent") else None

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the pipeline for the result, if Flower's own wrapper adds the noise."""
        if self.private is None:
            return {}
        clipping = "adaptive" if self.is_adaptive else "fixed"
        return {"trust_model": "central", "clipping": clipping}  # the server adds the noise
