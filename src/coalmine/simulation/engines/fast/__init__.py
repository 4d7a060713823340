"""Engines written by hand for the paper's models, without autograd; each gives the updates of the plain ones."""
