"""Checks of `output_dir`: whose it is, and where in it the run starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint.fingerprint import Fingerprint, fingerprint, sharding_of
from adora_vl.checkpoint.resume import StartPoint
from adora_vl.config.command import refuse_no_folder
from adora_vl.data.loading import as_asked
from adora_vl.models.adapter import hash_of
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
    """Check `output_dir`, and find where in it the run starts.

    A launch locks the folder, a dry run only looks at it, and Python code does so in `train`. It is
    the last check, since a fingerprint has the configs as the others leave them. `code_hashes`: of
    the user's own code. Raises `UserError`.
    """
    start = StartPoint(None, [])
    if not context.local:
        return OutputFacts(folder=None, start=start)
    config = request.config
    refuse_no_folder(config.output_dir)
    inputs = [
        *(("model_name_or_path", source) for source in model.sources),
        *(("dataset_name", folder) for folder in data.folders),
    ]
    of_this_run = partial(fingerprint_of, request, model, data, code_hashes, context)
    if context.output_dir_mode == "look":
        # Only where the folder has checkpoints is the fingerprint needed, which reads all weights.
        folder = RunFolder(config, of_this_run, inputs)
        start = folder.look(config.resume_from_checkpoint, data_known=data.train is not None)
        return OutputFacts(folder=folder, start=start)
    folder = RunFolder(config, of_this_run(), inputs)
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
    """Return every setting that influences the steps, with which a checkpoint is compared."""
    script = request.script
    source = request.model
    python_settings = {}
    settings: list[Any] = [request.config]
    if script is not None and data.train is not None:
        settings = [as_asked(script, data.train.data.table), request.config, source.keys]
    if script is None and source.peft_config is not None:
        python_settings["peft_config"] = python_inputs.adapter_text(source.peft_config)
    if script is None and model.four_bit:
        python_settings["4 bits"] = (
            f"{source.keys.bnb_4bit_quant_type} {source.keys.use_bnb_nested_quant}"
        )
    model_id = model.name
    if source.loaded is not None:
        model_id = python_inputs.identity_of_model(source.loaded)
    rows = data.folders if script is not None else [python_inputs.identity_of_rows(data.train)]
    result = fingerprint(
        *settings,
        data=rows,
        model=model_id,
        revision=model.revision,
        processes=context.sharding.processes,
        sharding=context.sharding.name if context.dry_run else sharding_of(request.config),
        code_hashes=code_hashes,
        left_out=data.left_out,
    )
    if model.adapters:
        result["model"] = hash_of(model.adapters, result["model"])
    return {**result, **python_settings}
