"""Members of enumerations in pickled data, which releases of Python write in two ways."""

import pytest

from ckptkit.foreign.torch_files.pickle_writer import Call, Global, pickled
from ckptkit.foreign.torch_files.restricted_pickle import parsed
from threefold.errors import CheckFailed


def test_a_member_of_an_enumeration_is_described_however_python_writes_it() -> None:
    """By its class and value, or by `getattr` of its class and name."""
    allowed, member = ["a.Class", "builtins.getattr"], Call(Global("a", "Class"), ("NAME",))
    by_name = Call(Global("builtins", "getattr"), (Global("a", "Class"), "NAME"))
    for value in (member, by_name):
        found = parsed(pickled(value), allowed, "here")
        assert (found.name, found.args) == ("a.Class", ("NAME",))
    with pytest.raises(CheckFailed, match=r"here names 'builtins\.getattr'"):
        parsed(pickled(by_name), ["a.Class"], "here")
    for args in (("text", "NAME"), (Global("a", "Class"), 1), (Global("a", "Class"),)):
        with pytest.raises(CheckFailed, match="an attribute of what is not a name"):
            parsed(pickled(Call(Global("builtins", "getattr"), args)), allowed, "here")
