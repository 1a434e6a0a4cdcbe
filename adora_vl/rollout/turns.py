"""Several turns of a rollout: the policy samples, tools answer its calls, and it continues.

The tokens of earlier turns stay as they were sampled, and the tokens of a tool's answer are put
behind them, once. Nothing is decoded and encoded again, since one of sixteen completions would come
back as other tokens. This file knows neither tools nor trainer.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from PIL import Image

from adora_vl.data.prompts import control_tokens, tool_response
from adora_vl.data.shared_images import as_kept_image
from adora_vl.rollout.rollouts import (
    Call,
    FinishReason,
    Picture,
    Rollout,
    SamplingRequest,
    SamplingResult,
    Segment,
)
from adora_vl.rollout.stopping import StopCriteria

CALL = "<tool_call>"  # begins a call in the policy's words
MIN_TOKENS_LEFT = 16  # tokens of the completion that a tool's answer has to leave to the policy

Key = TypeVar("Key", bound=Hashable)


class TurnPlayer(Protocol[Key]):
    """Samples and answers the turns of rollouts, which have keys of any kind."""

    def sample(self, rollouts: Mapping[Key, Rollout]) -> dict[Key, Rollout]:
        """Return the rollouts with one more turn of the policy, from one call of the engine.

        All ranks call it equally often, also with no rollouts.
        """

    def answer(self, key: Key, rollout: Rollout) -> Rollout:
        """Return a rollout whose turn has ended with the answer to its calls, or as it is."""

    def has_room(self, key: Key, rollout: Rollout) -> bool:
        """Return whether a rollout may sample more tokens."""

    def any_rank_continues(self, continues: bool) -> bool:
        """Return whether any rank wants another turn. Collective.

        `continues`: whether this rank does.
        """


def run_turns(rollouts: Mapping[Key, Rollout], player: TurnPlayer[Key]) -> dict[Key, Rollout]:
    """Continue rollouts in lockstep, turn by turn, until tools answer none of them.

    All rollouts sample a turn, then those that got an answer sample the next one. Returns the
    continued rollouts by their keys.
    """
    continued = dict[Key, Rollout]()
    running = dict(rollouts)
    while True:
        for key, rollout in player.sample(running).items():
            continued[key] = rollout
            if rollout.finish_reason is FinishReason.STOP:
                continued[key] = player.answer(key, rollout)
        running = {
            key: continued[key]
            for key in running
            if not continued[key].has_ended and player.has_room(key, continued[key])
        }
        if not player.any_rank_continues(bool(running)):
            return continued


def append_result(
    rollout: Rollout,
    request: SamplingRequest,
    result: SamplingResult,
    *,
    step: int,
    max_turn: int | None,
    stop: StopCriteria | None,
    compared: bool = True,
) -> Rollout:
    """Return the rollout with one segment more, and with the reason why it ended, if it did.

    Args:
        rollout: that the request continued.
        request: of this turn.
        result: the tokens that were sampled for it.
        step: optimizer steps that the weights had made.
        max_turn: tokens of a turn; None for any number.
        stop: says whether a turn ended by itself, since servers do not say why they stopped; None
            for a sampler that says it.
        compared: whether the engine saw the trainer's images; else its log-probabilities do not
            belong to the trainer's prompt, and are left out.
    """
    assert request.max_length is not None
    logps = tuple(result.logps) if compared else (None,) * len(result.tokens)
    segment = Segment(tokens=tuple(result.tokens), logps=logps, step=step)
    with_segment = replace(rollout, segments=(*rollout.segments, segment), compared=compared)
    finish_reason = result.finish_reason
    if finish_reason is FinishReason.RUNNING:
        is_at_limit = len(result.tokens) >= (request.max_tokens or request.max_length)
        finish_reason = FinishReason.LENGTH if is_at_limit else FinishReason.STOP
        # The last token that fits may also be the one that ends the turn.
        if is_at_limit and stop is not None and stop.ends(with_segment.last_turn_tokens):
            finish_reason = FinishReason.STOP
    if finish_reason is FinishReason.LENGTH:
        is_full = len(with_segment.tokens) >= request.max_length
        is_turn_full = max_turn is not None and len(with_segment.last_turn_tokens) >= max_turn
        if not is_full and not is_turn_full:
            # Only the budget of this generation is used up.
            return with_segment
    return replace(with_segment, finish_reason=finish_reason)


@dataclass(frozen=True)
class ToolAnswer:
    """The answer of tools to the calls of a turn, in order."""

    parts: Sequence[str | Image.Image]  # of the user's turn
    calls: Sequence[Call]  # that have no segment yet


class Tools(Protocol):
    """The tools of a run (`adora_vl.tools`)."""

    def answer(
        self,
        text: str,
        images: Sequence[Image.Image],
        *,
        seed: str,
        last: bool,
        environment: object,
    ) -> ToolAnswer | None:
        """Answer a turn of the policy; None where it called nothing.

        Args:
            text: of the turn.
            images: the problem's, then those that tools have returned.
            seed: names the random numbers.
            last: whether no further calls are left.
            environment: the rollout's own, or None.
        """


@dataclass(frozen=True)
class ToolLoop:
    """Answers the calls of a run's rollouts."""

    tools: Tools
    processor: Any  # or a tokenizer
    template: Mapping[str, Any]  # arguments of its chat template
    tokens_of: Callable[[Image.Image], int]  # number of tokens of an image
    max_answers: int | None  # turns of a rollout that are answered; None: any number
    decode: Callable[[Sequence[int]], str] = field(repr=False)
    # most tokens of a turn of the policy; None: as many as the completion has left
    turn_tokens: int | None = None
    # tokens that the engine has for a prompt with its completion; None: for any
    context_length: int | None = None

    def __call__(
        self,
        rollout: Rollout,
        images: Sequence[Image.Image],
        *,
        prompt_length: int,
        max_length: int,
        step: int,
        seed: str,
    ) -> Rollout:
        """Answer the calls of a rollout whose turn has ended.

        Args:
            rollout: whose last segment is the policy's.
            images: of its problem.
            prompt_length: tokens of its prompt.
            max_length: tokens of the whole completion, with those of tools.
            step: optimizer steps that have been made.
            seed: names the rollout; the random numbers of tools follow from it.

        Returns:
            The rollout as it is where it called nothing; with the answer as a further segment; or
            ended, where no calls or no tokens are left.
        """
        text = self.decode(rollout.last_turn_tokens)
        answered_turns = sum(segment.logps is None for segment in rollout.segments)
        if CALL not in text:
            return rollout
        if self.max_answers is not None and answered_turns >= self.max_answers:
            return replace(rollout, finish_reason=FinishReason.CALLS)
        images_so_far = [*images, *(picture.image for picture in rollout.pictures)]
        answer = self.tools.answer(
            text,
            images_so_far,
            seed=f"{seed}/{answered_turns}",
            last=self.max_answers is not None and answered_turns + 1 >= self.max_answers,
            environment=rollout.environment,
        )
        if answer is None:
            return rollout
        new_images = [
            as_kept_image(part.convert("RGB"))
            for part in answer.parts
            if isinstance(part, Image.Image)
        ]
        image_lengths = [self.tokens_of(image) for image in new_images]
        answer_ids = self._ids(answer.parts, image_lengths, rollout.last_turn_tokens)
        max_tokens = max_length
        if self.context_length is not None:
            max_tokens = min(max_length, self.context_length - prompt_length)
        if max_tokens - len(rollout.tokens) - len(answer_ids) < MIN_TOKENS_LEFT:
            return replace(
                rollout,
                finish_reason=FinishReason.CONTEXT,
                calls=(*rollout.calls, *answer.calls),
            )
        segment_number = len(rollout.segments)
        new_pictures = [
            Picture(digest=image.digest, image=image, span=segment_number) for image in new_images
        ]
        answered_calls = [replace(call, span=segment_number) for call in answer.calls]
        return replace(
            rollout,
            segments=(*rollout.segments, Segment(tokens=tuple(answer_ids), logps=None, step=step)),
            finish_reason=FinishReason.RUNNING,
            pictures=(*rollout.pictures, *new_pictures),
            calls=(*rollout.calls, *answered_calls),
        )

    def _ids(
        self,
        parts: Sequence[str | Image.Image],
        image_lengths: Sequence[int],
        last_turn: Sequence[int],
    ) -> list[int]:
        """Return token ids of the tool reply turn, which follow the policy's turn.

        Args:
            parts: texts and images of the reply.
            image_lengths: tokens of each image.
            last_turn: token ids of the policy's turn. Where it lacks the token that ends a turn, as
                one that was stopped at a string, that token comes first.
        """
        before_reply, image_text, after_reply = self._around
        reply_text = "".join(
            self._harmless(part) if isinstance(part, str) else image_text for part in parts
        )
        tokenizer = self._tokenizer
        image_id = getattr(self.processor, "image_token_id", None)
        read_ids: list[int] = tokenizer(
            f"{before_reply}{reply_text}{after_reply}", add_special_tokens=False
        )["input_ids"]
        if last_turn and last_turn[-1] == read_ids[0]:
            read_ids = read_ids[1:]
        remaining_image_lengths = iter(image_lengths)
        expanded_ids = list[int]()
        for token in read_ids:
            expanded_ids += [token] * (next(remaining_image_lengths) if token == image_id else 1)
        return expanded_ids

    def count(self, text: str) -> int:
        """Return number of tokens of a text of the policy's."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def around(self) -> int:
        """Tokens that an answer without a word takes, behind a turn that has an end."""
        ids = self._ids(tool_response([""]), [], ())
        return len(ids) - 1  # the first one is the end of the policy's turn

    @property
    def _tokenizer(self) -> Any:
        """The tokenizer of a processor, or the tokenizer itself."""
        return getattr(self.processor, "tokenizer", self.processor)

    @cached_property
    def _around(self) -> tuple[str, str, str]:
        """What the chat template writes around a reply.

        Three texts: between the policy's words and the user's turn, for an image, and behind the
        user's turn. They are read off a conversation with marks in the place of the words.
        """
        has_images = hasattr(self.processor, "tokenizer")
        answer_mark = "Answer 4711."
        begin_mark = "Begin 4712."
        end_mark = "End 4713."

        def content(*parts: str | None) -> Any:
            if not has_images:
                return "".join(part or "" for part in parts)
            return [{"type": "text", "text": part} if part else {"type": "image"} for part in parts]

        messages = [
            {"role": "user", "content": content(begin_mark)},
            {"role": "assistant", "content": content(answer_mark)},
            {"role": "user", "content": content(begin_mark, None, end_mark)},
        ]
        text: str = self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.template
        )
        after_answer = text.rpartition(answer_mark)[2]
        before_reply, _, rest = after_answer.partition(begin_mark)
        image_text, _, after_reply = rest.partition(end_mark)
        return before_reply, image_text, after_reply

    def _harmless(self, text: str) -> str:
        """Return a text in which no control token of the model is left.

        Each of them gets a space behind its first character. The token of an image would have no
        image, and the token of a turn would begin one.
        """
        for mark in self._control_tokens:
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
        return text

    @cached_property
    def _control_tokens(self) -> tuple[str, ...]:
        """The texts of the model's control tokens."""
        return control_tokens(self.processor)
