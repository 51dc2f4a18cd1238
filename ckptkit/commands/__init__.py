"""The verbs of the `ckptkit` command, a file each, in the order of the help. numpy is imported by verbs alone."""

VERBS = (
    "ls", "best", "pin", "unpin", "rm", "rollback", "prune", "inspect", "verify", "hash", "diff", "copy", "reshard",
    "import", "export", "crash-test",
)  # fmt: skip
