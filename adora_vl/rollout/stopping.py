"""What ends an answer, for every kind of sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from adora_vl.rollout.rollouts import Rollout


class StopParameters(NamedTuple):
    """What `generation_kwargs` of a config name to end an answer, beside the model's own tokens."""

    strings: tuple[str, ...]
    """`stop`: the strings."""
    token_ids: tuple[int, ...]
    """`stop_token_ids`: the tokens."""

    @classmethod
    def from_config(cls, generation_kwargs: Mapping[str, Any] | None) -> StopParameters:
        """Read the key of a config; it names nothing in a config without it."""
        settings = generation_kwargs or {}
        stop = settings.get("stop") or ()
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(strings=strings, token_ids=tuple(settings.get("stop_token_ids") or ()))

    @property
    def sampling(self) -> dict[str, Any]:
        """vLLM's sampling parameters for them; empty where there are none."""
        parameters: dict[str, Any] = {}
        if self.strings:
            parameters["stop"] = list(self.strings)
        if self.token_ids:
            parameters["stop_token_ids"] = list(self.token_ids)
        return parameters


@dataclass(frozen=True)
class StopCriteria:
    """The tokens and strings that end an answer, for every kind of sampler.

    The tokens are those that end a turn of the model, and `stop_token_ids` of the config; the
    strings are `stop` of the config.
    """

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()  # vLLM's `stop`
    decode: Callable[[Sequence[int]], str] = str  # returns the text of token ids

    @classmethod
    def from_config(
        cls,
        tokens: Iterable[int],
        generation_kwargs: Mapping[str, Any],
        decode: Callable[[Sequence[int]], str],
    ) -> StopCriteria:
        """Return the criteria of a run.

        Args:
            tokens: the ids that end a turn of the model, in any run.
            generation_kwargs: the key of the config, which may name further tokens and strings.
            decode: returns the text of token ids.
        """
        stop = StopParameters.from_config(generation_kwargs)
        return cls(frozenset({*tokens, *stop.token_ids}), stop.strings, decode)

    def has_stopped(self, ids: Sequence[int], text: str | None = None) -> bool:
        """Return whether an answer of these tokens was ended by one of the criteria.

        It was if its last token is one of `tokens`, or completes one of `strings`, or if it is
        empty. It was not if it was cut off at its limit, or because it repeats itself.

        `text`: the decoded tokens; None: they are decoded here.
        """
        if not ids or ids[-1] in self.tokens:
            return True
        if text is None:
            text = self.decode(ids)
        strings_in_text = [string for string in self.strings if string in text]
        if not strings_in_text:
            return False
        text_before_last_token = self.decode(ids[:-1])
        return any(string not in text_before_last_token for string in strings_in_text)

    def rollout_has_stopped(self, rollout: Rollout, last_turn_text: str) -> bool:
        """Return whether the last turn of a rollout was ended by one of the criteria.

        The result is False for a rollout whose tool call got no answer, or that has no room left.
        Its last turn may end with a stop token, but it is not an answer to the problem.
        """
        if rollout.finish_reason.is_unanswered:
            return False
        return self.has_stopped(rollout.last_turn_tokens, last_turn_text)


def cut_behind_stop_string(
    ids: Sequence[int], strings: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Return how many tokens there are up to the one that first completes a string.

    Transformers samples a batch of answers until all have ended, so an answer that has ended has
    further tokens to cut off. For example, the tokens `a`, `</an`, `swer>`, `b` and the string
    `</answer>` give 3. The result is None if no string is complete.

    Args:
        ids: the sampled tokens.
        strings: the strings that end an answer.
        decode: returns the text of token ids.
    """

    def is_complete(length: int) -> bool:
        """Return whether the first tokens have one of the strings."""
        text = decode(ids[:length])
        return any(string in text for string in strings)

    if not is_complete(len(ids)):
        return None
    # If a string is complete, it stays complete with more tokens. So the number is found by halving
    # the range between a length that is incomplete and one that is complete.
    incomplete_length = 0
    complete_length = len(ids)
    while complete_length - incomplete_length > 1:
        middle_length = (incomplete_length + complete_length) // 2
        if is_complete(middle_length):
            complete_length = middle_length
        else:
            incomplete_length = middle_length
    return complete_length
