"""Every check before a weight is loaded, once and in one order, the cheapest first.

A user's own code is run by the stops `rewards` and `tries` alone, after all keys are right.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from PIL import Image
from transformers import TrainerState

from adora_vl.builtin.builtin_data import data_folders, resolve_model
from adora_vl.checkpoint.fingerprint import Fingerprint, fingerprint, sharding_of
from adora_vl.checkpoint.resume import StartPoint
from adora_vl.config import AdoraGRPOConfig, checks
from adora_vl.config.batch_plan import batch_plan, check_rows
from adora_vl.config.command import check_output_dir
from adora_vl.config.run_context import RunContext
from adora_vl.config.unused_keys import RunSettings, refuse_unused, unused_keys
from adora_vl.data import prompt_lengths as lengths
from adora_vl.data.dataloader import shown_rows
from adora_vl.data.loading import as_asked, load_rows
from adora_vl.data.prompts import asks_for_answer_tags, control_token_in, control_tokens
from adora_vl.data.rows import has_images, images_of
from adora_vl.evaluation import DataMissingError, fitting_evaluations, take_evaluations
from adora_vl.models import check as fits
from adora_vl.models import reference
from adora_vl.models.adapter import adapters_of, check_keys, hash_of, processor_folder
from adora_vl.models.families import sees_images
from adora_vl.models.four_bit import check_four_bit
from adora_vl.models.load import check_weights, limit_pixels, load_config, load_processor
from adora_vl.models.shape import config_for_planning, refuse_embedding_adapters
from adora_vl.preflight import python_inputs
from adora_vl.preflight.resolved_run import ResolvedRun, RunRequest, count_of
from adora_vl.preflight.run_folder import RunFolder
from adora_vl.record.trackers import check_trackers
from adora_vl.rewards import try_rewards
from adora_vl.rewards.choose import check_sums, choose_rewards
from adora_vl.rollout.engine_settings import refuse_on_cpu
from adora_vl.rollout.prompt_tokens import refuse_prefill
from adora_vl.rollout.rollouts import RolloutGroup, groups_of, row_for_rewards
from adora_vl.tools.environments import Environments, environments_of
from adora_vl.tools.room import Room, refuse_no_room
from adora_vl.tools.run import Toolbox, choose_tools, view_of
from adora_vl.tools.tries import unsteady_tools
from adora_vl.training.extensions import check_extensions, chosen_extensions
from adora_vl.utils.errors import UserError, in_one_line
from adora_vl.utils.hub import no_hub, notes_on
from adora_vl.utils.own_files import function_name
from adora_vl.utils.versions import check_versions

_ELSEWHERE = (
    "the run is for another machine, so packages, trackers, servers, attention kernel, weights "
    "and output_dir were not looked at"
)


def walk(asked: RunRequest, where: RunContext) -> ResolvedRun:
    """Make every stop. Raises `UserError` at the first thing that cannot work."""
    run = ResolvedRun(asked, where)
    if not where.here:
        run.unknown.append(_ELSEWHERE)
    for stop in CHECKS:
        stop(run)
    return run


def versions(run: ResolvedRun) -> None:
    """The libraries, and vLLM where it is used."""
    check_versions(run.config.use_vllm and run.where.here)


def keys(run: ResolvedRun) -> None:
    """What the keys alone say."""
    by_trl = run.asked.trl_evaluates
    checks.check_config(run.config, trl_evaluates=by_trl)
    refuse_unused(run.config, trl_evaluates=by_trl)
    run.extensions = chosen_extensions(run.config)
    tools = bool(run.config.tools or run.asked.tools)
    environments = run.environment is not None
    if tools or environments:
        checks.check_tools(run.config, tools=tools, environments=environments, trl_evaluates=by_trl)


def batches(run: ResolvedRun) -> None:
    """Micro-batches, groups and machines."""
    sharding = run.where.sharding
    checks.check_machines(run.config, sharding.processes, sharding.machines)
    run.plan = batch_plan(run.config, sharding.processes)


def machine(run: ResolvedRun) -> None:
    """Optimizer, trackers and the hub, where this is the machine."""
    if not run.where.here:
        return
    checks.check_optimizer(run.config)
    check_trackers(run.config.report_to)
    # Transformers makes the repository when the weights are loaded
    if run.config.push_to_hub and no_hub():
        raise UserError(
            f"push_to_hub: true, but {no_hub()}; set it to false and upload output_dir afterwards"
        )


def rewards(run: ResolvedRun) -> None:
    """Presets, files, functions and options, and which sums they can reach; and the tools."""
    output_dir = Path(run.config.output_dir)
    if run.script is not None:
        tags = asks_for_answer_tags(run.script.adora_system_prompt, run.script.adora_prompt)
        run.rewards = choose_rewards(
            run.script.adora_reward, answer_tags=tags, output_dir=output_dir
        )
    else:
        run.rewards = python_inputs.rewards_given(run.asked.rewards, output_dir)
    environments = environments_of(run.environment, run.config.adora_tool_options.seconds)
    run.tools = choose_tools([*run.config.tools, *run.asked.tools], environments)
    if environments is not None:
        _graded_by(run, environments)
    check_sums(run.rewards.entries, run.config.reward_weights, run.config.adora_correct_above)


def _graded_by(run: ResolvedRun, environments: Environments) -> None:
    """Their own reward beside the others: as in TRL it weighs 1, unless `reward_weights` has one
    more.
    """
    found = run.rewards
    weights = run.config.reward_weights
    name = environments.name
    if not environments.grades:
        if not found.functions:
            raise UserError(
                f"reward_funcs: None would train on nothing, as {name} has no "
                "get_reward; give a function"
            )
        return
    same = name in (*found.entries, *map(function_name, found.functions))
    if same:
        raise UserError(
            f"environment_factory: a reward function has the name {name!r}, too; rename the class"
        )
    if weights is not None and len(weights) == len(found.entries):
        run.config.reward_weights = [*weights, 1.0]
    entries = (*found.entries, name)
    functions = (*found.functions, environments.reward())
    run.rewards = replace(
        found, entries=entries, functions=functions, from_python=found.from_python | {name}
    )


def model(run: ResolvedRun) -> None:
    """The model's config and family, and what the engine can do with it."""
    keys = run.model
    config = run.config
    here = run.where.here
    run.name = str(keys.model_name_or_path or "")
    run.revision = keys.model_revision
    if run.asked.model.loaded is not None:
        run.model_config = run.asked.model.loaded.config
    else:
        if not run.name:
            raise UserError("model_name_or_path: not set; name a model folder, a hub id, or 'tiny'")
        _find_adapters(run)
        with config.main_process_first(desc="building the tiny model where it is missing"):
            run.name = resolve_model(run.name)
        # whose report, and the config that it writes, name the model as the user does
        if run.where.paper:
            run.model_config, note = config_for_planning(run.name, run.revision)
            run.unknown += [note] if note else []
        else:
            if not run.adapters:
                keys.model_name_or_path = run.name
            run.model_config = load_config(run.name, run.revision)
        run.notes += notes_on(run.name)
    run.notes += fits.check_family(keys, config, run.model_config)
    stage = run.where.sharding.stage
    run.four_bit = check_four_bit(
        keys, config, run.model_config, run.peft_config, stage=stage, here=here
    )
    if run.four_bit and len(run.adapters) > (run.adapter is not None):
        merged = (
            f"{run.adapters[-1].name!r} would be merged into a base in 4 bits, which rounds it away"
        )
        remedy = "make a model of it with `python -m adora_vl.export` and name that"
        raise UserError(f"model_name_or_path: {merged}; {remedy}")
    check_extensions(run.extensions, run.model_config)
    checks.check_tensor_parallel(config, run.model_config, run.where.sharding.processes)
    if here and config.use_vllm and config.vllm_mode == "colocate":
        refuse_on_cpu(run.model_config, config.vllm_enable_sleep_mode)
    sharded = config.deepspeed_plugin is not None
    lost = run.adapter is None and fits.loses_updates(keys, run.model_config, deepspeed=sharded)
    if lost and not run.where.paper:  # a dry run says it by itself
        run.notes.append(fits.LOST_UPDATES)


def _find_adapters(run: ResolvedRun) -> None:
    """The adapters that were named in the place of a model, and their base in its name."""
    run.adapters = adapters_of("model_name_or_path", run.name, run.revision)
    if not run.adapters:
        return
    first = run.adapters[0]
    named = str(run.model.model_name_or_path)
    run.name = run.adapters[-1].base
    run.revision = run.adapters[-1].revision
    if run.adapter is None:
        run.notes.append(
            f"the adapter {named} is merged into its base {first.base}, and a new one is trained"
        )
    else:
        check_keys(first, run.model, run.asked.given.words if run.asked.given else ())
        run.notes.append(f"the adapter {named} of {first.base} goes on training")


def parts(run: ResolvedRun) -> None:
    """Frozen parts, layers with an adapter, attention, what `from_pretrained` is given, and the
    keys that do nothing with them.
    """
    if run.where.here:
        fits.check_attention(run.model, run.config.model_init_kwargs or {})
    loaded = run.asked.model.loaded
    if loaded is None:
        fits.check_arguments(run.model_config, dict(run.config.model_init_kwargs or {}))
    _check_reference(run)
    if loaded is None or not hasattr(loaded, "peft_config"):
        fits.check_parts(run.model, run.model_config, run.peft_config, run.config.adora_freeze)
    else:
        refuse_embedding_adapters(loaded)
    adapted = run.peft_config is not None or hasattr(loaded, "peft_config")
    fits.check_trainable(run.config, run.model_config, adapted=adapted)
    settings = RunSettings(run.config, run.model, adapted, run.asked.trl_evaluates)
    run.notes += unused_keys(settings)
    wanted = run.config.resume_from_checkpoint
    if run.script is None and wanted is not None:
        run.notes.append(
            f"resume_from_checkpoint: {wanted} in the config is not read by train(), as in "
            "Transformers; write train(resume_from_checkpoint=...)"
        )
    run.notes += fits.dropout_notes(run.peft_config, run.config, one_step=run.plan.has_one_step)


def _check_reference(run: ResolvedRun) -> None:
    """Whether the reference of a KL term can be the policy that the run starts from."""
    beta = run.config.beta
    loaded = run.asked.model.loaded
    if loaded is None:
        is_new = run.adapter is None
        reference.check_adapter_start(run.peft_config, beta, is_new=is_new)
        return
    reference.check_copied(loaded, beta)
    reference.check_adapter_start(run.peft_config, beta, is_new=True)
    for config in getattr(loaded, "peft_config", {}).values():
        reference.check_adapter_start(config, beta, is_new=False)


def processor(run: ResolvedRun) -> None:
    """The processor, its limits in pixels, and how long a prompt may be."""
    config = run.config
    run.processor = run.asked.model.processor
    if run.processor is None:
        where = processor_folder(run.adapters, run.name, sees=sees_images(run.model_config))
        run.processor = _load_processor(run, where, run.revision)
    if run.processor is not None:
        limit_pixels(run.processor, config.min_pixels, config.max_pixels)
    pixels = lengths.limits_of(
        run.processor,
        model=run.model_config,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    tokens = control_tokens(run.processor)
    _refuse_in_template(config.chat_template_kwargs or {}, tokens)
    if run.tools.environments is not None:
        run.tools.environments.control_tokens = tokens
    if run.tools.functions:
        view = view_of(run.model_config, pixels)
        run.toolbox = Toolbox(
            chosen=run.tools, options=config.adora_tool_options, view=view, control_tokens=tokens
        )
    unknown = lengths.uncountable(run.model_config)
    run.overlong = lengths.OverlongPrompts(
        None if unknown else _limit(run),
        _counter(run),
        pixels,
        run.script.adora_overlong_prompts if run.script is not None else None,
        speaks=run.first and not run.where.paper,
        paper=run.where.paper,
        most=run.asked.most,
    )
    if run.overlong.limit is None and run.first and not run.where.paper:
        print(
            "the lengths of the prompts are not checked: "
            f"{unknown or 'neither a key nor the model has a limit'}"
        )


def _refuse_in_template(options: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """What a chat template is given stands in every prompt; a whole template may have tokens."""
    given = {name: value for name, value in options.items() if name != "chat_template"}
    token = control_token_in(given, tokens)
    if token is not None:
        raise UserError(
            f"chat_template_kwargs: it has the model's own token {token}; remove it from the text"
        )


def _load_processor(run: ResolvedRun, name: str, revision: str | None) -> Any:
    """Where a dry run cannot reach the hub, None with a line about it."""
    try:
        return load_processor(name, revision)
    except UserError:
        if not run.where.paper or Path(name).is_dir():
            raise
        guess = (
            f"{lengths.CHARACTERS_A_TOKEN} characters per token, images follow the published rule"
        )
        run.unknown.append(
            f"the processor of {name} cannot be reached: text is estimated at {guess}"
        )
        return None


def _counter(run: ResolvedRun) -> Any:
    if run.script is None:
        return lengths.message_counter(run.processor, run.config.chat_template_kwargs)
    if run.processor is None:
        return lengths.character_counter(run.system_prompt)
    return lengths.tokenizer_counter(
        run.processor, run.system_prompt, run.config.chat_template_kwargs
    )


def _limit(run: ResolvedRun) -> lengths.ContextLimit | None:
    """The limit of prompts and answers. The first rank alone asks a server for its own."""
    config = run.config
    on_server = run.config.use_vllm and run.config.vllm_mode == "server"
    served = [lengths.served_length(config) if on_server and run.where.here and run.first else None]
    if on_server and run.where.here and config.world_size > 1:
        broadcast_object_list(served)
    limit = lengths.context_limit(config, run.model_config, served[0])
    if on_server and served[0] is None and run.first and not run.where.paper:
        print(
            "the vLLM server does not answer yet, so prompts are held against "
            f"{limit.name if limit else None}"
        )
    return limit


def rows(run: ResolvedRun) -> None:
    """The rows to train on: those that the model can read, and whose prompts leave room for an
    answer.
    """
    asked = run.asked.rows
    run.data = []
    run.dataset = None
    if isinstance(asked, python_inputs.Datasets):
        run.dataset = python_inputs.told_of_tools(asked.train, run.schemas)
        run.evaluated = python_inputs.told_of_tools(asked.evaluate, run.schemas)
        for one in (asked.train, asked.evaluate):
            refuse_prefill(one)
        _check_stream(run.config, asked.train)
        tokens = control_tokens(run.processor)
        python_inputs.refuse_unusable_prompts("train_dataset", run.dataset, tokens)
        python_inputs.refuse_unusable_prompts("eval_dataset", run.evaluated, tokens)
        if python_inputs.is_stored(run.dataset):
            fits.check_sees(
                run.model, run.model_config, has_images=python_inputs.check_prompts(run.dataset)
            )
            run.overlong.kept_of(python_inputs.prompts_of(run.dataset), len(run.dataset))
    else:
        with run.config.main_process_first(desc="making the dataset where it is missing"):
            run.data = data_folders(asked)
        missing = (
            next((name for name in run.data if not Path(name).is_dir()), None)
            if run.where.paper
            else None
        )
        if missing is not None:
            guess, words = lengths.assumed(run.overlong.pixels, sees=sees_images(run.model_config))
            run.unknown.append(
                f"the dataset {missing!r} is not here, so rows and prompts are not known; {words}"
            )
            run.lengths = guess
            return
        told = copy(asked)
        told.adora_system_prompt = run.system_prompt
        run.dataset = load_rows(
            told, folders=run.data, seed=run.config.seed_of_rows, fitting=partial(_fitting, run)
        )
        python_inputs.refuse_unusable_prompts("dataset", run.dataset, control_tokens(run.processor))
    run.lengths = run.overlong.lengths
    count = count_of(run.dataset)
    if count is not None:
        check_rows(run.plan, count)


def _check_stream(config: AdoraGRPOConfig, dataset: Any) -> None:
    """Raise `UserError` for a seed that TRL does not shuffle a streamed data set by."""
    seed = config.data_seed
    if isinstance(dataset, IterableDataset) and seed is not None:
        raise UserError(
            f"data_seed: {seed}, but a streamed data set is shuffled by seed; set that one, or "
            "load the data set whole"
        )


def room(run: ResolvedRun) -> None:
    """Whether the limits leave room for an answer of each tool."""
    if run.toolbox is None:
        return
    config = run.config
    known = run.lengths is not None and run.dataset is not None  # and not assumed
    prompts = run.lengths.prompt if known and run.lengths is not None else []
    limits = Room(
        key="max_completion_length",
        completion=config.max_completion_length,
        context=config.vllm_max_model_length,
        prompt=min(prompts, default=None),
        pictures=python_inputs.fewest_pictures(run.dataset),
    )
    refuse_no_room(
        run.toolbox,
        processor=run.processor,
        template=config.chat_template_kwargs or {},
        room=limits,
    )


def _fitting(run: ResolvedRun, dataset: Dataset, texts: Sequence[str]) -> Sequence[int]:
    """A tokenizer alone counts no images, so it is asked first whether the model reads them."""
    fits.check_sees(run.model, run.model_config, has_images=has_images(dataset.data.table))
    if run.asked.most is not None and run.asked.most < len(dataset):
        run.unknown.append(
            f"measured on the first {run.asked.most} of {len(dataset)} rows (--rows)"
        )
    return run.overlong.fitting(dataset, texts)


def tries(run: ResolvedRun) -> None:
    """The user's own environments, tools and reward functions on the groups of two rows, and the
    judge with a question.
    """
    rows = list[Any]()
    environments = run.tools.environments
    if run.dataset is not None and (run.rewards.user_functions or run.toolbox is not None):
        if isinstance(run.dataset, Dataset):
            named = [name for name in run.dataset.column_names if name != "prompt"]
            run.rewards.check_columns([*named, "environments"] if environments else named)
        try:
            rows = shown_rows(list(islice(iter(run.dataset), 2)))
        except Exception as error:  # a decoder raises what it likes
            why = in_one_line(error)
            raise UserError(
                f"train_dataset: its first rows cannot be read ({why}); mend them"
            ) from error
    size = run.config.num_generations
    groups = groups_of([row for row in rows for _ in range(size)], "try/0/0", 0, 0, size)
    if environments is not None:
        groups = environments.entered(groups, run.config.seed, anew=True)
    given = [row_for_rewards(group.row, rollout) for group in groups for rollout in group.rollouts]
    try_rewards(
        run.rewards,
        rows=given,
        timeout=run.config.adora_reward_timeout,
        state=TrainerState(),
        calls_judge=run.where.here,
    )
    if run.toolbox is not None:
        run.notes += _unsteady(run.toolbox, groups)


def _unsteady(toolbox: Toolbox, groups: Sequence[RolloutGroup]) -> list[str]:
    """A line for each tool that answers a call in two ways, on the first problem's pictures."""
    if not groups:
        return unsteady_tools(toolbox)
    first = groups[0]
    pictures = [image for image in images_of(first.row) if isinstance(image, Image.Image)]
    inside = [rollout.environment for rollout in first.rollouts if rollout.environment is not None]
    return unsteady_tools(toolbox, pictures, inside)


def evaluations(run: ResolvedRun) -> None:
    """The problems of the evaluations on the way; whole groups where TRL evaluates."""
    config = run.config
    asked = run.asked.rows
    run.evaluations = None
    if isinstance(asked, python_inputs.Datasets) and asked.evaluate is not None:
        key = "num_generations_eval" if config.num_generations_eval else "num_generations"
        batch = config.per_device_eval_batch_size
        group = getattr(config, key)
        processes = run.plan.processes
        if batch * processes % group:
            raise UserError(
                f"per_device_eval_batch_size: {batch} x {processes} processes is no whole "
                f"number of groups of {key}: {group}; set it to {group}"
            )
        return
    prompt = run.script.adora_prompt if run.script is not None else None
    try:  # the report of a dry run reads the config again
        asked_of = copy(config) if run.where.paper else config
        plan = take_evaluations(asked_of, run.data, prompt)
    except DataMissingError as error:
        if not run.where.paper:
            raise
        run.unknown.append(f"the problems of the evaluations are not known: {error}")
        return
    run.evaluations = fitting_evaluations(plan, run.overlong) if plan is not None else None


def weights(run: ResolvedRun) -> None:
    """Whether a model folder's files are there and whole."""
    if run.asked.model.loaded is None:
        for one in (run.name, *(str(adapter.folder) for adapter in run.adapters)):
            check_weights("model_name_or_path", one)


def folder(run: ResolvedRun) -> None:
    """`output_dir`, and where in it the run starts."""
    run.start = StartPoint(None, [])
    if not run.where.here:
        return
    config = run.config
    check_output_dir(config.output_dir)
    models = (run.name, *(str(adapter.folder) for adapter in run.adapters))
    inputs = [
        *(("model_name_or_path", one) for one in models),
        *(("dataset_name", one) for one in run.data),
    ]
    now = partial(_fingerprint, run)
    run.folder = RunFolder(config, now if run.where.folder == "look" else now(), inputs)
    if run.where.folder == "take":
        run.start = run.folder.take(config.resume_from_checkpoint)
    elif run.where.folder == "look":
        run.start = run.folder.look(
            config.resume_from_checkpoint, data_known=run.dataset is not None
        )


def _fingerprint(run: ResolvedRun) -> Fingerprint:
    """By which a checkpoint's run is known again."""
    source = run.asked.model
    script = run.script
    further = {}
    settings: list[Any] = [run.config]
    if script is not None and run.dataset is not None:
        settings = [as_asked(script, run.dataset.data.table), run.config, run.model]
    if script is None and source.peft_config is not None:
        further = {"peft_config": python_inputs.adapter_text(source.peft_config)}
    if script is None and run.four_bit:
        further["4 bits"] = f"{run.model.bnb_4bit_quant_type} {run.model.use_bnb_nested_quant}"
    name = run.name if source.loaded is None else python_inputs.identity_of_model(source.loaded)
    found = fingerprint(
        *settings,
        data=run.data if script is not None else [python_inputs.identity_of_rows(run.dataset)],
        model=name,
        revision=run.revision,
        processes=run.where.sharding.processes,
        sharding=run.where.sharding.name if run.where.paper else sharding_of(run.config),
        own=run.own,
        left_out=run.overlong.left_out,
    )
    if run.adapters:
        found["model"] = hash_of(run.adapters, found["model"])
    return {**found, **further}


CHECKS: tuple[Callable[[ResolvedRun], None], ...] = (
    versions,
    keys,
    batches,
    machine,
    rewards,
    model,
    parts,
    processor,
    rows,
    room,
    tries,
    evaluations,
    weights,
    folder,
)
