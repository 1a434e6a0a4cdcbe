"""Every check before a weight is loaded, once and in one order, the cheapest first.

A command, a dry run, the doctor and Python code all come this way, so a mistake is refused by the
same line wherever it is made. Only the checks `rewards` and `tries` run code of the user's own,
after all keys are right.
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
from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments, checks
from adora_vl.config.batch_plan import batch_plan, check_rows
from adora_vl.config.command import check_output_dir
from adora_vl.config.run_context import RunContext
from adora_vl.config.unused_keys import RunSettings, refuse_unused, unused_keys
from adora_vl.data import prompt_lengths as lengths
from adora_vl.data.dataloader import shown_rows
from adora_vl.data.dataset import refuse_for_evaluation
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


def resolve_run(request: RunRequest, context: RunContext) -> ResolvedRun:
    """Run every check. Raises `UserError` at the first thing that cannot work."""
    run = ResolvedRun(request, context)
    if not context.local:
        run.unknown.append(_ELSEWHERE)
    for check in CHECKS:
        check(run)
    return run


def versions(run: ResolvedRun) -> None:
    """Check the versions of the libraries, and of vLLM where it is used."""
    check_versions(run.config.use_vllm and run.context.local)


def keys(run: ResolvedRun) -> None:
    """Check the keys against each other, before anything is read from the disk or the hub."""
    trl_evaluates = run.request.trl_evaluates
    checks.check_config(run.config, trl_evaluates=trl_evaluates)
    refuse_unused(run.config, trl_evaluates=trl_evaluates)
    run.extensions = chosen_extensions(run.config)
    tools = bool(run.config.tools or run.request.tools)
    environments = run.environment is not None
    if tools or environments:
        checks.check_tools(
            run.config, tools=tools, environments=environments, trl_evaluates=trl_evaluates
        )


def batches(run: ResolvedRun) -> None:
    """Work out micro-batches and groups, and check how they are spread over machines."""
    sharding = run.context.sharding
    checks.check_machines(run.config, sharding.processes, sharding.machines)
    run.plan = batch_plan(run.config, sharding.processes)


def machine(run: ResolvedRun) -> None:
    """Check optimizer, trackers and the hub, where this machine will run the training."""
    if not run.context.local:
        return
    checks.check_optimizer(run.config)
    check_trackers(run.config.report_to)
    # Transformers would create the repository only after the weights are loaded.
    if run.config.push_to_hub and no_hub():
        raise UserError(
            f"push_to_hub: true, but {no_hub()}; set it to false and upload output_dir afterwards"
        )


def rewards(run: ResolvedRun) -> None:
    """Choose the reward functions and the tools, and check which sums the rewards can reach."""
    output_dir = Path(run.config.output_dir)
    if run.script is not None:
        tags = asks_for_answer_tags(run.script.adora_system_prompt, run.script.adora_prompt)
        run.rewards = choose_rewards(
            run.script.adora_reward, answer_tags=tags, output_dir=output_dir
        )
    else:
        run.rewards = python_inputs.rewards_from_python(run.request.rewards, output_dir)
    environments = environments_of(run.environment, run.config.adora_tool_options.seconds)
    run.tools = choose_tools([*run.config.tools, *run.request.tools], environments)
    if environments is not None:
        _add_environment_reward(run, environments)
    check_sums(run.rewards.entries, run.config.reward_weights, run.config.adora_correct_above)


def _add_environment_reward(run: ResolvedRun, environments: Environments) -> None:
    """Add the reward of the environments to the others.

    Its weight is 1, as in TRL, unless `reward_weights` has one value more than there are functions.
    """
    chosen = run.rewards
    weights = run.config.reward_weights
    name = environments.name
    if not environments.grades:
        if not chosen.functions:
            raise UserError(
                f"reward_funcs: None would train on nothing, as {name} has no "
                "get_reward; give a function"
            )
        return
    taken_names = (*chosen.entries, *map(function_name, chosen.functions))
    if name in taken_names:
        raise UserError(
            f"environment_factory: a reward function has the name {name!r}, too; rename the class"
        )
    if weights is not None and len(weights) == len(chosen.entries):
        run.config.reward_weights = [*weights, 1.0]
    run.rewards = replace(
        chosen,
        entries=(*chosen.entries, name),
        functions=(*chosen.functions, environments.reward()),
        from_python=chosen.from_python | {name},
    )


def model(run: ResolvedRun) -> None:
    """Find the model, and check its family, its precision and what the engine can do with it."""
    keys = run.model
    config = run.config
    local = run.context.local
    run.name = str(keys.model_name_or_path or "")
    run.revision = keys.model_revision
    if run.request.model.loaded is not None:
        run.model_config = run.request.model.loaded.config
    else:
        if not run.name:
            raise UserError("model_name_or_path: not set; name a model folder, a hub id, or 'tiny'")
        _find_adapters(run)
        with config.main_process_first(desc="building the tiny model where it is missing"):
            run.name = resolve_model(run.name)
        # The report of a dry run, and the config that it writes, name the model as the user does.
        if run.context.dry_run:
            run.model_config, note = config_for_planning(run.name, run.revision)
            run.unknown += [note] if note else []
        else:
            if not run.adapters:
                keys.model_name_or_path = run.name
            run.model_config = load_config(run.name, run.revision)
        run.notes += notes_on(run.name)
    run.notes += fits.check_family(keys, config, run.model_config)
    stage = run.context.sharding.stage
    run.four_bit = check_four_bit(
        keys, config, run.model_config, run.peft_config, stage=stage, runs_here=local
    )
    if run.four_bit and len(run.merged_adapters):
        merged = (
            f"{run.adapters[-1].name!r} would be merged into a base in 4 bits, which rounds it away"
        )
        remedy = "make a model of it with `python -m adora_vl.export` and name that"
        raise UserError(f"model_name_or_path: {merged}; {remedy}")
    check_extensions(run.extensions, run.model_config)
    checks.check_tensor_parallel(config, run.model_config, run.context.sharding.processes)
    if local and config.use_vllm and config.vllm_mode == "colocate":
        refuse_on_cpu(run.model_config, config.vllm_enable_sleep_mode)
    sharded = config.deepspeed_plugin is not None
    lost = run.adapter is None and fits.loses_updates(keys, run.model_config, deepspeed=sharded)
    # a dry run says so in its report
    if lost and not run.context.dry_run:
        run.notes.append(fits.LOST_UPDATES)


def _find_adapters(run: ResolvedRun) -> None:
    """Follow an adapter that was named in place of a model down to its base model."""
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
        cli_args = run.request.cli_args
        check_keys(first, run.model, cli_args.words if cli_args else ())
        run.notes.append(f"the adapter {named} of {first.base} goes on training")


def parts(run: ResolvedRun) -> None:
    """Check what is trained, how the model is loaded, and which keys do nothing with that.

    What is trained: frozen parts, layers with an adapter, the reference of a KL term. How it is
    loaded: the attention kernel and the arguments of `from_pretrained`.
    """
    if run.context.local:
        fits.check_attention(run.model, run.config.model_init_kwargs or {})
    loaded = run.request.model.loaded
    if loaded is None:
        fits.check_arguments(run.model_config, dict(run.config.model_init_kwargs or {}))
    _check_reference(run)
    if loaded is None or not hasattr(loaded, "peft_config"):
        fits.check_parts(run.model, run.model_config, run.peft_config, run.config.adora_freeze)
    else:
        refuse_embedding_adapters(loaded)
    adapted = run.peft_config is not None or hasattr(loaded, "peft_config")
    fits.check_trainable(run.config, run.model_config, adapted=adapted)
    settings = RunSettings(run.config, run.model, adapted, run.request.trl_evaluates)
    run.notes += unused_keys(settings)
    checkpoint = run.config.resume_from_checkpoint
    if run.script is None and checkpoint is not None:
        run.notes.append(
            f"resume_from_checkpoint: {checkpoint} in the config is not read by train(), as in "
            "Transformers; write train(resume_from_checkpoint=...)"
        )
    run.notes += fits.dropout_notes(run.peft_config, run.config, one_step=run.plan.has_one_step)


def _check_reference(run: ResolvedRun) -> None:
    """Check that the reference of a KL term can be the policy that the run starts from."""
    beta = run.config.beta
    loaded = run.request.model.loaded
    if loaded is None:
        is_new = run.adapter is None
        reference.check_adapter_start(run.peft_config, beta, is_new=is_new)
        return
    reference.check_copied(loaded, beta)
    reference.check_adapter_start(run.peft_config, beta, is_new=True)
    for config in getattr(loaded, "peft_config", {}).values():
        reference.check_adapter_start(config, beta, is_new=False)


def processor(run: ResolvedRun) -> None:
    """Load the processor, limit its pixels, and work out how long a prompt may be."""
    config = run.config
    run.processor = run.request.model.processor
    if run.processor is None:
        source = processor_folder(run.adapters, run.name, sees=sees_images(run.model_config))
        run.processor = _load_processor(run, source, run.revision)
    if run.processor is not None:
        limit_pixels(run.processor, config.min_pixels, config.max_pixels)
    pixels = lengths.limits_of(
        run.processor,
        model=run.model_config,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    tokens = control_tokens(run.processor)
    _refuse_control_tokens(config.chat_template_kwargs or {}, tokens)
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
        speaks=run.is_main_process and not run.context.dry_run,
        paper=run.context.dry_run,
        max_rows=run.request.max_rows,
    )
    if run.overlong.limit is None and run.is_main_process and not run.context.dry_run:
        print(
            "the lengths of the prompts are not checked: "
            f"{unknown or 'neither a key nor the model has a limit'}"
        )


def _refuse_control_tokens(options: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Raise `UserError` for a control token in `chat_template_kwargs`.

    The values stand in every prompt, where such a token would end a turn. A `chat_template` among
    them is left out: a whole template needs the tokens.
    """
    values = {name: value for name, value in options.items() if name != "chat_template"}
    token = control_token_in(values, tokens)
    if token is not None:
        raise UserError(
            f"chat_template_kwargs: it has the model's own token {token}; remove it from the text"
        )


def _load_processor(run: ResolvedRun, name: str, revision: str | None) -> Any:
    """Load the processor; None, with a line for the user, where a dry run cannot reach the hub."""
    try:
        return load_processor(name, revision)
    except UserError:
        if not run.context.dry_run or Path(name).is_dir():
            raise
        guess = (
            f"{lengths.CHARACTERS_A_TOKEN} characters per token, images follow the published rule"
        )
        run.unknown.append(
            f"the processor of {name} cannot be reached: text is estimated at {guess}"
        )
        return None


def _counter(run: ResolvedRun) -> Any:
    """The function that counts the tokens of prompts, exact where the processor is here."""
    if run.script is None:
        return lengths.message_counter(run.processor, run.config.chat_template_kwargs)
    if run.processor is None:
        return lengths.character_counter(run.system_prompt)
    return lengths.tokenizer_counter(
        run.processor, run.system_prompt, run.config.chat_template_kwargs
    )


def _limit(run: ResolvedRun) -> lengths.ContextLimit | None:
    """The limit on the length of a prompt with its answer; None where nothing limits it.

    Collective with a server: rank 0 alone asks it for its limit, and broadcasts the reply.
    """
    config = run.config
    on_server = config.use_vllm and config.vllm_mode == "server"
    served_length = None
    if on_server and run.context.local:
        if run.is_main_process:
            served_length = lengths.served_length(config)
        if config.world_size > 1:
            broadcast_list = [served_length]
            broadcast_object_list(broadcast_list)
            served_length = broadcast_list[0]
    limit = lengths.context_limit(config, run.model_config, served_length)
    if on_server and served_length is None and run.is_main_process and not run.context.dry_run:
        print(
            "the vLLM server does not answer yet, so prompts are held against "
            f"{limit.name if limit else None}"
        )
    return limit


def rows(run: ResolvedRun) -> None:
    """Load the rows that the model can read and whose prompts leave room for an answer."""
    request = run.request.rows
    run.data = []
    run.dataset = None
    if isinstance(request, python_inputs.Datasets):
        _take_datasets(run, request)
    else:
        with run.config.main_process_first(desc="making the dataset where it is missing"):
            run.data = data_folders(request)
        if run.context.dry_run and not all(Path(folder).is_dir() for folder in run.data):
            _assume_lengths(run)
            return
        _load_rows_of_keys(run, request)
    run.lengths = run.overlong.lengths
    count = count_of(run.dataset)
    if count is not None:
        check_rows(run.plan, count)


def _take_datasets(run: ResolvedRun, datasets: python_inputs.Datasets) -> None:
    """Check the data sets that Python code passed, and take them into the run."""
    run.dataset = python_inputs.with_tool_descriptions(datasets.train, run.schemas)
    run.evaluated = python_inputs.with_tool_descriptions(datasets.evaluate, run.schemas)
    refuse_for_evaluation(datasets.train, where="train_dataset:")
    for dataset in (datasets.train, datasets.evaluate):
        refuse_prefill(dataset)
    _check_stream(run.config, datasets.train)
    tokens = control_tokens(run.processor)
    python_inputs.refuse_unusable_prompts("train_dataset", run.dataset, tokens)
    python_inputs.refuse_unusable_prompts("eval_dataset", run.evaluated, tokens)
    if python_inputs.is_stored(run.dataset):
        any_images = python_inputs.check_prompts(run.dataset)
        fits.check_sees(run.model, run.model_config, has_images=any_images)
        run.overlong.kept_of(python_inputs.prompts_of(run.dataset), len(run.dataset))


def _assume_lengths(run: ResolvedRun) -> None:
    """Assume the lengths of prompts for a dry run whose data set is not on this machine."""
    missing = next(folder for folder in run.data if not Path(folder).is_dir())
    guess, words = lengths.assumed(run.overlong.pixels, sees=sees_images(run.model_config))
    run.unknown.append(
        f"the dataset {missing!r} is not here, so rows and prompts are not known; {words}"
    )
    run.lengths = guess


def _load_rows_of_keys(run: ResolvedRun, script: AdoraScriptArguments) -> None:
    """Load the rows that a command names, with the system prompt that tools add to."""
    script = copy(script)
    script.adora_system_prompt = run.system_prompt
    run.dataset = load_rows(
        script, folders=run.data, seed=run.config.seed_of_rows, fitting=partial(_fitting, run)
    )
    python_inputs.refuse_unusable_prompts("dataset", run.dataset, control_tokens(run.processor))


def _check_stream(config: AdoraGRPOConfig, dataset: Dataset | IterableDataset) -> None:
    """Raise `UserError` for `data_seed`, by which TRL does not shuffle a streamed data set."""
    seed = config.data_seed
    if isinstance(dataset, IterableDataset) and seed is not None:
        raise UserError(
            f"data_seed: {seed}, but a streamed data set is shuffled by seed; set that one, or "
            "load the data set whole"
        )


def room(run: ResolvedRun) -> None:
    """Check that the limits on tokens leave room for an answer of each tool."""
    if run.toolbox is None:
        return
    config = run.config
    # without a data set the lengths are assumed, and prove nothing
    prompts = []
    if run.lengths is not None and run.dataset is not None:
        prompts = run.lengths.prompt
    limits = Room(
        key="max_completion_length",
        completion=config.max_completion_length,
        context=config.vllm_max_model_length,
        prompt=min(prompts, default=None),
        pictures=python_inputs.fewest_images(run.dataset),
    )
    refuse_no_room(
        run.toolbox,
        processor=run.processor,
        template=config.chat_template_kwargs or {},
        room=limits,
    )


def _fitting(run: ResolvedRun, dataset: Dataset, texts: Sequence[str]) -> Sequence[int]:
    """The numbers of the rows whose prompts leave room for an answer.

    Images are checked first: a tokenizer alone would count none, and a model that cannot read
    them would be found out only later.
    """
    fits.check_sees(run.model, run.model_config, has_images=has_images(dataset.data.table))
    if run.request.max_rows is not None and run.request.max_rows < len(dataset):
        run.unknown.append(
            f"measured on the first {run.request.max_rows} of {len(dataset)} rows (--rows)"
        )
    return run.overlong.fitting(dataset, texts)


def tries(run: ResolvedRun) -> None:
    """Try the user's environments, tools and reward functions on two rows, and ask the judge.

    What fails here would otherwise fail after the weights are loaded and answers are sampled.
    """
    rows = _first_rows(run)
    environments = run.tools.environments
    group_size = run.config.num_generations
    repeated_rows = [row for row in rows for _ in range(group_size)]
    groups = groups_of(repeated_rows, "try/0/0", 0, 0, group_size)
    if environments is not None:
        groups = environments.entered(groups, run.config.seed, anew=True)
    graded_rows = [
        row_for_rewards(group.row, rollout) for group in groups for rollout in group.rollouts
    ]
    try_rewards(
        run.rewards,
        rows=graded_rows,
        timeout=run.config.adora_reward_timeout,
        state=TrainerState(),
        calls_judge=run.context.local,
    )
    if run.toolbox is not None:
        run.notes += _unsteady(run.toolbox, groups)


def _first_rows(run: ResolvedRun) -> list[dict[str, Any]]:
    """The first two rows, where rewards or tools of the user's are tried; else none."""
    rows: list[dict[str, Any]] = []
    environments = run.tools.environments
    if run.dataset is not None and (run.rewards.user_functions or run.toolbox is not None):
        if isinstance(run.dataset, Dataset):
            columns = [name for name in run.dataset.column_names if name != "prompt"]
            if environments:
                columns.append("environments")
            run.rewards.check_columns(columns)
        try:
            rows = shown_rows(list(islice(iter(run.dataset), 2)))
        except Exception as error:  # the decoders of images raise exceptions of any class
            why = in_one_line(error)
            raise UserError(
                f"train_dataset: its first rows cannot be read ({why}); mend them"
            ) from error
    return rows


def _unsteady(toolbox: Toolbox, groups: Sequence[RolloutGroup]) -> list[str]:
    """A line for each tool that answers the same call in two ways, on the first row's images."""
    if not groups:
        return unsteady_tools(toolbox)
    first = groups[0]
    images = [image for image in images_of(first.row) if isinstance(image, Image.Image)]
    environments = [
        rollout.environment for rollout in first.rollouts if rollout.environment is not None
    ]
    return unsteady_tools(toolbox, images, environments)


def evaluations(run: ResolvedRun) -> None:
    """Load the problems that are evaluated during training.

    Where TRL evaluates a data set from Python, only its batches are checked: they have to be whole
    groups.
    """
    config = run.config
    request = run.request.rows
    run.evaluations = None
    if isinstance(request, python_inputs.Datasets) and request.evaluate is not None:
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
    # `take_evaluations` takes keys out of the config, which the report of a dry run reads again.
    taken_from = copy(config) if run.context.dry_run else config
    try:
        plan = take_evaluations(taken_from, run.data, prompt)
    except DataMissingError as error:
        if not run.context.dry_run:
            raise
        run.unknown.append(f"the problems of the evaluations are not known: {error}")
        return
    run.evaluations = fitting_evaluations(plan, run.overlong) if plan is not None else None


def weights(run: ResolvedRun) -> None:
    """Check that the files of the model's folder, and of its adapters, are complete."""
    if run.request.model.loaded is None:
        for model_folder in _model_folders(run):
            check_weights("model_name_or_path", model_folder)


def _model_folders(run: ResolvedRun) -> list[str]:
    """The model and the adapters that the run reads: folders, or hub ids."""
    return [run.name, *(str(adapter.folder) for adapter in run.adapters)]


def folder(run: ResolvedRun) -> None:
    """Check `output_dir`, and find where in it the run starts.

    A launch locks the folder, a dry run only looks at it, and Python code does so in `train`.
    """
    run.start = StartPoint(None, [])
    if not run.context.local:
        return
    config = run.config
    check_output_dir(config.output_dir)
    inputs = [
        *(("model_name_or_path", model) for model in _model_folders(run)),
        *(("dataset_name", data) for data in run.data),
    ]
    if run.context.output_dir_mode == "look":
        run.folder = RunFolder(config, partial(_fingerprint, run), inputs)
    else:
        run.folder = RunFolder(config, _fingerprint(run), inputs)
    if run.context.output_dir_mode == "take":
        run.start = run.folder.take(config.resume_from_checkpoint)
    elif run.context.output_dir_mode == "look":
        run.start = run.folder.look(
            config.resume_from_checkpoint, data_known=run.dataset is not None
        )


def _fingerprint(run: ResolvedRun) -> Fingerprint:
    """Every setting that influences the steps, with which a checkpoint is compared."""
    source = run.request.model
    script = run.script
    python_settings = {}
    settings: list[Any] = [run.config]
    if script is not None and run.dataset is not None:
        settings = [as_asked(script, run.dataset.data.table), run.config, run.model]
    if script is None and source.peft_config is not None:
        python_settings["peft_config"] = python_inputs.adapter_text(source.peft_config)
    if script is None and run.four_bit:
        python_settings["4 bits"] = (
            f"{run.model.bnb_4bit_quant_type} {run.model.use_bnb_nested_quant}"
        )
    model_id = run.name
    if source.loaded is not None:
        model_id = python_inputs.identity_of_model(source.loaded)
    data = run.data if script is not None else [python_inputs.identity_of_rows(run.dataset)]
    result = fingerprint(
        *settings,
        data=data,
        model=model_id,
        revision=run.revision,
        processes=run.context.sharding.processes,
        sharding=run.context.sharding.name if run.context.dry_run else sharding_of(run.config),
        code_hashes=run.user_code_hashes,
        left_out=run.overlong.left_out,
    )
    if run.adapters:
        result["model"] = hash_of(run.adapters, result["model"])
    return {**result, **python_settings}


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
