"""The page of other programs' names has every entry of the tables, with what it is here."""

from tools.site.foreign_names import FUNCTIONS, foreign_names_page
from tools.site.markdown import code
from trainer.config.foreign import derived
from trainer.config.foreign.table import PROGRAMS, entries


def test_every_name_is_on_the_page() -> None:
    page = foreign_names_page()
    for program in PROGRAMS:
        for entry in entries(program):
            assert code(entry.name).removesuffix("</code>") in page, entry.name
    assert page.count("\n| ") > 800


def test_what_is_worked_out_has_its_words() -> None:
    assert FUNCTIONS.keys() == derived.FUNCTIONS.keys()


def test_a_row_says_what_a_name_is_here() -> None:
    page = foreign_names_page()
    assert f"| {code('--clip-grad X')} | {code('optim.clip')} |" in page
    assert f"| {code('--normalization RMSNorm')} | {code('model.norm = rmsnorm')} |" in page
    assert f"| {code('--fp16-lm-cross-entropy')} | the loss is in fp32 here |" in page
