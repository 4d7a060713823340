"""What a run leaves on disk: its directory, the file of its rounds, and the record that it commits to before round 1."""
