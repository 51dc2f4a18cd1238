"""Whether the passes of a step may be one CUDA graph: what Python decides in them it decides once."""

from collections.abc import Iterator

from threefold.options import Fault
from trainer.config import Config
from trainer.config.resolve import row_lengths


def graph_faults(config: Config) -> Iterator[Fault]:
    """Yield what a run with `train.cuda_graphs` decides at each step, or waits for in a pass."""
    if not config.train.cuda_graphs:
        return
    model, data = config.model, config.data
    reasons = {
        "model.dropout": ("drops by the number of a step, which a graph has for good", model.dropout > 0),
        "model.attention_dropout": ("drops by the number of a step, too", model.attention_dropout > 0),
        "parallel.grad_reduce": (
            "rounds by the number of a step, which a graph has for good",
            config.parallel.grad_reduce == "int8",
        ),
        "model.num_experts": ("repeats steps whose rows do not fit", model.num_experts > 0),
        "data.document_mask": ("has other bounds in each step", data.document_mask),
        "data.packing": ("puts documents in rows, with other bounds in each step", data.packing != "concat"),
        "data.mixture": (
            "has rows of several lengths, or documents that attention does not cross, and a graph is of one kind",
            len(set(row_lengths(config))) > 1 or any(each.mask_documents for each in data.mixture),
        ),
        "train.rampup_batch_size": (
            "changes the number of micro-batches, and a graph is of one",
            bool(config.train.rampup_batch_size),
        ),
        "optim.offload": ("loads states beside the passes, which no graph has", config.optim.offload),
        "train.recompute_offload": ("moves inputs of layers beside the passes", config.train.recompute_offload),
        "fp8.stats_interval": ("counts values in some steps alone", config.fp8.stats_interval > 0),
        "profile.nvtx": ("marks passes and layers, of which a graph has no ranges", config.profile.nvtx),
    }
    for name, (reason, is_so) in reasons.items():
        if is_so:
            yield {name, "train.cuda_graphs"}, f"{name} {reason}: leave train.cuda_graphs out"
