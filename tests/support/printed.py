"""What a command line prints, and its exit code."""

from collections.abc import Callable, Sequence

import pytest


def printed(
    main: Callable[[list[str]], int], argv: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Return the exit code of a call, its output and its errors."""
    try:
        code = main(list(argv))
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err
