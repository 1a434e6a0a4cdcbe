"""A config of another trainer on its way to one of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from adora_vl.migrate.source import SourceConfig
from adora_vl.utils.cli import yaml_line
from adora_vl.utils.convert import convert
from adora_vl.utils.errors import UserError

# The other trainer's key and its default there, by our key: `{"epsilon": ("clip_ratio_low", 0.2)}`.
# A name in capitals is none of our keys: its value only enters a computation, as
# `PROMPTS_PER_GENERATION` does that of `steps_per_generation`.
KeyMap = Mapping[str, tuple[str, Any]]
# What it means that a key of the other trainer has no counterpart here, by a part of the key's
# name. The first part that is in the name counts.
_MEANING_BY_NAME_PART = {
    "fsdp": "how the model is divided is in configs/accelerate: zero3.yaml, zero3_offload.yaml",
    "offload": "configs/accelerate/zero3_offload.yaml keeps the optimizer in the host's memory",
    "deepspeed": "how the model is divided is in configs/accelerate: zero2.yaml, zero3.yaml",
    ".ref.": "the reference model is divided as the policy is",
    "val_": "evaluations are greedy: adora_eval",
    "critic": "no critic: GRPO has none",
    "ray": "no Ray: `accelerate launch` starts the processes",
    "padding": "always so in this project",
    "resume": "a checkpoint of another trainer cannot be continued",
    "load_checkpoint": "a checkpoint of another trainer cannot be continued",
}
# `${a.b}` of OmegaConf, and what a shell would fill in; a `$` that ends a regular expression is
# none.
_COMPUTED_VALUE_PATTERN = re.compile(r"\$[A-Za-z_{(0-9]|`")
_LONGEST_VALUE = 60  # characters of a value that is quoted


@dataclass(frozen=True)
class LaunchPlan:
    """How the other trainer starts its processes."""

    processes: int = 1
    """The number of processes, on all machines together."""
    accelerate_config: str = ""
    """The name of the file in `configs/accelerate` that shards the model as the other trainer does,
    such as `zero3`."""

    @property
    def options(self) -> list[str]:
        """The options of `adora_vl.train --dry-run` for this launch; none for a single process."""
        if self.processes == 1:
            return []
        options = ["--processes", str(self.processes)]
        if self.accelerate_config:
            file = f"configs/accelerate/{self.accelerate_config}.yaml"
            options = ["--accelerate-config", file, *options]
        return options


class ConvertedValue(NamedTuple):
    """The value of one of our keys, and where it came from."""

    value: Any
    source: str
    """The other trainer's keys and a note, for a comment beside the value; it may be empty."""


@dataclass
class Migration:
    """A config of another trainer, and what it has become so far as a config of this package.

    A converter reads the other trainer's values by `get`, sets our keys by `set_key`, and says by
    `add_remark` what a person has to look at.
    """

    source: SourceConfig
    """What was read of the other trainer: its values by its names, its launch line and so on."""
    keys: dict[str, ConvertedValue] = field(default_factory=dict)
    """The values of our keys, as far as they are converted."""
    unmatched: dict[str, str] = field(default_factory=dict)
    """For each name of the other trainer that has no counterpart here, what that means."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The other trainer's defaults of names without a counterpart."""
    key_map: KeyMap = field(default_factory=dict)
    """The other trainer's names by our keys, for the converters that EasyR1 and verl share."""
    read_names: set[str] = field(default_factory=set)
    """The names of the other trainer that a converter has read."""
    remarks: list[str] = field(default_factory=list)
    """What a person has to look at, each a line."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The other trainer's values by its names."""
        return self.source.values

    def get(self, name: str, default: object = None) -> Any:
        """Return the value that the other trainer's config has under a name, or the default.

        The name counts as read, so that it is not listed as one without a counterpart.

        Args:
            name: the other trainer's name, dotted where its keys are in groups.
            default: the other trainer's default, which is returned where the config lacks the name.
                It is also returned where a shell or OmegaConf would compute the value, as in
                `${a.b}`, and a remark then asks for the value. If the default is a number, a text
                such as `1e-6` is read as a number.

        Raises:
            UserError: a number is needed, and the value is none.
        """
        self.read_names.add(name)
        value = self.values.get(name)
        if isinstance(value, str) and _COMPUTED_VALUE_PATTERN.search(value):
            self.add_remark(f"{name}: {value} is computed; write the value itself")
            value = None
        if value is None:
            return default
        if isinstance(default, int | float) and not isinstance(value, int | float):
            try:
                # YAML reads 1e-6 as a text.
                number = float(value)
            except (ValueError, TypeError):
                raise UserError(f"CONFIG: {name}: {value!r:.60} is not a number") from None
            return int(number) if number.is_integer() else number
        return value

    def ignore(self, name: str) -> None:
        """Count a name as read: nothing is lost without it, so it is not listed as unmatched."""
        self.read_names.add(name)

    def mapped_name(self, key: str) -> str:
        """Return the other trainer's name that `key_map` has under a key."""
        name, _ = self.key_map[key]
        return name

    def get_mapped(self, key: str) -> Any:
        """Return the other trainer's value, or its default, of the name that `key_map` has."""
        return self.get(*self.key_map[key])

    def get_count(self, name: str, default: int) -> int:
        """Return the value of a name as `get` does, where it has to be a whole number from 1 on.

        Raises:
            UserError: the value is below 1, or no whole number.
        """
        count: int = convert(
            f"CONFIG: {name}", self.get(name, default), Annotated[int, Field(ge=1)]
        )
        return count

    def set_key(self, key: str, value: object, *names: str, note: str = "") -> None:
        """Set one of our keys, and remember where its value came from, for a comment in the YAML.

        `set_key("beta", 0.04, "kl_coef", note="theirs")` writes the line `beta: 0.04  # kl_coef
        (default); theirs` if the other trainer's config has no `kl_coef`.

        Args:
            key: our key.
            value: its value.
            names: the other trainer's names that the value comes from. A name that its config does
                not have is marked as a default.
            note: what to say after the names, in the comment after the value.
        """
        sources = [name if name in self.values else f"{name} (default)" for name in names]
        source_text = ", ".join(sources)
        comments = [text for text in (source_text, note) if text]
        self.keys[key] = ConvertedValue(value, source="; ".join(comments))

    def copy_key(self, key: str, name: str, default: object = None) -> None:
        """Set one of our keys to the value of one of the other trainer's names, unless it is None.

        `default`: the other trainer's default of that name; None leaves the key out where the
        config does not set the name.
        """
        value = self.get(name, default)
        if value is not None:
            self.set_key(key, value, name)

    def add_remark(self, text: str) -> None:
        """Add a line to what a person has to look at, once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def resolve_path(self, name: object) -> str:
        """Return the path of a file or folder that a config names; the name itself if none exists.

        Scripts name files from the top of their repository, so the folders above the script are
        looked through too.
        """
        path = self.source.find_path(str(name))
        return str(path or name)

    def list_unmatched(self) -> None:
        """Add every value that no converter has read to `unmatched`, with what that means."""
        unread_names = self.values.keys() - self.read_names - self.unmatched.keys()
        for name in unread_names:
            meanings = [text for part, text in _MEANING_BY_NAME_PART.items() if part in name]
            meaning = meanings[0] if meanings else "no counterpart"
            value = yaml_line(self.values[name])
            self.unmatched[name] = f"{value:.{_LONGEST_VALUE}}: {meaning}"

    def is_default(self, name: str) -> bool:
        """Return whether the other trainer's config could as well leave out a name.

        That is so if the name's value is empty, or is the other trainer's default.
        """
        value = self.values.get(name)
        if value is None or value in ("", [], {}):
            return True
        return name in self.defaults and self.defaults[name] == value

    def set_method(self) -> None:
        """Set the method to plain GRPO, which the other trainer has; our default is ADORA."""
        self.set_key("adora_method", "grpo", note="theirs; adora for ADORA")


def split_at_sign(names: list[str], sign: str) -> tuple[list[str], list[str]]:
    """Divide names such as `geometry3k@train` at a sign, such as `@`.

    For example, `geometry3k@train` and `mine` give ["geometry3k", "mine"] and ["train"].

    Returns:
        for each name the part before the sign, and then the different parts after the sign.
    """
    names_before: list[str] = []
    parts_after: list[str] = []
    for name in names:
        name_before, matched_sign, part_after = name.partition(sign)
        names_before.append(name_before)
        if matched_sign and part_after not in parts_after:
            parts_after.append(part_after)
    return names_before, parts_after


def to_words(value: object) -> list[str]:
    """Return the items of a list as texts, or the words of a text: `a b` gives ["a", "b"]."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return str(value).split()


def path_exists(path: Path) -> bool:
    """Return whether there is a file or folder; a text that is no path counts as none."""
    try:
        return path.exists()
    except OSError:  # longer than a file name may be, as the words of a command can be
        return False
