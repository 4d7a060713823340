"""Random bad input for every entry point of coalmine: `make fuzz`, or `python -m fuzz --help`."""
