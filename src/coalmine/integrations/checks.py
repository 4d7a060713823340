"""What integrations check of their settings, before the first round."""

from coalmine.checks import nonnegative_array, one_number, positive_array


def positive(name: str, value: float) -> float:
    """`value` as a float, refused unless it is finite and above 0."""
    return float(positive_array(name, one_number(name, value)))


def nonnegative(name: str, value: float) -> float:
    """`value` as a float, refused unless it is finite and at least 0."""
    return float(nonnegative_array(name, one_number(name, value)))
