"""From vectors to a result: adversaries, state, run directory, record, verdict."""
