"""Generation: prompts of any lengths are continued together, and their texts come out token by token."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from datakit import Tokenizer
from threefold.errors import UserError
from trainer.job.ranks import Ranks
from trainer.run.continuation import Continuation, Finish, Until
from trainer.run.decoder import Decoder, for_decoding
from trainer.run.environment import ranks_of
from trainer.run.inference import Checkpoint, TrainedModel
from trainer.run.sampling import Sampling, number_of
from trainer.run.tokenizer import prompt_tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """One further token of a sample of a prompt, both by number, and the text that is certain by it.

    The last piece of a sample says why it ends: before what ends it (`stop`, then without a token of its own), after as
    many tokens as were asked for (`length`), or as the model reads no more (`window`).
    """

    prompt: int
    sample: int
    token: int | None
    text: str
    finish: Finish | None


class Generation:
    """A checkpoint and its tokenizer, open for prompts; every rank of a mesh makes the same calls."""

    def __init__(self, checkpoint: Checkpoint, ranks: Ranks, tokenizer: Tokenizer | None = None) -> None:
        """Take a checkpoint, whose model is loaded at its first use; by default with its own tokenizer."""
        config = ranks.on_all(lambda: for_decoding(checkpoint.config))
        self.window = checkpoint.window
        self.tokenizer = tokenizer or ranks.on_all(lambda: prompt_tokenizer(checkpoint))
        self._checkpoint, self._ranks = replace(checkpoint, config=config), ranks

    @cached_property
    def model(self) -> TrainedModel:
        """Return the loaded model."""
        return TrainedModel(self._checkpoint, self._ranks)

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        """Return the tokens of a prompt, without what the tokenizer puts behind a text, or around one that `is_whole`.

        UserError for one without tokens, or with more than the model reads.
        """
        before, after = self.tokenizer.frame()
        ids: list[int] = self.tokenizer.encode_batch([text])[0].tolist()
        tokens = ids[len(before) * is_whole : len(ids) - len(after)]
        if len(tokens) <= len(before) * (not is_whole):
            raise UserError("the prompt holds no token", hint="--prompt 'Once upon a time'")
        if len(tokens) > self.window:
            message = f"the prompt has {len(tokens)} tokens, and the model reads {self.window}: {text[:40]!r} ..."
            longer = f", or --train.seq-length {len(tokens)}, which is longer than what it was trained on"
            has_table = self._checkpoint.config.model.position == "learned"
            raise UserError(message, hint="a shorter one" + ("" if has_table else longer))
        return tokens

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        until: Until,
        sampling: Sampling | None = None,
        *,
        num_samples: int = 1,
        batch_size: int = 16,
    ) -> Iterator[Piece]:
        """Yield what follows prompts of `encode`, token by token; `batch_size` rows are continued at once.

        Samples of a prompt, and equal prompts, differ by the number of the sample.
        """
        sampling = sampling or Sampling()
        rows, draws = list[Continuation](), Counter[int]()
        for prompt, tokens in enumerate(prompts):
            most, key = self.window - len(tokens) + 1, sampling.key(tokens)
            for sample in range(num_samples):
                row = Continuation(self.tokenizer, prompt, sample, tokens, key, draws[key], until, most)
                draws[key] += 1
                rows.append(row)
        for first in range(0, len(rows), batch_size):
            yield from self._batch(rows[first : first + batch_size], sampling)

    def _batch(self, rows: list[Continuation], sampling: Sampling) -> Iterator[Piece]:
        def choose(logits_BV: Tensor) -> Tensor:
            return sampling.choose(logits_BV, [number_of(row.key, row.draw, row.place) for row in rows])

        most = max(min(len(row.prompt_tokens) + row.until.num_tokens - 1, self.window) for row in rows)
        decoder = Decoder(self.model.engine)
        tokens = decoder.begin([row.prompt_tokens for row in rows], choose, most_tokens=most)
        while rows:
            for row, token in zip(rows, tokens, strict=True):
                num_tokens = len(row.tokens)
                text = row.add(token)
                is_added = len(row.tokens) > num_tokens
                yield Piece(row.prompt, row.sample, token if is_added else None, text, row.finish)
            for place in reversed(range(len(rows))):
                if rows[place].finish:
                    decoder.leave(place)
                    rows[place], tokens[place] = rows[-1], tokens[-1]
                    del rows[-1], tokens[-1]
            if rows:
                tokens = decoder.next(tokens, choose)


def generate_text(checkpoint: Checkpoint, prompt: str, *, num_tokens: int, temperature: float) -> str:
    """Return the prompt and what a checkpoint continues it with: `num_tokens` tokens, or up to the model's window.

    A temperature of 0 always takes the likeliest token; else train.seed seeds the sampling.
    """
    if num_tokens < 1 or temperature < 0:
        message = f"num_tokens must be at least 1, got {num_tokens}, and temperature at least 0, got {temperature:g}"
        raise UserError(message)
    with ranks_of(checkpoint.config) as ranks:
        generation = Generation(checkpoint, ranks)
        sampling = Sampling(temperature, seed=checkpoint.config.train.seed)
        pieces = generation.stream([generation.encode(prompt)], Until(num_tokens), sampling)
        return prompt + "".join(piece.text for piece in pieces)
