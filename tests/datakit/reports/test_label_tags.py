"""LabelTags against the tag of the document that each label is found in."""

import numpy as np
import pytest

from datakit import (
    Blend,
    LabelTags,
    MegatronBlend,
    MegatronOrder,
    Packing,
    Recipe,
    TokenStore,
    merge,
    pack,
    preprocess,
    write_store,
)
from datakit.format.tags import Tag
from tests.datakit.conftest import write_jsonl

LENGTH = 16


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str) -> list[TokenStore]:
    """A store of three files, two of them with tags, one without any, and one merged of both."""
    folder = tmp_path_factory.mktemp("tagged")
    for number, name in enumerate(("web", "code", "other")):
        texts = [f"{name} {word} " * (1 + (word + number) % 9) for word in range(40)]
        (folder / "in").mkdir(exist_ok=True)
        write_jsonl(folder / "in" / f"{name}.jsonl", texts)
    tags = tuple(Tag(name, str(folder / "in" / f"{name}.jsonl")) for name in ("code", "web"))
    recipe = Recipe(tokenizer=tokenizer_path, append_eod=True, tags=tags)
    preprocess([folder / "in"], folder / "tagged", recipe)
    tagged = TokenStore.open(folder / "tagged")
    plain = write_store(folder / "plain", [[1] * size for size in (5, 90, 30)], vocab_size=tagged.vocab_size)
    preprocess([folder / "in" / "web.jsonl"], folder / "untagged", Recipe(tokenizer=tokenizer_path))
    merged = merge([folder / "tagged", folder / "untagged"], folder / "merged")
    return [tagged, plain, merged]


def expected_rows(blend: Blend, samples: np.ndarray) -> list[list[str | None]]:
    """The tag of the document that holds each label, token by token; of packed rows without their padding."""
    rows = []
    for source, start in zip(*(column.tolist() for column in blend.addresses(samples))):
        store, row = blend.stores[source], start // LENGTH
        if store.packing == "concat":
            labels = [store.token_at(row, 1 + column, LENGTH) for column in range(LENGTH)]
        else:
            pieces = store.rows.pieces(row, LENGTH)
            labels = [piece.start + at for piece in pieces for at in range(piece.size)]
        rows.append([store.tag(store.document_at(label)) for label in labels])
    return rows


def found_rows(tags: LabelTags, samples: np.ndarray, expected: list[list[str | None]]) -> list[list[str | None]]:
    numbers = tags.of(samples)
    assert numbers.shape == (len(samples), LENGTH)
    return [[tags.names[n] for n in row[: len(other)]] for row, other in zip(numbers.tolist(), expected)]


@pytest.mark.parametrize("kind", ["concat", "packed", "megatron"])
def test_a_label_has_the_tag_of_its_document(stores: list[TokenStore], kind: str) -> None:
    if kind == "megatron":
        blend: Blend = MegatronBlend(stores[:1], seq_length=LENGTH, seed=1, order=MegatronOrder(num_samples=60))
    elif kind == "packed":
        pack(stores[0].path, seq_length=LENGTH, packing="best_fit")
        blend = Blend([(TokenStore.open(stores[0].path, rows=Packing("best_fit", LENGTH)), 1.0)], seq_length=LENGTH)
    else:
        blend = Blend([(store, 1.0) for store in stores], seq_length=LENGTH, seed=3)
    tags, samples = LabelTags(blend), np.array([7, 7, *range(50), 3])
    assert tags
    assert tags.names == ("code", "web", None)
    expected = expected_rows(blend, samples)
    assert {tag for row in expected for tag in row} == {"code", "web", None}
    assert found_rows(tags, samples, expected) == expected


def test_stores_without_tags_have_none(stores: list[TokenStore]) -> None:
    tags = LabelTags(Blend([(stores[1], 1.0)], seq_length=LENGTH))
    assert not tags
    assert tags.of([0, 1]).tolist() == [[0] * LENGTH] * 2
