"""Random bad input for every way into coalmine: `make fuzz`, or `python -m fuzz --help`."""
