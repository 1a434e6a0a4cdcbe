"""An `infer` with a stub for the engine, to be killed: `python -m tests.unit.evals.killed_infer
OUTPUT SECONDS`.
"""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from PIL import Image

from adora_vl.evals.inference.requests import AnswerEngineSettings, AnswerRequest
from adora_vl.evals.inference.runner import infer
from adora_vl.evals.records import Problem
from adora_vl.utils.openai_client import Reply

PROBLEM_COUNT = 200
SAMPLES_PER_PROBLEM = 2


class SlowEngine:
    """Answers with what it was asked and the seed, and takes its time over a batch, as a model
    does.
    """

    batch_size = 7

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        """Answer after some time, with the question, the seed and 500 letters."""
        time.sleep(self._seconds)
        return [
            Reply(
                f"{request.messages[-1]['content'][-1]['text']} {request.seed} " + "x" * 500,
                n_tokens=9,
                finish_reason="stop",
                n_prompt_tokens=3,
            )
            for request in requests
        ]


def images(index: int) -> list[Image.Image]:
    """The image of a problem; one problem in ten has an image that cannot be read, and raises."""
    if index % 10 == 3:
        raise OSError("broken")
    return [Image.new("RGB", (8, 8))]


def main(output: Path, seconds: float) -> None:
    """Answer 200 problems twice each, with `seconds` for a batch, and write into `output`."""
    problems = [
        Problem(
            {"pid": f"p/{i}", "answer": "5", "question": f"q{i}"}, f"q{i}", 1, partial(images, i)
        )
        for i in range(PROBLEM_COUNT)
    ]
    settings = AnswerEngineSettings(
        model="m", engine="transformers", temperature=1.0, system_prompt=None
    )
    infer(
        problems,
        output,
        settings,
        {"model": "m"},
        build=lambda _: SlowEngine(seconds),
        samples_per_problem=SAMPLES_PER_PROBLEM,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
