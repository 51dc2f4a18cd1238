"""Closing and Making: the two ways in which a `with` ends what it was opened for."""

from typing import Self


class Closing:
    """What is closed where its `with` ends."""

    def close(self) -> object:
        """Close it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class Making(Closing):
    """What is complete once its `with` ends, and leaves nothing if that ends by an exception."""

    def abort(self) -> None:
        """Stop, and leave nothing."""
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
