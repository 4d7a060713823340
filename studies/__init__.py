"""Slow studies: `make studies`."""
