"""A look at where threads are leaves no circle of references, which would keep their variables."""

import gc
import threading
import weakref

import pytest

from torchgspmd.comm import places
from torchgspmd.comm.places import stack_of_main, stacks
from torchgspmd.comm.rank_failure import Status


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
