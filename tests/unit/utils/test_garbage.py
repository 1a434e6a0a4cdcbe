"""Imports of large libraries, during and after which nobody looks for garbage in them."""

import gc
import weakref

import pytest

from adora_vl.utils.launch import without_garbage_collection


@pytest.fixture(autouse=True)
def unfrozen_objects():
    """Let the collector see all objects again after each test."""
    yield
    gc.unfreeze()


class Node:
    """An object that refers to itself, so that only the garbage collector deletes it."""

    def __init__(self) -> None:
        self.itself = self


def test_objects_of_an_import_are_not_searched_for_garbage_any_more():
    gc.unfreeze()
    with without_garbage_collection():
        assert not gc.isenabled()
        imported = Node()
    assert gc.isenabled()
    assert not any(thing is imported for thing in gc.get_objects())


def test_what_was_garbage_before_an_import_is_deleted():
    """A model that a notebook has dropped does not keep its memory for ever."""
    dropped = weakref.ref(Node())
    with without_garbage_collection():
        assert dropped() is None


def test_what_becomes_garbage_after_an_import_is_deleted():
    with without_garbage_collection():
        pass
    dropped = weakref.ref(Node())
    gc.collect()
    assert dropped() is None


def test_a_process_that_had_it_off_keeps_it_off_and_a_failed_import_turns_it_on():
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ImportError), without_garbage_collection():
        raise ImportError
    assert gc.isenabled()
