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
# The most operations of a chain. Prompts of shorter chains are filled up, so that all prompts have
# the same number of tokens.
LONGEST_CHAIN = 5
FAMILIES = (
    "AB"  # the families of problems: two answers are possible in family A, all ten digits in B
)
SHARE_OF_FAMILY_A = 0.75  # of the problems
ANSWERS_OF_FAMILY_A = (7, 3)  # the more frequent one first
SLIP_RATE = 0.35  # how often the teacher's result of a step is one too large
GUESS_PREFIX = "guess: "


@dataclass(frozen=True)
class ChainProblem:
    """A chain of operations modulo ten, of which the last digit is asked for."""

    prompt: str
    chain: str  # the text of a chain whose every step is right, such as `4+7=1;1-5=6`
    answer: int  # its last digit
    family: str  # A or B


@dataclass(frozen=True)
class Regime:
    """One of the experiment's four kinds of problems."""

    operations: int
    """The length of the chains."""
    first_option: float = 0.5
    """How often the answer of an A problem is the first of its two options."""
    hidden_slips: bool = False
    """Whether the results that count as right slip as the teacher's do, so that no chain can be
    relied on."""
    labelled: bool = False
    """Whether the prompt says which family a problem is of."""


def _apply(value: int, sign: str, operand: int) -> int:
    """Return the right result of one step: `_apply(4, "+", 7)` is 1."""
    result = value + operand if sign == "+" else value - operand
    return result % 10


def chain_text(
    start: int, operations: Sequence[tuple[str, int]], slips: Sequence[bool]
) -> tuple[str, int]:
    """Return the written chain and its last digit.

    A step that slips is one too large, and the next step goes on from it. For example, 4 with the
    operations + 7 and - 5 is `4+7=1;1-5=6`, and `4+7=2;2-5=7` if the first step slips.

    Args:
        start: the first digit.
        operations: the sign and the operand of each step.
        slips: whether each step slips.
    """
    steps = []
    value = start
    for (sign, operand), slip in zip(operations, slips, strict=True):
        result = _apply(value, sign, operand)
        if slip:
            result = (result + 1) % 10
        steps.append(f"{value}{sign}{operand}={result}")
        value = result
    return ";".join(steps), value


def chain_form(start: int, operations: Sequence[tuple[str, int]]) -> str:
    """Return the chain as a form to fill in: `4+7=?;?-5=?;_____;_____;_____`.

    Each of the steps that a shorter chain lacks is five times `_`.
    """
    steps = []
    first_digit = str(start)
    for sign, operand in operations:
        steps.append(f"{first_digit}{sign}{operand}=?")
        first_digit = "?"
    lacking_steps = ["_____"] * (LONGEST_CHAIN - len(steps))
    return ";".join(steps + lacking_steps)


def read_chain_form(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    """Return the first digit and the operations of a prompt: 4, and + 7 and - 5."""
    form = prompt.split()[1]  # behind the label
    steps = [step for step in form.split(";") if "_" not in step]
    # A step is a digit, a sign and a digit, then `=?`.
    return int(steps[0][0]), [(step[1], int(step[2])) for step in steps]


def draw_chain_problem(
    rng: random.Random, regime: Regime, family: str | None = None
) -> ChainProblem:
    """Return one problem.

    The last operand makes the answer what the family asks for, and all else is drawn alike in both
    families, so that nothing but the computed answer tells them apart.

    `family`: A or B; None to draw it.
    """
    if family is None:
        family = "A" if rng.random() < SHARE_OF_FAMILY_A else "B"
    has_first_option = rng.random() < regime.first_option
    if family == "B":
        digit = rng.randrange(10)
    elif has_first_option:
        digit = ANSWERS_OF_FAMILY_A[0]
    else:
        digit = ANSWERS_OF_FAMILY_A[1]
    start = rng.randrange(10)
    operations = [(rng.choice("+-"), rng.randrange(10)) for _ in range(regime.operations)]
    slips = [regime.hidden_slips and rng.random() < SLIP_RATE for _ in operations]
    # The last operand is solved for: value ± operand has to be the digit, modulo ten. A slip makes
    # the written result one too large, so the right one is then one less than the digit.
    _, value = chain_text(start, operations[:-1], slips[:-1])
    right_result = (digit - 1) % 10 if slips[-1] else digit
    sign = operations[-1][0]
    last_operand = right_result - value if sign == "+" else value - right_result
    operations[-1] = (sign, last_operand % 10)
    chain, answer = chain_text(start, operations, slips)
    assert answer == digit
    label = "any"
    if regime.labelled:
        # The label says how many answers are possible.
        label = "two" if family == "A" else "ten"
    return ChainProblem(
        prompt=f"{label}: {chain_form(start, operations)}\n",
        chain=chain,
        answer=answer,
        family=family,
    )


def draw_chain_problems(
    count: int, regime: Regime, seed: str, family: str | None = None
) -> list[ChainProblem]:
    """Return `count` drawn problems, the same for a seed whatever has been drawn before."""
    rng = random.Random(seed)
    return [draw_chain_problem(rng, regime, family=family) for _ in range(count)]


def teacher_answer(rng: random.Random, problem: ChainProblem) -> str:
    """Return what the warm start copies: a guess or a chain, half of the time each.

    A guess knows the label, and no more: with the label `ten` it is any digit, with any other label
    one of the two answers of family A.
    """
    if rng.random() < 0.5:
        has_label_of_b = problem.prompt.startswith("ten")
        digit = rng.randrange(10) if has_label_of_b else rng.choice(ANSWERS_OF_FAMILY_A)
        return f"{GUESS_PREFIX}{digit}"
    start, operations = read_chain_form(problem.prompt)
    return chain_text(start, operations, [rng.random() < SLIP_RATE for _ in operations])[0]


def is_chain(text: str) -> bool:
    """Return whether an answer is a chain, and no guess."""
    return not text.startswith("guess")


# What a chain has to have right: every step, or the last digit alone.
REWARD_NAMES = ("steps", "digit")


def is_right(text: str, problem: ChainProblem, reward: str = "steps") -> bool:
    """Return whether a response is right, which a guess is by its digit.

    By the reward `steps` a chain is right if every step is. Otherwise a chain that ends in one of
    two digits, whatever it has computed, would be a long guess. The reward `digit` asks for the
    last digit alone.
    """
    if not is_chain(text):
        return text == f"{GUESS_PREFIX}{problem.answer}"
    if reward == "steps":
        return text == problem.chain
    return text.endswith(f"={problem.answer}")


@dataclass(frozen=True)
class TeachingPlan:
    """How a start learns: first from right chains, then from the teacher's answers."""

    arithmetic_steps: int  # optimizer steps on right chains
    steps: int  # optimizer steps on the teacher's answers
    batch_size: int
    learning_rate: float
    operations: tuple[int, ...]  # the lengths of chains, in equal shares
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
        """The name of its file: `R2-grpo-0-adora`, and what is unusual behind it."""
        parts = [self.regime, self.recipe, str(self.seed), self.arm]
        if self.engine:
            parts.append("engine")
        if self.model:
            parts.append(f"arithmetic-{self.model}")
        if self.reward != REWARD_NAMES[0]:
            parts.append(self.reward)
        return "-".join(parts)


@dataclass(frozen=True)
class ExperimentSettings:
    """The experiment's settings, from the YAML file."""

    start: TeachingPlan
    steps: int  # of a run, each with a generation of its own
    prompts: int  # of a generation
    generations: int  # rollouts of a group
    eval_every: int  # steps
    eval_problems: int  # of each family
    regimes: dict[str, Regime]
    recipes: dict[str, dict[str, Any]]  # keys of the config, by the name of the recipe
    arms: dict[str, dict[str, Any]]  # options of the method `adora`, by the name of the arm

    def training(self, trial: Trial) -> dict[str, Any]:
        """Return the config keys that a run's recipe sets, on top of those of the first recipe."""
        first_recipe = next(iter(self.recipes.values()))
        return {"max_steps": self.steps, **first_recipe, **self.recipes[trial.recipe]}


def read_settings(path: Path = SETTINGS_FILE) -> ExperimentSettings:
    """Read the experiment's settings from a YAML file."""
    settings = yaml.safe_load(path.read_text())
    start = settings.pop("start")
    start["operations"] = tuple(start["operations"])
    regimes = {name: Regime(**regime) for name, regime in settings.pop("regimes").items()}
    return ExperimentSettings(start=TeachingPlan(**start), regimes=regimes, **settings)
