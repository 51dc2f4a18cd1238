"""Inspect: what a checkpoint holds, from its root alone."""

from collections import Counter
from typing import Any

from ckptkit.format.root import Root
from ckptkit.model.tensor import TensorInfo, storage_order
from threefold.masking import masked_values


def describe(root: Root, url: str) -> dict[str, Any]:
    """Return a JSON-ready description: totals, layout, metadata, and the tensor table in storage order."""
    untied = [info for info in root.tensors.values() if info.placement.tied_to is None]
    return {
        "url": url,
        "step": root.step,
        "attempt": root.attempt,
        "layout": str(root.layout),
        "num_layers": root.num_layers,
        "num_tensors": len(root.tensors),
        "num_elements": sum(info.numel for info in untied),
        "tensor_bytes": sum(info.size_bytes for info in untied),
        "file_bytes": sum(part.data_bytes + part.index_bytes for part in root.parts),
        "num_files": len(root.parts),
        "share": None if root.share is None else f"{root.share} of {root.share.of}",
        "dtypes": dict(Counter(info.dtype for info in untied)),
        "saved": root.saved.to_json() if root.saved else None,
        "certificate": masked_values(root.certificate),
        "metadata": masked_values(root.metadata),  # an older version did not mask what it stored
        "tensors": [_row(info) for info in sorted(root.tensors.values(), key=storage_order)],
    }


def _row(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name, "dtype": info.dtype, "shape": list(info.shape), "bytes": info.size_bytes,
        "placement": describe_placement(info),
    }  # fmt: skip


def describe_placement(info: TensorInfo) -> str:
    """Return a placement in words: `layer 3, dim 0 by tp`."""
    place = info.placement
    stage = f"layer {place.stage}" if isinstance(place.stage, int) else f"{place.stage} stage"
    if place.tied_to is not None:
        return f"{stage}, tied to {place.tied_to}"
    if not place.cuts:
        return f"{stage}, replicated"
    cuts = [
        f"dim {cut.dim} by {cut.axis}" + (f" ({cut.max_parts} parts)" if cut.max_parts else "") for cut in place.cuts
    ]
    padded = {None: "", 1: ", padded"}.get(place.round_to, f", padded to {place.round_to}")
    return f"{stage}, {', '.join(cuts)}{padded}"
