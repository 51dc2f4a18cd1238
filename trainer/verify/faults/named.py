"""All named faults: what the checks of `trainer verify` must find."""

from collections.abc import Sequence
from difflib import get_close_matches

from threefold.errors import UserError
from trainer.verify.faults.context import CONTEXT_FAULTS
from trainer.verify.faults.dispatch import DISPATCH_FAULTS
from trainer.verify.faults.eight_bits import EIGHT_BIT_FAULTS
from trainer.verify.faults.experts import EXPERT_FAULTS
from trainer.verify.faults.fault import Fault
from trainer.verify.faults.gradients import GRADIENT_FAULTS
from trainer.verify.faults.graphs import GRAPH_FAULTS
from trainer.verify.faults.holders import HOLDER_FAULTS, REPLICA_FAULTS
from trainer.verify.faults.initial import INITIAL_FAULTS
from trainer.verify.faults.leases import LEASE_FAULTS
from trainer.verify.faults.offload import OFFLOAD_FAULTS
from trainer.verify.faults.optimizers import OPTIMIZER_FAULTS
from trainer.verify.faults.passes import PASS_FAULTS
from trainer.verify.faults.recompute import RECOMPUTE_FAULTS
from trainer.verify.faults.rounding import ROUNDING_FAULTS
from trainer.verify.faults.saves import SAVE_FAULTS
from trainer.verify.faults.stages import STAGE_FAULTS
from trainer.verify.faults.streams import STREAM_FAULTS
from trainer.verify.faults.tensor import CUT_TOKEN_FAULTS, TENSOR_FAULTS
from trainer.verify.faults.tokens import TOKEN_FAULTS
from trainer.verify.faults.updates import UPDATE_FAULTS

_ALL = (
    *STREAM_FAULTS,
    *TOKEN_FAULTS,
    *GRADIENT_FAULTS,
    *UPDATE_FAULTS,
    *OPTIMIZER_FAULTS,
    *OFFLOAD_FAULTS,
    *INITIAL_FAULTS,
    *TENSOR_FAULTS,
    *CUT_TOKEN_FAULTS,
    *CONTEXT_FAULTS,
    *STAGE_FAULTS,
    *PASS_FAULTS,
    *GRAPH_FAULTS,
    *HOLDER_FAULTS,
    *REPLICA_FAULTS,
    *LEASE_FAULTS,
    *RECOMPUTE_FAULTS,
    *EXPERT_FAULTS,
    *DISPATCH_FAULTS,
    *EIGHT_BIT_FAULTS,
    *ROUNDING_FAULTS,
    *SAVE_FAULTS,
)
FAULTS = {fault.name: fault for fault in _ALL}


def faults_named(names: Sequence[str]) -> list[Fault]:
    """Return the faults of some names, all without one; UserError says which may have been meant."""
    for name in names:
        if name not in FAULTS:
            near = get_close_matches(name, FAULTS, 1, 0) or list(FAULTS)[:1]
            raise UserError(f"no fault is named {name}, did you mean {near[0]}?", hint="trainer verify --faults --list")
    return [FAULTS[name] for name in dict.fromkeys(names)] if names else list(_ALL)
