"""`python -m reproduction`."""

from typing import NoReturn

from coalmine.cli.program import run_program
from reproduction.command import reproduce


def main() -> NoReturn:
    """Run an experiment and exit with its code."""
    run_program(reproduce, "python -m reproduction")


if __name__ == "__main__":
    main()
