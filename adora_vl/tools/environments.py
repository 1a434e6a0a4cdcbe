"""Environments in TRL's form: an object for each rollout of a generation, whose public methods that
rollout may call.

Stock TRL resets each rollout's by itself, and takes whatever `reset` then says. Ours resets those
of one problem with the same random numbers, and refuses what differs: the rollouts of a group are
compared, so they begin alike.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adora_vl.data.prompts import CONTROL_TOKENS, control_token_in
from adora_vl.rewards.safe_call import own_copy
from adora_vl.rollout.rollouts import RolloutGroup
from adora_vl.tools.calls import clean, limited
from adora_vl.types import Row
from adora_vl.utils.errors import UserError, in_one_line
from adora_vl.utils.own_files import from_file, function_name, source_hash

KEY = "environment_factory"
_OWN = ("reset", "get_reward")  # methods that no model is told of


@dataclass
class Environments:
    """Those of a run on one rank. As in TRL an instance is made once and reset often."""

    factory: Callable[[], Any]
    name: str
    hashes: Mapping[str, str]  # of its file, as `ChosenTools.hashes`
    seconds: float  # that making or resetting one may take
    made: list[Any] = field(default_factory=list)
    taken: int = 0  # of them by the present generation
    control_tokens: Sequence[str] = CONTROL_TOKENS  # of the model, which `reset` may not say

    def __post_init__(self) -> None:
        """Raises `UserError` for what is none."""
        first = self._free(f"{KEY}: {self.name}")
        # as TRL names its reward
        self.taken = 0
        self.name = type(first).__name__
        members = dict(inspect.getmembers(type(first), inspect.isfunction))
        public = [name for name in members if name not in _OWN and not name.startswith("_")]
        self.tools: dict[str, Callable[..., Any]] = {name: getattr(first, name) for name in public}
        self.grades = "get_reward" in members
        later = next(
            (name for name in _OWN if inspect.iscoroutinefunction(members.get(name))), None
        )
        if "reset" not in members:
            raise UserError(
                f"{KEY}: {self.name} has no method reset(self, **row), which begins a rollout"
            )
        if not self.tools:
            raise UserError(f"{KEY}: {self.name} has no public method that a model could call")
        if later:
            raise UserError(f"{KEY}: {self.name}.{later} is async; write a plain method")

    def reward(self) -> Callable[..., list[float | None]]:
        """TRL's reward function of environments that grade by themselves, under the name of their
        class.
        """

        def get_reward(environments: Sequence[Any], **_: Any) -> list[float | None]:
            return [one.get_reward() for one in environments]

        get_reward.__name__ = self.name
        return get_reward

    def entered(
        self, groups: Sequence[RolloutGroup], run_seed: int, *, anew: bool
    ) -> list[RolloutGroup]:
        """The groups in environments, with what `reset` said.

        `anew`: those of before are free. Raises `UserError`.
        """
        self.taken = 0 if anew else self.taken
        return [self._entered(group, run_seed) for group in groups]

    def _entered(self, group: RolloutGroup, run_seed: int) -> RolloutGroup:
        problem = group.problem
        where = f"row {group.row.get('id', problem.number)}"
        seed = f"{run_seed}/{problem.where}/{problem.place}"
        inside = [
            replace(rollout, environment=self._free(f"{KEY}: {where}"))
            for rollout in group.rollouts
        ]
        said = [
            self._reset(rollout.environment, row=group.row, where=f"{KEY}: {where}", seed=seed)
            for rollout in inside
        ]
        other = next((text for text in said if text != said[0]), said[0])
        if other != said[0]:
            raise UserError(
                f"{KEY}: {where}: reset says {said[0]!r:.60} to one rollout of a problem and "
                f"{other!r:.60} to another; let it say what the row alone decides"
            )
        return replace(group, row=_told(group.row, said[0]), rollouts=tuple(inside))

    def _free(self, where: str) -> Any:
        """An instance that no rollout of this generation has."""
        if self.taken == len(self.made):
            new = self._run(self.factory, f"{where}: it cannot be made", KEY)
            known = any(new is one for one in self.made)
            if known:
                raise UserError(
                    f"{where}: {self.name} is one object for two rollouts; give what makes one at "
                    "each call"
                )
            self.made.append(new)
        self.taken += 1
        return self.made[self.taken - 1]

    def _reset(self, environment: Any, row: Row, where: str, seed: str) -> str:
        said = self._run(lambda: environment.reset(**own_copy(dict(row))), f"{where}: reset", seed)
        if said is not None and not isinstance(said, str):
            raise UserError(
                f"{where}: reset returned a {type(said).__name__}; return a text or None"
            )
        text = clean(said or "")
        token = control_token_in(text, self.control_tokens)
        if token is not None:
            raise UserError(
                f"{where}: reset says {token}, which is a token of the model's own; leave it out "
                "of the text"
            )
        return text

    def _run(self, do: Callable[[], Any], what: str, seed: str) -> Any:
        try:
            with limited(f"environment {self.name}", self.seconds, seed):
                return do()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise UserError(f"{what}: {in_one_line(error)}") from None


def environments_of(asked: Any, seconds: float) -> Environments | None:
    """Of the key, `FILE.py:CLASS`, or of what Python gave; None without any. Raises `UserError`."""
    if asked is None:
        return None
    if isinstance(asked, str):
        own = from_file(KEY, asked, "class", callable)
        return Environments(
            factory=own.value,
            name=function_name(own.value),
            hashes={own.file: own.hash},
            seconds=seconds,
        )
    if isinstance(asked, Mapping):
        raise UserError(f"{KEY}: several environments are not supported; give one class")
    if not callable(asked):
        raise UserError(f"{KEY}: {asked!r:.80} is no class")
    name = function_name(asked)
    return Environments(
        factory=asked, name=name, hashes={name: source_hash(asked)}, seconds=seconds
    )


def _told(row: Row, text: str) -> Row:
    """The row with the text at the end of its prompt's last message."""
    if not text:
        return row
    *before, last = row["prompt"]
    said: Any = last["content"]
    if isinstance(said, str):
        said += text
    else:
        said = [*said, {**dict.fromkeys(said[0] if said else ()), "type": "text", "text": text}]
    return Row(**{**row, "prompt": [*before, {**last, "content": said}]})
