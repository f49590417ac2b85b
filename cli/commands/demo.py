"""`dcnr demo`."""


def demo() -> None:
    """Placeholder."""
