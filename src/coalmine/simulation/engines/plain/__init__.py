"""Engines that use autograd and torch.func: the readable reference for every model."""
