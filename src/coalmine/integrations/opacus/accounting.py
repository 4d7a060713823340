"""The accounting of an Opacus run: what the accountant counts, how a claimed epsilon is read, and what has changed."""

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opacus import PrivacyEngine
from opacus.accountants import IAccountant
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer

from coalmine.argument_checks import count_of, one_number
from coalmine.estimators.sampling import Poisson
from coalmine.verdict.claim import NOISES, Claim

UNIT, ADJACENCY = "row", "add or remove one"  # what Opacus's accountants count
MOST_DISTINCT = 64  # most different steps for which the accountant is asked: it composes them one by one
NOISE, CLIP, RATE = "noise_multiplier", "clip_norm", "sampling_rate"  # in a line of metrics


@dataclass
class _Change:
    """The steps in which a setting differed from its value when the audit began."""

    then: float
    first: int
    steps: int
    low: float
    high: float

    def __str__(self) -> str:
        now = f"{self.low:.4g}" if self.low == self.high else f"{self.low:.4g} to {self.high:.4g}"
        return f"{self.then:.4g} then, {now} in {count_of(self.steps, 'step')}, first in step {self.first}"


class StepAccounting:
    """Noise, clip norm and sampling rate of the steps, beside those when the audit began."""

    def __init__(
        self,
        optimizer: DPOptimizer,
        loader: Any,
        rate: float,
        *,
        clip_norm: float,
        earlier: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._optimizer, self._loader, self._rate = optimizer, loader, rate
        self.accountant = attached_accountant(optimizer)
        self._then = self._now(clip_norm)
        self._changes: dict[str, _Change] = {}
        for line in earlier:  # of the steps before a restart
            self._see(line.get("round"), line)

    def note_step(self, step: int, *, clip_norm: float) -> dict[str, float]:
        """Take the settings of a step, and return them."""
        settings = self._now(clip_norm)
        self._see(step, settings)
        return settings

    def _now(self, clip_norm: float) -> dict[str, float]:
        return {NOISE: float(self._optimizer.noise_multiplier), CLIP: clip_norm, RATE: self._sampler_rate()}

    def _see(self, step: Any, settings: Mapping[str, Any]) -> None:
        for name, then in self._then.items():
            value = settings.get(name)
            if not isinstance(value, float | int) or math.isclose(value, then, rel_tol=1e-9):
                continue
            change = self._changes.setdefault(name, _Change(then, step, 0, math.inf, -math.inf))
            change.steps += 1
            change.low, change.high = min(change.low, value), max(change.high, value)

    @property
    def notes(self) -> list[str]:
        """A line for each setting that changed since `audited`. An adaptive clip norm is meant to."""
        adaptive = isinstance(self._optimizer, AdaClipDPOptimizer) or hasattr(
            self._optimizer, "_adjusted_noise_multiplier"
        )
        return [
            f"the {name.replace('_', ' ')} changed since audited(): {change}"
            for name, change in self._changes.items()
            if not (adaptive and name == CLIP)
        ]

    @property
    def steps(self) -> int | None:
        """The number of steps that the accountant counted; None without an accountant."""
        return None if self.accountant is None else sum(int(part[2]) for part in self.accountant.history)

    @property
    def name(self) -> str | None:
        """The accountant's name."""
        return None if self.accountant is None else f"opacus {type(self.accountant).__name__}"

    def epsilon(self, delta: float) -> float | None:
        """The epsilon that the accountant quotes for the steps that it has counted; None if it quotes none."""
        history = [] if self.accountant is None else self.accountant.history
        if not history or len(history) > MOST_DISTINCT:
            return None
        if any(not part[0] for part in history):
            return math.inf
        assert self.accountant is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps without sampling, and of orders at the end of their range
            try:
                return float(self.accountant.get_epsilon(delta))
            except (ArithmeticError, RuntimeError, ValueError):
                return None  # Opacus's PRV accountant has settings that it cannot compute; engine.get_epsilon says why

    def claim(self, *, steps: int, delta: float, observed: bool) -> Claim:
        """The accounting of a bare claim, over this many steps; its epsilon is no number of anybody's.

        Sampling is counted unless every row is in every step. If the rate changed, no scheme describes the run: the claim is
        read with the smallest rate, so that sampling refutes nothing, and with a sampler that nobody observed, so that
        nothing is confirmed. Noise that changed is that of each round.
        """
        history = [] if self.accountant is None else self.accountant.history
        rates = {min(float(part[1]), 1.0) for part in history} or {min(self._rate, 1.0)}
        noises = {float(part[0]) for part in history} or {float(self._optimizer.noise_multiplier)}
        terms: dict[str, Any] = {"delta": delta, "unit": UNIT, "adjacency": ADJACENCY}
        steady = NOISE not in self._changes and len(noises) == 1
        if min(rates) >= 1:
            return Claim(1.0, participations=steps, **terms)
        (noise,) = noises if steady else (0.0,)
        return Claim(
            1.0,
            sampling=Poisson(min(rates), rounds=steps),
            noise_multiplier=noise if NOISES[0] <= noise <= NOISES[1] else None,
            sampler_observed=observed and len(rates) == 1,
            **terms,
        )

    def _sampler_rate(self) -> float:
        """The rate of the loader's own sampler, or else the stated one."""
        sampler = getattr(self._loader, "batch_sampler", None)
        return float(getattr(sampler, "sample_rate", getattr(self._loader, "sample_rate", self._rate)))


def attached_accountant(optimizer: DPOptimizer) -> IAccountant | None:
    """The accountant whose hook `make_private` attached, if it is still the optimizer's only hook."""
    if not inspect.isfunction(optimizer.step_hook):
        return None
    closure = inspect.getclosurevars(optimizer.step_hook).nonlocals.values()
    return next((value for value in closure if isinstance(value, IAccountant)), None)


def number_of(claim: Any, *, delta: Any, unknown: IAccountant | None = None) -> Any:
    """The claim, or what an accountant or a PrivacyEngine quotes for its history as one.

    The accountant `unknown` is the one that will count the run: its epsilon is known only afterwards.
    """
    accountant = claim.accountant if isinstance(claim, PrivacyEngine) else claim
    if not isinstance(accountant, IAccountant):
        return claim
    if accountant is unknown or not accountant.history:
        raise ValueError(
            "claim must be a number, and this accountant knows its epsilon only after training: pass the target epsilon, "
            "such as claim=3.0"
        )
    delta = one_number("delta", delta)
    return Claim(float(accountant.get_epsilon(delta)), delta=delta, adjacency=ADJACENCY, counts_sampling=True)


def update_noise_multiplier(optimizer: DPOptimizer) -> float:
    """Noise multiplier of the gradients: with an adaptive clip, z_Δ = (z⁻² − (2σ_b)⁻²)^−½, as its count has noise too."""
    noise = float(getattr(optimizer, "_adjusted_noise_multiplier", optimizer.noise_multiplier))
    if isinstance(optimizer, AdaClipDPOptimizer) and noise:
        return float((noise**-2 - (2 * float(optimizer.unclipped_num_std)) ** -2) ** -0.5)
    return noise
