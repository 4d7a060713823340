"""Somebody else's audit, recomputed: its commitment, its rounds, and the result that follows from them."""

from coalmine.verification.audit_check import judge_again, verify_run
from coalmine.verification.check import Check

__all__ = ["Check", "judge_again", "verify_run"]
