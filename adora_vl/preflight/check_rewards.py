"""Checks of what is the user's own: rewards, tools and environments, chosen and then tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from PIL import Image
from transformers import TrainerState

from adora_vl.advantage.adora import Adora
from adora_vl.data.dataloader import with_upright_rgb_images
from adora_vl.data.loading import unreadable_rows
from adora_vl.data.prompts import asks_for_answer_tags, control_tokens, fault_in_messages
from adora_vl.data.rows import images_of
from adora_vl.preflight import python_columns, python_inputs
from adora_vl.rewards import try_rewards
from adora_vl.rewards.choose import RewardSet, choose_rewards
from adora_vl.rewards.steps import STEPS
from adora_vl.rollout.rollouts import RolloutGroup, StepKey, new_groups_of_rows, row_for_rewards
from adora_vl.tools.environments import build_environments
from adora_vl.tools.run import Toolbox, ToolSet, choose_tools
from adora_vl.tools.tries import nondeterminism_warnings
from adora_vl.utils.errors import UserError, describe_error
from adora_vl.utils.own_files import function_name

if TYPE_CHECKING:
    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.request import RunRequest
    from adora_vl.preflight.resolved_run import DataInfo, PromptInfo


def check_rewards(request: RunRequest) -> RewardSet:
    """Load the reward functions that a command or Python code asks for.

    Raises `UserError` for one that does not exist, or does not fit the prompts.
    """
    output_dir = Path(request.config.output_dir)
    script_args = request.script_args
    if script_args is None:
        return python_inputs.rewards_from_python(request.rewards, output_dir)
    # If the prompts ask for <answer> tags, the text inside the tags is graded.
    has_answer_tags = asks_for_answer_tags(
        script_args.adora_system_prompt, script_args.adora_prompt
    )
    return choose_rewards(
        script_args.adora_reward, answer_tags=has_answer_tags, output_dir=output_dir
    )


def check_tools(request: RunRequest) -> ToolSet:
    """Load the tools that the model may call, and build the first environment.

    Raises `UserError` for a tool that cannot be called.
    """
    config = request.config
    environments = build_environments(request.environment, config.adora_tool_options.seconds)
    return choose_tools([*config.tools, *request.tools], environments)


def with_environment_reward(
    rewards: RewardSet, tools: ToolSet, config: AdoraGRPOConfig
) -> RewardSet:
    """Return the reward functions, and with them the reward of the environments if there is one.

    An environment class has a reward if it has a method `get_reward`. The weight of this reward is
    1, as in TRL, unless `reward_weights` has a value for it already. The weight is written into the
    config, where TRL and the fingerprint read it.

    Raises `UserError` if there is no reward at all, or two have the same name.
    """
    environments = tools.environments
    if environments is None:
        return rewards
    name = environments.name
    if not environments.give_rewards:
        if not rewards.functions:
            raise UserError(
                f"reward_funcs: None would train on nothing, as {name} has no "
                "get_reward; give a function"
            )
        return rewards
    taken_names = (*rewards.entries, *map(function_name, rewards.functions))
    if name in taken_names:
        raise UserError(
            f"environment_factory: a reward function has the name {name!r}, too; rename the class"
        )
    weights = config.reward_weights
    # A list that is as long as the other rewards lacks the weight of the environments' reward.
    lacks_weight = weights is not None and len(weights) == len(rewards.entries)
    if lacks_weight:
        config.reward_weights = [*weights, 1.0]
    return replace(
        rewards,
        entries=(*rewards.entries, name),
        functions=(*rewards.functions, environments.reward_function()),
        from_python=rewards.from_python | {name},
    )


def check_criteria(config: AdoraGRPOConfig, rewards: RewardSet) -> None:
    """Raise `UserError` if ADORA uses the criterion `working`, and no reward measures it.

    The criterion compares the claims on a figure that the reward `steps` counts in each response.
    """
    measures_steps = STEPS in rewards.entries
    for name, method in config.methods.by_name.items():
        if isinstance(method, Adora) and "working" in method.criteria and not measures_steps:
            raise UserError(
                f"adora_method.{name}.criteria: working compares what the reward steps counts; add "
                "steps to adora_reward, with weight 0 if it is to be measured only"
            )


def check_user_code(
    request: RunRequest,
    rewards: RewardSet,
    tools: ToolSet,
    prompts: PromptInfo,
    data: DataInfo,
    context: RunContext,
) -> None:
    """Call the user's environments, tools and reward functions once, on two rows of the data.

    A judge is asked too. An error here would otherwise come after the weights are loaded and
    answers are sampled. A note for the user names tools that answer the same call differently.

    Args:
        request: What the user asks for.
        rewards: The reward functions.
        tools: The tools and environments.
        prompts: The processor, the tools and the limits on a prompt's length.
        data: The rows to train on.
        context: Where the run takes place, and the messages for the user.

    Raises `UserError` for code that fails.
    """
    config = request.config
    if isinstance(request.data_source, python_inputs.Datasets):
        for key, dataset in request.data_source.by_key:
            python_columns.refuse_unusable_answers(key, rewards, dataset)
    rows = _first_rows(request, rewards, tools, prompts, data)
    group_size = config.num_generations
    repeated_rows = [row for row in rows for _ in range(group_size)]
    # Groups as a training step makes them before it samples: their rollouts have no tokens yet. No
    # step of a training has the mode `try`, so the seeds of these groups are used nowhere else.
    groups = new_groups_of_rows(
        repeated_rows,
        StepKey(mode="try", step=0, micro=0),
        start_generation=0,
        first_row_number=0,
        group_size=group_size,
    )
    if tools.environments is not None:
        groups = tools.environments.reset_for_groups(
            groups,
            config.seed,
            control_tokens=control_tokens(prompts.processor),
            begins_generation=True,
        )
    rows_to_grade = [
        row_for_rewards(group.row, rollout) for group in groups for rollout in group.rollouts
    ]
    try_rewards(
        rewards,
        rows=rows_to_grade,
        timeout=config.adora_reward_timeout,
        state=TrainerState(),
        calls_judge=context.on_this_machine,
    )
    if prompts.toolbox is not None:
        context.messages.notes.extend(_notes_on_tools(prompts.toolbox, groups))


def _first_rows(
    request: RunRequest,
    rewards: RewardSet,
    tools: ToolSet,
    prompts: PromptInfo,
    data: DataInfo,
) -> list[dict[str, Any]]:
    """Return the first two rows of the data, for trying the user's rewards and tools on them.

    The list is empty if a command has none to try, or if the data set is not here. The rows of
    Python code are read in any case, since those of a stream were not checked before. The arguments
    are those of `check_user_code`.

    Raises `UserError` for rows that cannot be read or used, and for columns that a reward function
    needs and the data lacks.
    """
    if data.train_dataset is None:
        return []
    if isinstance(data.train_dataset, Dataset):
        columns = [name for name in data.train_dataset.column_names if name != "prompt"]
        if tools.environments:
            columns.append("environments")
        rewards.check_columns(columns)
    is_from_python = request.script_args is None
    has_code_to_try = bool(rewards.user_functions) or prompts.toolbox is not None
    if not is_from_python and not has_code_to_try:
        return []
    try:
        rows = with_upright_rgb_images(list(islice(iter(data.train_dataset), 2)))
    except Exception as error:  # the decoders of images raise exceptions of any class
        reason = describe_error(error)
        raise UserError(
            f"train_dataset: its first rows cannot be read ({reason}); mend them"
        ) from error
    if is_from_python:
        _refuse_unusable_rows(rows, control_tokens(prompts.processor))
    return rows


def _refuse_unusable_rows(rows: Sequence[Mapping[str, Any]], tokens: Sequence[str]) -> None:
    """Raise `UserError` for the first row with a prompt or an image that no step can use.

    `tokens`: the control tokens of the model, which no prompt may contain.
    """
    for number, row in enumerate(rows):
        fault = fault_in_messages(row.get("prompt"), tokens)
        if fault is not None:
            raise UserError(f"train_dataset: row {row.get('id', number)}: {fault}")
    for name, reason in unreadable_rows(rows):
        raise UserError(
            f"train_dataset: row {name}: an image cannot be read: {reason}; mend the row"
        )


def _notes_on_tools(toolbox: Toolbox, groups: Sequence[RolloutGroup]) -> list[str]:
    """Return a note on each tool that answers the same call differently when it is repeated.

    The tools are called with the images and environments of the first group.
    """
    if not groups:
        return nondeterminism_warnings(toolbox)
    first_group = groups[0]
    images = [image for image in images_of(first_group.row) if isinstance(image, Image.Image)]
    environments = [
        rollout.environment for rollout in first_group.rollouts if rollout.environment is not None
    ]
    return nondeterminism_warnings(toolbox, images, environments)
