"""Evidence becomes a verdict: claims, their limits, findings and the alarm."""
