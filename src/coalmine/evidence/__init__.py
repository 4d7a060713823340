"""The log becomes evidence: the ladder of adversaries, and the gauges."""
