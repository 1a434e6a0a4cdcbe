"""The reward `judge`: a language model behind an OpenAI-compatible endpoint says how good an answer
is, from 0 to 1.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adora_vl.rewards.completion import completion_text, response_texts
from adora_vl.rewards.thinking import final_part, is_blank
from adora_vl.utils.errors import UserError, did_you_mean
from adora_vl.utils.openai_client import ChatClient, Endpoint, EndpointError, Messages, check_url

NAME = "judge"
KEY_VARIABLE = "ADORA_VL_JUDGE_KEY"
INSTRUCTION = (
    "You are given a problem, its reference answer and a reply to the problem. Say whether the "
    "reply's final answer is the reference answer, whatever its notation: 1 if it is, 0 if it is "
    "not or if there is none."
)
_FORM = "Put a number from 0 to 1, and nothing else, between <score> and </score>."
_MAX_CHARS = 16_000  # of a reply: its end has the answer
_SHOWN_CHARS = 80  # of a judge's reply in a message
# The options in `adora_reward: [{judge: {...}}]` with type and default. One without a default has
# to be given.
_OPTIONS: dict[str, tuple[type, Any]] = {
    "base_url": (str, None),
    "model": (str, None),
    "instruction": (str, INSTRUCTION),
    "cache": (str, "judge_cache.jsonl"),
    "budget": (int, -1),
    "concurrency": (int, 16),
    "timeout": (float, 60.0),
    "attempts": (int, 4),
    "wait": (float, 1.0),
    "max_tokens": (int, 512),
}
_OF_A_CALL = ("base_url", "concurrency")  # options of how it is reached, on which no score depends


def without_address(entry: Any) -> Any:
    """An entry of `adora_reward` without what says where the judge is.

    The same model on another port or node is the same judge, so a run may go on with it.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry.get(NAME), Mapping):
        return entry
    options = {key: value for key, value in entry[NAME].items() if key not in _OF_A_CALL}
    return {**entry, NAME: options}


class JudgeReward:
    """A reward function of TRL's form.

    `folder`: where the cache lies, unless its option is an absolute path.
    """

    __name__ = "judge_reward"  # as TRL's log has it

    def __init__(self, options: Mapping[str, Any], folder: Path) -> None:
        """Raises `UserError` for an option that is missing, unknown or of the wrong kind."""
        given = _checked(options)
        self._endpoint = Endpoint(
            url=check_url("adora_reward.judge.base_url", given["base_url"]),
            model=given["model"],
            key_variable=KEY_VARIABLE,
            timeout_s=given["timeout"],
            attempts=given["attempts"],
            wait_s=given["wait"],
            workers=given["concurrency"],
            body={"temperature": 0, "max_tokens": given["max_tokens"]},
        )
        self._budget = None if given["budget"] < 0 else given["budget"]
        self._cache = folder / Path(given["cache"]).expanduser()
        self._instruction = given["instruction"]
        self._client: ChatClient | None = None
        self._warned = False
        self._refused: EndpointError | None = None

    @property
    def client(self) -> ChatClient:
        """Made at the first call: its cache lies in the run's folder, which has to be checked
        first.
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
        """One score per completion, or the error of its call.

        The judge reads the final part of each reply. A reply that is nothing but thinking scores 0
        without a call. Of the `columns` it reads `problem` and `answer`. Logs `judge/failed` and
        `judge/cached`, shares. Raises `UserError` where the endpoint refuses the key.
        """
        problems = columns.get("problem") or [
            completion_text(prompt) for prompt in prompts or [""] * len(completions)
        ]
        references = columns.get("answer") or [None] * len(completions)
        replies = response_texts(completions, thinking_opened)
        rows = zip(problems, references, replies, strict=True)
        asked = [self._question(str(problem), answer, reply) for problem, answer, reply in rows]
        known = [messages is not None and self._known(messages) is not None for messages in asked]
        found = self.client.each(self._score, asked)
        if self._refused is not None:
            raise UserError(
                f"adora_reward: judge: {self._endpoint.url} refuses the key in {KEY_VARIABLE} for "
                f"the model {self._endpoint.model!r} ({self._refused}); set {KEY_VARIABLE} to one "
                "that it takes"
            )
        errors = [each for each in found if isinstance(each, EndpointError)]
        if errors and not self._warned:
            self._warned = True  # once; the log counts them
            print(
                f"warning: the judge failed, the first time: {errors[0]}; no score",
                file=sys.stderr,
                flush=True,
            )
        if log_metric and asked:
            log_metric("judge/failed", len(errors) / len(asked))
            log_metric("judge/cached", sum(known) / len(asked))
        return found

    def _question(self, problem: str, answer: object, reply: str) -> Messages | None:
        """What the judge is asked about one reply; None where the reply has only thinking in it."""
        part = final_part(reply)
        if is_blank(part) and not is_blank(reply):
            return None
        return self.messages(problem, answer, part)

    def messages(self, problem: str, answer: object, reply: str) -> Messages:
        """What the judge is asked about one completion."""
        reference = "" if answer is None else f"<reference>\n{answer}\n</reference>\n"
        text = (
            f"<problem>\n{problem}\n</problem>\n{reference}<reply>\n{reply[-_MAX_CHARS:]}\n</reply>"
        )
        return [
            {"role": "system", "content": f"{self._instruction} {_FORM}"},
            {"role": "user", "content": text},
        ]

    def try_once(self) -> None:
        """Two questions before a run, about a right answer and a wrong one, whose scores are read.

        Raises `UserError` where a call fails, or a reply has no score. Two equal scores are a
        warning. With a budget of one call the right answer is asked about alone.
        """
        replies = ["It is 5.", "It is 4."]
        if self._budget is not None:
            replies = replies[: self._budget]
        scores = [self._tried(reply) for reply in replies]
        if len(scores) == len(set(scores)):
            return
        print(
            f"warning: adora_reward: judge: the model {self._endpoint.model!r} gives {scores[0]} "
            "for a right and for a wrong answer to 2 + 3; look at its instruction",
            file=sys.stderr,
            flush=True,
        )

    def _tried(self, answer: str) -> str:
        """The score of an answer to a problem of ours, whose right answer is 5, as text."""
        where = f"adora_reward: judge: {self._endpoint.url} with the model {self._endpoint.model!r}"
        try:
            reply = self.client.chat(self.messages("What is 2 + 3?", "5", answer))
        except EndpointError as error:
            remedy = f"the key is read from {KEY_VARIABLE}"
            if error.unreachable:
                remedy = "is a server there?"
            raise UserError(f"{where} gave no answer: {error}; {remedy}") from None
        try:
            return score_in(reply.text)
        except EndpointError as error:
            remedy = "its reply has to end in a score such as <score>0.7</score>"
            if reply.finish_reason == "length":
                most = self._endpoint.body["max_tokens"]
                remedy = f"it was cut off at max_tokens, {most}: raise it for a judge that thinks"
            shown = reply.text[:_SHOWN_CHARS]
            raise UserError(f"{where} gave no score: {error}: {shown!r}; {remedy}") from None

    def _score(self, messages: Messages | None) -> float | EndpointError:
        if messages is None:
            return 0.0
        if self._refused is not None:
            return self._refused
        known = self._known(messages)
        if known is not None:
            return known
        try:
            return float(self.client.ask(messages, score_in))
        except EndpointError as error:
            if error.refused:
                self._refused = error
            return error

    def _known(self, messages: Messages) -> float | None:
        """The score in the cache.

        What is none there is asked for anew: a file may have been edited, or be damaged.
        """
        found = self.client.cached(messages)
        try:
            return None if found is None else _checked_score(found)
        except EndpointError:
            return None


def score_in(text: str) -> str:
    """The score in the final part of a judge's reply, as text.

    Raises `EndpointError` where there is none from 0 to 1.
    """
    text = final_part(text)
    if "<score>" not in text or "</score>" not in text:
        raise EndpointError("the reply has no <score>...</score>")
    word = text.rsplit("<score>", 1)[1].split("</score>", 1)[0].strip()
    _checked_score(word)
    return word


def _checked_score(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise EndpointError(f"the score {word:.40} is no number") from None
    if not 0 <= number <= 1:
        raise EndpointError(f"the score {word:.40} is not from 0 to 1")
    return number


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    where = "adora_reward.judge"
    for name in options:
        if name not in _OPTIONS:
            raise UserError(f"{where}: unknown option {name!r}{did_you_mean(str(name), _OPTIONS)}")
    found = {}
    for name, (kind, default) in _OPTIONS.items():
        value = options.get(name, default)
        if value is None:
            raise UserError(
                f"{where}: no {name}; give base_url and model, as in {{judge: {{base_url: URL, "
                "...}}"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        least = 0 if name in ("budget", "wait") else 1 if kind is int else 1e-3
        fits = (
            isinstance(value, str)
            if kind is str
            else number and (value == default or value >= least)
        )
        if not fits or (kind is int and value != int(value)) or value == "":
            wanted = (
                "a text"
                if kind is str
                else f"a {'whole ' * (kind is int)}number of at least {least:g}"
            )
            raise UserError(f"{where}.{name}: {value!r:.60} is not {wanted}")
        found[name] = kind(value)
    return found
