"""One test of a sampler, as a value."""

from dataclasses import dataclass

from coalmine.estimators.sampler_tests.count_laws import Count

LEVEL = 2e-4  # level of each test


@dataclass(frozen=True, kw_only=True)
class SamplerTest:
    """One test of a sampler: a statistic, its expected value under the claimed scheme, and the p-value."""

    name: str
    title: str
    statistic: float
    expected: float
    p_value: float
    level: float = LEVEL

    @classmethod
    def two_sided(cls, name: str, title: str, count: Count) -> "SamplerTest":
        """The test of whether a count is as expected."""
        return cls(name=name, title=title, statistic=count.observed, expected=count.expected, p_value=count.two_sided)

    @property
    def high(self) -> bool:
        """Whether the statistic is above its expected value."""
        return self.statistic > self.expected

    @property
    def passed(self) -> bool:
        return self.p_value >= self.level
