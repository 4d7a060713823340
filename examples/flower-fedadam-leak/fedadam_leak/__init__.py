"""Noise after the optimiser: a DP wrapper around FedAdam, caught by coalmine."""
