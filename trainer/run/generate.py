"""Generation in its simple form: one process, one prompt, the whole window computed again for each token."""

from collections.abc import Callable

import torch

from datakit import Tokenizer, open_tokenizer
from threefold.errors import UserError
from trainer.job.ranks import Ranks
from trainer.run.inference import Checkpoint, TrainedModel


def generate_text(checkpoint: Checkpoint, prompt: str, *, num_tokens: int, temperature: float) -> str:
    """Return the prompt and what a checkpoint continues it with, `num_tokens` tokens more.

    A temperature of 0 always takes the likeliest token; else train.seed seeds the sampling.
    """
    if num_tokens < 1 or temperature < 0:
        message = f"--tokens must be at least 1, got {num_tokens}, and --temperature at least 0, got {temperature:g}"
        raise UserError(message, hint="--tokens 64 --temperature 0.8")
    config = checkpoint.config
    tokenizer = fitting_tokenizer(config.data.tokenizer, config.model.vocab_size)
    tokens: list[int] = tokenizer.encode_batch([prompt])[0].tolist()
    if not tokens:
        raise UserError("the prompt holds no token", hint="--prompt 'Once upon a time'")
    with Ranks(config.train.device, timeout_s=config.parallel.timeout_s) as ranks:
        engine = TrainedModel(checkpoint, ranks).engine

        def logits_of(window: list[int]) -> torch.Tensor:
            return engine.logits(torch.tensor([window], device=ranks.device))[0].double().cpu()

        ids = continue_tokens(
            logits_of, tokens, num_tokens, window=checkpoint.window, temperature=temperature, seed=config.train.seed
        )
    return tokenizer.decode(ids)


def fitting_tokenizer(path: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer, refused if it knows tokens that the model does not."""
    if not path:
        raise UserError(
            "no tokenizer to read the prompt with", hint="--data.tokenizer FILE, the one of the run's stores"
        )
    tokenizer = open_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{path} has {tokenizer.vocab_size} tokens, the model {vocab_size}",
            hint="--data.tokenizer FILE, the one of the run's stores",
        )
    return tokenizer


def continue_tokens(
    logits_of: Callable[[list[int]], torch.Tensor],
    tokens: list[int],
    num_tokens: int,
    *,
    window: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Return `tokens` and `num_tokens` more; `logits_of` returns those after at most `window` tokens, [vocabulary]."""
    sampler = torch.Generator().manual_seed(seed)
    ids = list(tokens)
    for _ in range(num_tokens):
        logits = logits_of(ids[-window:])
        if temperature:
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=sampler)
        else:
            chosen = logits.argmax(-1)
        ids.append(int(chosen))
    return ids
