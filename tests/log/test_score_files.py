"""The readers of score files; tests/cli/test_estimate.py tests the command."""

import pytest

from coalmine.log import score_files


@pytest.mark.parametrize(
    "content",
    [
        b"score\n1\n-2.5e3\n+.5\n",
        b"1\r\n2\r\n3\r\n",
        b"\xef\xbb\xbfCosine\n1\n2\n\n",
        b"observed\n1\n2",
        b"1\n2\n\n3\n",
        b"score\t\n1\n",
        b"1\r2\n3\n",
        b"1\n\r2\n3\n",
        b"1\n+\n3\n",
        b"1\n1e999\n",
        b"canary\n1\n2\n",
        b"# run\n1\n2\n",
        b"1\x0c2\n3\n",
        b"score\n",
    ],
)
def test_the_quick_reader_agrees_with_the_general_reader(content, monkeypatch):
    """For one number per line, the quick reader gives the same scores and error messages as the general one."""

    def outcome() -> object:
        try:
            found = score_files._by_role("file", score_files._read_csv("file", content), "observed")
        except ValueError as error:
            return str(error)
        return [part if part is None else part.tolist() for part in (found.observed, found.unobserved)]

    quick = outcome()
    monkeypatch.setattr(score_files, "_read_plain", lambda _: None)
    assert outcome() == quick
