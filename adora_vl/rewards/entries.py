"""The entries of `adora_reward`: their names and options, and how they compare between runs.

An entry is a name, or a mapping of names to their options.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from adora_vl.utils.convert import options_to_dict
from adora_vl.utils.own_files import name_without_file

RewardEntry = str | Mapping[str, Any]
JUDGE = "judge"
# Other names of rewards that a config may have, with the name that manifest, log and record have.
_CANONICAL_NAME_BY_OTHER_NAME = {"adora": "boxed_accuracy"}
# The options of a judge that say how it is reached, on which no score depends.
_CONNECTION_OPTIONS = ("base_url", "concurrency")


class NamedReward(NamedTuple):
    """A reward that an entry names.

    `name`: the reward's canonical name, or FILE.py:FUNCTION. `options`: as the user wrote them.
    """

    name: str
    options: Mapping[str, Any]


def canonical_reward_name(name: str) -> str:
    """Return the canonical name of a reward: `boxed_accuracy` for its other name `adora`."""
    return _CANONICAL_NAME_BY_OTHER_NAME.get(name, name)


def named_rewards(entries: Sequence[RewardEntry]) -> list[NamedReward]:
    """Return the rewards that the entries of `adora_reward` name, in their order.

    Raises `UserError` for options that are no mapping.
    """
    rewards: list[NamedReward] = []
    for entry in entries:
        options_by_name = {entry: None} if isinstance(entry, str) else entry
        for name, options in options_by_name.items():
            key = f"adora_reward.{name_without_file(name)}"
            rewards.append(
                NamedReward(name=canonical_reward_name(name), options=options_to_dict(key, options))
            )
    return rewards


def with_canonical_names(entries: Sequence[RewardEntry]) -> list[str | dict[str, Any]]:
    """Return entries of `adora_reward` with the canonical names of their rewards."""
    canonical_entries: list[str | dict[str, Any]] = []
    for entry in entries:
        if isinstance(entry, Mapping):
            canonical_entries.append({canonical_reward_name(name): entry[name] for name in entry})
        else:
            canonical_entries.append(canonical_reward_name(entry))
    return canonical_entries


def normalize_reward_entries(entries: Sequence[RewardEntry]) -> list[RewardEntry]:
    """Return entries of `adora_reward` in a form that is equal for equal runs.

    Rewards have their canonical names. A judge lacks the options that say where it is: the same
    model on another port or node is the same judge, so a run may go on with it.
    """
    comparable: list[RewardEntry] = []
    for entry in with_canonical_names(entries):
        if isinstance(entry, Mapping) and isinstance(entry.get(JUDGE), Mapping):
            options = {
                name: value
                for name, value in entry[JUDGE].items()
                if name not in _CONNECTION_OPTIONS
            }
            comparable.append({**entry, JUDGE: options})
        else:
            comparable.append(entry)
    return comparable
