"""Exit codes of the commands (docs/reference/exit-codes.md)."""

BAD_INPUT, INTERNAL_ERROR = 2, 70  # an interruption is 128 plus the number of the signal
VERDICT_CODES = {"PASS": 0, "VIOLATION": 1, "UNDERPOWERED": 3}
