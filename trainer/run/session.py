"""Session: prompts of a command line, a file or a terminal, and what is printed of their continuations.

One prompt's text comes out as it is made; of several each comes out whole, in the order of the prompts. In a dialogue
lines are read by the first rank alone and handed to the others, who wait no longer than for a line or a word that none
has come.
"""

import json
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from threefold.console import log, report
from threefold.errors import UserError
from trainer.job.ranks import Ranks
from trainer.run.chat import ChatTemplate, Message
from trainer.run.continuation import Until
from trainer.run.generate import Generation, Piece
from trainer.run.sampling import Sampling

WORD_EVERY_S = 5.0  # that no line has come: ranks wait for each other only so long
FORGET, END = "/forget", "/end"


@dataclass(slots=True)
class Answer:
    """One sample of one prompt, whole: what `--json` prints of it."""

    prompt: int
    sample: int
    num_prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: Piece) -> None:
        """Take the next token."""
        self.text += piece.text
        self.tokens += [] if piece.token is None else [piece.token]
        self.finish = piece.finish


@dataclass(frozen=True, slots=True)
class Session:
    """An open checkpoint and how it continues texts, or with a template answers messages; all ranks have one."""

    generation: Generation
    ranks: Ranks
    until: Until
    sampling: Sampling
    template: ChatTemplate | None = None
    system: str = ""
    num_samples: int = 1
    batch_size: int = 16

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt, or of the messages up to the one that is to be answered."""
        if self.template is None:
            assert isinstance(prompt, str), "messages need a template"
            return self.generation.encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return self.generation.encode(self.template.render(messages), is_whole=True)

    def pieces(self, prompts: Sequence[Sequence[int]]) -> Iterator[Piece]:
        """Yield what follows prompts."""
        samples, size = self.num_samples, self.batch_size
        return self.generation.stream(prompts, self.until, self.sampling, num_samples=samples, batch_size=size)

    def answer(self, prompts: Sequence[str | Sequence[Message]], *, as_json: bool) -> None:
        """Print the continuations of prompts, with the prompts unless they are messages."""
        texts = ["" if self.template or not isinstance(prompt, str) else prompt for prompt in prompts]
        encoded = self.ranks.on_all(lambda: [self.encode(prompt) for prompt in prompts])
        answers = {
            (prompt, sample): Answer(prompt, sample, len(tokens))
            for prompt, tokens in enumerate(encoded)
            for sample in range(self.num_samples)
        }
        is_alone, is_speaker = len(answers) == 1 and not as_json, self.ranks.rank == 0
        if is_alone and is_speaker:
            write(texts[0])
        waiting, started = list(answers), time.perf_counter()
        for piece in self.pieces(encoded):
            answers[piece.prompt, piece.sample].add(piece)
            if is_alone and is_speaker:
                write(piece.text)
            while not is_alone and waiting and answers[waiting[0]].finish:
                place = waiting.pop(0)
                if is_speaker and not as_json:
                    write(f"--- prompt {place[0] + 1}" + f", sample {place[1] + 1}" * (self.num_samples > 1) + "\n")
                    write(texts[place[0]] + answers[place].text + "\n")
        if is_alone and is_speaker:
            write("\n")
        if is_speaker and as_json:
            print_answers(list(answers.values()), time.perf_counter() - started)
        self.say_window([answer.finish for answer in answers.values()])

    def say_window(self, finishes: Sequence[str | None]) -> None:
        """Say where the model's window ended texts."""
        num = sum(finish == "window" for finish in finishes)
        if num:
            window, what = (
                self.generation.window,
                "the text" if len(finishes) == 1 else f"{num} of {len(finishes)} texts",
            )
            self.ranks.say(f"{what} ended at the model's window: it reads {window} tokens, the prompt's among them")

    def converse(self) -> None:
        """Answer lines of stdin until it ends; with a template they are one conversation, else each is continued."""
        messages = list[Message]()
        if self.generation.model and sys.stdin.isatty():
            self.ranks.say(f"a line is answered at once; {FORGET} begins a new conversation, {END} or Ctrl-D ends")
        for line in self._lines():
            if line == FORGET:
                messages = []
            elif line.strip():
                asked: list[Message] = [*messages, {"role": "user", "content": line}]
                try:
                    tokens = self.encode(asked if self.template else line)
                except UserError as error:  # the next line may be better; all ranks have the same
                    if self.ranks.rank == 0:
                        report(error)
                    continue
                text = self._spoken(tokens, "" if self.template else line)
                messages = [*asked, {"role": "assistant", "content": text}]

    def _spoken(self, tokens: Sequence[int], before: str) -> str:
        """Print the continuation of a prompt, and return it."""
        answer, is_speaker = Answer(0, 0, len(tokens)), self.ranks.rank == 0
        if is_speaker:
            write(before)
        for piece in self.pieces([tokens]):
            answer.add(piece)
            if is_speaker:
                write(piece.text)
        if is_speaker:
            write("\n")
        self.say_window([answer.finish])
        return answer.text

    def _lines(self) -> Iterator[str]:
        """Yield the first rank's lines on all ranks, up to its end of stdin."""
        lines: queue.Queue[str | None] = queue.Queue()
        if self.ranks.rank == 0:
            threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
        while True:
            line: Any = self.ranks.broadcast(_next_of(lines) if self.ranks.rank == 0 else None)
            if line == [None]:
                return
            if line is not None:
                yield line


def print_answers(answers: Sequence[Answer], seconds: float) -> None:
    """Print answers as one JSON document, with the rate of all their tokens."""
    num_tokens = sum(len(answer.tokens) for answer in answers)
    rate = {"seconds": seconds, "tokens_per_s": num_tokens / seconds}
    print(json.dumps({"answers": [asdict(answer) for answer in answers], **rate}, indent=2, ensure_ascii=False))


def write(text: str) -> None:
    """Print a part of a text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _read_lines(lines: "queue.Queue[str | None]") -> None:
    """Put the lines of stdin into a queue, and behind them None; on a thread of its own, which nobody waits for."""
    try:
        for line in sys.stdin:
            if line.strip() == END:
                break
            lines.put(line.rstrip("\n"))
    except OSError as error:
        log(f"stdin cannot be read ({error}): ranks have no terminal, but `cat | trainer launch ...` has one")
    lines.put(None)


def _next_of(lines: "queue.Queue[str | None]") -> Any:
    """Return the next line, [None] behind the last one, or None if none has come yet."""
    try:
        line = lines.get(timeout=WORD_EVERY_S)
    except queue.Empty:
        return None
    return [None] if line is None else line
