"""Tests that look at a program's system calls."""

import shutil

import pytest

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
