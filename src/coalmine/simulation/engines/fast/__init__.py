"""Hand-written engines for the paper's models, without autograd; they give the same updates as the plain engines."""
