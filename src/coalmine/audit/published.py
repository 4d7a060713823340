"""What the published estimators say of an audit's scores, beside the audit's own numbers."""

from coalmine.audit.adversaries import Scores
from coalmine.estimators.bounds import FEWEST
from coalmine.estimators.literature.compare import literature_rows
from coalmine.estimators.literature.row import LiteratureRow


def published_rows(scores: Scores, *, delta: float, confidence: float = 0.95) -> tuple[LiteratureRow, ...]:
    """Every published estimator on one rung's scores; none where there are too few of them."""
    if min(scores.observed.size, scores.unobserved.size) < FEWEST:
        return ()
    return literature_rows(scores.observed, scores.unobserved, delta=delta, confidence=confidence)
