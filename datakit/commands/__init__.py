"""The verbs of the `datakit` command, a file each, in the order of the help. numpy is imported by verbs alone."""

VERBS = (
    "train-tokenizer",
    "preprocess",
    "inspect",
    "verify",
    "stats",
    "merge",
    "pack",
    "convert",
    "diff",
    "archive",
    "unarchive",
    "blend",
    "blame",
    "where",
)
