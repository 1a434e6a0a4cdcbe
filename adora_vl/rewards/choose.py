"""The reward functions of a run: presets, the judge, and functions of the user's; and which sums
they can reach.
"""

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from adora_vl.rewards import judge
from adora_vl.rewards.knights import COMPLETE, LOGIC_RL, NOTHING, RIGHT, WRONG_FORM
from adora_vl.rewards.other_forms import in_trl_form
from adora_vl.rewards.presets import OTHERS, PRESETS, reward_functions
from adora_vl.rewards.safe_call import RewardFailure, is_async, safe_call
from adora_vl.utils.errors import UserError, did_you_mean
from adora_vl.utils.own_files import from_file, is_own, own_name

# What TRL gives beside the columns of the data set.
GIVEN = (
    "prompts",
    "completions",
    "completion_ids",
    "thinking_opened",  # ours, not TRL's: whether each prompt ends in `<think>`
    "trainer_state",
    "log_extra",
    "log_metric",
)
# The least and the most that a function gives. What a judge or a function of the user's gives is
# not known.
_RANGES: dict[str, tuple[float, float]] = {
    **{name: (min(values), max(values)) for name, values in PRESETS.items()},
    "knights": (min(RIGHT, COMPLETE, NOTHING), max(RIGHT, COMPLETE, NOTHING)),
    "knights_logic_rl": (min(WRONG_FORM, *LOGIC_RL.values()), max(WRONG_FORM, *LOGIC_RL.values())),
    "think_format": (0.0, 1.0),
    "think_answer_format": (0.0, 1.0),
}


def with_options(
    entry: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function with its options filled in.

    Raises `UserError` for an option that it does not take.
    """
    if not options:
        return function
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = [
        each.name
        for each in parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    for option in options:
        if option in GIVEN:
            raise UserError(
                f"adora_reward.{own_name(entry)}: {option!r} is given by the trainer; choose "
                "another name"
            )
        if option not in named and not takes_any:
            raise UserError(
                f"adora_reward.{own_name(entry)}: no argument "
                f"{option!r}{did_you_mean(option, named)}"
            )
    filled = partial(function, **options)
    filled.__name__ = own_name(entry)  # type: ignore[attr-defined]  # TRL names the reward in the log by it
    return filled


def check_columns(entry: str, function: Callable[..., Any], columns: Collection[str]) -> None:
    """Raise `UserError` where a call with these columns of the data set cannot work."""
    options = set(function.keywords) if isinstance(function, partial) else set()
    taken = sorted(options & set(columns))
    if taken:
        raise UserError(
            f"adora_reward.{own_name(entry)}: {taken[0]!r} is a column of the data; rename the "
            "argument"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin may not say what it takes
        return
    given = {*GIVEN, *columns} - {"prompt", "completion"}
    for parameter in signature.parameters.values():
        takes_several = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        needed = parameter.default is parameter.empty and not takes_several
        if parameter.kind is parameter.POSITIONAL_ONLY and needed:
            raise UserError(
                f"adora_reward: {entry!r} takes {parameter.name!r} by position; TRL gives it by "
                "name"
            )
        if needed and parameter.name not in given:
            raise UserError(
                f"adora_reward: {entry!r} needs {parameter.name!r}, which is no column of the "
                "data set (it has "
                f"{', '.join(sorted(columns))}){did_you_mean(parameter.name, given)}; or give it "
                "as an option"
            )
    if not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        raise UserError(
            f"adora_reward: {entry!r} must end with **kwargs, which take the columns that it does "
            "not name"
        )


NAMES = (*PRESETS, *OTHERS, judge.NAME)


@dataclass(frozen=True)
class ChosenRewards:
    """The reward functions of a run in the order of `adora_reward`, and a hash of each file that
    they come from, with its neighbours. `given`: the entries of functions that Python gave.
    """

    entries: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    hashes: Mapping[str, str]
    given: frozenset[str] = frozenset()

    @property
    def own(self) -> list[tuple[str, Callable[..., Any]]]:
        """The entries of the user's own functions, with them."""
        pairs = zip(self.entries, self.functions, strict=True)
        return [
            (entry, function) for entry, function in pairs if is_own(entry) or entry in self.given
        ]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `UserError` for a function that needs what the data set does not have."""
        for entry, function in self.own:
            check_columns(entry, function, columns)


Entry = str | Mapping[str, Any]  # of `adora_reward`: a name, or {name: options}


def names_of(asked: Sequence[Entry]) -> list[str]:
    return [name for name, _ in _asked(asked)]


def rounds(asked: Sequence[Entry]) -> bool:
    """Whether a preset accepts a rounded decimal."""
    return any(
        options.get("rounding") is True for name, options in _asked(asked) if name in PRESETS
    )


def _asked(asked: Sequence[Entry]) -> list[tuple[str, dict[str, Any]]]:
    """The name and the options of each entry. Raises `UserError`."""
    found = []
    for entry in asked:
        pairs = [(entry, {})] if isinstance(entry, str) else [*entry.items()]
        for name, options in pairs:
            if not isinstance(options or {}, Mapping):
                raise UserError(
                    f"adora_reward.{own_name(name)}: {options!r:.80} is no mapping, such as "
                    "{target: 50}"
                )
            found.append(
                (str(name), {str(option): value for option, value in (options or {}).items()})
            )
    return found


def choose_rewards(
    asked: Sequence[Entry], *, answer_tags: bool = False, output_dir: Path | None = None
) -> ChosenRewards:
    """The functions of the entries: presets, `judge`, and `FILE.py:FUNCTION`.

    `answer_tags`: as in `grade`. `output_dir`: where the judge keeps its answers. Raises
    `UserError` for an entry that does not exist, a name given twice, and options that an entry does
    not take.
    """
    pairs = _asked(asked)
    entries = [name for name, _ in pairs]
    presets = {name: options for name, options in pairs if not is_own(name) and name != judge.NAME}
    for name, options in presets.items():
        if name not in NAMES and ":" in name:
            raise UserError(f"adora_reward: {name!r} is neither a preset nor FILE.py:FUNCTION")
        known = ["rounding"] if name in PRESETS else []
        for option, value in options.items():
            if option not in known:
                raise UserError(
                    f"adora_reward.{name}: unknown option {option!r}, it has "
                    f"{', '.join(known) or 'none'}"
                )
            if not isinstance(value, bool):
                raise UserError(f"adora_reward.{name}.{option}: {value!r:.60} is not true or false")
    _check_names(entries, [own_name(name) if is_own(name) else name for name in entries])
    rounded = [name for name, options in presets.items() if options.get("rounding")]
    functions = reward_functions([*presets], rounded, answer_tags) if presets or not entries else []
    made: dict[str, Callable[..., Any]] = dict(zip(presets, functions, strict=True))
    hashes = {}
    found = []
    for name, options in pairs:
        if name == judge.NAME:
            made[name] = judge.JudgeReward(options, output_dir or Path.cwd())
        if not is_own(name):
            found.append(made[name])
            continue
        own = from_file("adora_reward", name)
        hashes[own.file] = own.hash
        found.append(in_trl_form(with_options(name, own.value, options)))
    _check_names(
        entries, [own_name(name) if is_own(name) else made[name].__name__ for name in entries]
    )
    return ChosenRewards(tuple(entries), tuple(found), hashes)


def try_rewards(
    chosen: ChosenRewards,
    rows: Sequence[Mapping[str, Any]],
    timeout: float | None,
    state: Any,
    *,
    asks: bool = True,
) -> None:
    """Call each of the user's functions once before the run, as TRL would, with a short answer to
    each of `rows`, and the judge with a question of ours if `asks`. Raises `UserError` for a
    function that fails or returns nonsense.
    """
    for function in chosen.functions:
        if asks and isinstance(function, judge.JudgeReward):
            function.try_once()
    if not rows:
        return
    columns = {
        key: [row[key] for row in rows] for key in rows[0] if key not in ("prompt", "completion")
    }
    words = [rf"The answer is \boxed{{{row.get('answer', '')}}}." for row in rows]
    arguments: dict[str, Any] = {
        "prompts": [row["prompt"] for row in rows],
        "completions": [
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, words, strict=True)
        ],
        "completion_ids": [[0]] * len(rows),
        "thinking_opened": [False] * len(rows),
        **columns,
        "trainer_state": state,
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    for entry, function in chosen.own:
        call_once(entry, function=function, arguments=arguments, timeout=timeout)


def call_once(
    entry: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    timeout: float | None,
    unscored: dict[int, str] | None = None,
) -> list[float | None]:
    """The rewards of one function for these arguments; `unscored` as in `safe_call`.

    Raises `UserError` if it fails.
    """
    failures: list[RewardFailure] = []
    call = safe_call(
        function, name=own_name(entry), timeout=timeout, failures=failures, unscored=unscored
    )
    found: list[float | None] = (
        asyncio.run(call(**arguments)) if is_async(function) else call(**arguments)
    )
    if failures and failures[0].mistake:
        raise UserError(failures[0].reason)
    if failures:
        raise UserError(
            f"adora_reward: {entry!r}, tried before the run: {failures[0].row}: "
            f"{failures[0].reason}"
        )
    return found


def _check_names(entries: Sequence[str], names: Sequence[str]) -> None:
    """Raise `UserError` for a name given twice: the log and the record tell rewards apart by it."""
    for index, name in enumerate(names):
        if name in names[:index]:
            first = entries[names.index(name)]
            same = (
                "is given twice"
                if first == entries[index]
                else f"and {first!r} have the same name {name!r}"
            )
            remedy = (
                "weigh it with reward_weights instead"
                if first == entries[index]
                else "rename one of them"
            )
            raise UserError(f"adora_reward: {entries[index]!r} {same}; {remedy}")


def reachable(entries: Sequence[str], weights: Sequence[float]) -> tuple[float, float] | None:
    """The least and the largest weighted sum of the functions of `adora_reward`; None where that is
    not known.
    """
    counted = [
        (_RANGES.get(entry), weight)
        for entry, weight in zip(entries, weights, strict=True)
        if weight
    ]
    known = [sorted(weight * value for value in ends) for ends, weight in counted if ends]
    return (
        (sum(low for low, _ in known), sum(high for _, high in known))
        if len(known) == len(counted)
        else None
    )


def check_sums(
    entries: Sequence[str], weights: Sequence[float] | None, correct_above: float
) -> None:
    """Raise `UserError` where every rollout would have the same reward, or none could be correct,
    or wrong.
    """
    weights = [1.0] * len(entries) if weights is None else weights
    if len(weights) != len(entries):
        raise UserError(
            f"reward_weights: {weights} has {len(weights)} values for adora_reward: {list(entries)}"
        )
    if not any(weights):
        raise UserError(
            f"reward_weights: {weights} makes every reward 0; give a weight other than 0 to one "
            "of them"
        )
    sums = reachable(entries, weights)
    if sums is None or sums[0] <= correct_above < sums[1]:
        return
    which = "no rollout" if correct_above >= sums[1] else "every rollout"
    raise UserError(
        f"adora_correct_above: {correct_above:g} makes {which} correct, because the sum of the "
        f"rewards is from {sums[0]:g} to {sums[1]:g}; set it between the sum of a wrong answer "
        f"and that of a right one, for example to {sum(sums) / 2:g}. The log of every method goes "
        "by it, also that of plain GRPO"
    )
