"""Ops at true width, each with the same in float64: a name, what the device has made, and what it should be.

Inputs are drawn, of a normal distribution, and rounded to the run's precision: the float64 of these is what is right.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.linear.fp8 import Fp8Gemm
from trainer.linear.weight import Weight
from trainer.ops.activation import ACTIVATIONS, activate, activate_reference
from trainer.ops.attention.reference import Reference
from trainer.ops.attention.seam import Mask
from trainer.ops.attention.slopes import alibi_slopes
from trainer.ops.cross_entropy import VocabularyPart, cross_entropy_reference
from trainer.ops.dtypes import wide_dtype
from trainer.ops.norm import add_norm, add_norm_reference
from trainer.ops.rope import rope, rope_reference, rotary_frequencies, turns_at
from trainer.parallel.cross_entropy import vocab_cross_entropy
from trainer.verify.difference import require_equal
from trainer.verify.true_width import Wide, parts_of

Pairs = Iterator[tuple[str, Tensor, Tensor]]
CAST = 2**-3  # of the norm of what is cast to eight bits, which the coarser of their formats rounds by at most
WIDE = torch.float64


def normals(wide: Wide, use: int, *shape: int) -> Tensor:
    """Return numbers of a use, in the run's precision."""
    draw = torch.Generator().manual_seed(use)
    return torch.randn(*shape, generator=draw).to(wide.device, wide.engine.dtype)


def product_pairs(wide: Wide) -> Pairs:
    """Yield the three products of each shape of a matrix; those of weights are added twice."""
    kinds, parts = set[tuple[object, ...]](), parts_of(wide.engine, "parameters")
    for weight in wide.engine.store.weights:
        kind = (*weight.shape, type(weight.gemm))
        if len(weight.shape) == 2 and kind not in kinds:
            kinds.add(kind)
            values = torch.cat([parts[name] for name in weight.name.split(" + ")])
            gradient = torch.zeros(values.shape, dtype=wide_dtype(values.dtype), device=wide.device)
            probe = Weight(weight.name, values, gradient, contributes=True)
            if isinstance(weight.gemm, Fp8Gemm):
                probe.gemm = Fp8Gemm(probe, weight.gemm.recipe, keeps_columns=weight.gemm.keeps_columns)
            yield from products_of(wide, probe, gradient)


def products_of(wide: Wide, weight: Weight, gradient: Tensor) -> Pairs:
    """Yield those of one matrix; in eight bits the float64 is of what the recipe multiplies."""
    tokens, gemm, w = wide.config.train.seq_length, weight.gemm, weight.values.to(WIDE)
    x, dy = normals(wide, 1, tokens, w.shape[1]), normals(wide, 2, tokens, w.shape[0])
    cast_x, cast_dy = gemm.take(x, keeps=True), gemm.share(dy)
    x_again = gemm.retake(*gemm.keep(cast_x))
    factors = [x.to(WIDE), w, dy.to(WIDE), w, dy.to(WIDE), x.to(WIDE)]
    if isinstance(gemm, Fp8Gemm):
        copies = [(cast_x.rows, False), (gemm.copy_of_weight(columns=False), False), (cast_dy.rows, False)]
        copies += [(gemm.copy_of_weight(columns=True), True)]
        copies += [(cast_dy.columns, True), (x_again.columns, True)] if gemm.narrow else []
        for number, (copy, is_transposed) in enumerate(copies):
            values = copy.wide(WIDE).t() if is_transposed else copy.wide(WIDE)
            gap = torch.linalg.vector_norm(values - factors[number]) / torch.linalg.vector_norm(factors[number])
            require_equal(bool(gap <= CAST), f"a factor of {weight.name} is off by {gap:.1e} in eight bits")
            factors[number] = values
    yield f"x W^T of {weight.name}", gemm.forward(cast_x), factors[0] @ factors[1].t()
    yield f"dy W of {weight.name}", gemm.dgrad(cast_dy), factors[2] @ factors[3]
    for _ in range(2):
        gemm.wgrad(cast_dy, x_again)
    yield f"dy^T x of {weight.name}", gradient, 2 * factors[4].t() @ factors[5]


def attention_pairs(wide: Wide) -> Pairs:
    """Yield the result and the gradients of attention over each kind of mask of the layers, by the run's backend."""
    model, tokens, reference = wide.config.model, wide.config.train.seq_length, Reference()
    bounds, longest = (wide.bounds, wide.longest) if wide.config.data.document_mask else (None, tokens)
    alibi = alibi_slopes(model.num_heads, device=wide.device) if model.position == "alibi" else None
    for window in dict.fromkeys(wide.engine.choices.windows):
        mask = Mask(bounds, bounds, longest, longest, window=window, alibi=alibi)
        backend = wide.engine.choices.attention[mask.kind]
        sizes = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
        q, k, v, dout = (normals(wide, use, tokens, number, model.head_size) for use, number in enumerate(sizes))
        out, lse = backend.forward(q, k, v, mask)
        made = out, *backend.backward(dout, (q, k, v, out, lse), mask)
        q, k, v, dout = (each.to(WIDE) for each in (q, k, v, dout))
        exact, lse = reference.forward(q, k, v, mask)
        expected = exact, *reference.backward(dout, (q, k, v, exact, lse), mask)
        for name, values, other in zip(("the result", "dq", "dk", "dv"), made, expected, strict=True):
            yield f"{name} of attention {mask.kind} by {backend.name}", values, other


def op_pairs(wide: Wide) -> Pairs:
    """Yield results and gradients of the ops between products."""
    for name, op, plain, inputs in ops_of(wide):
        dtype = wide.engine.dtype
        own, expected = both_ways(op, inputs, dtype), both_ways(plain, [each.to(WIDE) for each in inputs], dtype)
        for number, (values, other) in enumerate(zip(own, expected, strict=True)):
            yield f"{name}, result or gradient {number + 1} of {len(own)},", values, other


def ops_of(wide: Wide) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any], list[Tensor]]]:
    """Yield the name of each op, the run's form of it, the same in plain torch, and its inputs."""
    model, tokens, forms = wide.config.model, wide.config.train.seq_length, wide.engine.choices.forms
    of_norm = [normals(wide, use, *shape) for use, shape in enumerate([(tokens, model.hidden_size)] * 2)]
    of_norm += [normals(wide, use, model.hidden_size) for use in range(2, 4 if model.norm == "layernorm" else 3)]

    def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return add_norm(x, residual, weight, bias, model.norm_eps, None, forms.norm)

    def plain_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return add_norm_reference(x, residual, weight, bias, model.norm_eps)

    yield model.norm, norm, plain_norm, of_norm
    counts = model.num_heads, model.num_kv_heads
    if model.position == "rope":
        frequencies = rotary_frequencies(model, device=wide.device)

        def turns(x: Tensor) -> Tensor:
            return turns_at(torch.arange(tokens, device=wide.device), frequencies, x.dtype)

        packed = normals(wide, 5, tokens, (counts[0] + 2 * counts[1]) * model.head_size)
        yield (
            "rotation",
            lambda x: rope(x, turns(x), *counts, form=forms.rope),
            lambda x: rope_reference(x, turns(x), *counts),
            [packed],
        )
    activation = ACTIVATIONS[model.activation].in_form(forms.activation)
    widened = normals(wide, 6, tokens, activation.num_parts * (model.ffn_hidden_size or model.hidden_size))
    yield activation.name, lambda x: activate(x, activation), lambda x: activate_reference(x, activation), [widened]
    labels = torch.randint(model.vocab_size, (tokens,), generator=torch.Generator().manual_seed(7)).to(wide.device)
    part, z_loss = (
        VocabularyPart(0, model.vocab_size, forms.cross_entropy, model.logit_softcap),
        wide.config.train.z_loss,
    )
    group = wide.engine.mesh.tp

    def plain_loss(logits: Tensor) -> Tensor:
        cap = model.logit_softcap
        return cross_entropy_reference(cap * torch.tanh(logits / cap) if cap else logits, labels, z_loss)

    yield (
        "the loss",
        lambda logits: vocab_cross_entropy(logits * 1, labels, part, group, z_loss=z_loss),
        plain_loss,
        [normals(wide, 8, tokens, model.vocab_size)],
    )


def both_ways(op: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the results of an op, and the gradients of its inputs for drawn `dtype` ones of the results."""
    inputs = [each.detach().clone().requires_grad_() for each in inputs]
    results = op(*inputs)
    outputs = [results] if isinstance(results, Tensor) else list(results)
    draw = torch.Generator().manual_seed(9)
    douts = [torch.randn(out.shape, generator=draw).to(dtype).to(out.device, out.dtype) for out in outputs]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, inputs, douts)]
