import math
from dataclasses import replace

import pytest

from coalmine.estimators.literature.literature_row import LiteratureRow

ROW = LiteratureRow(
    name="Somebody 2030",
    reference="arXiv 0000.00000",
    value=1.25,
    kind="valid bound",
    confidence=0.95,
    controls="train data",
    receives="final model",
    assumptions="none",
    threshold="none",
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": ""}, "name must not be empty"),
        ({"kind": "bound"}, "kind must be one of estimate, heuristic, valid bound"),
        ({"threshold": "some"}, "threshold must be one of none; fixed in advance"),
        ({"confidence": 1.5}, r"confidence must lie in \(0, 1\)"),
        ({"confidence": None}, "a valid bound must have a confidence"),
        ({"value": None}, "a row must have either a value or needs"),
        ({"needs": "needs more"}, "a row must have either a value or needs"),
        ({"value": None, "needs": "more"}, "needs must read 'needs ...'"),
        ({"value": math.nan}, "value must be at least 0"),
        ({"value": -0.1}, "value must be at least 0"),
    ],
)
def test_rows_are_checked(changed, message):
    with pytest.raises(ValueError, match=message):
        replace(ROW, **changed)
