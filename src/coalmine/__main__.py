"""`python -m coalmine`, and the command `coalmine`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run a command and exit with its code."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        print(f"coalmine: the commands need: pip install 'coalmine[cli]' ({error})", file=sys.stderr)
        sys.exit(2)  # bad input, as in docs/reference/exit-codes.md
    from coalmine.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
