"""A config of another trainer on its way to one of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adora_vl.migrate.source import Source
from adora_vl.utils.cli import yaml_line
from adora_vl.utils.errors import UserError

# The other trainer's key and its default, by our key. A name in capitals is none of our keys: its
# value only enters a computation, as `PROMPTS` does that of `steps_per_generation`.
Names = Mapping[str, tuple[str, Any]]
# What it means that a key of theirs has no counterpart, by a part of its name: the first that fits.
_MEANINGS = {
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
# `${a.b}` of OmegaConf, and what a shell would fill in; a `$` that ends a regular expression is none.
_COMPUTED = re.compile(r"\$[A-Za-z_{(0-9]|`")
_LONGEST = 60  # characters of a value that is quoted


@dataclass(frozen=True)
class LaunchPlan:
    """How the other trainer starts its processes.

    `processes`: on all machines together. `accelerate`: the name of the file in
    `configs/accelerate` that divides the model as it does there.
    """

    processes: int = 1
    accelerate: str = ""

    @property
    def options(self) -> list[str]:
        """The options with which a dry run plans for this launch; none for a single process."""
        if self.processes == 1:
            return []
        words = ["--processes", str(self.processes)]
        if self.accelerate:
            words = ["--accelerate-config", f"configs/accelerate/{self.accelerate}.yaml", *words]
        return words


@dataclass
class Migration:
    """A config of another trainer, and the keys of ours that it became so far.

    `source`: what was read. `keys`: by each of our keys its value, and where it came from.
    `unmatched`: by each of its names without a counterpart what that means. `defaults`: names of
    theirs without a counterpart, with their defaults. `used`: the names that were read.
    `remarks`: what a person has to look at, each a line.
    """

    source: Source
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of theirs by their names."""
        return self.source.values

    def get(self, name: str, default: object = None) -> Any:
        """Return the value of one of the other trainer's names, or its default.

        The name counts as read, so that it is not listed as one without a counterpart. A value that
        a shell or OmegaConf would compute is the default too, and a remark asks for the value
        itself. A text where the default is a number is read as one. Raises `UserError` where that
        is impossible.
        """
        self.used.add(name)
        value = self.values.get(name)
        if isinstance(value, str) and _COMPUTED.search(value):
            self.remark(f"{name}: {value} is computed; write the value itself")
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

    def count_of(self, name: str, default: int) -> int:
        """Return the value of a name that counts something.

        Raises `UserError` where it is below 1 or no whole number.
        """
        value = self.get(name, default)
        if value < 1 or value != int(value):
            raise UserError(f"CONFIG: {name}: {value} is not a whole number from 1 on")
        return int(value)

    def put(self, key: str, value: object, *names: str, note: str = "") -> None:
        """Set one of our keys.

        `names`: the names that the value comes from; one that the config does not have is marked
        as a default. `note`: what to say beside them.
        """
        sources = [name if name in self.values else f"{name} (default)" for name in names]
        self.keys[key] = (value, "; ".join(filter(None, (", ".join(sources), note))))

    def copy(self, key: str, name: str, default: object = None) -> None:
        """Set one of our keys to the value of a name of theirs, if that is set or has a default."""
        value = self.get(name, default)
        if value is not None:
            self.put(key, value, name)

    def copy_path(self, key: str, name: str, default: object = None) -> None:
        """Set one of our keys to a value that may name a file of this machine.

        Where the file is found, its path from here is written in place of the name.
        """
        value = self.get(name, default)
        if value is not None:
            self.put(key, self.path_of(value), name)

    def remark(self, text: str) -> None:
        """Add a line to what a person has to look at, once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def path_of(self, name: object) -> str:
        """Return the path of a file or folder that a config names, or the name where none exists.

        Scripts name files from the top of their repository, so its folders are looked through.
        """
        path = self.source.find(str(name))
        return str(name) if path is None else str(path)

    def split_off(self, names: list[str], sign: str) -> tuple[list[str], list[str]]:
        """Split `a@train` at the sign `@`, for all names.

        Returns the parts before the sign, and the different parts behind it, where there is one.
        """
        heads = [name.partition(sign)[0] for name in names]
        tails = [name.partition(sign)[2] for name in names if sign in name]
        distinct_tails = list(dict.fromkeys(tails))
        return heads, distinct_tails

    def list_unmatched(self) -> None:
        """Add every value that nothing has read to `unmatched`, with what that means."""
        unread_names = self.values.keys() - self.used - self.unmatched.keys()
        for name in unread_names:
            meaning = next(
                (text for part, text in _MEANINGS.items() if part in name), "no counterpart"
            )
            value = yaml_line(self.values[name])
            self.unmatched[name] = f"{value:.{_LONGEST}}: {meaning}"

    def is_default(self, name: str) -> bool:
        """Return whether a name of theirs has the value that it has there when it is left out."""
        value = self.values.get(name)
        if value is None or value in ("", [], {}):
            return True
        return name in self.defaults and self.defaults[name] == value

    def set_method(self) -> None:
        """Set the method to theirs, since ours differs by default."""
        self.put("adora_method", "grpo", note="theirs; adora for ADORA")


def words_in(value: object) -> list[str]:
    """Return the items of a list as texts, or the words of a text."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return str(value).split()


def path_exists(path: Path) -> bool:
    """Return whether there is a file or folder; a text that is no path counts as none."""
    try:
        return path.exists()
    except OSError:  # longer than a file name may be, as the words of a command can be
        return False
