"""The command line: options in, one library call, a report out."""
