"""Batches in the form that models of transformers take: they shift labels by themselves.

Label i of ours is token i + 1. Theirs is token i, which a model compares with what it makes at i - 1:

    tokens     5   6   7   0   8        our labels     6   7   0   8   9     and the mask    1  1  1  0  1
    input_ids  5   6   7   0   8        their labels -100  6   7   0 -100

Label 0 is compared with nothing. What our last label asks for, 9, is in no label of theirs.
"""

from typing import Any

from threefold.errors import UserError

DATAKIT, TRANSFORMERS = FORMATS = ("datakit", "transformers")
IGNORED = -100  # the label that a loss of transformers leaves out


def check_format(name: object) -> str:
    """Return the name of a format; UserError if it is not one."""
    if name not in FORMATS:
        raise UserError(f"format is one of {', '.join(FORMATS)}, not {name!r}", hint='format="transformers"')
    return str(name)


def for_transformers(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch's tensors under the names of transformers; the memory of labels is used for theirs."""
    tokens, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"]
    labels[:, 1:] = tokens[:, 1:]
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, IGNORED)
    labels[:, 0] = IGNORED
    return {"input_ids": tokens, "labels": labels, "position_ids": batch["positions"]}
