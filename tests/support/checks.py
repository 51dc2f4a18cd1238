"""What helpers of tests check with: a statement `assert` in them would not be executed under `python -O`."""

from trainer.verify.difference import Different as Different
from trainer.verify.difference import require_equal as require_equal


def require(holds: object, text: str) -> None:
    """Fail the test if something does not hold."""
    if not holds:
        raise AssertionError(text)
