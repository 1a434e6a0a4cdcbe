"""Several turns of a rollout: the policy samples a turn, tools answer its calls, and it goes on.

The tokens of earlier turns stay as they were sampled, and the tokens of a tool's answer are put
behind them, once. No tokens are decoded and encoded again, since one of sixteen completions would
come back as other tokens. This file knows neither tools nor trainer.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

from PIL import Image

from adora_vl.data.prompts import control_tokens, tool_response
from adora_vl.data.shared_images import as_image_with_digest
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

CALL_TAG = "<tool_call>"  # begins a call of a tool in the policy's text
# A tool's answer has to leave at least this many tokens of the completion to the policy.
MIN_TOKENS_LEFT = 16

Key = TypeVar("Key", bound=Hashable)


class TurnSampler(Protocol[Key]):
    """Samples the turns of rollouts, and answers the tool calls in them.

    A turn is what the policy says between two answers of tools. The rollouts have keys of any type.
    """

    def sample(self, rollouts: Mapping[Key, Rollout]) -> dict[Key, Rollout]:
        """Sample one more turn of each rollout in one call of the engine.

        Returns the longer rollouts by the same keys. All ranks call it equally often, also without
        rollouts.
        """

    def answer(self, key: Key, rollout: Rollout) -> Rollout:
        """Answer the tool calls in the last turn of a rollout.

        Returns the rollout with the answer behind that turn, or as it is if nothing was called.
        """

    def can_continue(self, key: Key, rollout: Rollout) -> bool:
        """Return whether a rollout may sample more tokens."""


def run_turns(
    rollouts: Mapping[Key, Rollout],
    turn_sampler: TurnSampler[Key],
    any_rank_continues: Callable[[bool], bool],
) -> dict[Key, Rollout]:
    """Sample rollouts turn by turn, until no turn of any rank is answered by a tool.

    All rollouts sample their first turn together. The rollouts whose turn was answered sample the
    next turn together, and so on. For example, if only b of a, b and c calls a tool, the
    turn_sampler samples a b c, answers b, and samples b. Returns the rollouts by their keys.

    Args:
        rollouts: the rollouts so far, by their keys.
        turn_sampler: samples and answers one turn of each rollout.
        any_rank_continues: returns whether any rank has rollouts that sample another turn. It gets
            whether this rank has, and is collective.
    """
    results = dict[Key, Rollout]()
    running = dict(rollouts)
    while True:
        for key, rollout in turn_sampler.sample(running).items():
            # A turn that ended by itself may call a tool.
            is_turn_complete = rollout.finish_reason is FinishReason.STOP
            results[key] = turn_sampler.answer(key, rollout) if is_turn_complete else rollout
        running = {
            key: results[key]
            for key in running
            if not results[key].has_ended and turn_sampler.can_continue(key, results[key])
        }
        # The next call of the engine is collective, so a rank without rollouts goes on too.
        if not any_rank_continues(bool(running)):
            return results


def append_result(
    rollout: Rollout,
    request: SamplingRequest,
    result: SamplingResult,
    *,
    step: int,
    max_turn_tokens: int | None,
    stop_criteria: StopCriteria | None,
    saw_trainer_images: bool = True,
    context_length: int | None = None,
) -> Rollout:
    """Return a rollout with sampled tokens as a further segment, and with why it has ended, if so.

    For example, a result of the tokens 5 6 that ended by itself gives the rollout with a segment
    5 6 and the finish reason `STOP`. If only the token budget of this generation is used up, the
    rollout stays `RUNNING`, and goes on in the next generation.

    Args:
        rollout: the rollout so far.
        request: the request that continued it.
        result: the tokens that were sampled for the request.
        step: the number of optimizer steps behind the weights that sampled them.
        max_turn_tokens: the largest number of tokens of a turn of the policy; None for any number.
        stop_criteria: say whether the turn ended by itself, for servers, whose results have no
            finish reason; None for a sampler whose results have one.
        saw_trainer_images: whether the engine saw the trainer's images. Otherwise its
            log-probabilities belong to another prompt, and are left out.
        context_length: how many tokens of a prompt with its completion a server takes; None: any
            number, or a sampler whose results have a finish reason.
    """
    assert request.max_length is not None
    logps = tuple(result.logps) if saw_trainer_images else (None,) * len(result.tokens)
    segment = Segment(tokens=tuple(result.tokens), logps=logps, step=step)
    longer_rollout = replace(
        rollout, segments=(*rollout.segments, segment), saw_trainer_images=saw_trainer_images
    )
    turn_tokens = longer_rollout.last_turn_tokens
    finish_reason = result.finish_reason
    # A server does not say why it has stopped: its results arrive as RUNNING.
    if finish_reason is FinishReason.RUNNING:
        has_stopped = stop_criteria is not None and stop_criteria.has_stopped(turn_tokens)
        is_context_full = (
            context_length is not None
            and len(request.prompt_ids) + len(result.tokens) >= context_length
        )
        finish_reason = _finish_reason_of_server(
            has_stopped=has_stopped,
            is_context_full=is_context_full,
            # Without a limit for this request the whole completion may be sampled at once.
            is_at_limit=len(result.tokens) >= (request.max_tokens or request.max_length),
        )
    # LENGTH says that as many tokens were sampled as were requested, which may be fewer than a turn
    # may have. A full context has the reason CONTEXT, which ends the rollout.
    if finish_reason is FinishReason.LENGTH:
        is_completion_full = len(longer_rollout.tokens) >= request.max_length
        is_turn_full = max_turn_tokens is not None and len(turn_tokens) >= max_turn_tokens
        if not is_completion_full and not is_turn_full:
            # Only the token budget of this generation is used up. The next one goes on.
            return longer_rollout
    return replace(longer_rollout, finish_reason=finish_reason)


def _finish_reason_of_server(
    *, has_stopped: bool, is_context_full: bool, is_at_limit: bool
) -> FinishReason:
    """Return why a server has stopped to sample. Servers do not say it, so it follows from limits.

        the stop criteria hold, or no limit is reached    STOP
        else the server's context is full                 CONTEXT
        else as many tokens as were requested             LENGTH

    Args:
        has_stopped: whether the turn ends as the stop criteria say. The last token that fits may
            also be the one that ends the turn.
        is_context_full: whether prompt and completion have as many tokens as the server takes.
        is_at_limit: whether as many tokens were sampled as were asked for.
    """
    if has_stopped or not (is_context_full or is_at_limit):
        return FinishReason.STOP
    return FinishReason.CONTEXT if is_context_full else FinishReason.LENGTH


@dataclass(frozen=True)
class ToolAnswer:
    """The answer of tools to all calls of a turn."""

    parts: Sequence[str | Image.Image]  # the texts and pictures of the user's turn, in order
    calls: Sequence[Call]  # the calls for the record, without the number of their segment


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
        """Answer the calls in a turn of the policy; None where it called nothing.

        Args:
            text: the text of the turn.
            images: the images of the problem, then those that tools have returned.
            seed: a text from which the random numbers of the tools follow.
            last: whether this is the last turn of the rollout that is answered.
            environment: the environment of this rollout, whose methods are tools too; None in a run
                without environments.
        """


class _TemplateTexts(NamedTuple):
    """What the chat template writes around the text of a tool's answer."""

    before_answer: str  # between the policy's text and that of the answer
    image: str  # for an image
    after_answer: str  # between the text of the answer and the policy's next text


@dataclass(frozen=True)
class ToolLoop:
    """Answers the tool calls of a run's rollouts.

    The answer of the tools becomes a further segment of the rollout: its tokens, as the chat
    template writes them between the policy's turn and its next one. A turn is what the policy says
    between two answers.
    """

    tools: Tools
    processor: Any  # or a tokenizer
    chat_template_kwargs: Mapping[str, Any]
    count_image_tokens: Callable[[Image.Image], int]  # returns how many tokens an image becomes
    max_answers: int | None  # how many turns of a rollout are answered; None: any number
    decode: Callable[[Sequence[int]], str] = field(repr=False)
    # the largest number of tokens of a turn of the policy; None: what the completion has left
    max_turn_tokens: int | None = None
    # how many tokens of a prompt with its completion the engine takes; None: any number
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
        """Answer the tool calls in the last turn of a rollout, and return the rollout.

        Args:
            rollout: the rollout, which ends with a turn of the policy.
            images: the images of its problem.
            prompt_length: the number of tokens of its prompt.
            max_length: the largest number of tokens of the completion, with those of tools.
            step: the number of optimizer steps that have been made.
            seed: a text that names the rollout, from which the random numbers of tools follow.

        Returns the rollout as it is, if it called nothing; with the answer as a further segment; or
        ended without it, if no further answer is allowed or fits.
        """
        text = self.decode(rollout.last_turn_tokens)
        if CALL_TAG not in text:
            return rollout
        # A segment that the policy has not sampled is a tool's answer.
        answer_count = sum(not segment.is_sampled for segment in rollout.segments)
        if self.max_answers is not None and answer_count >= self.max_answers:
            return replace(rollout, finish_reason=FinishReason.CALLS)
        answer = self.tools.answer(
            text,
            [*images, *(picture.image for picture in rollout.pictures)],
            seed=f"{seed}/{answer_count}",
            last=self.max_answers is not None and answer_count + 1 >= self.max_answers,
            environment=rollout.environment,
        )
        if answer is None:
            return rollout
        max_tokens = max_length
        if self.context_length is not None:
            max_tokens = min(max_length, self.context_length - prompt_length)
        return self._with_answer(rollout, answer, max_tokens=max_tokens, step=step)

    def _with_answer(
        self, rollout: Rollout, answer: ToolAnswer, *, max_tokens: int, step: int
    ) -> Rollout:
        """Return a rollout with the answer of tools as a further segment.

        If fewer than `MIN_TOKENS_LEFT` of `max_tokens` would remain for the policy, the rollout
        ends without the answer.

        Args:
            rollout: the rollout, which ends with the turn that was answered.
            answer: the answer.
            max_tokens: the largest number of tokens of the completion.
            step: the number of optimizer steps that have been made.
        """
        images = [
            as_image_with_digest(part.convert("RGB"))
            for part in answer.parts
            if isinstance(part, Image.Image)
        ]
        answer_ids = self._answer_ids(
            answer.parts,
            image_lengths=[self.count_image_tokens(image) for image in images],
            last_turn=rollout.last_turn_tokens,
        )
        tokens_left = max_tokens - len(rollout.tokens) - len(answer_ids)
        if tokens_left < MIN_TOKENS_LEFT:
            return replace(
                rollout,
                finish_reason=FinishReason.CONTEXT,
                calls=(*rollout.calls, *answer.calls),
            )
        segment_number = len(rollout.segments)
        pictures = [
            Picture(digest=image.digest, image=image, segment_number=segment_number)
            for image in images
        ]
        calls = [replace(call, segment_number=segment_number) for call in answer.calls]
        return replace(
            rollout,
            # `logps=None` marks the segment as a tool's.
            segments=(*rollout.segments, Segment(tokens=tuple(answer_ids), logps=None, step=step)),
            finish_reason=FinishReason.RUNNING,
            pictures=(*rollout.pictures, *pictures),
            calls=(*rollout.calls, *calls),
        )

    def _answer_ids(
        self,
        parts: Sequence[str | Image.Image],
        *,
        image_lengths: Sequence[int],
        last_turn: Sequence[int],
    ) -> list[int]:
        """Return the token ids of a tool's answer, as they follow the policy's turn.

        Args:
            parts: the texts and images of the answer.
            image_lengths: the number of tokens of each image.
            last_turn: the token ids of the policy's turn. If it was stopped at a string, it lacks
                the token that ends a turn. That token then comes first in the result.
        """
        texts = self._template_texts
        answer_text = "".join(
            self._without_control_tokens(part) if isinstance(part, str) else texts.image
            for part in parts
        )
        ids: list[int] = self._tokenizer(
            f"{texts.before_answer}{answer_text}{texts.after_answer}", add_special_tokens=False
        )["input_ids"]
        # `before_answer` begins with the token that ends the policy's turn.
        if last_turn and last_turn[-1] == ids[0]:
            ids = ids[1:]
        # The text has one image token for each image. It is repeated to the image's length.
        image_token_id = getattr(self.processor, "image_token_id", None)
        remaining_lengths = iter(image_lengths)
        expanded_ids = list[int]()
        for token in ids:
            repetitions = next(remaining_lengths) if token == image_token_id else 1
            expanded_ids += [token] * repetitions
        return expanded_ids

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def empty_answer_length(self) -> int:
        """The number of tokens that a tool's answer without any text has."""
        ids = self._answer_ids(tool_response([""]), image_lengths=[], last_turn=())
        return len(ids) - 1  # the first one ends the policy's turn

    @property
    def _tokenizer(self) -> Any:
        """The tokenizer of a processor, or the tokenizer itself."""
        return getattr(self.processor, "tokenizer", self.processor)

    @cached_property
    def _template_texts(self) -> _TemplateTexts:
        """What the chat template writes around a tool's answer, which is a message of the user.

        To find it, the template is applied to a conversation with marks in place of its texts, and
        the result is split at the marks.
        """
        has_images = hasattr(self.processor, "tokenizer")  # a tokenizer alone reads no images
        policy_mark = "Answer 4711."
        begin_mark = "Begin 4712."
        end_mark = "End 4713."

        def content(*parts: str | None) -> Any:
            """Return the content of a message with these texts; None stands for an image."""
            if not has_images:
                return "".join(part or "" for part in parts)
            return [{"type": "text", "text": part} if part else {"type": "image"} for part in parts]

        messages = [
            {"role": "user", "content": content(begin_mark)},
            {"role": "assistant", "content": content(policy_mark)},
            {"role": "user", "content": content(begin_mark, None, end_mark)},
        ]
        text: str = self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
        )
        # The begin mark is in the first message too, so the text is read from the policy's mark on.
        after_policy = text.rpartition(policy_mark)[2]
        before_answer, _, from_image_on = after_policy.partition(begin_mark)
        image_text, _, after_answer = from_image_on.partition(end_mark)
        return _TemplateTexts(before_answer, image=image_text, after_answer=after_answer)

    def _without_control_tokens(self, text: str) -> str:
        """Return a tool's text in which the tokenizer finds no control token of the model.

        Each of them gets a space behind its first character. An image token would have no image,
        and a token that begins a turn would begin one.
        """
        for token in self._control_tokens:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    @cached_property
    def _control_tokens(self) -> tuple[str, ...]:
        """The texts of the model's control tokens."""
        return control_tokens(self.processor)
