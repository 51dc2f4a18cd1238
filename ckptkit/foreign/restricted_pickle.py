"""Pickled data of other programs, read without running anything of it: what it names is compared with an allow-list.

No module is imported and no class of the data's is made. An object is a Record of its name, the arguments it was made
with and the state it was given; a name alone is a Name. Any other name is an error. It is Python's parser in pure
Python, whose memo is a dict: a number in the data cannot make that large.
"""

import io
import pickle
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from threefold.errors import CheckFailed

MAX_BYTES = 2 << 30
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

    def find_class(self, module: str, name: str) -> Name:
        full = f"{module}.{name}"
        if full not in self._allowed:
            text = f"{self._where} names {full!r}, which no such file has; nothing of it was run"
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
        is_dict = (name == "collections.OrderedDict" and not args) or name == "collections.defaultdict"
        self.stack[-1] = {} if is_dict else Record(name, args)

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is dict:
            return  # attributes of an ordered dict, such as a module's versions
        if type(made) is not Record:
            raise pickle.UnpicklingError("a state for what is not an object")
        made.state = state

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("an opcode that no such file has")

    refused = (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
    dispatch: ClassVar[dict[int, Any]] = {
        **BASE.dispatch, **dict.fromkeys((opcode[0] for opcode in refused), load_refused),
        pickle.NEWOBJ[0]: load_newobj, pickle.REDUCE[0]: load_reduce, pickle.BUILD[0]: load_build,
    }  # fmt: skip


def parsed(data: bytes, allowed: Collection[str], where: str, external: Callable[[Any], Any] | None = None) -> Any:
    """Return what pickled data describes, if it names nothing but `allowed`; CheckFailed names what else, or damage.

    `external` returns what an object becomes that the data refers to and does not hold.
    """
    try:
        return _Parser(data, allowed, where, external).load()
    except CheckFailed:
        raise
    except Exception as error:  # whatever the data has it do
        found = "it ends too early" if isinstance(error, EOFError) else repr(error)
        raise CheckFailed(f"{where} is not a file of pickled data, or is damaged: {found}") from None
