"""Noise after the optimiser: a DP wrapper around FedAdam, detected by coalmine."""
