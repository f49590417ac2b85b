"""`dcnr verify`."""


def verify() -> None:
    """Placeholder."""
