"""The warnings of an audit: each is logged once, and kept for the result."""

import logging

logger = logging.getLogger("flwr.coalmine")  # goes to the same handlers as Flower's own log


class WarningLog:
    """The warnings so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Log a warning and keep it, unless it came before."""
        if text not in self.texts:
            self.texts.append(text)
            logger.warning("%s", text)
