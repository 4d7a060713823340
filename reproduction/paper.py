"""The paper's printed numbers that runs are compared with; those of Table 2 are in `table_2`."""

from typing import NamedTuple


class EpsilonRow(NamedTuple):
    """A line of the tables of Section 5: analytical, then bound and estimate from all iterates and from the final model."""

    analytical: float
    all_lower_bound: float
    all_estimate: float
    final_lower_bound: float
    final_estimate: float


STACK_OVERFLOW = {  # row of each noise multiplier (Table 4)
    0.0: EpsilonRow(float("inf"), 6.240, 45800, 2.88, 4.60),
    0.0496: EpsilonRow(300, 6.238, 382, 1.11, 1.97),
    0.0986: EpsilonRow(100, 5.05, 89.4, 0.688, 1.18),
    0.2317: EpsilonRow(30, 0.407, 2.693, 0.311, 0.569),
}
EMNIST = {  # Table 5
    0.0: EpsilonRow(float("inf"), 6.25, 48300, 3.86, 5.72),
    0.16: EpsilonRow(33.8, 2.87, 17.9, 1.01, 1.20),
    0.18: EpsilonRow(28.1, 2.32, 12.0, 0.788, 1.15),
    0.195: EpsilonRow(24.8, 2.02, 8.88, 0.723, 1.08),
    0.25: EpsilonRow(16.9, 0.896, 3.86, 0.550, 0.818),
    0.315: EpsilonRow(12.0, 0.315, 1.50, 0.216, 0.737),
}
ACCURACY = {  # noise multiplier: analytical epsilon, accuracy without and with 1,000 canaries in per cent (Table 3)
    0.0: (float("inf"), 25.3, 25.3),
    0.064: (194.0, 24.0, 23.9),
    0.102: (93.8, 23.1, 23.1),
    0.184: (40.2, 21.5, 21.5),
    0.234: (28.9, 20.6, 20.5),
}
NORMALITY_TIMES = (1, 2, 3, 5, 10)
NORMALITY = {  # noise multiplier: the Anderson-Darling statistic by presentations (Appendix C)
    0.0: (0.464, 0.590, 0.396, 0.407, 0.196),
    0.1023: (0.976, 0.422, 0.340, 0.432, 0.116),
    0.2344: (0.326, 0.157, 0.347, 0.951, 0.401),
}
CRITICAL_15, CRITICAL_1 = 0.574, 1.088  # the paper's critical values of the statistic at 15 % and 1 %
THREE_OF_FIFTEEN = 0.68  # "the probability of observing three or more"
LARGEST_BOUND = 6.24  # "a maximum possible value of 6.24 with perfect separation"
CANIFE_ANALYTICAL = 34.5
EMNIST_USERS, EMNIST_CHARACTERS = 3383, 814_000
