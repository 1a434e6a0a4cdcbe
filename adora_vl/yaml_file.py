"""A YAML file of options, read strictly: what the user wrote is what is used, or one line says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from adora_vl.errors import UserError


class _Loader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys without a word. A key that is merged with `<<` may be given again."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f"line {line} gives {key.value!r} a second time")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_mapping(option: str, path: Path) -> dict[str, Any]:
    """The keys and values in a file. Raises `UserError`, which begins with `option`, in one line."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506  # a SafeLoader
    except FileNotFoundError as error:
        raise UserError(f"{option}: no file {str(path)!r}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: {str(path)!r} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"{option}: {str(path)!r} cannot be read ({error.strerror}); name a YAML file") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise UserError(f"{option}: {str(path)!r} is not valid YAML ({' '.join(str(error).split()):.300})") from error
    except RecursionError as error:
        raise UserError(f"{option}: {str(path)!r} is nested too deeply; name a file of `key: value` lines") from error
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise UserError(f"{option}: {str(path)!r}: expected `key: value` lines, found {found}")
    return {str(key): value for key, value in content.items()}
