"""One module per framework, each behind its extra: its objects become vectors, and the audit does the rest."""
