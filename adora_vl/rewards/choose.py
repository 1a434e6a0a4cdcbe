"""The reward functions of a run: those of this package, and functions of the user's.

A run names them under `adora_reward`. This module resolves the entries, checks the user's functions
against the columns of the data set, tries them once before the run, and says which sums the rewards
can reach.
"""

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adora_vl.rewards.entries import JUDGE, RewardEntry, named_rewards
from adora_vl.rewards.judge import JudgeOptions, JudgeReward
from adora_vl.rewards.knights import (
    COMPLETE_REWARD,
    LOGIC_RL_REWARD_BY_VERDICT,
    NO_ANSWER_REWARD,
    RIGHT_REWARD,
    WRONG_FORM_REWARD,
)
from adora_vl.rewards.other_forms import as_trl_reward_function
from adora_vl.rewards.presets import (
    PRESETS,
    REWARD_FUNCTION_BY_NAME,
    LastBatchGrades,
    NoOptions,
    PresetOptions,
    preset_function,
)
from adora_vl.rewards.safe_call import RewardFailure, is_async, safe_call
from adora_vl.rewards.steps import (
    FIGURE_COLUMN,
    REWARD_RANGE,
    STEPS,
    StepsOptions,
    StepsReward,
    missing_figure_message,
)
from adora_vl.utils.convert import convert, refuse_unknown_options
from adora_vl.utils.errors import UserError, did_you_mean, nearest_choice
from adora_vl.utils.own_files import is_users_file, load_from_file, name_without_file

if TYPE_CHECKING:
    from transformers import TrainerState

# The keyword arguments that every reward function gets beside the columns of the data set.
TRAINER_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "thinking_opened",  # ours, not TRL's: whether each prompt ends in `<think>`
    "trainer_state",
    "log_extra",
    "log_metric",
)
# From this likeness on an option is taken for a misspelt argument: `targat` has 0.83 to `target`,
# and `max_words` has 0.78 to `min_words`.
_MISSPELLING_LIKENESS = 0.82
# The values that each reward can have; for `steps` only the smallest and the largest one. The
# values of a judge and of a user's function are unknown.
_POSSIBLE_VALUES_BY_REWARD: dict[str, tuple[float, ...]] = {
    **PRESETS,
    "knights": (RIGHT_REWARD, COMPLETE_REWARD, NO_ANSWER_REWARD),
    "knights_logic_rl": (WRONG_FORM_REWARD, *LOGIC_RL_REWARD_BY_VERDICT.values()),
    STEPS: REWARD_RANGE,
    "think_format": (0.0, 1.0),
    "think_answer_format": (0.0, 1.0),
}


RewardOptions = PresetOptions | JudgeOptions | StepsOptions | NoOptions
_OPTIONS_CLASS_BY_NAME: Mapping[str, type[RewardOptions]] = {
    **dict.fromkeys(PRESETS, PresetOptions),
    **dict.fromkeys(REWARD_FUNCTION_BY_NAME, NoOptions),
    JUDGE: JudgeOptions,
    STEPS: StepsOptions,
}
REWARD_NAMES = tuple(_OPTIONS_CLASS_BY_NAME)


def bind_options(
    entry: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the function of an entry with its options bound as keyword arguments.

    Args:
        entry: the function's entry in `adora_reward`, for messages.
        function: a reward function of the user's.
        options: the mapping under its name in `adora_reward`; empty returns `function` itself.

    Raises `UserError` for an option that the function does not take or that the trainer passes
    itself, and for a misspelled one that only `**kwargs` would take.
    """
    if not options:
        return function
    key = f"adora_reward.{name_without_file(entry)}"
    for option in options:
        if option in TRAINER_ARGUMENTS:
            raise UserError(f"{key}: {option!r} is given by the trainer; choose another name")
    parameters = _parameters_for_options(function)
    checked_options = list(options)
    if _takes_any_argument(function):
        # `**kwargs` takes an option of any name, so only a probable misspelling is refused.
        checked_options = _probable_misspellings(options, parameters)
    refuse_unknown_options(key, checked_options, [parameter.name for parameter in parameters])
    function_with_options = partial(function, **options)
    # TRL logs the reward under this name, which a partial lacks.
    function_with_options.__name__ = name_without_file(entry)  # type: ignore[attr-defined]
    return function_with_options


def _parameters_for_options(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a reward function that an option may set: all but the trainer's."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        takes_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if takes_name and parameter.name not in TRAINER_ARGUMENTS:
            parameters.append(parameter)
    return parameters


def _probable_misspellings(
    options: Mapping[str, Any], parameters: Sequence[inspect.Parameter]
) -> list[str]:
    """Return the options that look like misspelt parameters, such as `targat` for `target`.

    Only a parameter with a default that no option sets counts, since a parameter without a default
    may be a column of the data.
    """
    unset_names = [
        parameter.name
        for parameter in parameters
        if parameter.default is not parameter.empty and parameter.name not in options
    ]
    return [
        option
        for option in options
        if nearest_choice(option, unset_names, _MISSPELLING_LIKENESS) is not None
    ]


def _takes_any_argument(function: Callable[..., Any]) -> bool:
    """Return whether a function takes arguments of any name, in `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def check_columns(entry: str, function: Callable[..., Any], columns: Collection[str]) -> None:
    """Raise `UserError` where a call with these columns of the data set cannot work.

    The rules in the order of the code:

    - A bound option must not have the name of a column.
    - A required argument must not be positional-only.
    - A required argument must be a column of the data set, or an argument that TRL passes.
    - The function must end with `**kwargs`, which take all other columns.
    """
    # `bind_options` makes a partial of a function with options, whose keywords are the options.
    options = set(function.keywords) if isinstance(function, partial) else set()
    clashes = sorted(options & set(columns))
    if clashes:
        raise UserError(
            f"adora_reward.{name_without_file(entry)}: {clashes[0]!r} is a column of the data; "
            "rename the argument"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin may not say what it takes
        return
    # TRL passes each column to the function, and some arguments of its own. In place of the columns
    # `prompt` and `completion` it passes `prompts` and `completions`.
    available = {*TRAINER_ARGUMENTS, *columns} - {"prompt", "completion"}
    for parameter in signature.parameters.values():
        takes_several = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        is_required = parameter.default is parameter.empty and not takes_several
        if parameter.kind is parameter.POSITIONAL_ONLY and is_required:
            raise UserError(
                f"adora_reward: {entry!r} takes {parameter.name!r} by position; TRL gives it by "
                "name"
            )
        if is_required and parameter.name not in available:
            raise UserError(
                f"adora_reward: {entry!r} needs {parameter.name!r}, which is no column of the "
                f"data set (it has {', '.join(sorted(columns))})"
                f"{did_you_mean(parameter.name, available)}; or give it as an option"
            )
    if not _takes_any_argument(function):
        raise UserError(
            f"adora_reward: {entry!r} must end with **kwargs, which take the columns that it does "
            "not name"
        )


@dataclass(frozen=True)
class RewardSet:
    """The reward functions of a run in the order of `adora_reward`.

    `entries` and `functions` are parallel. `hashes` has, for each file that functions come from, a
    hash of the file and the modules beside it. `from_python` has the entries of functions that were
    passed as Python objects.
    """

    entries: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    hashes: Mapping[str, str]
    from_python: frozenset[str] = frozenset()

    @property
    def user_functions(self) -> list[tuple[str, Callable[..., Any]]]:
        """Entry and function of each function of the user's, from a file or from Python."""
        pairs = zip(self.entries, self.functions, strict=True)
        return [
            (entry, function)
            for entry, function in pairs
            if is_users_file(entry) or entry in self.from_python
        ]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `UserError` for a function that needs what the data set does not have."""
        if STEPS in self.entries and FIGURE_COLUMN not in columns:
            raise UserError(missing_figure_message())
        for entry, function in self.user_functions:
            check_columns(entry, function, columns)


class RequestedReward(NamedTuple):
    """A reward that a run asks for.

    `name` is the name of one of our rewards, or FILE.py:FUNCTION. `options` are the converted
    options of our reward, or a mapping of the keyword arguments for a user's function.
    """

    name: str
    options: RewardOptions | Mapping[str, Any]


def parse_reward_entries(entries: Sequence[RewardEntry]) -> list[RequestedReward]:
    """Return the rewards that the entries of `adora_reward` name, with converted options.

    Raises `UserError` for an unknown name, and for options that the reward does not take.
    """
    requested: list[RequestedReward] = []
    for name, options in named_rewards(entries):
        if is_users_file(name):
            requested.append(RequestedReward(name=name, options=options))
            continue
        if name not in _OPTIONS_CLASS_BY_NAME and ":" in name:
            raise UserError(f"adora_reward: {name!r} is neither a preset nor FILE.py:FUNCTION")
        if name not in _OPTIONS_CLASS_BY_NAME:
            raise UserError(
                f"adora_reward: unknown preset {name!r}, use one of "
                f"{', '.join(REWARD_NAMES)}{did_you_mean(name, REWARD_NAMES)}"
            )
        key = f"adora_reward.{name}"
        # An option without a value, such as `timeout:` in YAML, gets its default.
        set_options = {option: value for option, value in options.items() if value is not None}
        converted_options = convert(key, set_options, _OPTIONS_CLASS_BY_NAME[name])
        requested.append(RequestedReward(name=name, options=converted_options))
    return requested


def accepts_rounding(rewards: Sequence[RequestedReward]) -> bool:
    """Return whether one of the presets accepts the reference answer rounded to a decimal."""
    return any(
        isinstance(reward.options, PresetOptions) and reward.options.rounding for reward in rewards
    )


def choose_rewards(
    entries: Sequence[RewardEntry], *, answer_tags: bool = False, output_dir: Path | None = None
) -> RewardSet:
    """Return the reward functions of the entries: those of this package, and `FILE.py:FUNCTION`.

    Presets share their graders, so that each completion is graded once for all of them. The first
    preset logs the grades.

    Args:
        entries: the value of `adora_reward`.
        answer_tags: what the presets accept as an answer, see `grade`.
        output_dir: the folder of the judge's cache; None is the current folder.

    Raises `UserError` for an entry that does not exist, a name that occurs twice, and options that
    an entry does not take.
    """
    if not entries:
        raise UserError(
            f"adora_reward: [] names no reward, use one or more of {', '.join(REWARD_NAMES)}"
        )
    rewards = parse_reward_entries(entries)
    names = [reward.name for reward in rewards]
    exact_grades = LastBatchGrades(rounding=False, answer_tags=answer_tags)
    rounding_grades = LastBatchGrades(rounding=True, answer_tags=answer_tags)
    # None without a preset; then nothing logs the grades.
    first_preset = next((name for name in names if name in PRESETS), None)
    functions: list[Callable[..., Any]] = []
    function_names: list[str] = []
    hash_by_file: dict[str, str] = {}
    function: Callable[..., Any]
    for name, options in rewards:
        if isinstance(options, Mapping):  # a user's function, whose options are not converted
            user_function = load_from_file("adora_reward", name)
            hash_by_file[user_function.file] = user_function.hash
            function = as_trl_reward_function(
                bind_options(name, user_function.function_or_class, options)
            )
            functions.append(function)
            function_names.append(name_without_file(name))
            continue
        if isinstance(options, PresetOptions):
            grades = rounding_grades if options.rounding else exact_grades
            function = preset_function(name, grades, logs=name == first_preset)
        elif isinstance(options, JudgeOptions):
            function = JudgeReward(options, output_dir or Path.cwd())
        elif isinstance(options, StepsOptions):
            function = StepsReward(
                gate=options.gate, rounding=accepts_rounding(rewards), answer_tags=answer_tags
            )
        else:
            function = REWARD_FUNCTION_BY_NAME[name]
        functions.append(function)
        function_names.append(function.__name__)
    # Two entries with different names may still have functions of the same name: the function of
    # `accuracy` is `accuracy_reward`, and a user may have written another function of that name.
    _refuse_repeated_names(names, function_names)
    return RewardSet(entries=tuple(names), functions=tuple(functions), hashes=hash_by_file)


def reward_function(
    preset: str, rounding: bool = False, answer_tags: bool = False
) -> Callable[..., Any]:
    """Return the reward function of one preset, with TRL's signature; see `choose_rewards`.

    `rounding` and `answer_tags`: what it accepts as an answer, as in `grade`.
    """
    options = {"rounding": True} if rounding else {}
    return choose_rewards([{preset: options}], answer_tags=answer_tags).functions[0]


def try_rewards(
    chosen: RewardSet,
    rows: Sequence[Mapping[str, Any]],
    timeout: float | None,
    state: "TrainerState | None",
    *,
    calls_judge: bool = True,
) -> None:
    """Call each of the user's functions once before the run, as TRL would, to find errors early.

    Each gets a short answer to every row. The rewards are discarded.

    Args:
        chosen: the reward functions of the run.
        rows: a few rows of the data set, each with a `prompt`; without rows only the judge is
            tried.
        timeout: seconds for each call, None for no limit.
        state: what the functions get as `trainer_state`.
        calls_judge: whether the judge is tried too, with a question of ours.

    Raises `UserError` for a function that fails or returns nonsense.
    """
    # The judge is a model behind an endpoint, which may be out of reach.
    for function in chosen.functions:
        if calls_judge and isinstance(function, JudgeReward):
            function.try_once()
    if not rows:
        return
    completions: list[Any] = []
    for row in rows:
        text = rf"The answer is \boxed{{{row.get('answer', '')}}}."
        # TRL gives completions as text where prompts are text, else as messages.
        is_text = isinstance(row["prompt"], str)
        completion = text if is_text else [{"role": "assistant", "content": text}]
        completions.append(completion)
    columns = {}
    for name in rows[0]:
        if name not in ("prompt", "completion"):
            columns[name] = [row[name] for row in rows]
    arguments: dict[str, Any] = {
        **columns,
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": [[0]] * len(rows),
        "thinking_opened": [False] * len(rows),
        "trainer_state": state,
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    for entry, function in chosen.user_functions:
        call_once(entry, function=function, arguments=arguments, timeout=timeout)


def call_once(
    entry: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    timeout: float | None,
    unscored: dict[int, str] | None = None,
) -> list[float | None]:
    """Call one reward function, sync or async, and return its rewards.

    Args:
        entry: the function's entry in `adora_reward`, for messages.
        function: the reward function.
        arguments: the keyword arguments of the call, as TRL would pass them.
        timeout: seconds, None for no limit.
        unscored: filled with the reasons of completions without a score, as in `safe_call`.

    Raises `UserError` if the call fails.
    """
    failures: list[RewardFailure] = []
    call = safe_call(
        function,
        name=name_without_file(entry),
        timeout=timeout,
        failures=failures,
        unscored=unscored,
    )
    returned = call(**arguments)
    rewards: list[float | None] = asyncio.run(returned) if is_async(function) else returned
    # A `UserError` explains the mistake itself. Any other failure is an error in the function, and
    # the message names the row.
    if failures and failures[0].is_users_mistake:
        raise UserError(failures[0].reason)
    if failures:
        raise UserError(
            f"adora_reward: {entry!r}, tried before the run: {failures[0].rows_in_words}: "
            f"{failures[0].reason}"
        )
    return rewards


def _refuse_repeated_names(entries: Sequence[str], names: Sequence[str]) -> None:
    """Raise `UserError` for a name that occurs twice, since log and record tell rewards by it.

    `entries` and `names` are parallel: the entries of `adora_reward`, and the name of each.
    """
    entry_by_name: dict[str, str] = {}
    for entry, name in zip(entries, names, strict=True):
        if name not in entry_by_name:
            entry_by_name[name] = entry
            continue
        first_entry = entry_by_name[name]
        if first_entry == entry:
            raise UserError(
                f"adora_reward: {entry!r} is given twice; weigh it with reward_weights instead"
            )
        raise UserError(
            f"adora_reward: {entry!r} and {first_entry!r} have the same name {name!r}; rename one "
            "of them"
        )


def range_of_weighted_sum(
    entries: Sequence[str], weights: Sequence[float]
) -> tuple[float, float] | None:
    """Return the smallest and the largest weighted sum of the rewards, None if they are unknown.

    Two rewards of 0 or 1 with the weights 1 and -0.5 give (-0.5, 1.0). The sums are unknown if a
    reward with a weight other than 0 has no known values.
    """
    smallest = 0.0
    largest = 0.0
    for entry, weight in zip(entries, weights, strict=True):
        if not weight:
            continue
        rewards = _POSSIBLE_VALUES_BY_REWARD.get(entry)
        if rewards is None:
            return None
        weighted_rewards = [weight * value for value in rewards]
        smallest += min(weighted_rewards)
        largest += max(weighted_rewards)
    return smallest, largest


def check_reward_sums(
    entries: Sequence[str], weights: Sequence[float] | None, correct_above: float
) -> None:
    """Raise `UserError` if the rewards cannot tell a correct rollout from a wrong one.

    They cannot if all weights are 0, or if the threshold `adora_correct_above` is outside of the
    range of their sums, so that every rollout or no rollout would be correct.
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
    sum_range = range_of_weighted_sum(entries, weights)
    if sum_range is None:
        return  # the rewards of a judge or of a user's function are unknown
    lowest, highest = sum_range
    if lowest <= correct_above < highest:
        return
    correct_rollouts = "no rollout" if correct_above >= highest else "every rollout"
    raise UserError(
        f"adora_correct_above: {correct_above:g} makes {correct_rollouts} correct, because the sum of the "
        f"rewards is from {lowest:g} to {highest:g}; set it between the sum of a wrong answer "
        f"and that of a right one, for example to {(lowest + highest) / 2:g}. The log of every "
        "method goes by it, also that of plain GRPO"
    )
