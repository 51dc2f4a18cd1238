"""Uses of fsync whose loss nothing shows, each with the reason."""

OLDER = "names what was durable before the program began"
DEBRIS = "what comes back has no root, and a later prune removes it"
RACES = ("two jobs", "two jobs that prune")  # whose files are those of a step is another time
UNSEEN: dict[str, dict[str, str]] = {
    "pin": {".": OLDER, "run": OLDER},
    "prune": {".": OLDER, "run": OLDER, "run/step-#/a": DEBRIS},
    "remove": {".": OLDER, "run": OLDER, "run/step-#/a": DEBRIS},
    "rollback": {".": OLDER, "run": OLDER},
    "undo": {".": OLDER, "run": OLDER, "run/step-#/a": "a note of the rollback says nothing of a step with a root"},
    "preprocess": {
        "store/.work/items": "an item whose note is lost is made once more",
        "store/.work/items/.#.json.#.tmp": "an item whose note is torn is made once more",
    },
    "archive": {
        f"archive/.work/.shard-#-#.{kind}.zst.json.#.tmp": "a torn note of a finished file lets it be made once more"
        for kind in ("bin", "idx", "origin")
    },
}
UNSEEN |= {
    "prune of four": UNSEEN["prune"],
    "prune of eight": UNSEEN["prune"],
    "preprocess shards": UNSEEN["preprocess"],
    "archive shards": UNSEEN["archive"],
}
