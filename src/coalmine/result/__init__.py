"""What comes out of an audit."""
