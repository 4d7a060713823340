"""The privacy of a run as its config plans it: exposures, analytical epsilon, claim. All is known before round 1."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from coalmine.estimators.amplification import AmplifiedEpsilon, amplified_epsilon
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.result.trainer_section import TrainerSection
from coalmine.simulation.clipping import Clipping
from coalmine.simulation.cohorts import Cohorts, sampling_of
from coalmine.simulation.config import RunConfig
from coalmine.simulation.exposure import CanaryExposures, Exposure, canary_exposures, exposed_epsilon, most_exposed
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.pipeline_record import CLOSED_FORM, PipelineRecord, accountant_version, of_library

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedPrivacy:
    """The planned exposures and epsilons of a run with `population` clients or examples."""

    config: RunConfig
    cohorts: Cohorts
    population: int

    @cached_property
    def clipping(self) -> Clipping:
        return self.config.privacy.clipping_of(self.cohorts.expected_size)

    @cached_property
    def law(self) -> CorrelatedNoise | None:
        return self.config.noise_law()

    def exposures(self, rounds: int) -> CanaryExposures:
        """The canaries' exposures after `rounds` rounds."""
        count = self.config.canaries.count
        return canary_exposures(lambda number: self.cohorts.of_round(number).canaries, rounds, count, self.law)

    @cached_property
    def usual(self) -> Exposure:
        """The most common exposure of a canary after all planned rounds."""
        return self.exposures(self.config.rounds).usual

    @cached_property
    def analytical(self) -> float:
        """The analytical epsilon of the most common exposure."""
        return self.epsilon(self.usual)

    def epsilon(self, exposure: Exposure) -> float:
        """The analytical epsilon of an exposure."""
        return exposed_epsilon(exposure, self.clipping, delta=self.config.privacy.delta)

    @property
    def counts_clients(self) -> bool:
        """Whether client exposures are counted exactly: under correlated noise, and for rounds from a file."""
        return self.law is not None or self.config.participation.kind == "file"

    @cached_property
    def client(self) -> Exposure:
        """A client's exposure: the average, or the largest in this run if clients are counted exactly."""
        config, cohorts = self.config, self.cohorts
        if self.counts_clients:
            present = (cohorts.of_round(number).clients for number in range(1, config.rounds + 1))
            return most_exposed(present, self.law)
        replaced = config.canaries.count if config.canaries.pattern == "replace" else 0
        share = (cohorts.expected_size - cohorts.expected_canaries) / (self.population - replaced)
        times = max(1, round(round(config.rounds * share, 9)))  # rounding twice treats an exact half as a half
        return Exposure(times, times)

    @cached_property
    def claim(self) -> Claim | None:
        """The claim that the config makes; None if it makes none."""
        settings = self.config.claim
        if self.config.claim_counts_sampling:
            return self._amplified_claim(settings.epsilon)
        if settings.epsilon is not None:
            return self.claim_of(settings.epsilon)
        if not settings.analytical:
            return None
        if self.analytical == 0:  # delta alone covers it
            log.warning("the analytical epsilon is 0 at this delta, so there is no claim to judge")
            return None
        return self.claim_of(self.analytical)

    def claim_of(self, epsilon: float) -> Claim:
        """A claim for the most common exposure of the canaries."""
        sensitivity = None if self.law is None else self.usual.sensitivity
        return Claim(epsilon, participations=self.usual.times, sensitivity=sensitivity)

    def _amplified_claim(self, epsilon: float | None) -> Claim:
        """The claim of the accountant's epsilon, or of a number that the user says is the accountant's."""
        config = self.config
        scheme, noise = sampling_of(config, self.population), config.privacy.noise_multiplier
        assert scheme is not None  # RunConfig checks it
        observed = (
            config.canaries.pattern != "spread"
        )  # canaries take part exactly when the clients' sampler picks them
        return Claim(
            float(self._accounted) if epsilon is None else epsilon,
            sampling=scheme,
            noise_multiplier=noise or None,
            sampler_observed=observed,
        )

    @cached_property
    def _accounted(self) -> AmplifiedEpsilon:
        """The accountant's epsilon."""
        scheme = sampling_of(self.config, self.population)
        assert scheme is not None
        return amplified_epsilon(self.config.privacy.noise_multiplier, scheme, self.config.privacy.delta)

    @property
    def count_noise_multiplier(self) -> float | None:
        """The noise multiplier of an adaptive clip's count; None if the clip is fixed."""
        return self.clipping.count_noise_multiplier if self.config.privacy.clipping == "adaptive" else None

    @property
    def count_epsilon(self) -> float | None:
        """The epsilon of an adaptive clip's count; None if the clip is fixed."""
        noise, delta = self.count_noise_multiplier, self.config.privacy.delta
        return None if noise is None else float(mechanism_epsilon(noise, delta=delta, participations=self.usual.times))

    @property
    def update_epsilon(self) -> float:
        """The epsilon of the updates alone, without an adaptive clip's count."""
        noise = self.clipping.update_noise_multiplier / self.usual.sensitivity
        return float(mechanism_epsilon(noise, delta=self.config.privacy.delta))

    def section(self, title: str) -> TrainerSection:
        """The trainer's section of the result as it is known before round 1; `title` is the name of the data."""
        config = self.config
        return TrainerSection(
            task=config.task.name,
            title=title,
            level=config.task.level,
            noise_multiplier=config.privacy.noise_multiplier,
            update_noise_multiplier=self.clipping.update_noise_multiplier,
            update_epsilon=self.update_epsilon,
            count_noise_multiplier=self.count_noise_multiplier,
            count_epsilon=self.count_epsilon,
            presentations=self.usual.times,
            noise=config.privacy.noise,
            sensitivity=self.usual.sensitivity,
            population=self.population,
            client_rounds=self.client.times,
            client_epsilon=self.epsilon(self.client),
            client_exposure="most exposed" if self.counts_clients else "average",
            secret_seed=config.canaries.seed_file is not None,
            pipeline=self._pipeline(),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        """Caveats and context for a reader of the result, one sentence each."""
        config, unit = self.config, self.config.task.level
        if config.canaries.pattern == "replace":
            yield f"{config.canaries.count:,} of the {self.population:,} {unit}s are canaries"
        if config.claim_counts_sampling and config.canaries.pattern == "spread":
            yield (
                f"the canaries' rounds are planned, so the sampler of the {unit}s is not observed; --pattern clients or "
                "--pattern replace lets it pick the canaries"
            )
        if self.count_noise_multiplier and self.count_epsilon is not None:
            yield (
                f"adaptive clipping spends ε {self.count_epsilon:.4g} on its count (noise multiplier "
                f"{self.count_noise_multiplier:.4g}), so the updates have noise multiplier "
                f"{self.clipping.update_noise_multiplier:.4g} and known-others is compared with ε {self.update_epsilon:.4g}"
            )
        if config.canaries.seed_file is None:
            yield "the canaries use the public demo seed; give --seed-file for an audit that others can trust"

    def _pipeline(self) -> PipelineRecord:
        """The record of this training pipeline, for the privacy statement."""
        config, accountant = self.config, None
        if config.claim.analytical:
            accountant = CLOSED_FORM
        elif config.claim.accountant:
            accountant = self._accounted.accountant
        released = [
            "metrics.jsonl, without noise: the accuracy on examples held out from training, and in each round the number of "
            f"{config.task.level}s and the share of clipped updates"
        ]
        if config.privacy.clipping == "adaptive":
            released.append(
                "the adaptive clip's count, with its own noise, which the ε covers"
                if self.count_noise_multiplier
                else "the adaptive clip's count, without noise, which no ε covers"
            )
        precision = "fp32 for weights, sums, clip and noise"
        if config.engine.precision == "tf32":
            precision += "; tf32 for matrix products in training"
        return of_library(
            "coalmine",
            unit=config.task.level,
            trust_model="central",
            clip_norm=config.privacy.clip_norm,
            clipping=config.privacy.clipping,
            precision=precision,
            generator="a torch.Generator, which is not cryptographic; its seed is in config.toml, so anyone who has that "
            "file can regenerate the noise",
            accountant=accountant,
            accountant_version=None if accountant is None else accountant_version(accountant),
            also_released="; ".join(released),
            pretraining="none: the initial model is random",
            evaluation="accuracy is measured on examples that took no part in training; the ε does not cover them",
        )

    def audited_items(self) -> list[AuditedItem]:
        """The audit coverage that follows from this pipeline; the audit derives the rest from its rounds."""
        config, usual, client = self.config, self.usual, self.client
        unit, pattern = config.task.level, config.canaries.pattern
        weights = (
            "every canary declares as many examples as the largest client, and so weighs as much"
            if unit == "client"
            else "every canary weighs as much as an example"
        )
        sampler = (
            f"the canaries' rounds are planned; how the {unit}s were sampled is not tested"
            if pattern == "spread"
            else f"the canaries are sampled like the {unit}s; a claim of the accountant's epsilon tests their rounds"
        )
        items = [AuditedItem("weights", "checked", weights), AuditedItem("sampler", "not checked", sampler)]
        if client.times > usual.times and not config.claim_counts_sampling:
            who = f"the most exposed {unit} in" if self.counts_clients else f"each {unit} in about"
            rounds = f"{usual.times} of the rounds, {who} {client.times}"
            detail = f"a canary takes part in {rounds}: a verdict is for {usual.times}"
            items.append(AuditedItem("participations", "not checked", detail))
        return items
