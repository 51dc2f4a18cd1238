"""What the pickles of older releases name for packed stores; kept for one release."""

from datakit.rows.older_names import reopen_packed as _reopen

__all__ = ["_reopen"]
