"""Section 5: a word LSTM of 4.05 million parameters, one presentation, from all iterates and from the final model."""

from reproduction import epsilon_table
from reproduction.paper import STACK_OVERFLOW
from reproduction.training_configs import words

EXPERIMENT = epsilon_table.experiment(
    "stackoverflow",
    "ε against noise, next words (the paper: Stack Overflow)",
    words,
    STACK_OVERFLOW,
    original="Stack Overflow",
)
