"""Each rollout has an environment of its own, and those of one problem begin alike.

What is no environment is refused.
"""

import asyncio
import random

import numpy as np
import pytest
from PIL import Image

from adora_vl.config.blocks import ToolOptions
from adora_vl.data.prompts import CONTROL_TOKENS
from adora_vl.rollout.rollouts import DrawnProblem, Rollout, RolloutGroup, StepKey
from adora_vl.tools.environments import build_environments
from adora_vl.tools.run import Toolbox, choose_tools
from adora_vl.tools.tries import nondeterminism_warnings
from adora_vl.types import Row
from adora_vl.utils.errors import UserError


class DoorsEnvironment:
    """An environment with doors, which notes those that were opened."""

    count = 0  # of the instances that were built

    def __init__(self):
        DoorsEnvironment.count += 1

    def reset(self, answer, images, **row):
        """Begin with a random number, and return it with the row's answer for the prompt."""
        images[0].paste("red", (0, 0, 9, 9))  # this is a copy of the row's image
        self.opened = []
        self.behind = random.randrange(10**9)
        return f" {answer}: {self.behind}." if answer else None

    def open(self, door: int) -> str:
        """Open a door.

        Args:
            door: Its number.
        """
        self.opened.append(door)
        return f"{self.opened}"

    def get_reward(self):
        return float(len(self.opened))


SHARED_ENVIRONMENT = DoorsEnvironment()


def rollout_group(number, content, answer="x"):
    """Return a group of two rollouts that have not begun, of a problem with this prompt."""
    images = [Image.new("RGB", (28, 28))]
    row = Row(
        id=f"r{number}", answer=answer, prompt=[{"role": "user", "content": content}], images=images
    )
    return RolloutGroup(
        problem=DrawnProblem(
            row_number=number, key=StepKey(mode="train", step=3, micro=0), group_number=number
        ),
        row=row,
        start_generation=0,
        rollouts=(Rollout(),) * 2,
    )


def call_open(toolbox, rollout, door):
    """Return the answer to a call of the tool `open` by this rollout."""
    call = f'<tool_call>{{"name": "open", "arguments": {{"door": {door}}}}}</tool_call>'
    return (
        toolbox.answer(call, [], seed="0", last=False, environment=rollout.environment)
        .calls[0]
        .text
    )


def reset(environments, *groups, begins_generation=True):
    """Return groups whose rollouts have environments that have begun, in a run with the seed 7."""
    return environments.reset_for_groups(
        groups, 7, control_tokens=CONTROL_TOKENS, begins_generation=begins_generation
    )


def test_environments_of_a_problem_begin_alike_and_say_the_problem():
    """Rollouts of a problem begin alike, and nothing outside of the environments changes.

    The text of `reset` is appended to the prompt, also where that is a list of parts.
    """
    environments = build_environments(DoorsEnvironment, seconds=10.0)
    content_parts = [{"type": "image", "text": None}, {"type": "text", "text": "Which?"}]
    new_groups = [
        rollout_group(0, "Which?"),
        rollout_group(1, content_parts),
        rollout_group(2, "Which?", answer=""),
    ]
    random_state = random.getstate()
    reset_groups = reset(environments, *new_groups)
    first_group, second_group, third_group = reset_groups
    first_rollout, second_rollout = first_group.rollouts
    # `behind` is the random number that `reset` has drawn
    drawn_numbers = [group.rollouts[0].environment.behind for group in reset_groups]

    assert first_group.row["prompt"] == [
        {"role": "user", "content": f"Which? x: {drawn_numbers[0]}."}
    ]
    assert second_group.row["prompt"][0]["content"][2:] == [
        {"type": "text", "text": f" x: {drawn_numbers[1]}."}
    ]
    assert third_group.row == new_groups[2].row
    assert first_rollout.environment.behind == second_rollout.environment.behind
    assert len(set(drawn_numbers)) == 3
    assert random.getstate() == random_state
    assert new_groups[0].row["images"][0].getpixel((0, 0))[0] == 0


def test_each_rollout_plays_in_its_own_environment():
    """The calls of a rollout open doors in its environment, whose reward is their number."""
    environments = build_environments(DoorsEnvironment, seconds=10.0)
    toolbox = Toolbox(choose_tools(["calculate"], environments), options=ToolOptions(), view=None)
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["calculate", "open"]
    [group] = reset(environments, rollout_group(0, "Which?"))
    first_rollout, second_rollout = group.rollouts
    assert call_open(toolbox, first_rollout, door=3) == "[3]"
    assert call_open(toolbox, first_rollout, door=4) == "[3, 4]"
    assert call_open(toolbox, second_rollout, door=5) == "[5]"
    reward = environments.reward_function()
    played = [first_rollout.environment, second_rollout.environment]
    assert reward(environments=played, prompts=[]) == [2.0, 1.0]
    assert reward.__name__ == "DoorsEnvironment"


def test_the_environments_of_a_generation_are_used_again_in_the_next_one():
    """Three problems of two rollouts have six environments, and a fourth one adds two."""
    DoorsEnvironment.count = 0
    environments = build_environments(DoorsEnvironment, seconds=10.0)
    toolbox = Toolbox(choose_tools([], environments), options=ToolOptions(), view=None)
    new_groups = [rollout_group(number, "Which?") for number in range(3)]
    first_group, *_ = reset(environments, *new_groups)
    call_open(toolbox, first_group.rollouts[0], door=3)
    assert DoorsEnvironment.count == 6
    reset(environments, rollout_group(3, "Which?"), begins_generation=False)
    first_group_again, *_ = reset(environments, *new_groups)
    assert DoorsEnvironment.count == 8
    assert first_group_again.row == first_group.row
    first_environment = first_group.rollouts[0].environment
    assert first_group_again.rollouts[0].environment is first_environment
    assert not first_environment.opened


async def async_method(self, **row):
    """Stands for a method that has to be awaited, such as a reward that asks a judge."""
    return 0.5


def test_an_environment_may_have_no_tools_and_a_reward_that_is_awaited():
    """It then says the problem and judges the answer, which the model gives in a single turn."""
    members = {"reset": lambda self, **row: "Guess.", "get_reward": async_method}
    environments = build_environments(type("Judged", (), members), seconds=5)
    (group,) = reset(environments, rollout_group(0, ""))
    assert environments.tools == {}
    assert group.row["prompt"] == [{"role": "user", "content": "Guess."}]
    played = [rollout.environment for rollout in group.rollouts]
    rewards = environments.reward_function()(environments=played)
    assert asyncio.run(rewards) == [0.5, 0.5]  # type: ignore[arg-type]  # it is async here


def environment_class_with(**methods):
    """Return a class like `DoorsEnvironment` whose methods of these names call the functions."""
    return type(
        "Own",
        (DoorsEnvironment,),
        {name: lambda self, method=method, **row: method() for name, method in methods.items()},
    )


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("own.py", "'own.py' names no class; write FILE.py:CLASS"),
        (3, "3 is no class"),
        ({"a": DoorsEnvironment}, "several environments are not supported; give one class"),
        (dict, "dict has no method reset"),
        (lambda: SHARED_ENVIRONMENT, "row r0: DoorsEnvironment is one object for two rollouts"),
        (lambda: 1 / 0, "<lambda>: it cannot be made: ZeroDivisionError"),
        (
            type("Late", (DoorsEnvironment,), {"reset": async_method}),
            "Late.reset is async; write a plain method",
        ),
        (
            environment_class_with(reset=lambda: str(random.SystemRandom().random())),
            "row r0: reset says '[0-9.]+' to one rollout of a problem and '[0-9.]+' to another",
        ),
        (
            environment_class_with(reset=lambda: [][0]),
            "row r0: reset: IndexError: list index out of range",
        ),
        (
            environment_class_with(reset=lambda: " Answer <|image_pad|>"),
            "row r0: reset says <.image_pad.>, which is a token of the model's own",
        ),
        (
            environment_class_with(reset=lambda: 3),
            "row r0: reset returned a int; return a text or None",
        ),
    ],
)
def test_what_is_no_environment_is_refused(entry, reason):
    """An entry that is no class, or whose object misbehaves, is refused with its name and why."""
    with pytest.raises(UserError, match=f"^environment_factory: {reason}"):
        build_environments(entry, 10.0).reset_for_groups(
            [rollout_group(0, "Which?")],
            7,
            control_tokens=CONTROL_TOKENS,
            begins_generation=True,
        )


def test_a_method_that_answers_in_two_ways_in_environments_that_begin_alike_is_named():
    """Both environments of a problem are asked the same, and have to answer the same."""

    class Dice(DoorsEnvironment):
        """An environment with a tool whose answer is another one at each call."""

        def throw(self) -> float:
            """Throw."""
            return float(np.random.default_rng().random())

    environments = build_environments(Dice, seconds=10.0)
    toolbox = Toolbox(choose_tools([], environments), options=ToolOptions(), view=None)
    [group] = reset(environments, rollout_group(0, "Which?"))
    group_environments = [rollout.environment for rollout in group.rollouts]
    [warning_line] = nondeterminism_warnings(toolbox, [], group_environments)
    assert warning_line.startswith("tools: 'throw' answers"), (
        "`open` counts in both alike, `throw` does not"
    )
    assert nondeterminism_warnings(toolbox) == [], (
        "a method is not called before its environment has begun"
    )
