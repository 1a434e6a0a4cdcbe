"""Checks of `output_dir`: whose it is, and where in it the run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint.fingerprint import Fingerprint, fingerprint, sharding_of
from adora_vl.checkpoint.resume import InputFolder, StartPoint
from adora_vl.config.command import refuse_no_folder
from adora_vl.data.loading import script_arguments_for_fingerprint
from adora_vl.models.adapter import hash_adapters
from adora_vl.preflight import python_inputs
from adora_vl.preflight.facts import DataFacts, ModelFacts, OutputFacts
from adora_vl.preflight.run_folder import RunFolder

if TYPE_CHECKING:
    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.request import RunRequest


def check_output_dir(
    request: RunRequest,
    model: ModelFacts,
    data: DataFacts,
    code_hashes: Mapping[str, str],
    context: RunContext,
) -> OutputFacts:
    """Check the folder that a run writes to, and find where in it the run starts.

    A launch locks the folder, and a dry run only looks at it. From Python code it is left alone,
    because `train` locks it later. This is the last check, because the run is compared with a
    checkpoint by its config, and earlier checks still change the config.

    `code_hashes`: a hash of each file of the user's own code. Raises `UserError`.
    """
    if not context.on_this_machine:
        return OutputFacts(folder=None, start=StartPoint(checkpoint=None))
    config = request.config
    refuse_no_folder(config.output_dir)
    model_folders = [InputFolder("model_name_or_path", source) for source in model.sources]
    data_folders = [InputFolder("dataset_name", folder) for folder in data.folders]
    inputs = [*model_folders, *data_folders]
    compute_fingerprint = partial(fingerprint_of, request, model, data, code_hashes, context)
    if context.output_dir_mode == "look":
        # The fingerprint reads all weights, so it is computed only if the folder has checkpoints.
        folder = RunFolder(config, compute_fingerprint, inputs)
        start = folder.look(config.resume_from_checkpoint, has_data=data.train is not None)
        return OutputFacts(folder=folder, start=start)
    folder = RunFolder(config, compute_fingerprint(), inputs)
    start = StartPoint(checkpoint=None)
    if context.output_dir_mode == "take":
        start = folder.take(config.resume_from_checkpoint)
    return OutputFacts(folder=folder, start=start)


def fingerprint_of(
    request: RunRequest,
    model: ModelFacts,
    data: DataFacts,
    code_hashes: Mapping[str, str],
    context: RunContext,
) -> Fingerprint:
    """Return everything that influences the steps of a run, as text by name.

    A run resumes from a checkpoint only if their fingerprints are equal. `code_hashes`: a hash of
    each file of the user's own code.
    """
    script = request.script
    loaded_model = request.model.loaded
    model_id = model.name
    if loaded_model is not None:
        model_id = python_inputs.identity_of_model(loaded_model)
    settings: list[Any] = [request.config]
    data_ids: Sequence[str] = data.folders
    # Python code passes its rows, and has no keys of data and rewards. In a dry run the data set of
    # a command may not be here; then its keys are left out too.
    if script is None:
        data_ids = [python_inputs.identity_of_rows(data.train)]
    elif data.train is not None:
        settings = [
            script_arguments_for_fingerprint(script, data.train.data.table),
            request.config,
            request.model.keys,
        ]
    result = fingerprint(
        *settings,
        data=data_ids,
        model=model_id,
        revision=model.revision,
        processes=context.sharding.processes,
        sharding=context.sharding.name if context.dry_run else sharding_of(request.config),
        code_hashes=code_hashes,
        left_out_ids=data.left_out,
        has_tools=bool(request.tools),
    )
    if model.adapters:
        result["model"] = hash_adapters(model.adapters, result["model"])
    if script is None:
        result |= _identity_of_python_objects(request, model)
    return result


def _identity_of_python_objects(request: RunRequest, model: ModelFacts) -> Fingerprint:
    """Return the part of a fingerprint for what Python code passes as objects, beside its rows.

    These are the rewards, the processor, the adapter's config and the quantisation. Each is known
    by its content.
    """
    source = request.model
    identity_by_name = {"reward_funcs": python_inputs.rewards_text(request.rewards)}
    if source.processor is not None:
        identity_by_name["processing_class"] = python_inputs.identity_of_processor(source.processor)
    if source.peft_config is not None:
        identity_by_name["peft_config"] = python_inputs.adapter_text(source.peft_config)
    if model.four_bit:
        quantisation = (source.keys.bnb_4bit_quant_type, source.keys.use_bnb_nested_quant)
        identity_by_name["4 bits"] = " ".join(map(str, quantisation))
    return identity_by_name
