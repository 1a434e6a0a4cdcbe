"""Mistakes in keys and values, said before TRL and Transformers are imported, which takes some ten seconds.

`keys.json` says what each key takes. `setup/write_key_table.py` writes it from the dataclasses. It is trusted only
where the installed versions are those that it was made with. TRL's parser reads again what passes here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from importlib.metadata import version
from operator import or_
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from adora_vl.config.given import check_keys, command_line_values, config_file, read_config
from adora_vl.config.values import convert

TABLE = Path(__file__).parent / "keys.json"
_KINDS: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict, "list": list}
_LIBRARIES = ("trl", "transformers")


def first_look(arguments: Sequence[str]) -> None:
    """Raises the `UserError` that `parse` would raise for a key or a value, where that can be known already. A command
    that asks for help gets it, whatever else is in it.
    """
    if any(word in ("-h", "--help") for word in arguments):
        return
    table = json.loads(TABLE.read_bytes())
    if table["versions"] != _versions():
        return
    known: dict[str, dict[str, Any]] = table["keys"]
    file = config_file(arguments)
    values = read_config(file, known) if file else {}
    line = command_line_values(arguments, known)
    check_keys((key for key in line if key != "config"), "command line", known)
    left = {key: value for key, value in values.items() if key not in line}
    for key, value in {**left, **_alone(line, known)}.items():
        if key in known and known[key]["kinds"]:
            convert(key, value, _hint(known[key]["kinds"]), known[key]["names"])


def key_table() -> dict[str, Any]:
    """What `keys.json` should hold for the installed versions: of every key its kinds (none: anything), its names, and
    whether several words may follow it.
    """
    from adora_vl.config.command_line import DATACLASSES, takes_several
    from adora_vl.config.values import declared

    keys = {key: facts for dataclass in DATACLASSES for key, facts in declared(dataclass).items()}
    several = takes_several()
    entries = {key: {**_entry(key, *facts), "several": key in several} for key, facts in keys.items()}
    return {"versions": _versions(), "keys": dict(sorted(entries.items()))}


def _versions() -> dict[str, str]:
    return {library: version(library) for library in _LIBRARIES}


def _alone(line: dict[str, list[str]], known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The values of the command line. Left to the parser: a key without a word, and several words for a key that takes
    one.
    """
    values: dict[str, Any] = {}
    for key, words in line.items():
        if words and key in known and known[key]["several"]:
            values[key] = words
        elif len(words) == 1:
            values[key] = words[0]
    return values


def _hint(kinds: Sequence[str]) -> Any:
    """The annotation that `convert` takes, such as `int | None`."""
    return reduce(or_, (None if kind == "null" else _KINDS[kind] for kind in kinds))


def _entry(key: str, hint: Any, choices: Any) -> dict[str, Any]:
    from adora_vl.config.names import names_of

    names = list(names_of(key, hint, choices))
    found = {get_origin(each) or each for each in (hint, *get_args(hint))}
    kinds = [name for name, kind in _KINDS.items() if kind in found] or (["str"] if names else [])
    if Literal in found and not names:
        kinds = []
    return {"kinds": [*kinds, "null"] if kinds and NoneType in found else kinds, "names": names}
