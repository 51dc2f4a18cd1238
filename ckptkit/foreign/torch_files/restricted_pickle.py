"""Pickled data of other programs, read without running anything of it: what it names is compared with an allow-list.

No module is imported and no class of the data's is made. An object is a Record of its name, the arguments it was made
with and the state it was given; a name alone is a Name. Any other name is an error. It is Python's parser in pure
Python, whose memo is a dict: a number in the data cannot make that large.

A few bytes can describe a nest of any size, as values may be shared. What comes out is bounded: as a tree, in which a
value counts wherever it is used, and in its depth; and it does not hold itself. So whoever walks through it ends.
"""

import io
import pickle
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

from ckptkit.foreign.checks import shown, words_of
from threefold.errors import CheckFailed

MAX_BYTES = 2 << 30
MAX_DEPTH = 100
LEAST_VALUES, VALUES_PER_BYTE = 1 << 20, 16  # how many values there may be, each counted wherever it is used
MAX_KEY, MAX_TUPLES = (1 << 60) - 1, 4096  # of numbers, whose hashes differ then; and how many tuples may be keys
VALUE_BYTES = 64  # a text counts as one more value for so many bytes
HOLDERS, TEXTS = frozenset([list, tuple, set, frozenset]), frozenset([str, bytes])
GETATTR = "builtins.getattr"  # by which some releases of Python 3.11 write a member of an enumeration
BASE: Any = pickle._Unpickler


class Name(str):
    """The name of a class, function or constant, which is nothing but its name."""

    __slots__ = ()


class Record:
    """An object of the data: its class, its arguments and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.state: Any = {}


class _Parser(BASE):  # type: ignore[misc]
    """Takes the data's opcodes one by one; what would import, call or fill anything else than the above is an error."""

    def __init__(
        self, data: bytes, allowed: Collection[str], where: str, external: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._where, self._external = allowed, where, external
        self._num_tuples = 0  # that are keys

    def find_class(self, module: str, name: str) -> Name:
        full = f"{module}.{name}"
        if full not in self._allowed:
            text = f"{self._where} names {shown(full)}, which no such file has; nothing of it was run"
            raise CheckFailed(text, hint="use files of people whom you trust")
        return Name(full)

    def get_extension(self, code: int) -> None:
        raise CheckFailed(f"{self._where} names extension {code}, which no such file has; nothing of it was run")

    def persistent_load(self, pid: Any) -> Any:
        if self._external is None:
            raise pickle.UnpicklingError("an object that is elsewhere")
        return self._external(pid)

    def load_newobj(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(args) is not tuple:
            raise pickle.UnpicklingError("an object of no class")
        self.append(Record(name, args))

    def load_reduce(self) -> None:
        args, name = self.stack.pop(), self.stack[-1]
        if type(name) is not Name or type(args) is not tuple:
            raise pickle.UnpicklingError("a call of what is not a name")
        if name == GETATTR:
            if len(args) != 2 or type(args[0]) is not Name or type(args[1]) is not str:
                raise pickle.UnpicklingError("an attribute of what is not a name")
            name, args = args[0], args[1:]
        is_dict = (name == "collections.OrderedDict" and not args) or name == "collections.defaultdict"
        self.stack[-1] = {} if is_dict else Record(name, args)

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is dict:
            return  # attributes of an ordered dict, such as a module's versions
        if type(made) is not Record:
            raise pickle.UnpicklingError("a state for what is not an object")
        made.state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._fill(self.stack[-1], items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._fill(self.stack[-1], items)

    def load_additems(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(self._hashable(items))

    def load_frozenset(self) -> None:
        self.append(frozenset(self._hashable(self.pop_mark())))

    def _fill(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict:
            raise pickle.UnpicklingError("items for what is not a dict")
        target.update(zip(self._hashable(items[::2]), items[1::2], strict=True))

    def _hashable(self, keys: list[Any]) -> list[Any]:
        """Return what is to be hashed, if that takes no walk through a nest, and few of it have a hash of choice.

        Numbers that differ by a multiple of 2^61 - 1 have one hash, and so have tuples of numbers that are made for it:
        each of n such keys is compared with all others. Hashes of texts cannot be foreseen.
        """
        for key in keys:
            parts = key if type(key) is tuple else (key,)
            if any(type(part) is tuple for part in parts):
                raise pickle.UnpicklingError("a key that is nested")
            if any(type(part) is int and not -MAX_KEY <= part <= MAX_KEY for part in parts):
                raise pickle.UnpicklingError("a key that is a number of more than 60 bits")
            self._num_tuples += type(key) is tuple
        if self._num_tuples > MAX_TUPLES:
            raise pickle.UnpicklingError(f"more than {MAX_TUPLES:,} tuples as keys")
        return keys

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("an opcode that no such file has")

    refused = (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
    dispatch: ClassVar[dict[int, Any]] = {
        **BASE.dispatch, **dict.fromkeys((opcode[0] for opcode in refused), load_refused),
        pickle.NEWOBJ[0]: load_newobj, pickle.REDUCE[0]: load_reduce, pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.DICT[0]: load_dict,
        pickle.ADDITEMS[0]: load_additems, pickle.FROZENSET[0]: load_frozenset,
    }  # fmt: skip


def parsed(data: bytes, allowed: Collection[str], where: str, external: Callable[[Any], Any] | None = None) -> Any:
    """Return what pickled data describes, if it names nothing but `allowed`; CheckFailed names what else, or damage.

    `external` returns what an object becomes that the data refers to and does not hold.
    """
    try:
        value = _Parser(data, allowed, where, external).load()
        _num_values([value], MAX_DEPTH + 1, max(LEAST_VALUES, VALUES_PER_BYTE * len(data)), {})
    except CheckFailed:
        raise
    except Exception as error:  # whatever the data has it do
        text = f"{where} is not a file of pickled data, or is damaged: {words_of(error)}"
        raise CheckFailed(text, hint="use files of people whom you trust, or fetch it again") from None
    return value


def _num_values(parts: Iterable[Any], depth: int, most: int, known: dict[int, int]) -> int:
    """Return how many values there are as a tree: a ValueError for too many, a deep nest, or one that is endless.

    `known` has those of each value that was walked through, by identity, and 0 while it is.
    """
    if depth < 0:
        raise ValueError(f"values nested more than {MAX_DEPTH} deep")
    total = 0
    for part in parts:
        kind = type(part)
        if kind is Record:
            inner: Iterable[Any] = (*part.args, part.state) if part.state else part.args
        elif kind is dict:
            inner = [*part, *part.values()]
        elif kind in HOLDERS:
            inner = part
        else:
            total += 1 + (len(part) // VALUE_BYTES if kind in TEXTS else 0)
            continue
        size = known.get(id(part), -1)
        if size < 0:
            known[id(part)] = 0
            known[id(part)] = size = 1 + _num_values(inner, depth - 1, most, known)
        elif not size:
            raise ValueError("a value that holds itself")
        total += size
        if total > most:
            raise ValueError(f"more than {most:,} values, as some are used again and again")
    return total
