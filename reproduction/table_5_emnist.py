"""Section 5.1: a CNN of 1.2 million parameters on handwriting, from all iterates and from the final model."""

from reproduction import epsilon_table
from reproduction.paper import EMNIST
from reproduction.training_configs import characters

EXPERIMENT = epsilon_table.experiment(
    "emnist", "ε against noise, handwriting (the paper: EMNIST)", characters, EMNIST, original="EMNIST"
)
