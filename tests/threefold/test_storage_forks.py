"""A fork of a process that uses a storage: another client, or one error; the parent's requests go on."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
from threefold.errors import StorageError
from threefold.storage import open_storage

url = sys.argv[1]

def forked(name, work):
    child = os.fork()
    if child == 0:
        try:
            print(name, work(), flush=True)
        except StorageError as error:
            print(name, type(error).__name__, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)

forked("imported", lambda: open_storage(url).info("missing"))
storage = open_storage(url)
forked("opened", lambda: storage.info("missing"))
storage.write("key", b"1")
forked("inherited", lambda: storage.read("key"))
forked("new", lambda: open_storage(url).read("key"))
forked("exclusive", lambda: storage.write("other", b"2", if_absent=True))
forked("grandchild", lambda: forked("of", lambda: storage.read("key")))
forked("delete", lambda: storage.delete(["key"]))
storage.write("key", b"3")
print("parent", storage.read("key"), sorted(storage.list_keys()))
"""
REFUSED = (
    "StorageError cannot reach {url}: this process was forked from one that had used an object store, whose client "
    "does not survive a fork\n"
    'hint: DataLoader(..., multiprocessing_context="forkserver"), or multiprocessing.set_start_method("forkserver")'
)


def printed(url: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, url], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_fork_of_a_process_that_made_requests_of_an_object_store_is_refused(s3_url: str) -> None:
    what, hint = REFUSED.format(url=s3_url).split("\n")
    refused = {name: [f"{name} {what}", hint] for name in ("inherited", "new", "exclusive", "of", "delete")}
    assert printed(s3_url) == [
        "imported None",
        "opened None",
        *refused["inherited"],
        *refused["new"],
        *refused["exclusive"],
        *refused["of"],
        "grandchild None",
        *refused["delete"],
        "parent b'3' ['key']",
    ]


@pytest.mark.ci
@pytest.mark.slow  # s3fs takes seconds
def test_a_fork_opens_what_is_behind_fsspec_again(s3_url: str) -> None:
    assert printed(s3_url.replace("s3://", "s3a://")) == [
        "imported None",
        "opened None",
        "inherited b'1'",
        "new b'1'",
        "exclusive None",
        "of b'1'",
        "grandchild None",
        "delete None",
        "parent b'3' ['key', 'other']",
    ]
