"""What a verdict can rest on: one class for each finding, by theme."""

from coalmine.verdict.findings import amplified, canaries, checks, gauges, missing, noise, power, records, rows

__all__ = ["amplified", "canaries", "checks", "gauges", "missing", "noise", "power", "records", "rows"]
