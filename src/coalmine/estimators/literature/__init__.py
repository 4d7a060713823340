"""The published estimators of epsilon, one file each, all on the same scores."""
