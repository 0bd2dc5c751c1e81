"""A look at where threads are is safe while they run, and keeps none of their variables."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch.distributed

from torchgspmd.comm import places
from torchgspmd.comm.places import stack_of_main, stacks
from torchgspmd.comm.rank_failure import Status

PACKAGE = Path(places.__file__).parents[1]
DISTRIBUTED = Path(torch.distributed.__file__).parent

# Threads that are not Python's begin and end, as gloo's do that free a tensor. 20 s of it ended a
# process whose stacks faulthandler wrote.
NATIVE_THREADS = """
import ctypes, gc, os, sys, threading, time
from torchgspmd.comm.places import stacks

sys.setswitchinterval(1e-6)
gc.set_threshold(50)
libc, end = ctypes.CDLL(None), time.monotonic() + 4
call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

def begin_and_join():
    threads = (ctypes.c_ulong * 16)()
    while time.monotonic() < end:
        for i in range(16):
            libc.pthread_create(ctypes.byref(threads, 8 * i), None, call, None)
        for thread in threads:
            libc.pthread_join(ctypes.c_ulong(thread), None)

def look():
    while time.monotonic() < end:
        stacks()

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        os.stat("/")  # releases the interpreter's lock

def count(n):
    Cycle()
    yield from count(n - 1) if n else range(3)

for work in (begin_and_join, begin_and_join, look):
    threading.Thread(target=work).start()
while time.monotonic() < end:
    sum(count(5)), time.sleep(0)
assert gc.isenabled()
"""


class Held:
    """A variable of a function that is looked at."""


def looks():
    places.status(Status, "")
    stack_of_main()


def from_another_thread():
    thread = threading.Thread(target=looks)
    thread.start()
    thread.join()


def of_an_error():
    try:
        raise RuntimeError
    except RuntimeError as error:
        places.status_of_error(Status(), "", error)


@pytest.mark.parametrize("look", [looks, from_another_thread, of_an_error])
def test_variables_end_with_their_function(look):
    def function():
        held = Held()
        look()
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert function()() is None
    finally:
        gc.enable()


def test_stacks_of_all_threads():
    ready, done = threading.Event(), threading.Event()

    def größe():
        ready.set()
        done.wait()

    thread = threading.Thread(target=größe)
    thread.start()
    ready.wait()
    try:
        found = stacks()
        own, other = found[threading.get_ident()], found[thread.ident or 0]
    finally:
        done.set()
        thread.join()
    assert (own[0].file, own[0].function) == (__file__, "test_stacks_of_all_threads")
    assert (__file__, "größe") in [(row.file, row.function) for row in other]
    assert own[0].line == test_stacks_of_all_threads.__code__.co_firstlineno + 11


@pytest.mark.skipif(sys.platform != "linux", reason="begins threads by pthread_create")
def test_stacks_while_native_threads_begin():
    subprocess.run([sys.executable, "-c", NATIVE_THREADS], check=True, timeout=120)


def test_each_wait_is_in_a_function_that_there_is() -> None:
    """A frame is found by its file and function, and both may move."""
    for file, function in places._WAITS:
        files = [*PACKAGE.rglob(file), *DISTRIBUTED.glob(file)]
        assert files, file
        assert function is None or any(f"def {function}(" in p.read_text() for p in files), function
