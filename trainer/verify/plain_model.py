"""The model and its training once more, in plain torch on whole tensors and written apart: what the trainer must equal.

Shapes: B samples, S positions, D hidden, N heads, H head size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trainer.config import Config, ModelConfig
from trainer.config.resolve import settled
from trainer.model.microbatch import Batch
from trainer.ops.dropout import dropout_reference
from trainer.ops.rope import rotary_frequencies
from trainer.verify.plain_optimizers import plain_optimizers, plain_rate

State = dict[str, Tensor]
Drop = Callable[..., Tensor]


def logits(
    model: ModelConfig,
    state: State,
    tokens_BS: Tensor,
    positions_BS: Tensor,
    drop: Drop,
    documents_BS: Tensor | None = None,
    spread: "Spread | None" = None,
) -> Tensor:
    """Return logits, [B, S, vocabulary]; attention stays in documents, if their numbers are given."""
    spread = spread or Spread(model)
    x_BSD = state["embed.weight"][tokens_BS]
    if model.position == "learned":
        x_BSD = x_BSD + state["pos.weight"][positions_BS]
    x_BSD = drop(x_BSD, layer=model.num_layers, site=0)
    for layer in range(model.num_layers):
        prefix = f"layers.{layer}."
        part = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        window = 0 if model.window_every and (layer + 1) % model.window_every == 0 else model.window
        of_weights = partial(drop, layer=layer)
        x_BSD = x_BSD + drop(
            _attend(model, part, _norm(model, part, "norm1", x_BSD), positions_BS, documents_BS, window, of_weights),
            layer=layer,
            site=0,
        )
        x_BSD = x_BSD + drop(
            _mixture(model, part, _norm(model, part, "norm2", x_BSD), layer, spread), layer=layer, site=1
        )
    head = state["embed.weight" if model.tie_embeddings else "head.weight"]
    logits_BSV = _norm(model, state, "norm", x_BSD) @ head.T
    cap = model.logit_softcap
    return cap * torch.tanh(logits_BSV / cap) if cap else logits_BSV


def train(
    config: Config, state: State, batches: Sequence[Batch], spread: "Spread | None" = None
) -> Iterator[tuple[float, float]]:
    """Train, and yield loss and gradient norm of each step; `state` holds the parameters afterwards."""
    model, optim = config.model, settled(config).optim
    spread = spread or Spread(model)
    for value in state.values():
        value.requires_grad_()
    optimizers = plain_optimizers(optim, state)
    for step, batch in enumerate(batches):
        for param_group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            param_group["lr"] = plain_rate(optim, step) * param_group["factor"]
        loss = differentiate(config, state, batch, step, spread)
        spread.end_step()
        gradients = [value.grad for value in state.values() if value.grad is not None]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        for gradient in gradients if optim.clip else ():
            gradient *= min(1.0, optim.clip / norm)
        for optimizer in optimizers:
            optimizer.step()
        yield loss, norm


def differentiate(config: Config, state: State, batch: Batch, step: int, spread: "Spread") -> float:
    """Return the loss of the step that follows `step` steps; the parameters have its gradients then."""
    model, mask = config.model, batch.loss_mask.flatten(0, 1)

    def drop(x: Tensor, *, layer: int, site: int) -> Tensor:
        place = {"step": step, "layer": layer, "site": site, "first_sample": batch.first_sample}
        p = model.dropout if site < 2 else model.attention_dropout
        return dropout_reference(x, p, seed=config.train.seed, **place) if p else x

    loss = (_losses(model, state, batch, drop, spread, config.train.z_loss) * mask).sum() / mask.sum()
    for value in state.values():
        value.grad = None
    (loss + spread.loss(mask, batch.tokens.shape[1]) / mask.sum()).backward()
    return loss.item()


@torch.no_grad()
def evaluation(config: Config, state: State, batch: Batch, spread: "Spread") -> tuple[float, float]:
    """Return the sum of the token losses of a batch, without dropout, and how many they are."""
    mask = batch.loss_mask.flatten(0, 1)
    losses = _losses(config.model, state, batch, lambda x, **_: x, spread, z_loss=0.0)
    return float((losses * mask).sum()), float(mask.sum())


def _losses(model: ModelConfig, state: State, batch: Batch, drop: Drop, spread: "Spread", z_loss: float) -> Tensor:
    """Return the loss of each token, [B, S]."""
    tokens, labels, positions = (part.flatten(0, 1) for part in (batch.tokens, batch.labels, batch.positions))
    documents = None if batch.documents is None else document_numbers(batch)
    logits_BSV = logits(model, state, tokens, positions, drop, documents, spread)
    logs = torch.log_softmax(logits_BSV, -1)
    return z_loss * logits_BSV.logsumexp(-1) ** 2 - logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def document_numbers(batch: Batch) -> Tensor:
    """Return the number of each token's document, in its micro-batch, [B, S]."""
    assert batch.documents is not None, "the batch has bounds of documents"
    num_rows, length = batch.tokens.shape[1:]
    places = torch.arange(num_rows * length)
    numbers = [(places.unsqueeze(1) >= bounds.to(places.device)).sum(1) for bounds, _ in batch.documents]
    return torch.cat(numbers).view(-1, length)


def _norm(model: ModelConfig, part: State, name: str, x: Tensor) -> Tensor:
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.norm_eps) * part[f"{name}.weight"]
    return y + part[f"{name}.bias"] if f"{name}.bias" in part else y


def _linear(part: State, name: str, x: Tensor) -> Tensor:
    y = x @ part[f"{name}.weight"].T
    return y + part[f"{name}.bias"] if f"{name}.bias" in part else y


def _attend(
    model: ModelConfig,
    part: State,
    x_BSD: Tensor,
    positions_BS: Tensor,
    documents_BS: Tensor | None,
    window: int,
    drop: Drop,
) -> Tensor:
    size = model.head_size or model.hidden_size // model.num_heads
    q, k, v = (_linear(part, f"attn.{name}", x_BSD).unflatten(-1, (-1, size)) for name in "qkv")  # [B, S, N, H]
    if model.qk_norm:
        q, k = _norm(model, part, "attn.q_norm", q), _norm(model, part, "attn.k_norm", k)
    if model.position == "rope":
        frequencies_H = rotary_frequencies(replace(model, head_size=size), device=x_BSD.device)
        q, k = _rotate(q, positions_BS, frequencies_H), _rotate(k, positions_BS, frequencies_H)
    repeats = model.num_heads // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores_BNST = torch.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(size)
    places = torch.arange(scores_BNST.shape[-1])
    back = places.unsqueeze(1) - places
    if model.position == "alibi":
        scores_BNST = scores_BNST - _slopes(model.num_heads).view(-1, 1, 1) * back
    scores_BNST = scores_BNST.masked_fill((back < 0) | (back >= (window or len(places))), -math.inf)
    if documents_BS is not None:
        others_BST = documents_BS.unsqueeze(2) != documents_BS.unsqueeze(1)
        scores_BNST = scores_BNST.masked_fill(others_BST.unsqueeze(1), -math.inf)
    weights_BNST = torch.softmax(scores_BNST, -1)
    weights_BNST = torch.stack([drop(each, site=2 + head) for head, each in enumerate(weights_BNST.unbind(1))], 1)
    return _linear(part, "attn.out", torch.einsum("bnst,btnh->bsnh", weights_BNST, v).flatten(2))


def _slopes(num_heads: int) -> Tensor:
    """Return ALiBi's slopes as its authors write them: a series, or of a power of two less and every other one of two.

    They are rounded to float32, in which masks have them.
    """

    def series(number: int) -> list[float]:
        return [2.0 ** (-8 * (head + 1) / number) for head in range(number)]

    power = 2 ** int(math.log2(num_heads))
    slopes = series(power) + series(2 * power)[::2][: num_heads - power]
    return torch.tensor(slopes, dtype=torch.float32).double()


def _rotate(x: Tensor, positions_BS: Tensor, frequencies_H: Tensor) -> Tensor:
    """Return x with feature j and j + H/2 as one complex number, turned by the position times a frequency."""
    half = x.shape[-1] // 2
    angles = positions_BS[..., None, None] * frequencies_H
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


class Spread:
    """The biases of routers by layer, and what a forward pass routed: logits, scores, and which experts were chosen."""

    def __init__(self, model: ModelConfig) -> None:
        self.model, self.routed = model, dict[int, tuple[Tensor, Tensor, Tensor]]()
        self.biases = {layer: torch.zeros(model.num_experts).double() for layer in range(model.num_layers)}

    def loss(self, mask_BS: Tensor, rows_at_once: int) -> Tensor:
        """Return the sum over tokens of what is added to their losses, of micro-batches of so many rows."""
        model, total = self.model, torch.zeros((), dtype=torch.float64)
        num_rows = 1 if model.moe_balance == "seq_aux" else rows_at_once
        for logits_BSE, scores_BSE, chosen_BSE in self.routed.values():
            total = total + model.moe_z_loss * (torch.logsumexp(logits_BSE, -1) ** 2 * mask_BS).sum()
            if model.moe_balance not in ("aux", "seq_aux"):
                continue
            shares_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True)
            for first in range(0, len(mask_BS), num_rows):
                rows = slice(first, first + num_rows)
                tokens = chosen_BSE[rows].double().mean((0, 1)) / model.experts_per_token
                product = (tokens * shares_BSE[rows].mean((0, 1))).sum() * model.num_experts
                total = total + model.moe_aux_coeff * product * mask_BS[rows].sum()
        return total

    def end_step(self) -> None:
        """Move the biases of experts toward the mean of tokens."""
        for layer, (_, _, chosen_BSE) in self.routed.items():
            counts = chosen_BSE.double().sum((0, 1))
            if self.model.moe_balance == "bias":
                self.biases[layer] = self.biases[layer] + self.model.moe_bias_rate * torch.sign(counts.mean() - counts)


def _mixture(model: ModelConfig, part: State, x: Tensor, layer: int, spread: Spread) -> Tensor:
    """Return the mixture: every expert sees every token, and counts for those whose best it is among."""
    if "mlp.router.weight" not in part:
        return _feed_forward(model, part, x)
    logits = x @ part["mlp.router.weight"].T
    scores = 1 / (1 + torch.exp(-logits)) if model.router_score == "sigmoid" else torch.softmax(logits, -1)
    compared, chosen = scores + spread.biases[layer], torch.zeros_like(scores, dtype=torch.bool)
    for expert in range(model.num_experts):
        own = compared[..., expert, None]
        before = (compared > own).sum(-1) + (compared == own)[..., :expert].sum(-1)
        chosen[..., expert] = before < model.experts_per_token
    spread.routed[layer] = logits, scores, chosen
    weights = scores * chosen
    if model.router_norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    experts = {name: value for name, value in part.items() if ".experts." in name}
    y = torch.zeros_like(x)
    for expert in range(model.num_experts):
        own_part = {name.replace(".experts", ""): value[expert] for name, value in experts.items()}
        y = y + model.router_scale * weights[..., expert, None] * _feed_forward(model, own_part, x)
    return y + _feed_forward(model, part, x, "mlp.shared") if model.num_shared_experts else y


def _feed_forward(model: ModelConfig, part: State, x: Tensor, name: str = "mlp") -> Tensor:
    up = _linear(part, f"{name}.up", x)
    if model.activation == "swiglu":
        gate = _linear(part, f"{name}.gate", x)
        return _linear(part, f"{name}.down", gate / (1 + torch.exp(-gate)) * up)
    inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    return _linear(part, f"{name}.down", 0.5 * up * (1 + torch.tanh(inner)))
