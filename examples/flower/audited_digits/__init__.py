"""Handwritten digits with differential privacy in Flower, audited by coalmine."""
