"""From the keys `adora_reward` and `adora_reward_options` to the reward functions of a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError, nearest
from adora_vl.rewards import judge
from adora_vl.rewards.own import check_columns, file_hash, find_file, is_own, load, own_name, with_options
from adora_vl.rewards.presets import OTHERS, PRESETS, reward_functions
from adora_vl.rewards.safe_call import RewardFailure, is_async, safe_call

_NAMES = (*PRESETS, *OTHERS, judge.NAME)


@dataclass(frozen=True)
class ChosenRewards:
    """The reward functions of a run in the order of `adora_reward`, and the hash of each file that they come from."""

    entries: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    hashes: Mapping[str, str]

    @property
    def own(self) -> list[tuple[str, Callable[..., Any]]]:
        """The entries that name files, with their functions."""
        pairs = zip(self.entries, self.functions, strict=True)
        return [(entry, function) for entry, function in pairs if is_own(entry)]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `UserError` for a function that needs what the data set does not have."""
        for entry, function in self.own:
            check_columns(entry, function, columns)


def choose_rewards(
    entries: Sequence[str],
    options: object = None,
    *,
    rounding: bool = False,
    answer_tags: bool = False,
    folders: Sequence[Path] = (),
    output_dir: Path | None = None,
) -> ChosenRewards:
    """The functions of the entries: presets, `judge`, and `FILE.py:FUNCTION` with the file in one of `folders`.

    `rounding`, `answer_tags`: what the presets accept, see `grade`. `output_dir`: where the judge keeps its answers.

    Raises `UserError` for an entry that does not exist, a name given twice, and options of no entry.
    """
    options_by_entry = _options(options, entries)
    presets = [entry for entry in entries if not is_own(entry) and entry != judge.NAME]
    for entry in presets:
        if entry not in _NAMES and ":" in entry:
            raise UserError(f"adora_reward: {entry!r} is neither a preset nor FILE.py:FUNCTION")
    functions = reward_functions(presets, rounding, answer_tags) if presets or not entries else []
    made: dict[str, Callable[..., Any]] = dict(zip(presets, functions, strict=True))
    if judge.NAME in entries:
        made[judge.NAME] = judge.JudgeReward(options_by_entry.get(judge.NAME, {}), output_dir or Path.cwd())
    hashes, found = {}, []
    for entry in entries:
        if not is_own(entry):
            found.append(made[entry])
            continue
        path = find_file(entry, folders or [Path.cwd()])
        found.append(with_options(entry, load(entry, path), options_by_entry.get(entry, {})))
        hashes[entry.rpartition(":")[0]] = file_hash(path)
    _check_names(entries, [own_name(entry) if is_own(entry) else made[entry].__name__ for entry in entries])
    return ChosenRewards(tuple(entries), tuple(found), hashes)


def try_rewards(chosen: ChosenRewards, rows: Sequence[Mapping[str, Any]], timeout: float | None, state: Any) -> None:
    """Call each own function once, as TRL would, with a short answer to each of these rows, which have a `prompt`, and
    the judge with a question of ours.

    What it says about the answers does not matter. Raises `UserError` for a function that fails or returns nonsense.
    """
    for function in chosen.functions:
        if isinstance(function, judge.JudgeReward):
            function.try_once()
    if not rows:
        return
    columns = {key: [row[key] for row in rows] for key in rows[0] if key not in ("prompt", "completion")}
    words = [rf"The answer is \boxed{{{row.get('answer', '')}}}." for row in rows]
    arguments: dict[str, Any] = {
        "prompts": [row["prompt"] for row in rows],
        "completions": [[{"role": "assistant", "content": text}] for text in words],
        "completion_ids": [[0]] * len(rows),
        **columns,
        "trainer_state": state,
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    for entry, function in chosen.own:
        call_once(entry, function, arguments, timeout)


def call_once(
    entry: str, function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None
) -> list[float | None]:
    """The rewards of one function for these arguments. Raises `UserError` where the function fails."""
    failures: list[RewardFailure] = []
    call = safe_call(function, own_name(entry), timeout, failures)
    found: list[float | None] = asyncio.run(call(**arguments)) if is_async(function) else call(**arguments)
    if failures:
        raise UserError(f"adora_reward: {entry!r}, tried before the run: {failures[0].row}: {failures[0].reason}")
    return found


def _options(options: object, entries: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by entry. A key of the mapping is an entry, or the name of its function."""
    key = "adora_reward_options"
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except ValueError as error:
            raise UserError(f"{key}: {options!r:.80} is not JSON ({error})") from None
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise UserError(f"{key}: {options!r:.80} is not a mapping of rewards to their arguments")
    able = {name: entry for entry in entries if is_own(entry) for name in (entry, own_name(entry))}
    able |= {judge.NAME: judge.NAME} if judge.NAME in entries else {}
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in options.items():
        if name not in able:
            there = f"rewards with options: {', '.join(dict.fromkeys(able.values()))}" if able else "no reward has any"
            raise UserError(f"{key}: {name!r} is no entry of adora_reward ({there}){nearest(str(name), able)}")
        if not isinstance(arguments, Mapping):
            raise UserError(f"{key}: {name}: {arguments!r:.80} is not a mapping, such as {{target: 50}}")
        found[able[name]] = {str(argument): value for argument, value in arguments.items()}
    return found


def _check_names(entries: Sequence[str], names: Sequence[str]) -> None:
    """The log and the record tell rewards apart by the names of their functions."""
    for index, name in enumerate(names):
        if name in names[:index]:
            first = entries[names.index(name)]
            same = "is given twice" if first == entries[index] else f"and {first!r} have the same name {name!r}"
            remedy = "weigh it with reward_weights instead" if first == entries[index] else "rename one of them"
            raise UserError(f"adora_reward: {entries[index]!r} {same}; {remedy}")
