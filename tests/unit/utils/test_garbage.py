"""Imports of large libraries, while and after which nobody looks for garbage in them."""

import gc
import weakref

import pytest

from adora_vl.utils.launch import imports_of_a_command, without_garbage_collection


class Node:
    """An object that refers to itself, so that only the garbage collector deletes it."""

    def __init__(self) -> None:
        self.itself = self


def test_objects_of_a_commands_imports_are_not_searched_for_garbage_any_more():
    with imports_of_a_command():
        assert not gc.isenabled()
        imported = Node()
    assert gc.isenabled()
    assert not any(candidate is imported for candidate in gc.get_objects())


def test_what_was_garbage_before_the_imports_of_a_command_is_deleted():
    dropped = weakref.ref(Node())
    with imports_of_a_command():
        assert dropped() is None


def test_what_becomes_garbage_after_the_imports_of_a_command_is_deleted():
    with imports_of_a_command():
        pass
    dropped = weakref.ref(Node())
    gc.collect()
    assert dropped() is None


def test_a_model_that_a_notebook_drops_after_an_import_is_deleted():
    """Objects that are there when our package is imported are not kept in a user's process."""
    model = Node()
    dropped = weakref.ref(model)
    import adora_vl

    assert adora_vl.AdoraGRPOConfig is not None
    del model
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
