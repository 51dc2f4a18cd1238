"""Different: two runs that should be equal are not."""


class Different(Exception):
    """Two runs that should be equal are not."""


def require_equal(holds: object, text: str) -> None:
    """Raise Different with a text if what should be equal is not."""
    if not holds:
        raise Different(text)
