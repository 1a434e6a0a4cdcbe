"""The task `angles`: figures in words, and a small model that works on them, slips and guesses.

A problem is a figure in the text form (docs/geometry.md) with its numbers, and asks for an angle.
Two other angles stand between the numbers and the answer, so three are unknown.
`benchmarks.working` trains on it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from adora_vl.builtin.processor import END_OF_TURN, build_tokenizer
from adora_vl.builtin.small_model import (
    TrainingStage,
    UntrainedModel,
    init_random_model,
    is_built,
    train_and_save,
)
from adora_vl.builtin.tiny_vl import EncodedPrompts, answer_loss, language_settings
from adora_vl.data.dataset import Row
from adora_vl.data.prompts import conversation
from adora_vl.geometry.figure import figure_as_json
from adora_vl.geometry.text import read_form_from_text
from adora_vl.geometry.verdict import solve_form

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

DegreesByAngle = Mapping[str, int]  # degrees by the name of an angle
DEGREES_UNIT = 5  # degrees; every number is a multiple of it
SMALLEST_ANGLE = 15  # degrees of any angle, so that no figure is flat
LARGEST_ANGLE = 150
USUAL_ANSWERS = (60, 80)  # the answers of most problems
USUAL_ANSWER_SHARE = 0.6
ONE_IN_FOR_TESTING = 4  # one in so many sets of numbers is for testing
ATTENTION_HEADS = 4


@dataclass(frozen=True)
class Step:
    """An unknown angle: its name, and its value from what is known before it."""

    angle: str
    value: Callable[[DegreesByAngle], int]


@dataclass(frozen=True)
class FigureKind:
    """A figure without numbers: its facts, whose numbers are given, and the steps to the answer.

    The last step is the answer. `unit`: what every given number is a multiple of, in degrees.
    """

    name: str
    facts: str
    labels: tuple[str, ...]
    steps: tuple[Step, ...]
    unit: int = DEGREES_UNIT


FIGURE_KINDS = (
    FigureKind(
        name="isosceles",
        facts="triangle ABC. AB = AC. D on BC",
        labels=("ABC", "BAD"),
        steps=(
            Step("ACB", lambda degrees: degrees["ABC"]),
            Step("BAC", lambda degrees: 180 - degrees["ABC"] - degrees["ACB"]),
            Step("CAD", lambda degrees: degrees["BAC"] - degrees["BAD"]),
        ),
    ),
    FigureKind(
        name="parallels",
        facts="AB parallel CD. AC and BD meet at E",
        labels=("BAC", "BDC"),
        steps=(
            Step("ABD", lambda degrees: degrees["BDC"]),
            Step("AEB", lambda degrees: 180 - degrees["BAC"] - degrees["ABD"]),
            Step("AED", lambda degrees: 180 - degrees["AEB"]),
        ),
    ),
    FigureKind(
        name="sums",
        facts="AC and BD meet at E",
        labels=("BAC", "ABD", "ACD", "ADB"),
        steps=(
            Step("AEB", lambda degrees: 180 - degrees["BAC"] - degrees["ABD"]),
            Step("BDC", lambda degrees: 180 - degrees["AEB"] - degrees["ACD"]),
            Step("ADC", lambda degrees: degrees["ADB"] + degrees["BDC"]),
        ),
        unit=2 * DEGREES_UNIT,
    ),
)


@dataclass(frozen=True)
class AngleProblem:
    """A figure with its numbers."""

    kind: FigureKind
    labels: DegreesByAngle

    @property
    def text(self) -> str:
        """The problem in the text form, as the model reads it."""
        numbers = [f"angle {angle} = {self.labels[angle]}" for angle in self.kind.labels]
        return ". ".join([self.kind.facts, *numbers, f"find angle {self.kind.steps[-1].angle}"])

    def values(self, slip: int | None = None, error: int = 0) -> dict[str, int]:
        """Return the angles of the steps.

        `error` degrees are added in the step `slip`, and go on.
        """
        degrees = dict(self.labels)
        for number, step in enumerate(self.kind.steps):
            degrees[step.angle] = step.value(degrees) + (error if number == slip else 0)
        return {step.angle: degrees[step.angle] for step in self.kind.steps}

    @property
    def answer(self) -> int:
        """The angle that is asked for, in degrees."""
        return self.values()[self.kind.steps[-1].angle]


def _is_drawable(problem: AngleProblem) -> bool:
    """Return whether every angle of the figure has a size that can be drawn."""
    values = {**problem.labels, **problem.values()}
    sizes = list(values.values())
    if problem.kind.name == "sums":
        # The angle CAD, since AEB is the outer angle of the triangle AED at E.
        sizes.append(values["AEB"] - values["ADB"])
        # What ABCD bends at D: AC and BD are its diagonals, so it bends outwards at each corner.
        sizes.append(180 - values["ADC"])
    return all(SMALLEST_ANGLE <= size <= LARGEST_ANGLE for size in sizes)


@cache
def _problems_by_answer(kind: FigureKind, *, for_testing: bool) -> Mapping[int, list[AngleProblem]]:
    """Return all problems of a kind that are for testing, or are not, by their answer.

    Of the problems with each answer one in `ONE_IN_FOR_TESTING` is for testing. They are chosen by
    a hash, and no model is taught or trained on them. The given angles are from 20 to 120 degrees.
    """
    by_answer: dict[int, list[AngleProblem]] = {}
    sizes = range(20, 125, kind.unit)
    for numbers in product(sizes, repeat=len(kind.labels)):
        problem = AngleProblem(kind=kind, labels=dict(zip(kind.labels, numbers, strict=True)))
        if _is_drawable(problem):
            by_answer.setdefault(problem.answer, []).append(problem)
    pool: dict[int, list[AngleProblem]] = {}
    for answer, problems in sorted(by_answer.items()):
        problems.sort(key=lambda problem: hashlib.sha256(problem.text.encode()).digest())
        tests = len(problems) // ONE_IN_FOR_TESTING
        chosen = problems[:tests] if for_testing else problems[tests:]
        if chosen:
            pool[answer] = chosen
    return pool


def draw_angle_problem(rng: random.Random, *, for_testing: bool) -> AngleProblem:
    """Return a problem of one of the splits, most with one of the `USUAL_ANSWERS`."""
    kind = rng.choice(FIGURE_KINDS)
    pool = _problems_by_answer(kind, for_testing=for_testing)
    answer = rng.choice(USUAL_ANSWERS) if rng.random() < USUAL_ANSWER_SHARE else rng.choice([*pool])
    return rng.choice(pool[answer])


def solved_row(problem: AngleProblem, row_id: str, split: str) -> Row:
    """Return the row of a problem, its figure and its answer from the solver alone."""
    result = solve_form(read_form_from_text(problem.text), looks=False, repair=False)
    assert result.status == "answered", f"{problem.text}: {result.status}, {result.why}"
    assert result.answer == str(problem.answer), f"{problem.text}: {result.answer}"
    assert result.figure is not None, "it is answered by its facts"
    answer = result.answer
    return {
        "id": row_id,
        "images": [],
        "problem": problem.text,
        "answer": answer,
        "answer_raw": answer,
        "choices": None,
        "split": split,
        "source": "angles",
        "meta": {
            "goal": "Angle",
            "shapes": [],
            "family": "angles",
            "kind": problem.kind.name,
            "solution": "",
            "slip": "",
        },
        "facts": problem.text,
        "figure": figure_as_json(result.figure),
    }


# What is said of an angle, in wordings of different lengths. Workings and guesses draw from the
# same, as often, so that the length of an answer says nothing of the work in it.
_WORDINGS = (
    "angle {angle} = {value}.",
    "so angle {angle} = {value}.",
    "then we have angle {angle} = {value}.",
    "now the angle {angle} is {value}.",
)


def response_text(rng: random.Random, angles: Mapping[str, int], answer: int) -> str:
    """Return a response that says of each of these angles what it is, and boxes an answer."""
    sentences = [
        rng.choice(_WORDINGS).format(angle=angle, value=value) for angle, value in angles.items()
    ]
    return " ".join([*sentences, f"\\boxed{{{answer}}}"])


def right_working(rng: random.Random, problem: AngleProblem) -> str:
    """Return a response that says the two angles on the way, and the answer."""
    return response_text(rng, problem.values(), problem.answer)


def guessed_response(rng: random.Random, problem: AngleProblem) -> str:
    """Return a response that repeats two given numbers and guesses, as long as a working."""
    value = rng.choice(USUAL_ANSWERS)
    names = problem.kind.labels[:2]
    angles = {name: problem.labels[name] for name in names}
    angles[problem.kind.steps[-1].angle] = value
    return response_text(rng, angles, value)


def slipped_working(rng: random.Random, problem: AngleProblem) -> str:
    """Return a working with an error of 10 degrees in one of its steps.

    In half of them the error goes on to the answer. In the others what is behind it is right, as
    if by luck.
    """
    slip = rng.randrange(len(problem.kind.steps))
    error = rng.choice((-10, 10))
    wrong = problem.values(slip, error)
    if rng.random() < 0.5:
        return response_text(rng, wrong, wrong[problem.kind.steps[-1].angle])
    name = problem.kind.steps[slip].angle
    return response_text(rng, {**problem.values(), name: wrong[name]}, problem.answer)


@dataclass(frozen=True)
class AnglesStart:
    """How a start learns: right workings first, then a teacher that slips and guesses.

    `guesses`: the share of bare guesses; `slips`: the share of the workings that have a slip.
    """

    arithmetic_steps: int
    steps: int
    batch_size: int
    learning_rate: float
    layers: int
    width: int
    guesses: float
    slips: float
    arithmetic_seed: int = 0
    seed: int = 0


def teacher_response(rng: random.Random, problem: AngleProblem, plan: AnglesStart) -> str:
    """Return an answer of the teacher, which the second stage of training copies."""
    if rng.random() < plan.guesses:
        return guessed_response(rng, problem)
    if rng.random() < plan.slips:
        return slipped_working(rng, problem)
    return right_working(rng, problem)


def _vocabulary_texts() -> Iterator[str]:
    """Texts with every word that a problem or a response can have."""
    rng = random.Random("vocabulary")
    yield "system user assistant You are a helpful assistant.\n"
    for _ in range(2000):
        problem = draw_angle_problem(rng, for_testing=False)
        yield f"{problem.text}\n{right_working(rng, problem)}\n{guessed_response(rng, problem)}"


def task_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word and each number of the task.

    Numbers are whole tokens, with and without a space before them, so that the length of an answer
    does not count their digits.
    """
    tokenizer = build_tokenizer(_vocabulary_texts())
    numbers = [str(number) for number in range(0, 2 * LARGEST_ANGLE, DEGREES_UNIT)]
    texts = [text for number in numbers for text in (number, f" {number}")]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return tokenizer


def _config(tokenizer: PreTrainedTokenizerFast, plan: AnglesStart) -> Qwen2Config:
    config = Qwen2Config(**language_settings(tokenizer))
    config.num_hidden_layers = plan.layers
    config.layer_types = config.layer_types[:1] * plan.layers
    config.hidden_size = plan.width
    config.intermediate_size = 4 * plan.width
    config.head_dim = plan.width // ATTENTION_HEADS
    config.num_attention_heads = ATTENTION_HEADS
    config.num_key_value_heads = ATTENTION_HEADS
    return config


def _stage_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    responses: Callable[[AngleProblem], str],
    batch_size: int,
) -> Tensor:
    """Return the loss of the responses to a random batch of problems."""
    problems = [draw_angle_problem(rng, for_testing=False) for _ in range(batch_size)]
    prompts = [_token_ids(tokenizer, prompt_text(tokenizer, problem.text)) for problem in problems]
    answers = [_token_ids(tokenizer, responses(problem) + END_OF_TURN) for problem in problems]
    return answer_loss(model, EncodedPrompts(prompts), answers, list(range(batch_size)))


def begin_arithmetic(plan: AnglesStart) -> UntrainedModel:
    """Return a model with random weights, and its first stage of training: right workings."""
    tokenizer = task_tokenizer()
    config = _config(tokenizer, plan)
    model = init_random_model(partial(Qwen2ForCausalLM, config), tokenizer, plan.arithmetic_seed)
    rng = random.Random(f"arithmetic/{plan.arithmetic_seed}")

    def loss_of(_: int) -> Tensor:
        return _stage_loss(model, tokenizer, rng, partial(right_working, rng), plan.batch_size)

    stage = TrainingStage(plan.arithmetic_steps, plan.learning_rate, loss_of)
    return UntrainedModel(model, tokenizer, [stage])


def begin_taught(plan: AnglesStart, arithmetic: Path) -> UntrainedModel:
    """Return the model of the first stage, and its second stage: the teacher's answers."""
    tokenizer = AutoTokenizer.from_pretrained(arithmetic)
    model = AutoModelForCausalLM.from_pretrained(arithmetic, dtype=torch.float32)
    rng = random.Random(f"teacher/{plan.seed}")

    def responses(problem: AngleProblem) -> str:
        return teacher_response(rng, problem, plan)

    def loss_of(_: int) -> Tensor:
        return _stage_loss(model, tokenizer, rng, responses, plan.batch_size)

    return UntrainedModel(
        model, tokenizer, [TrainingStage(plan.steps, plan.learning_rate, loss_of)]
    )


def prompt_text(tokenizer: PreTrainedTokenizerFast, problem: str) -> str:
    """Return the problem as the model reads it."""
    messages = conversation(problem, None)
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _token_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    return torch.tensor(tokenizer(text)["input_ids"])


def build_angles_start(folder: Path, plan: AnglesStart) -> None:
    """Write the model of a plan, and beside it the one of the first lesson for all seeds.

    What is there by the same plan stays.
    """
    arithmetic = folder.with_name(f"arithmetic-{plan.arithmetic_seed}")
    first_plan = replace(plan, seed=0)
    if not is_built(arithmetic, asdict(first_plan)):
        train_and_save(arithmetic, first_plan, begin_arithmetic)
    if not is_built(folder, asdict(plan)):
        train_and_save(folder, plan, partial(begin_taught, arithmetic=arithmetic))
