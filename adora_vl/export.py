"""`python -m adora_vl.export RUN OUT`: plain Hugging Face weights from a run or one of its
checkpoints.

RUN is a checkpoint folder, or an output_dir: of that the newest whole checkpoint, or the final
model where none is. OUT loads offline with `from_pretrained` and with vLLM. A LoRA adapter is
merged into its base model, unless --adapter. With --universal OUT is a checkpoint instead, from
which DeepSpeed goes on with another number of processes.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.utils.cli import Parser, exit_code_of, imports
from adora_vl.utils.cli import path as a_path
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replacing, replacing_folder, unwritable

with imports():
    from adora_vl.checkpoint.store import MARK, newest_valid, problem_of
    from adora_vl.checkpoint.writer import has_begun, recording_saved_files
    from adora_vl.models.adapter import adapters_of, load_merged, processor_folder, served_rank
    from adora_vl.models.families import sees_images
    from adora_vl.models.load import (
        ADAPTER,
        MERGED,
        auto_class,
        check_weights,
        load_processor,
        local_model,
        read_config,
    )
    from adora_vl.utils.hub import why_missing

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from transformers import ProcessorMixin

# By default vLLM takes the repetition penalty of the model's own generation config, and listens on
# every interface.
_SERVE_FLAGS = ("--generation-config", "vllm", "--host", "127.0.0.1")
_CHUNK = 16 << 20  # bytes that are copied at a time
_MODEL = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
_PROCESSOR = (
    "*processor_config.json",
    "tokenizer*",
    "chat_template*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "README.md",
)


def export(run: Path, output: Path, *, adapter: bool = False, universal: bool = False) -> Path:
    """Write the folder `output`, whole or not at all.

    `adapter`: leave a LoRA adapter as it is. `universal`: write a checkpoint for another number of
    processes. Returns the folder that was exported. Raises `UserError` where there is nothing to
    export, its weights are damaged, or `output` exists already.
    """
    source = find_weights(run)
    # Without these files the weights are still in the parts of the ranks.
    if list(source.glob("*.safetensors")):
        check_weights("RUN", str(source))
    _refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if universal:
        from adora_vl.checkpoint.universal import write_universal

        write_universal(source, output)
        return source
    # a folder that the last lines of a run propose, which belongs to the run
    is_of_run = output.resolve() == run.resolve() / MERGED and has_begun(run)
    with recording_saved_files(run, writes=is_of_run), replacing_folder(output) as staged:
        if (source / ADAPTER).is_file() and not adapter:
            _merge(source, staged)
        elif list(source.glob("*.safetensors")):
            copy_model(source, staged)
        else:
            _gather(source, staged)
        _copy(source, staged, _PROCESSOR)
        # Somebody may have made it meanwhile, because merging takes long.
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

    Returns whether anything was written. A model without LoRA is whole already. Under ZeRO-3 and
    FSDP the weights are in pieces, and a base in 4 bits would become a larger one: there merging is
    left to the user (`python -m adora_vl.export`). The evaluators look for `folder`, so it is
    written whole or not at all. The model itself is used up: its adapter is gone afterwards.
    Collective: all ranks call this together.
    """
    from accelerate.utils import is_peft_model
    from trl.distributed import DistributedBackend

    backend = DistributedBackend(accelerator)
    four_bit = getattr(model, "is_loaded_in_4bit", False)
    if not is_peft_model(model) or backend.is_zero3 or backend.is_fsdp or four_bit:
        return False
    if accelerator.is_main_process:
        with replacing_folder(folder) as staged:
            model.merge_and_unload().save_pretrained(staged)
            processing_class.save_pretrained(staged)
    accelerator.wait_for_everyone()
    return True


def copy_model(checkpoint: Path, output: Path) -> None:
    """Copy the weights (or the adapter) and the processor of a checkpoint into `output`.

    What only a resume needs is left out.
    """
    _copy(checkpoint, output, ("adapter_*.json", *_MODEL, *_PROCESSOR))


def find_weights(run: Path) -> Path:
    """The folder to export: a checkpoint itself, or a run's newest whole one, or its final model.

    Raises `UserError` where there is none.
    """
    if not run.is_dir():
        raise UserError(f"RUN: no folder {str(run)!r}")
    if (run / MARK).is_file() or run.name.startswith("checkpoint-"):
        problem = problem_of(run)
        if problem:
            raise UserError(f"RUN: {str(run)!r} is not whole: {problem}; name another checkpoint")
        return run
    checkpoint, _ = newest_valid(run)
    if checkpoint is not None:
        return checkpoint
    if (run / ADAPTER).is_file() or list(run.glob("*.safetensors")):
        return run
    raise UserError(f"RUN: {str(run)!r} holds neither a whole checkpoint nor a model")


def _copy(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copy the files that match the patterns, each whole or not at all."""
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        with replacing(target / path.name, durable=False) as copy, path.open("rb") as original:
            shutil.copyfileobj(original, copy, _CHUNK)


def _merge(source: Path, target: Path) -> None:
    """Write the base model with the adapter added to its weights, in the base model's dtype."""
    adapters = adapters_of("RUN", str(source))
    base = local_model(adapters[-1].base)
    try:
        init = {
            "revision": adapters[-1].revision,
            "dtype": "auto",
            "device_map": None,
            "trust_remote_code": False,
        }
        model = load_merged(base, adapters, init)
    except OSError as error:
        reason = why_missing(base, error)
        raise UserError(
            f"RUN: the adapter's base model {base!r} cannot be loaded ({reason})"
        ) from error
    processor = processor_folder(adapters, base, sees=sees_images(model.config))
    # the processor's files in `source` itself are copied by `export`
    if processor != str(source):
        load_processor(processor, adapters[-1].revision).save_pretrained(target)
    model.save_pretrained(target)


def serve_command(output: Path) -> str:
    """The command by which vLLM serves what was exported.

    From files vLLM takes a plain LoRA adapter alone, and only one; any other has to be merged.
    """
    if not (output / ADAPTER).is_file():
        return shlex.join(["vllm", "serve", str(output), *_SERVE_FLAGS])
    first, *beneath = adapters_of("OUT", str(output))
    config = first.config
    is_lora = getattr(config.peft_type, "value", "") == "LORA"
    has_variant = config.bias != "none" or config.use_dora
    has_exceptions = config.modules_to_save or config.rank_pattern or config.alpha_pattern
    if beneath or not is_lora or has_variant or has_exceptions:
        return f"not as an adapter: vLLM serves it merged alone (export {output} without --adapter)"
    revision: list[str] = []
    if first.revision is not None and not Path(first.base).is_dir():
        revision = ["--revision", first.revision]
    words = [
        *revision,
        "--enable-lora",
        "--max-lora-rank",
        str(served_rank(config)),
        "--lora-modules",
        f"policy={output}",
    ]
    return shlex.join(["vllm", "serve", first.base, *_SERVE_FLAGS, *words])


def _gather(source: Path, target: Path) -> None:
    """Gather the weights of a checkpoint of ZeRO-3 without `zero3_save_16bit_model`.

    The float32 weights are read from the parts of all ranks, and written in the model's dtype.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from adora_vl.checkpoint.universal import without_code

    config = read_config("RUN", str(source))
    model = auto_class(config).from_config(config, dtype=config.dtype)
    with without_code(source):
        model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(source)))
    model.save_pretrained(target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m adora_vl.export", description=__doc__)
    parser.add_argument("run", type=a_path, metavar="RUN")
    parser.add_argument("output", type=a_path, metavar="OUT")
    parser.add_argument("--adapter", action="store_true", help="leave a LoRA adapter as it is")
    parser.add_argument(
        "--universal", action="store_true", help="a checkpoint for another number of processes"
    )

    def command() -> None:
        """Export what the words name, and print where it is."""
        options = parser.parse_args(arguments)
        from safetensors import SafetensorError

        try:
            source = export(
                options.run,
                output=options.output,
                adapter=options.adapter,
                universal=options.universal,
            )
        # safetensors has an exception of its own for a full disk
        except (OSError, SafetensorError) as error:
            raise unwritable("OUT", options.output, error) from error
        print(f"{source} -> {options.output}")
        if not options.universal:
            print(f"Serve it      {serve_command(options.output)}")

    return exit_code_of(command, "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
