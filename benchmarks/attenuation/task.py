"""The task, its regimes, and the experiment's settings from the YAML file beside this module.

The task is a chain of one-digit operations modulo ten. An answer guesses the last digit, or is the
written chain.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SETTINGS_FILE = Path(__file__).with_name("settings.yaml")
# operations; prompts of shorter chains are filled up, so that all prompts have the same number of
# tokens
LONGEST_CHAIN = 5
ANSWERS_OF_FAMILY_A = (7, 3)  # the answers of family A, the more frequent one first
SLIP_RATE = 0.35  # how often the teacher's result of a step is one too large
GUESS_PREFIX = "guess: "


@dataclass(frozen=True)
class ChainProblem:
    """`chain` is what a chain has to say to be right, and `answer` its last digit.

    `family` is A or B.
    """

    prompt: str
    chain: str
    answer: int
    family: str


@dataclass(frozen=True)
class Regime:
    """One of the experiment's four.

    operations: length of the chains. first_option: how often the answer of an A problem is the
    first of its two options. hidden_slips: the results that count as right slip as the teacher's
    do, so that no chain can be relied on. labelled: the prompt says which family a problem is of.
    """

    operations: int
    first_option: float = 0.5
    hidden_slips: bool = False
    labelled: bool = False


def _apply(value: int, sign: str, operand: int) -> int:
    return (value + operand if sign == "+" else value - operand) % 10


def chain_text(
    start: int, operations: Sequence[tuple[str, int]], slips: Sequence[bool]
) -> tuple[str, int]:
    """Return the written chain and its last digit.

    A step that slips is one too large, and the next step goes on from it.
    """
    steps = []
    value = start
    for (sign, operand), slip in zip(operations, slips, strict=True):
        result = (_apply(value, sign, operand) + slip) % 10
        steps.append(f"{value}{sign}{operand}={result}")
        value = result
    return ";".join(steps), value


def chain_form(start: int, operations: Sequence[tuple[str, int]]) -> str:
    """Return the chain as a form to fill in: `4+7=?;?-5=?`.

    It has `_` for the steps that a shorter chain lacks.
    """
    steps = [
        f"{'?' if number else start}{sign}{operand}=?"
        for number, (sign, operand) in enumerate(operations)
    ]
    return ";".join([*steps, *["_____"] * (LONGEST_CHAIN - len(steps))])


def read_chain_form(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    """Return the first digit and the operations of a prompt."""
    steps = [step for step in prompt.split()[1].split(";") if "_" not in step]
    return int(steps[0][0]), [(step[1], int(step[2])) for step in steps]


def draw_chain_problem(
    rng: random.Random, regime: Regime, share_a: float = 0.75, family: str | None = None
) -> ChainProblem:
    """Return one problem.

    The last operand makes the answer what the family asks for, and all else is drawn alike in both
    families, so that nothing but the computed answer tells them apart.
    """
    family = family or ("A" if rng.random() < share_a else "B")
    first = rng.random() < regime.first_option
    digit = ANSWERS_OF_FAMILY_A[0 if first else 1] if family == "A" else rng.randrange(10)
    start = rng.randrange(10)
    operations = [(rng.choice("+-"), rng.randrange(10)) for _ in range(regime.operations)]
    slips = [regime.hidden_slips and rng.random() < SLIP_RATE for _ in operations]
    _, value = chain_text(start, operations[:-1], slips[:-1])
    before_slip = (digit - slips[-1]) % 10
    sign = operations[-1][0]
    operations[-1] = (
        sign,
        (before_slip - value) % 10 if sign == "+" else (value - before_slip) % 10,
    )
    chain, answer = chain_text(start, operations, slips)
    assert answer == digit
    label = {"A": "two", "B": "ten"}[family] if regime.labelled else "any"
    return ChainProblem(
        prompt=f"{label}: {chain_form(start, operations)}\n",
        chain=chain,
        answer=answer,
        family=family,
    )


def draw_chain_problems(
    number: int, regime: Regime, seed: str, family: str | None = None
) -> list[ChainProblem]:
    """Return drawn problems, the same for a seed whatever has been drawn before."""
    rng = random.Random(seed)
    return [draw_chain_problem(rng, regime, family=family) for _ in range(number)]


def teacher_answer(rng: random.Random, problem: ChainProblem) -> str:
    """Return what the warm start copies: a guess or a chain, half of the time each.

    A guess knows the label, and no more.
    """
    if rng.random() < 0.5:
        has_label_of_b = problem.prompt.startswith("ten")
        digit = rng.randrange(10) if has_label_of_b else rng.choice(ANSWERS_OF_FAMILY_A)
        return f"{GUESS_PREFIX}{digit}"
    start, operations = read_chain_form(problem.prompt)
    return chain_text(start, operations, [rng.random() < SLIP_RATE for _ in operations])[0]


def is_chain(text: str) -> bool:
    return not text.startswith("guess")


REWARD_NAMES = (
    "steps",
    "digit",
)  # what a chain has to have right: every step, or the last digit alone


def is_right(text: str, problem: ChainProblem, reward: str = "steps") -> bool:
    """Return whether a response is right, which a guess is by its digit.

    A chain is right if every step is: else a chain that ends in one of two digits whatever it has
    computed would be a long guess, and chains would not be what they stand for. The reward `digit`
    asks for no more.
    """
    if not is_chain(text):
        return text == f"{GUESS_PREFIX}{problem.answer}"
    return text == problem.chain if reward == "steps" else text.endswith(f"={problem.answer}")


@dataclass(frozen=True)
class TeachingPlan:
    """How a start learns: `arithmetic_steps` of right chains, then `steps` of the teacher's
    answers.

    `operations`: chains are as long as these, in equal shares.
    """

    arithmetic_steps: int
    steps: int
    batch_size: int
    learning_rate: float
    operations: tuple[int, ...]
    layers: int
    width: int


@dataclass(frozen=True)
class Trial:
    """One run.

    Those that differ in their arm alone are a pair: start, problems and seeds are the same.
    """

    regime: str
    recipe: str
    seed: int
    arm: str
    engine: bool  # whether vLLM samples the rollouts, or Transformers
    model: int = 0  # the seed of the arithmetic model that the start is made of
    reward: str = "steps"

    @property
    def name(self) -> str:
        model = f"-arithmetic-{self.model}" if self.model else ""
        reward = f"-{self.reward}" if self.reward != "steps" else ""
        return f"{self.regime}-{self.recipe}-{self.seed}-{self.arm}{'-engine' if self.engine else ''}{model}{reward}"


@dataclass(frozen=True)
class ExperimentSettings:
    """The experiment's settings. `recipes` and `arms` are keys of the config by name."""

    start: TeachingPlan
    steps: int
    prompts: int
    generations: int
    eval_every: int
    eval_problems: int
    regimes: dict[str, Regime]
    recipes: dict[str, dict[str, Any]]
    arms: dict[str, dict[str, Any]]

    def training(self, job: Trial) -> dict[str, Any]:
        """Return the config keys that a run's recipe sets, on top of those of the first recipe."""
        return {
            "max_steps": self.steps,
            **next(iter(self.recipes.values())),
            **self.recipes[job.recipe],
        }


def read_settings(path: Path = SETTINGS_FILE) -> ExperimentSettings:
    settings = yaml.safe_load(path.read_text())
    start = {**settings.pop("start")}
    start["operations"] = tuple(start["operations"])
    regimes = {name: Regime(**regime) for name, regime in settings.pop("regimes").items()}
    return ExperimentSettings(start=TeachingPlan(**start), regimes=regimes, **settings)
