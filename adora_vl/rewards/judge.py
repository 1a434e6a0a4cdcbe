"""The reward `judge`: a language model behind an OpenAI-compatible endpoint scores each answer.

A score is from 0 to 1. A call that fails gives no score: its error is returned in the place of the
score, and the log counts it as `judge/failed`.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adora_vl.rewards.completion import completion_text, response_texts
from adora_vl.rewards.thinking import final_part, is_blank
from adora_vl.utils.errors import UserError, did_you_mean
from adora_vl.utils.openai_client import ChatClient, Endpoint, EndpointError, Messages, check_url

REWARD_NAME = "judge"
KEY_VARIABLE = "ADORA_VL_JUDGE_KEY"
DEFAULT_INSTRUCTION = (
    "You are given a problem, its reference answer and a reply to the problem. Say whether the "
    "reply's final answer is the reference answer, whatever its notation: 1 if it is, 0 if it is "
    "not or if there is none."
)
_SCORE_FORMAT = "Put a number from 0 to 1, and nothing else, between <score> and </score>."
_MAX_REPLY_CHARS = 16_000  # of a reply: its end has the answer
_MAX_EXCERPT_CHARS = 80  # of a judge's reply in a message
# The options in `adora_reward: [{judge: {...}}]` with type and default. An option whose default is
# None is required.
_TYPE_AND_DEFAULT_BY_OPTION: dict[str, tuple[type, Any]] = {
    "base_url": (str, None),
    "model": (str, None),
    "instruction": (str, DEFAULT_INSTRUCTION),
    "cache": (str, "judge_cache.jsonl"),
    "budget": (int, -1),
    "concurrency": (int, 16),
    "timeout": (float, 60.0),
    "attempts": (int, 4),
    "wait": (float, 1.0),
    "max_tokens": (int, 512),
}
# The options that say how the judge is reached, on which no score depends.
_CONNECTION_OPTIONS = ("base_url", "concurrency")


def without_address(entry: object) -> object:
    """Return an entry of `adora_reward` without the options that say where the judge is.

    The same model on another port or node is the same judge, so a run may go on with it. Any entry
    but that of a judge is returned as it is.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry.get(REWARD_NAME), Mapping):
        return entry
    options = {
        key: value for key, value in entry[REWARD_NAME].items() if key not in _CONNECTION_OPTIONS
    }
    return {**entry, REWARD_NAME: options}


class JudgeReward:
    """The judge as a reward function in TRL's form.

    It keeps its scores in a cache, so that a resumed run pays for no answer twice.
    """

    __name__ = "judge_reward"  # as TRL's log has it

    def __init__(self, options: Mapping[str, Any], folder: Path) -> None:
        """Check the options; no call is made.

        Args:
            options: the options of the entry `judge` in `adora_reward`.
            folder: the folder of the cache, unless its option is an absolute path.

        Raises `UserError` for an option that is missing, unknown or of the wrong kind.
        """
        settings = _read_options(options)
        self._endpoint = Endpoint(
            url=check_url("adora_reward.judge.base_url", settings["base_url"]),
            model=settings["model"],
            key_variable=KEY_VARIABLE,
            timeout_s=settings["timeout"],
            attempts=settings["attempts"],
            wait_s=settings["wait"],
            workers=settings["concurrency"],
            body={"temperature": 0, "max_tokens": settings["max_tokens"]},
        )
        self._budget = None if settings["budget"] < 0 else settings["budget"]
        self._cache = folder / Path(settings["cache"]).expanduser()
        self._instruction = settings["instruction"]
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

        The judge reads the final part of each reply. A reply that is nothing but thinking scores 0
        without a call. The columns `problem` and `answer` of the data set are read if they exist.
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
            messages = self._question(str(problem), reference, reply)
            questions.append(messages)
            if messages is not None and self._cached_score(messages) is not None:
                cached_count += 1
        # All questions are asked at once, in the threads of the client.
        scores = self.client.each(self._score, questions)
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

    def _question(self, problem: str, answer: object, reply: str) -> Messages | None:
        """Return the messages about one reply; None for a reply that consists of thinking alone.

        `answer` is the reference answer, or None.
        """
        reply_without_thinking = final_part(reply)
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
        if len(set(scores)) == len(scores):
            return  # the judge tells them apart
        print(
            f"warning: adora_reward: judge: the model {self._endpoint.model!r} gives {scores[0]} "
            "for a right and for a wrong answer to 2 + 3; look at its instruction",
            file=sys.stderr,
            flush=True,
        )

    def _trial_score(self, answer: str) -> str:
        """Return the score, as text, of an answer to a problem of ours, whose right answer is 5.

        Raises `UserError` where the judge cannot be reached or gives no score.
        """
        where = f"adora_reward: judge: {self._endpoint.url} with the model {self._endpoint.model!r}"
        try:
            reply = self.client.chat(self.messages("What is 2 + 3?", "5", answer))
        except EndpointError as error:
            remedy = error.remedy(KEY_VARIABLE)
            raise UserError(f"{where} gave no answer: {error}; {remedy}") from None
        try:
            return read_score(reply.text)
        except EndpointError as error:
            remedy = "its reply has to end in a score such as <score>0.7</score>"
            if reply.finish_reason == "length":
                max_tokens = self._endpoint.body["max_tokens"]
                remedy = (
                    f"it was cut off at max_tokens, {max_tokens}: raise it for a judge that thinks"
                )
            excerpt = reply.text[:_MAX_EXCERPT_CHARS]
            raise UserError(f"{where} gave no score: {error}: {excerpt!r}; {remedy}") from None

    def _score(self, messages: Messages | None) -> float | EndpointError:
        """Return the score of one completion, from the cache or a call, or the error of the call."""
        if messages is None:
            return 0.0
        cached_score = self._cached_score(messages)
        if cached_score is not None:
            return cached_score
        try:
            return float(self.client.ask(messages, read_score))
        except EndpointError as error:
            return error

    def _cached_score(self, messages: Messages) -> float | None:
        """Return the score in the cache, None if there is none.

        A cached text that is no score counts as none and is requested again, since the file may
        have been edited or be damaged.
        """
        word = self.client.cached(messages)
        try:
            return None if word is None else _parse_score(word)
        except EndpointError:
            return None


def read_score(text: str) -> str:
    """Return the score in a judge's reply as text, from its last `<score>` tags.

    What the judge thinks before its reply is not read. Raises `EndpointError` where the reply has
    no score from 0 to 1.
    """
    text = final_part(text)
    if "<score>" not in text or "</score>" not in text:
        raise EndpointError("the reply has no <score>...</score>")
    word = text.rsplit("<score>", 1)[1].split("</score>", 1)[0].strip()
    _parse_score(word)
    return word


def _parse_score(word: str) -> float:
    """Return the score that a word says.

    Raises `EndpointError` unless it is a number from 0 to 1.
    """
    try:
        number = float(word)
    except ValueError:
        raise EndpointError(f"the score {word:.40} is no number") from None
    if not 0 <= number <= 1:
        raise EndpointError(f"the score {word:.40} is not from 0 to 1")
    return number


def _read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the judge in their types, with defaults. Raises `UserError`."""
    where = "adora_reward.judge"
    for name in options:
        if name not in _TYPE_AND_DEFAULT_BY_OPTION:
            raise UserError(
                f"{where}: unknown option {name!r}{did_you_mean(str(name), _TYPE_AND_DEFAULT_BY_OPTION)}"
            )
    settings = {}
    for name, (kind, default) in _TYPE_AND_DEFAULT_BY_OPTION.items():
        value = options.get(name)
        if value is None:  # left out, or null
            value = default
        if value is None:
            raise UserError(
                f"{where}: no {name}; give base_url and model, as in {{judge: {{base_url: URL, "
                "...}}"
            )
        if kind is str:
            fits = isinstance(value, str) and value != ""
            expected = "a text"
        else:
            minimum = _minimum_of_option(name, kind)
            number = _read_number(value)
            # The default of `budget`, which means no limit, is below its minimum.
            fits = number == default or number >= minimum
            if fits and kind is int:
                fits = number.is_integer()
            kind_of_number = "whole number" if kind is int else "number"
            expected = f"a {kind_of_number} of at least {minimum:g}"
        if not fits:
            raise UserError(f"{where}.{name}: {value!r:.60} is not {expected}")
        settings[name] = value if kind is str else kind(number)
    return settings


def _read_number(value: object) -> float:
    """Return the number that an option says; NaN, which no option takes, for what is none.

    It may be a text: YAML reads `1e-1` as one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _minimum_of_option(name: str, kind: type) -> float:
    """Return the smallest value of an option that is a number."""
    if name in ("budget", "wait"):
        return 0
    return 1 if kind is int else 1e-3
