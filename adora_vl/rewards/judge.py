"""The reward `judge`: a language model behind an OpenAI-compatible endpoint scores each answer.

A score is from 0 to 1. A call that fails gives no score: its error is returned in the place of the
score, and the log counts it as `judge/failed`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from adora_vl.rewards.completion import completion_text, response_texts
from adora_vl.rewards.thinking import is_blank, text_after_thinking
from adora_vl.utils.convert import Name
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import ChatClient, Endpoint, EndpointError, Messages, check_url

KEY_VARIABLE = "ADORA_VL_JUDGE_KEY"
DEFAULT_INSTRUCTION = (
    "You are given a problem, its reference answer and a reply to the problem. Say whether the "
    "reply's final answer is the reference answer, whatever its notation: 1 if it is, 0 if it is "
    "not or if there is none."
)
_SCORE_FORMAT = "Put a number from 0 to 1, and nothing else, between <score> and </score>."
_MAX_REPLY_CHARS = 16_000  # of a reply: its end has the answer
_MAX_EXCERPT_CHARS = 80  # of a judge's reply in a message

_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class JudgeOptions:
    """The options of the entry `judge` in `adora_reward`.

    - `base_url`: the address of the endpoint
    - `model`: the name of the model at the endpoint
    - `instruction`: what the judge is asked
    - `cache`: the file in which the scores are kept
    - `budget`: how many calls one process may make; None and -1 set no limit
    - `concurrency`: how many calls are made at a time
    - `timeout`: how many seconds a call may take
    - `attempts`: how often a call is tried
    - `wait`: seconds before the second attempt; they double before each further one
    - `max_tokens`: how long a reply may be
    """

    base_url: Name
    model: Name
    instruction: Annotated[str, Field(pattern=r"\S", description="a text")] = DEFAULT_INSTRUCTION
    cache: Name = "judge_cache.jsonl"
    budget: Annotated[int, Field(ge=0)] | Literal[-1] | None = None
    concurrency: _Count = 16
    timeout: Annotated[float, Field(ge=0.001)] = 60.0
    attempts: _Count = 4
    wait: Annotated[float, Field(ge=0)] = 1.0
    max_tokens: _Count = 512


class JudgeReward:
    """The judge as a reward function with TRL's signature.

    It keeps its scores in a cache, so that a resumed run pays for no answer twice.
    """

    __name__ = "judge_reward"  # as TRL's log has it

    def __init__(self, options: JudgeOptions, folder: Path) -> None:
        """Prepare the calls; none is made.

        `folder`: the folder of the cache, unless its option is an absolute path. Raises `UserError`
        where `base_url` is no address.
        """
        self._endpoint = Endpoint(
            url=check_url("adora_reward.judge.base_url", options.base_url),
            model=options.model,
            key_variable=KEY_VARIABLE,
            timeout_s=options.timeout,
            attempts=options.attempts,
            wait_s=options.wait,
            workers=options.concurrency,
            body={"temperature": 0, "max_tokens": options.max_tokens},
        )
        # The most calls that may be made; None for any number, which the option says as -1.
        self._budget = None if options.budget == -1 else options.budget
        self._cache = folder / Path(options.cache).expanduser()
        self._instruction = options.instruction
        self._client: ChatClient | None = None  # created by the property `client`
        self._has_warned = False

    @property
    def client(self) -> ChatClient:
        """The client, which is created at the first call.

        Its cache lies in the run's folder, which has to be checked first.
        """
        if self._client is None:
            self._client = ChatClient(self._endpoint, cache=self._cache, budget=self._budget)
        return self._client

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        thinking_opened: Sequence[bool] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | EndpointError]:
        """Return one score per completion, or the error of its call.

        The judge reads what stands behind the thinking of each reply. A reply that is nothing but
        thinking scores 0 without a call. `thinking_opened` says whether each prompt ends in
        `<think>`. The columns `problem` and `answer` of the data set are read if they exist.
        Logs the shares `judge/failed` and `judge/cached`.

        Raises `UserError` where the endpoint would answer no later call, as after a refused key.
        """
        problems = columns.get("problem") or [
            completion_text(prompt) for prompt in prompts or [""] * len(completions)
        ]
        references = columns.get("answer") or [None] * len(completions)
        replies = response_texts(completions, thinking_opened)
        questions = []
        cached_count = 0
        for problem, reference, reply in zip(problems, references, replies, strict=True):
            # None for a reply that is nothing but thinking, which `_score` gives 0.
            messages = self._build_messages_or_none(str(problem), reference, reply)
            questions.append(messages)
            if messages is not None and self._cached_score(messages) is not None:
                cached_count += 1
        # All questions are asked at once, in the threads of the client.
        scores = self.client.map_in_threads(self._score, questions)
        # Raises if an error has shown that the endpoint would refuse every later call as well.
        self.client.check_server("adora_reward: judge")
        errors = [score for score in scores if isinstance(score, EndpointError)]
        if errors and not self._has_warned:
            self._has_warned = True  # one warning a run; the log counts the errors
            print(
                f"warning: the judge failed, the first time: {errors[0]}; no score",
                file=sys.stderr,
                flush=True,
            )
        if log_metric and questions:
            log_metric("judge/failed", len(errors) / len(questions))
            log_metric("judge/cached", cached_count / len(questions))
        return scores

    def _build_messages_or_none(self, problem: str, answer: object, reply: str) -> Messages | None:
        """Return the messages about one reply; None for a reply that consists of thinking alone.

        `answer` is the reference answer, or None.
        """
        reply_without_thinking = text_after_thinking(reply)
        if is_blank(reply_without_thinking) and not is_blank(reply):
            return None
        return self.messages(problem, answer, reply_without_thinking)

    def messages(self, problem: str, answer: object, reply: str) -> Messages:
        """Return the chat messages that ask the judge to score one reply.

        `answer` is the reference answer, which is left out if it is None. A long reply is cut at
        its beginning, because its end has the answer.
        """
        reference_block = "" if answer is None else f"<reference>\n{answer}\n</reference>\n"
        reply_end = reply[-_MAX_REPLY_CHARS:]
        question = (
            f"<problem>\n{problem}\n</problem>\n{reference_block}<reply>\n{reply_end}\n</reply>"
        )
        return [
            {"role": "system", "content": f"{self._instruction} {_SCORE_FORMAT}"},
            {"role": "user", "content": question},
        ]

    def try_once(self) -> None:
        """Ask the judge about a right answer and a wrong one before the run.

        Two equal scores give a warning. With a budget of one call only the right answer is sent.
        Raises `UserError` where a call fails, or a reply has no score.
        """
        replies = ["It is 5.", "It is 4."]
        if self._budget is not None:
            replies = replies[: self._budget]
        scores = [self._trial_score(reply) for reply in replies]
        # With a budget of one call there is one score, so that nothing can be compared.
        tells_replies_apart = len(set(scores)) == len(scores)
        if tells_replies_apart:
            return
        print(
            f"warning: adora_reward: judge: the model {self._endpoint.model!r} gives {scores[0]} "
            "for a right and for a wrong answer to 2 + 3; look at its instruction",
            file=sys.stderr,
            flush=True,
        )

    def _trial_score(self, answer: str) -> str:
        """Ask the judge to score an answer to `What is 2 + 3?`, and return the score as text.

        Raises `UserError` where the judge cannot be reached or gives no score.
        """
        judge = f"adora_reward: judge: {self._endpoint.url} with the model {self._endpoint.model!r}"
        try:
            reply = self.client.chat(self.messages("What is 2 + 3?", "5", answer))
        except EndpointError as error:
            remedy = error.remedy(KEY_VARIABLE)
            raise UserError(f"{judge} gave no answer: {error}; {remedy}") from None
        try:
            return parse_score(reply.text)
        except EndpointError as error:
            remedy = "its reply has to end in a score such as <score>0.7</score>"
            if reply.finish_reason == "length":
                max_tokens = self._endpoint.body["max_tokens"]
                remedy = (
                    f"it was cut off at max_tokens, {max_tokens}: raise it for a judge that thinks"
                )
            excerpt = reply.text[:_MAX_EXCERPT_CHARS]
            raise UserError(f"{judge} gave no score: {error}: {excerpt!r}; {remedy}") from None

    def _score(self, messages: Messages | None) -> float | EndpointError:
        """Return the score of one completion, from the cache or a call, or the error of the call.

        `messages` ask the judge. They are None for a completion that is nothing but thinking, whose
        score is 0.
        """
        if messages is None:
            return 0.0
        cached_score = self._cached_score(messages)
        if cached_score is not None:
            return cached_score
        try:
            return float(self.client.ask(messages, parse_score))
        except EndpointError as error:
            return error

    def _cached_score(self, messages: Messages) -> float | None:
        """Return the score in the cache, None if there is none.

        A cached text that is no score counts as none and is requested again, since the file may
        have been edited or be damaged.
        """
        score_text = self.client.cached(messages)
        try:
            return None if score_text is None else _parse_score(score_text)
        except EndpointError:
            return None


def parse_score(text: str) -> str:
    """Return the score in a judge's reply as text, from its last `<score>` tags.

    `<score>0.2</score>, no, <score>0.7</score>` gives `0.7`. Raises `EndpointError` where the reply
    has no score from 0 to 1.
    """
    score_text = text_in_tags(text, "score")
    _parse_score(score_text)  # raises for anything but a score
    return score_text


def text_in_tags(reply: str, tag: str) -> str:
    """Return what a judge put between `<tag>` and `</tag>`, the last time that it opened the tag.

    What the judge thinks before its reply is not read. Raises `EndpointError` where the reply has
    no such tags.
    """
    reply = text_after_thinking(reply)
    if f"<{tag}>" not in reply or f"</{tag}>" not in reply:
        raise EndpointError(f"the reply has no <{tag}>...</{tag}>")
    text_after_tag = reply.rsplit(f"<{tag}>", 1)[1]
    return text_after_tag.split(f"</{tag}>", 1)[0].strip()


def _parse_score(score_text: str) -> float:
    """Return the number that a score says.

    Raises `EndpointError` unless it is a number from 0 to 1.
    """
    try:
        score = float(score_text)
    except ValueError:
        raise EndpointError(f"the score {score_text:.40} is no number") from None
    if not 0 <= score <= 1:
        raise EndpointError(f"the score {score_text:.40} is not from 0 to 1")
    return score
