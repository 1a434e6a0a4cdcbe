"""Reads a value out of nested lists and objects by a path such as `messages.0.content`."""

from collections.abc import Mapping

from adora_vl.utils.cli import read_json

NO_VALUE = object()  # in place of None, which may be the value


def value_at_path(value: object, path: str) -> object:
    """Return what stands in a nested value at a path; `NO_VALUE` where the path leads to nothing.

    For example, `messages.0.content` leads to `Find x.` in {"messages": [{"content": "Find x."}]}:
    a name in the path may be the index of a list. A key may have dots itself, and a list or an
    object may also be a text of JSON.
    """
    if not path:
        return value
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = read_json(value)
        except (ValueError, RecursionError):
            return NO_VALUE
    if isinstance(value, Mapping) and path in value:
        return value[path]
    name, _, rest_of_path = path.partition(".")
    is_number = name.removeprefix("-").isdecimal()
    if isinstance(value, list) and is_number and -len(value) <= int(name) < len(value):
        return value_at_path(value[int(name)], rest_of_path)
    if isinstance(value, Mapping) and name in value:
        return value_at_path(value[name], rest_of_path)
    return NO_VALUE
