"""What an audit by crafted canaries fixes in advance."""

from dataclasses import dataclass

from coalmine.checks import nonnegative_array, one_number, whole_number


@dataclass(frozen=True, kw_only=True)
class CanifeSettings:
    """How canaries are crafted and rounds audited; the defaults are those of the paper's comparison (Section 5.3).

    `design_rate` is the learning rate of Adam in the crafting, which neither paper states.
    """

    noise_multiplier: float
    clip_norm: float = 1.0
    batch_size: int = 128
    pool_size: int = 512  # held-out examples that the canary's gradient is made orthogonal to
    design_steps: int = 2500
    design_rate: float = 0.03
    audit_every: int = 100  # rounds
    scores: int = 100  # of each kind, with and without the canary, in each audited round

    def __post_init__(self) -> None:
        nonnegative_array("noise_multiplier", one_number("noise_multiplier", self.noise_multiplier))
        for name in ("clip_norm", "design_rate"):
            if not one_number(name, getattr(self, name)) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name, minimum in (("batch_size", 1), ("pool_size", 1), ("design_steps", 0), ("audit_every", 1)):
            whole_number(name, getattr(self, name), minimum=minimum)
        whole_number("scores", self.scores, minimum=10)  # below which no statement at 95 % says anything

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.clip_norm

    def audited(self, rounds: int) -> range:
        """The rounds that are audited: the first, and every `audit_every`-th after it."""
        return range(1, whole_number("rounds", rounds, minimum=1) + 1, self.audit_every)
