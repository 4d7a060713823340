"""The mathematics of an audit: numbers in, numbers out."""
