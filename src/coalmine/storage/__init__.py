"""The files of a run: its directory, the log of its rounds, and the record that it commits to before round 1."""
