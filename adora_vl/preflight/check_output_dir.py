"""Checks of `output_dir`: whose it is, and where in it the run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint.fingerprint import Fingerprint, compute_fingerprint
from adora_vl.checkpoint.resume import InputFolder, StartPoint
from adora_vl.config.command import refuse_unusable_output_dir
from adora_vl.data.loading import script_arguments_for_fingerprint
from adora_vl.models.adapter import hash_adapters
from adora_vl.preflight import python_inputs
from adora_vl.preflight.resolved_run import DataInfo, ModelInfo, OutputInfo
from adora_vl.preflight.run_folder import RunFolder

if TYPE_CHECKING:
    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.request import RunRequest


def check_output_dir(
    request: RunRequest,
    model: ModelInfo,
    data: DataInfo,
    code_hashes: Mapping[str, str],
    context: RunContext,
) -> OutputInfo:
    """Check the folder that a run writes to, and find where in it the run starts.

    A launch locks the folder, and a dry run only looks at it. From Python code it is left alone,
    because `train` locks it later. This is the last check, because the run is compared with a
    checkpoint by its config, and earlier checks still change the config.

    Args:
        request: What the user asks for.
        model: The model, of which only the config is loaded.
        data: The rows to train on.
        code_hashes: A hash of each file of the user's own code.
        context: Where the run takes place, and the messages for the user.

    Raises `UserError` for a folder of another run.
    """
    if not context.on_this_machine:
        return OutputInfo(folder=None, start_point=StartPoint(checkpoint=None))
    config = request.config
    refuse_unusable_output_dir(config.output_dir)
    model_folders = [InputFolder("model_name_or_path", source) for source in model.folders_or_ids]
    data_folders = [InputFolder("dataset_name", folder) for folder in data.folders]
    input_folders = [*model_folders, *data_folders]
    fingerprint_of_run = partial(
        compute_fingerprint_of_run, request, model, data, code_hashes, context
    )
    if context.output_dir_mode == "inspect":
        # The fingerprint reads all weights, so it is computed only if the folder has checkpoints.
        folder = RunFolder(config, fingerprint_of_run, input_folders)
        start_point = folder.inspect(
            config.resume_from_checkpoint, has_data=data.train_dataset is not None
        )
        return OutputInfo(folder=folder, start_point=start_point)
    folder = RunFolder(config, fingerprint_of_run(), input_folders)
    start_point = StartPoint(checkpoint=None)
    if context.output_dir_mode == "lock":
        start_point = folder.lock(config.resume_from_checkpoint)
    return OutputInfo(folder=folder, start_point=start_point)


def compute_fingerprint_of_run(
    request: RunRequest,
    model: ModelInfo,
    data: DataInfo,
    code_hashes: Mapping[str, str],
    context: RunContext,
) -> Fingerprint:
    """Return everything that influences the steps of a run, as text by name.

    A run resumes from a checkpoint only if their fingerprints are equal.

    Args:
        request: What the user asks for.
        model: The model, of which only the config is loaded.
        data: The rows to train on.
        code_hashes: A hash of each file of the user's own code.
        context: Where the run takes place.
    """
    script_args = request.script_args
    loaded_model = request.model.loaded_model
    model_id = model.name
    if loaded_model is not None:
        model_id = python_inputs.hash_model_object(loaded_model)
    settings: list[Any] = [request.config]
    data_ids: Sequence[str] = data.folders
    # Python code passes its rows, and has no keys of data and rewards. In a dry run the data set of
    # a command may not be here; then its keys are left out too.
    if script_args is None:
        data_ids = [python_inputs.hash_rows(data.train_dataset)]
    elif data.train_dataset is not None:
        settings = [
            script_arguments_for_fingerprint(script_args, data.train_dataset.data.table),
            request.config,
            request.model.model_args,
        ]
    result = compute_fingerprint(
        *settings,
        data=data_ids,
        model=model_id,
        revision=model.revision,
        processes=context.sharding.processes,
        sharding=context.sharding.name,
        code_hashes=code_hashes,
        left_out_ids=data.left_out_ids,
        has_tools=bool(request.tools),
    )
    if model.adapters:
        result["model"] = hash_adapters(model.adapters, result["model"])
    if script_args is None:
        result |= _fingerprint_of_python_objects(request, model)
    return result


def _fingerprint_of_python_objects(request: RunRequest, model: ModelInfo) -> Fingerprint:
    """Return the part of a fingerprint for what Python code passes as objects, beside its rows.

    These are the rewards, the processor, the adapter's config and the quantisation. Each is known
    by its content.
    """
    source = request.model
    identity_by_name = {"reward_funcs": python_inputs.rewards_as_json(request.rewards)}
    if source.processor is not None:
        identity_by_name["processing_class"] = python_inputs.hash_processor(source.processor)
    if source.peft_config is not None:
        identity_by_name["peft_config"] = python_inputs.adapter_config_as_json(source.peft_config)
    if model.is_four_bit:
        quantisation = (
            source.model_args.bnb_4bit_quant_type,
            source.model_args.use_bnb_nested_quant,
        )
        identity_by_name["4 bits"] = " ".join(map(str, quantisation))
    return identity_by_name
