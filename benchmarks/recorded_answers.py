"""Answers of set lengths in the place of those that an engine would sample.

A benchmark of the policy step takes this for the generation class, of our trainer or of TRL's. So
both ways learn from the same tokens, and no engine runs.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult

# of each token: that of a random model of 151,936 words
LOGP = -11.9
_TOKEN_IDS = range(20, 600)  # ids of the tokens of an answer; those below are special tokens


class RecordedAnswers:
    """Takes the place of the generation class, and gives an answer of a set length to each prompt.

    The lengths are set on the class, since it is the trainer that creates the object.
    """

    lengths: ClassVar[Sequence[int]] = ()
    """The tokens of the answers to the first prompts; those after them begin anew."""
    first_length: ClassVar[int | None] = None
    """The tokens of each answer of the first generation; None: `lengths` hold for it too."""
    # what our trainer reads of its generation class
    bytes_sent = 0
    model_runner = None

    def __init__(self, *arguments: object, **keywords: Any) -> None:
        """Take the arguments of a generation class; its processor says what ends an answer."""
        processing_class = keywords["processing_class"]
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self.end_token = tokenizer.eos_token_id
        self.longest_prompt = 0  # tokens of the longest prompt of the last generation
        self.generations = 0

    def take_images_from(self, cache: object) -> None:
        """Do nothing, since no engine reads images."""

    def staying_awake(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def sync_weights(self) -> None:
        """Do nothing, since there is no engine."""

    def sample(
        self, requests: Sequence[SamplingRequest], settings: object = None
    ) -> list[SamplingResult]:
        """Return an answer to each request, as our generation class does."""
        answers = self._next_answers([request.prompt_ids for request in requests])
        return [SamplingResult(tokens=tokens, logps=[LOGP] * len(tokens)) for tokens in answers]

    def generate(
        self,
        prompts: list[list[int]],
        images: object,
        num_generations: int,
        profiler: object = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Return an answer to each prompt, as TRL's generation class does.

        `prompts` has each prompt once for each of its rollouts. The parts are the prompts, the
        tokens of the answers, for each token a list with its log-probability, and None in place of
        the ids of further likely tokens.
        """
        answers = self._next_answers(prompts)
        return prompts, answers, [[[LOGP]] * len(tokens) for tokens in answers], None

    def _next_answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the tokens of an answer to each prompt, the same ones in each generation."""
        self.longest_prompt = max(len(prompt) for prompt in prompts)
        lengths: Sequence[int] = self.lengths
        if self.generations == 0 and self.first_length is not None:
            lengths = [self.first_length]
        self.generations += 1
        generator = torch.Generator().manual_seed(17)
        answers = []
        for index in range(len(prompts)):
            length = lengths[index % len(lengths)]
            # The last token is the one that ends the answer.
            tokens = torch.randint(
                _TOKEN_IDS.start, _TOKEN_IDS.stop, (length - 1,), generator=generator
            )
            answers.append([*tokens.tolist(), self.end_token])
        return answers
