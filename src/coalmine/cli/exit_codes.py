"""What a command's exit code means (docs/exit-codes.md)."""

BAD_INPUT, INTERNAL_ERROR, INTERRUPTED = 2, 70, 130
VERDICT_CODES = {"PASS": 0, "VIOLATION": 1, "UNDERPOWERED": 3}
