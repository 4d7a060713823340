"""Does a pipeline's sampler do what its accountant assumes? Tests on the rounds in which it picked the canaries."""

from coalmine.estimators.sampler_tests.reading import SamplerReading, rate_power, read_sampler
from coalmine.estimators.sampler_tests.recognition import MEANING
from coalmine.estimators.sampler_tests.sampler_test import LEVEL, SamplerTest

__all__ = ["LEVEL", "MEANING", "SamplerReading", "SamplerTest", "rate_power", "read_sampler"]
