"""Vectors become numbers: a model of any kind in blocks, and the measurements of one round."""
