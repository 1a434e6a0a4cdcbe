"""Every check before a weight is loaded, once and in one order, the cheapest first.

A command, a dry run, the doctor and Python code all come this way, so a mistake is refused by the
same line wherever it is made. Only `check_rewards`, `check_tools` and `check_user_code` run code of
the user's own, after all keys are right.
"""

from __future__ import annotations

from collections.abc import Mapping

from adora_vl.config.batch_plan import BatchLayout
from adora_vl.config.methods import check_methods, check_methods_fit_sharding
from adora_vl.config.run_context import RunContext
from adora_vl.evaluation import EvaluationPlan
from adora_vl.preflight.check_data import (
    check_evaluations,
    check_first_prompt,
    check_rows,
    check_tool_reply_room,
)
from adora_vl.preflight.check_keys import check_keys
from adora_vl.preflight.check_machine import check_batches, check_machine, check_schedule
from adora_vl.preflight.check_model import check_model, check_model_files, check_parts
from adora_vl.preflight.check_output_dir import check_output_dir
from adora_vl.preflight.check_prompts import check_prompts
from adora_vl.preflight.check_rewards import (
    check_criteria,
    check_rewards,
    check_tools,
    check_user_code,
    with_environment_reward,
)
from adora_vl.preflight.check_sampling import check_sampling
from adora_vl.preflight.request import RunRequest
from adora_vl.preflight.resolved_run import (
    DataInfo,
    ModelInfo,
    OutputInfo,
    PromptInfo,
    ResolvedRun,
    hashes_of_user_code,
)
from adora_vl.rewards.choose import RewardSet, check_reward_sums
from adora_vl.tools.run import ToolSet
from adora_vl.training.extensions import Extension, build_extensions
from adora_vl.utils.versions import check_versions


def run_checks(request: RunRequest, context: RunContext) -> ResolvedRun:
    """Make every check of a run before its weights are loaded, and return what they worked out.

    The cheapest checks come first. `context`: where the run takes place. Raises `UserError` at the
    first thing that cannot work.
    """
    config = request.config
    check_versions(config.use_vllm and context.on_this_machine)
    check_keys(request)
    check_sampling(config)
    check_methods(config)
    check_schedule(config)
    extensions: Mapping[str, Extension] = build_extensions(config)
    check_methods_fit_sharding(config, context.sharding)
    layout: BatchLayout = check_batches(config, context.sharding)
    check_machine(config, context)
    rewards: RewardSet = check_rewards(request)
    tools: ToolSet = check_tools(request)
    rewards = with_environment_reward(rewards, tools, config)
    check_reward_sums(rewards.entries, config.reward_weights, config.adora_correct_above)
    check_criteria(config, rewards)
    model: ModelInfo = check_model(request, extensions, context)
    check_parts(request, layout, model, context)
    prompts: PromptInfo = check_prompts(request, model, tools, context)
    data: DataInfo = check_rows(request, layout, model, prompts, context)
    check_first_prompt(config, model, prompts, data)
    check_tool_reply_room(config, prompts, data)
    check_user_code(request, rewards, tools, prompts, data, context)
    evaluations: EvaluationPlan | None = check_evaluations(request, layout, prompts, data, context)
    check_model_files(request, model, context)
    code_hashes = hashes_of_user_code(config, rewards, tools)
    output: OutputInfo = check_output_dir(request, model, data, code_hashes, context)
    return ResolvedRun(
        request=request,
        context=context,
        extensions=extensions,
        layout=layout,
        rewards=rewards,
        tools=tools,
        model=model,
        prompts=prompts,
        data=data,
        evaluations=evaluations,
        user_code_hashes=code_hashes,
        output=output,
    )
