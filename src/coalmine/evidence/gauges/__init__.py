"""Direct measurements of the noise, with the limits of a correct run."""
