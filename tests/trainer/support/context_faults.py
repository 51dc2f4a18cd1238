"""A fault of rows that are cut over ranks, which evaluations by groups of labels show."""

from trainer.verify.faults.context import of_the_first
from trainer.verify.faults.fault import CP, Fault

GROUP_FAULTS = (
    Fault(
        "cp-groups-of-first",
        "losses on each cp rank are summed by the groups of the first",
        CP,
        of_the_first("groups_S"),
    ),
)
