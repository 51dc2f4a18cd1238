"""What the pickles of older releases name for stores behind URLs; kept for one release."""

from datakit.rows.older_names import reopen_remote as _reopen

__all__ = ["_reopen"]
