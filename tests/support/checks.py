"""What helpers of tests check with: a statement `assert` in them would not be executed under `python -O`."""


class Different(Exception):
    """Two runs that should be equal are not."""


def require(holds: object, text: str) -> None:
    """Fail the test if something does not hold."""
    if not holds:
        raise AssertionError(text)


def require_equal(holds: object, text: str) -> None:
    """Raise Different if what should be equal is not: a planted fault is caught by this, and by no invariant."""
    if not holds:
        raise Different(text)
