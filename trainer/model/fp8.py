"""Which weights of a rank are multiplied in eight bits, and with whom it shares their scales."""

from math import prod

import torch

from threefold.errors import UserError
from trainer.config import Config
from trainer.config.eight_bits import eight_bit_names, keeps_weights, linears_of
from trainer.linear.fp8 import CastCounts, CutAlong, Fp8Gemm, Recipe
from trainer.mesh.group import Group
from trainer.mesh.mesh import ProcessMesh
from trainer.store.store import ParameterStore

CAPABILITIES = {"tensorwise": (8, 9), "rowwise": (9, 0), "blockwise": (9, 0)}  # from which on a GPU has such products


def multiply_in_eight_bits(
    config: Config, mesh: ProcessMesh, store: ParameterStore, counts: CastCounts, layers: range
) -> None:
    """Let the linears in these layers whose weights are to be in eight bits make their products so.

    Their casts are counted in `counts`. Raises UserError if the device has no such products.
    """
    names = eight_bit_names(config)
    if not names:
        return
    check_device(config.fp8.recipe, mesh.device)
    recipe = Recipe(config.fp8, counts, _if_cut(mesh.cp))
    linears = {each.name: (layer, each) for layer in layers for group in linears_of(config, layer) for each in group}
    for weight in store.weights:
        layer, linear = linears.get(weight.name.split(" + ")[0], (0, None))
        if linear is not None and linear.name in names:
            weight.gemm = Fp8Gemm(
                weight,
                recipe,
                cut=CutAlong(
                    outs=_if_cut(mesh.tp) if linear.own[0] < linear.shape[0] else (),
                    sums=_if_cut(mesh.tp) if linear.own[1] < linear.shape[1] else (),
                    sharers=mesh.kv if prod(linear.own) * mesh.tp.size > prod(linear.shape) else None,
                ),
                keeps_copies=keeps_weights(config),
                # the result of attention is there for its own backward
                keeps_columns=config.train.recompute == "none" and ".attn.out." not in linear.name,
                is_trained=store.options.with_optimizer,
                layer=layer,
            )


def check_device(recipe: str, device: torch.device) -> None:
    """Raise UserError if a GPU is too old for a recipe."""
    if device.type != "cuda":
        return
    found, needed = torch.cuda.get_device_capability(device), CAPABILITIES[recipe]
    if found < needed:
        text = f"fp8.recipe {recipe} needs sm_{needed[0]}{needed[1]} or newer, this GPU is sm_{found[0]}{found[1]}"
        has = " --fp8 tensorwise, or" if found >= CAPABILITIES["tensorwise"] else ""
        raise UserError(text, hint=f"{has} --fp8 off --bf16".strip())


def _if_cut(group: Group) -> tuple[Group, ...]:
    return (group,) if group.size > 1 else ()
