"""What ends an answer, for every kind of sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adora_vl.rollout.rollouts import Rollout


@dataclass(frozen=True)
class StopCriteria:
    """The tokens and strings that end an answer, for every kind of sampler."""

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()  # vLLM's `stop`
    decode: Callable[[Sequence[int]], str] = str  # token ids to the text that has the strings

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
        stop = generation_kwargs.get("stop") or ()
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        further_tokens = generation_kwargs.get("stop_token_ids") or ()
        return cls(frozenset({*tokens, *further_tokens}), strings, decode)

    def has_stopped(self, ids: Sequence[int], text: str | None = None) -> bool:
        """Return whether an answer of these tokens was ended by one of the criteria.

        Its last token then is one of `tokens`, or completes one of `strings`. An empty answer counts
        too. An answer that was cut off at its limit, or because it repeats itself, does not.

        `text`: the decoded tokens; None: they are decoded here.
        """
        if not ids or ids[-1] in self.tokens:
            return True
        if text is None:
            text = self.decode(ids)
        return any(
            string in text and string not in self.decode(ids[:-1]) for string in self.strings
        )

    def rollout_has_stopped(self, rollout: Rollout, last_turn_text: str) -> bool:
        """Return whether the last turn of a rollout was ended by one of the criteria.

        It is False for a rollout whose tool call got no answer, or that has no room left. Its last
        turn may end with such a token, and yet it is not the answer to the problem.
        """
        if rollout.finish_reason.is_unanswered:
            return False
        return self.has_stopped(rollout.last_turn_tokens, last_turn_text)
