"""What an audit writes: settings and commitment, the log of rounds, the run directory."""
