"""Several turns of a rollout: the policy samples, tools answer its calls, and it goes on.

The tokens of earlier turns stay as they were sampled; those of an answer are put behind them, once.
Nothing is decoded and encoded again: one of sixteen answers would come back as other tokens. This
file knows neither tools nor trainer.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from PIL import Image

from adora_vl.data.images import kept
from adora_vl.data.prompts import control_tokens, tool_response
from adora_vl.rollout.rollouts import (
    Call,
    Picture,
    Rollout,
    SamplingRequest,
    SamplingResult,
    Segment,
)

CALL = "<tool_call>"  # begins a call in the policy's words
LEAST = 16  # tokens that an answer of a tool has to leave

Key = TypeVar("Key", bound=Hashable)


def run_turns(
    rollouts: Mapping[Key, Rollout],
    ask: Callable[[dict[Key, Rollout]], dict[Key, Rollout]],
    answered: Callable[[Key, Rollout], Rollout],
    may_go_on: Callable[[Key, Rollout], bool],
    any_rank: Callable[[bool], bool],
) -> dict[Key, Rollout]:
    """These rollouts after they have gone on, in lockstep: all play a turn, then those that got an
    answer the next.

    `ask`: with what one call of the engine has added. `answered`: one whose turn has ended, with
    the answer to its calls; as it is where it called nothing. `may_go_on`: whether it has tokens
    left. `any_rank`: whether something holds on any rank, since all make the same calls of `ask`,
    also with nothing to ask.
    """
    done = dict[Key, Rollout]()
    going = dict(rollouts)
    while True:
        for key, rollout in ask(going).items():
            done[key] = answered(key, rollout) if rollout.ended == "stop" else rollout
        going = {
            key: done[key] for key in going if not done[key].ended and may_go_on(key, done[key])
        }
        if not any_rank(bool(going)):
            return done


def append_result(
    rollout: Rollout,
    ask: SamplingRequest,
    answer: SamplingResult,
    longest: int,
    turn: int | None,
    ended: Callable[[Sequence[int]], bool] | None,
    step: int = 0,
    compared: bool = True,
) -> Rollout:
    """The rollout with what was sampled for it.

    `longest`: tokens of the whole answer; `turn`: of a turn, None for any number. `ended`: whether
    a turn has an end, as a server does not say why it stopped. `step`: of the weights. `compared`:
    whether the engine saw the trainer's images, else its log-probabilities do not belong to the
    trainer's prompt.
    """
    logps = tuple(answer.logps) if compared else (None,) * len(answer.tokens)
    made = replace(
        rollout,
        spans=(*rollout.spans, Segment(tuple(answer.tokens), logps, step)),
        compared=compared,
    )
    reason = answer.reason
    if not reason:
        full = len(answer.tokens) >= (ask.limit or longest)
        reason = "length" if full and not (ended and ended(made.turn)) else "stop"
    if reason == "length" and len(made.tokens) < longest and not (turn and len(made.turn) >= turn):
        return replace(made, ended="")
    return replace(made, ended=reason)


@dataclass(frozen=True)
class ToolAnswer:
    """What tools say to the calls of a turn, in order."""

    parts: Sequence[str | Image.Image]  # of the user's turn
    calls: Sequence[Call]  # that have no span yet


class Tools(Protocol):
    """Those of a run (`adora_vl.tools`)."""

    def answer(
        self, text: str, images: Sequence[Image.Image], *, seed: str, last: bool, environment: Any
    ) -> ToolAnswer | None:
        """What they say to a turn of the policy, None where it called nothing.

        `images`: the problem's, then those of tools. `seed`: names the random numbers. `last`:
        whether no calls are left. `environment`: the rollout's own.
        """


@dataclass(frozen=True)
class ToolLoop:
    """How calls are answered in a run."""

    tools: Tools
    processor: Any  # or a tokenizer
    template: Mapping[str, Any]  # arguments of its chat template
    tokens_of: Callable[[Image.Image], int]  # of an image
    most: int | None  # turns that are answered; None: any number
    decode: Callable[[Sequence[int]], str] = field(repr=False)
    tokens: int | None = None  # of a turn, at the most; None: as many as the answer has left
    # tokens that the engine has for a prompt with its answer; None: for any
    room: int | None = None

    def __call__(
        self,
        rollout: Rollout,
        images: Sequence[Image.Image],
        *,
        prompt: int,
        longest: int,
        step: int,
        seed: str,
    ) -> Rollout:
        """A rollout whose turn has ended, with the answer to its calls.

        `images`: of its problem. `prompt`: tokens of it. `longest`: of the whole answer, with what
        tools say. `step`: optimizer steps made. `seed`: names its place.
        """
        text = self.decode(rollout.turn)
        number = sum(span.logps is None for span in rollout.spans)
        if CALL not in text:
            return rollout
        if self.most is not None and number >= self.most:
            return replace(rollout, ended="calls")
        seen = [*images, *(picture.image for picture in rollout.pictures)]
        last = self.most is not None and number + 1 >= self.most
        inside = rollout.environment
        told = self.tools.answer(text, seen, seed=f"{seed}/{number}", last=last, environment=inside)
        if told is None:
            return rollout
        shown = [kept(part.convert("RGB")) for part in told.parts if isinstance(part, Image.Image)]
        ids = self._ids(told.parts, [self.tokens_of(image) for image in shown], rollout.turn)
        limit = longest if self.room is None else min(longest, self.room - prompt)
        if limit - len(rollout.tokens) - len(ids) < LEAST:
            return replace(rollout, ended="room", calls=(*rollout.calls, *told.calls))
        place = len(rollout.spans)
        return replace(
            rollout,
            spans=(*rollout.spans, Segment(tuple(ids), None, step)),
            ended="",
            pictures=(*rollout.pictures, *(Picture(image.digest, image, place) for image in shown)),
            calls=(*rollout.calls, *(replace(call, span=place) for call in told.calls)),
        )

    def _ids(
        self, parts: Sequence[str | Image.Image], counts: Sequence[int], turn: Sequence[int]
    ) -> list[int]:
        """Of the user's turn that these parts are, behind the policy's, up to where it goes on."""
        before, image, behind = self._around
        said = "".join(self._harmless(part) if isinstance(part, str) else image for part in parts)
        tokenizer = self._tokenizer
        image_id = getattr(self.processor, "image_token_id", None)
        read: list[int] = tokenizer(f"{before}{said}{behind}", add_special_tokens=False)[
            "input_ids"
        ]
        rest = iter(counts)
        ids = list[int]()
        for token in read[1:] if turn and turn[-1] == read[0] else read:
            ids += [token] * (next(rest) if token == image_id else 1)
        return ids

    def count(self, text: str) -> int:
        """Tokens of a text of the policy's."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def around(self) -> int:
        """Tokens that an answer without a word takes, behind a turn that has an end."""
        ids = self._ids(tool_response([""]), [], ())
        return len(ids) - 1  # the first one is the end of the policy's turn

    @property
    def _tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @cached_property
    def _around(self) -> tuple[str, str, str]:
        """What the template writes between the policy's words and a user's turn, for an image, and
        behind the turn.
        """
        sees = hasattr(self.processor, "tokenizer")
        mark = "Answer 4711."
        asked = "Begin 4712."
        end = "End 4713."

        def content(*parts: str | None) -> Any:
            if not sees:
                return "".join(part or "" for part in parts)
            return [{"type": "text", "text": part} if part else {"type": "image"} for part in parts]

        turns = (
            ("user", content(asked)),
            ("assistant", content(mark)),
            ("user", content(asked, None, end)),
        )
        messages = [{"role": role, "content": said} for role, said in turns]
        text: str = self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.template
        )
        before, _, rest = text.rpartition(mark)[2].partition(asked)
        image, _, behind = rest.partition(end)
        return before, image, behind

    def _harmless(self, text: str) -> str:
        """A text without the model's own tokens: that of an image would have no image, that of a
        turn would begin one.
        """
        for mark in self._control_tokens:
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
        return text

    @cached_property
    def _control_tokens(self) -> tuple[str, ...]:
        return control_tokens(self.processor)
