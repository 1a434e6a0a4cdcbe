"""`python -m adora_vl.export RUN OUT`: plain Hugging Face weights from a run or one of its
checkpoints.

RUN is a checkpoint folder, or the output_dir of a run. From an output_dir the newest whole
checkpoint is exported, or the final model if there is no checkpoint. OUT loads offline with
`from_pretrained` and with vLLM. A LoRA adapter is merged into its base model, unless --adapter is
given. With --universal OUT is a checkpoint instead: DeepSpeed can go on from it with another number
of processes.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.checkpoint.run_files import recording_saved_files, run_has_begun
from adora_vl.checkpoint.store import (
    COMPLETE_FILE,
    describe_checkpoint_damage,
    find_newest_valid_checkpoint,
)
from adora_vl.checkpoint.training_prompts import write_training_prompts
from adora_vl.models.adapter import (
    find_processor_folder,
    load_merged,
    read_adapters,
    vllm_lora_rank,
)
from adora_vl.models.families import sees_images
from adora_vl.models.load import (
    ADAPTER_CONFIG_FILE,
    MERGED_FOLDER,
    auto_class,
    check_weights,
    load_processor,
    read_config,
    resolve_model_name,
)
from adora_vl.utils.cli import Parser, path_option, run_command
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replacing_file, replacing_folder, unwritable_error
from adora_vl.utils.hub import load_failure_reason

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from transformers import ProcessorMixin

# Without these flags vLLM would take the repetition penalty from the model's generation config, and
# would listen on every network interface.
_SERVE_FLAGS = ("--generation-config", "vllm", "--host", "127.0.0.1")
_COPY_CHUNK_BYTES = 16 << 20  # bytes that are copied at a time
_MODEL_FILE_PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
)
_PROCESSOR_FILE_PATTERNS = (
    "*processor_config.json",
    "tokenizer*",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "README.md",
)


def export(run: Path, output: Path, *, adapter: bool = False, universal: bool = False) -> Path:
    """Export a run's weights into the folder `output`, which is written whole or not at all.

    Args:
        run: a checkpoint, or the `output_dir` of a run.
        output: a folder that does not exist yet.
        adapter: whether a LoRA adapter stays an adapter. Otherwise it is merged into its base.
        universal: whether `output` becomes a checkpoint from which another number of processes can
            go on.

    Returns:
        The folder that was exported.

    Raises:
        UserError: there is nothing to export, its weights are damaged, or `output` exists already.
    """
    source = find_weights(run)
    # Without these files the weights are in the parts that DeepSpeed wrote for each rank.
    has_whole_weights = any(source.glob("*.safetensors"))
    if has_whole_weights:
        check_weights("RUN", str(source))
    _refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if universal:
        from adora_vl.checkpoint.universal import write_universal

        write_universal(source, output)
        return source
    # At its end a run proposes to export into its own folder `merged`. Files there are recorded as
    # files of the run.
    belongs_to_run = output.resolve() == run.resolve() / MERGED_FOLDER and run_has_begun(run)
    # All is written into `staged`, which becomes `output` when the block ends.
    with recording_saved_files(run, saves_model=belongs_to_run), replacing_folder(output) as staged:
        if (source / ADAPTER_CONFIG_FILE).is_file() and not adapter:
            _merge_adapter(source, staged, dtype="auto")
        elif has_whole_weights:
            copy_model(source, staged)
        else:
            _gather_sharded_weights(source, staged)
        _copy_files(source, staged, _PROCESSOR_FILE_PATTERNS)
        write_training_prompts(source, staged)
        # Again: merging takes long, and somebody may have made the folder meanwhile.
        _refuse_existing(output)
    return source


def _refuse_existing(output: Path) -> None:
    """Raise `UserError` if the folder exists."""
    if output.exists():
        raise UserError(f"OUT: {str(output)!r} is there already; name a new folder")


def save_merged(
    model: PeftModel, processing_class: ProcessorMixin, folder: Path, accelerator: Accelerator
) -> bool:
    """Write a PEFT model with its adapter merged in, and the processor, into `folder`.

    Nothing is written in three cases:

    - The model has no adapter. It is whole already.
    - ZeRO-3 divides the weights among ranks. The user can merge later (`python -m
      adora_vl.export`).
    - The base is in 4 bits. Merged it would be larger, so this is left to the user too.

    The evaluators look for `folder`, so it is written whole or not at all. Afterwards the model has
    no adapter any more. Collective: all ranks call this together.

    Returns:
        Whether anything was written.
    """
    from accelerate.utils import is_peft_model
    from trl.distributed import DistributedBackend

    backend = DistributedBackend(accelerator)
    four_bit = getattr(model, "is_loaded_in_4bit", False)
    if not is_peft_model(model) or backend.is_zero3 or four_bit:
        return False
    if accelerator.is_main_process:
        with replacing_folder(folder) as staged:
            model.merge_and_unload().save_pretrained(staged)
            processing_class.save_pretrained(staged)
            write_training_prompts(folder.parent, staged)  # for a copy of it in another place
    accelerator.wait_for_everyone()
    return True


def merge_checkpoint(checkpoint: Path, folder: Path, dtype: str) -> None:
    """Merge the adapter of a run's last checkpoint, and write into `folder` as `save_merged` does.

    The folder is written whole or not at all. One process calls this.

    `dtype`: the run's key `dtype`, in which it has loaded the base. Raises `UserError` where the
    base cannot be loaded.
    """
    with replacing_folder(folder) as staged:
        _merge_adapter(checkpoint, staged, dtype=dtype)
        _copy_files(checkpoint, staged, _PROCESSOR_FILE_PATTERNS)
        write_training_prompts(checkpoint, staged)


def copy_model(checkpoint: Path, output: Path, *, with_arguments: bool = False) -> None:
    """Copy the weights (or the adapter) and the processor of a checkpoint into `output`.

    Files that only a resumed run needs, such as the state of the optimizer, are not copied.
    `with_arguments`: whether `training_args.bin` is copied too. A final model has this file.
    """
    patterns = ["adapter_*.json", *_MODEL_FILE_PATTERNS, *_PROCESSOR_FILE_PATTERNS]
    if with_arguments:
        patterns.append("training_args.bin")
    _copy_files(checkpoint, output, patterns)


def find_weights(run: Path) -> Path:
    """Return the folder whose weights are exported.

    It is the first one that exists of these:

    1. `run` itself, if it is a checkpoint;
    2. the newest whole checkpoint of the run;
    3. `run` itself, if the final model lies in it.

    Raises `UserError` where none exists, and for a checkpoint that is not whole.
    """
    if not run.is_dir():
        raise UserError(f"RUN: no folder {str(run)!r}")
    if (run / COMPLETE_FILE).is_file() or run.name.startswith("checkpoint-"):
        problem = describe_checkpoint_damage(run)
        if problem:
            raise UserError(f"RUN: {str(run)!r} is not whole: {problem}; name another checkpoint")
        return run
    checkpoint, _ = find_newest_valid_checkpoint(run)
    if checkpoint is not None:
        return checkpoint
    if (run / ADAPTER_CONFIG_FILE).is_file() or list(run.glob("*.safetensors")):
        return run
    raise UserError(f"RUN: {str(run)!r} holds neither a whole checkpoint nor a model")


def _copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copy the files of a folder whose names match one of the patterns.

    Each file is copied whole or not at all. A pattern may name a subfolder. For example, what
    `additional_chat_templates/*.jinja` matches is copied into a subfolder of that name.
    """
    paths = {path for pattern in patterns for path in source.glob(pattern)}
    for path in sorted(paths):
        copied_path = target / path.relative_to(source)
        copied_path.parent.mkdir(exist_ok=True)
        with replacing_file(copied_path, durable=False) as copy, path.open("rb") as original:
            shutil.copyfileobj(original, copy, _COPY_CHUNK_BYTES)


def _merge_adapter(source: Path, target: Path, dtype: str) -> None:
    """Merge the adapter of a checkpoint into its base model.

    The base of an adapter may be an adapter itself. All of these adapters are merged. `dtype`: the
    dtype in which the base is loaded; `auto` for the base's own.
    """
    adapters = read_adapters("RUN", str(source))  # the last one was trained on the base model
    base = resolve_model_name(adapters[-1].base)
    init_kwargs = {
        "revision": adapters[-1].revision,
        "dtype": dtype,
        "device_map": None,
        "trust_remote_code": False,
    }
    try:
        model = load_merged(base, adapters, init_kwargs)
    except OSError as error:
        reason = load_failure_reason(base, error)
        raise UserError(
            f"RUN: the adapter's base model {base!r} cannot be loaded ({reason})"
        ) from error
    processor = find_processor_folder(adapters, base, reads_images=sees_images(model.config))
    # The processor's files in `source` itself are copied by `export`.
    if processor != str(source):
        load_processor(processor, adapters[-1].revision).save_pretrained(target)
    model.save_pretrained(target)


def serve_command(output: Path) -> str:
    """Return the command by which vLLM serves what was exported, or why there is none.

    For example, a whole model gives `vllm serve OUT --generation-config vllm --host 127.0.0.1`.
    vLLM serves a single plain LoRA adapter from files. Any other adapter has to be merged.
    """
    if not (output / ADAPTER_CONFIG_FILE).is_file():
        return shlex.join(["vllm", "serve", str(output), *_SERVE_FLAGS])
    adapter, *adapters_beneath = read_adapters("OUT", str(output))
    config = adapter.config
    is_lora = getattr(config.peft_type, "value", "") == "LORA"
    has_variant = config.bias != "none" or config.use_dora
    has_exceptions = config.modules_to_save or config.rank_pattern or config.alpha_pattern
    if adapters_beneath or not is_lora or has_variant or has_exceptions:
        return f"not as an adapter: vLLM serves it merged alone (export {output} without --adapter)"
    revision_flags: list[str] = []
    base_is_on_hub = not Path(adapter.base).is_dir()
    if adapter.revision is not None and base_is_on_hub:
        revision_flags = ["--revision", adapter.revision]
    lora_flags = [
        "--enable-lora",
        "--max-lora-rank",
        str(vllm_lora_rank(config)),
        "--lora-modules",
        f"policy={output}",
    ]
    return shlex.join(["vllm", "serve", adapter.base, *_SERVE_FLAGS, *revision_flags, *lora_flags])


def _gather_sharded_weights(source: Path, target: Path) -> None:
    """Write the whole weights of a ZeRO-3 checkpoint that has only the parts of each rank.

    DeepSpeed writes such a checkpoint unless `zero3_save_16bit_model` is set. The parts are in
    float32, and the whole weights are written in the model's dtype. The checkpoint's generation
    config is copied.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from adora_vl.checkpoint.universal import refusing_pickled_code

    config = read_config("RUN", str(source))
    model = auto_class(config).from_config(config, dtype=config.dtype)
    with refusing_pickled_code(source):
        model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(source)))
    model.save_pretrained(target)
    # `save_pretrained` has written a default generation config, since the model was built from its
    # config alone. The checkpoint's own one replaces it.
    _copy_files(source, target, ("generation_config.json",))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m adora_vl.export", description=__doc__)
    parser.add_argument(
        "run", type=path_option, metavar="RUN", help="output_dir of a training run, or a checkpoint"
    )
    parser.add_argument("output", type=path_option, metavar="OUT", help="the folder to write")
    parser.add_argument("--adapter", action="store_true", help="leave a LoRA adapter as it is")
    parser.add_argument(
        "--universal", action="store_true", help="a checkpoint for another number of processes"
    )

    def command() -> None:
        """Export by the words of the command line, and print where the weights are."""
        options = parser.parse_args(arguments)
        from safetensors import SafetensorError

        try:
            source = export(
                options.run,
                output=options.output,
                adapter=options.adapter,
                universal=options.universal,
            )
        # A full disk is an exception of its own in safetensors.
        except (OSError, SafetensorError) as error:
            raise unwritable_error("OUT", options.output, error) from error
        print(f"{source} -> {options.output}")
        if not options.universal:
            print(f"Serve it      {serve_command(options.output)}")

    return run_command(command, interrupt_note="nothing was written")


if __name__ == "__main__":
    sys.exit(main())
