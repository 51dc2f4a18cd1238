"""The texts that a tokenizer is trained on: all of the input, or a sample of it that is the same each time.

A sample is of documents over all inputs: those with the smallest hashes of their places, so many as fit into its bytes.
Of inputs much larger than it some hundred places are read, each some MiB; files that are compressed or of columns can
only be read whole. Memory is the sample's.
"""

import heapq
from collections.abc import Iterator, Sequence

import xxhash

from datakit.text.documents import DocumentReader, DocumentRules
from datakit.text.formats import is_lines
from datakit.text.inputs import FileSlice, InputFile, cut, default_item_bytes

READ_PER_BYTE = 8  # of the input for each byte of the sample
_NUM_PLACES, _MIN_FILES, _MIN_BYTES = 256, 8, 1 << 20


class TrainingTexts:
    """An iterable of texts; it counts the documents that it yields, skips, and yields with lone surrogates replaced.

    `share` is how much of the input was read, for a thread that shows it.
    """

    def __init__(self, files: Sequence[InputFile], rules: DocumentRules, max_bytes: int | None = None) -> None:
        self._files, self._rules, self._max_bytes = files, rules, max_bytes
        self.num_documents = self.num_skipped = self.num_replaced = self.text_bytes = 0
        self.share = 0.0

    def __iter__(self) -> Iterator[str]:
        parts = [(FileSlice(file, 0, file.size_bytes), file.size_bytes) for file in self._files]
        if self._max_bytes is None:
            texts: Iterator[str] = (text for _, text in self._read(parts))
        else:
            texts = iter(sample(self._read(self._places()), self._max_bytes))
        for text in texts:
            self.num_documents += 1
            self.text_bytes += len(text.encode())
            yield text
        self.share = 1.0

    def _places(self) -> list[tuple[FileSlice, int]]:
        """Return the slices that a sample is read from, each with how many bytes of it are read, in order."""
        wanted = READ_PER_BYTE * (self._max_bytes or 0)
        most = max(_MIN_BYTES, wanted // _NUM_PLACES)
        items = cut(self._files, default_item_bytes(self._files), split_txt=self._rules.txt_split == "line")
        slices = [part for item in items for part in item.slices]
        chosen: list[tuple[int, int]] = []
        total = 0
        for number in sorted(range(len(slices)), key=lambda number: _hash(f"slice {number}")):
            size = slices[number].stop - slices[number].start
            if is_lines(slices[number].file.kind) and not slices[number].file.compression:
                size = min(size, most)
            chosen.append((number, size))
            total += size
            if total >= wanted and len(chosen) >= _MIN_FILES:
                break
        return [(slices[number], size) for number, size in sorted(chosen)]

    def _read(self, parts: Sequence[tuple[FileSlice, int]]) -> Iterator[tuple[str, str]]:
        """Yield a name of the place and the text of each document, of each slice up to so many bytes."""
        total, done = max(1, sum(size for _, size in parts)), 0
        for number, (part, size) in enumerate(parts):
            reader, read = DocumentReader(part, self._rules), 0
            for count, document in enumerate(reader):
                yield f"{number} {count}", document.text
                read += document.input_bytes
                self.share = (done + min(read, size)) / total
                if read >= size < part.stop - part.start:
                    break
            done += size
            self.num_skipped += reader.skipped.total()
            self.num_replaced += reader.num_replaced


def sample(texts: Iterator[tuple[str, str]], max_bytes: int) -> list[str]:
    """Return the texts whose names have the smallest hashes, in their order, as many as fit into `max_bytes`.

    A text that is larger by itself is left out; if all are, it is the begin of one.
    """
    heap: list[tuple[int, int, str]] = []  # the largest hash first
    total, largest = 0, ""
    for number, (name, text) in enumerate(texts):
        size = len(text.encode())
        if size > max_bytes:
            largest = largest or text[:max_bytes]
            continue
        heapq.heappush(heap, (-_hash(name), number, text))
        total += size
        while total > max_bytes:
            total -= len(heapq.heappop(heap)[2].encode())
    chosen = [text for _, _, text in sorted(heap, key=lambda entry: entry[1])]
    return chosen or [largest.encode()[:max_bytes].decode(errors="ignore")] * bool(largest)


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())
