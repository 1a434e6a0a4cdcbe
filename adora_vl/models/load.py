"""Finds and loads a model by its name: its folder, config, processor and weights.

It also checks that weight files are whole, and puts saved weights back into a model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from adora_vl.models.families import KNOWN_FAMILIES_TEXT, sees_images
from adora_vl.models.generation_config import repair_generation_config
from adora_vl.utils.errors import RunError, UserError, describe_error
from adora_vl.utils.hashing import content_hash
from adora_vl.utils.hub import load_failure_reason, uses_local_files_only

if TYPE_CHECKING:  # importing it takes seconds, for which the help of a command need not wait
    from peft import PeftModel
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel, ProcessorMixin

TINY_MODEL = "tiny"
TINY_TEXT_MODEL = "tiny_text"
TINY_PERIMETER_MODEL = "tiny_perimeter"
TINY_ZOOM_MODEL = "tiny_zoom"
TINY_MODELS = (TINY_MODEL, TINY_PERIMETER_MODEL, TINY_TEXT_MODEL, TINY_ZOOM_MODEL)
# A checkout has these three models, so that a demo starts at once. A wheel has `tiny` alone. A
# missing model is built at its first use and kept in the cache folder.
PRETRAINED_FOLDER = Path(__file__).parents[1] / "builtin" / "pretrained"
FOLDER_BY_TINY_MODEL = {
    TINY_MODEL: PRETRAINED_FOLDER,
    TINY_PERIMETER_MODEL: PRETRAINED_FOLDER.with_name("pretrained_perimeter"),
    TINY_ZOOM_MODEL: PRETRAINED_FOLDER.with_name("pretrained_zoom"),
}
# the files that a model's answers depend on: weights, settings, tokenizer
_HASHED_FILE_PATTERNS = (
    "*.safetensors",
    "pytorch_model*.bin",
    "*.jinja",
    "*config.json",
    "chat_template.json",
    "token*.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
ADAPTER_CONFIG_FILE = "adapter_config.json"
MERGED_FOLDER = "merged"
# Returns a context in which parameters that ZeRO-3 shards are whole, so that they can be read. It
# is TRL's `gather_params`.
GatherParameters = Callable[[Iterable[Any]], AbstractContextManager[Any]]


def resolve_model_name(name: str) -> str:
    """Return the folder, or hub id, of the model that a user calls `name`.

    In the order of the code:

        `tiny`, `tiny_text`, ...                    its folder, built in some minutes if missing
        output_dir of a run with LoRA, such as RUN  the merged model in it, RUN/merged
        anything else                               `name` itself

    Raises `UserError` if a tiny model cannot be built, and for a LoRA adapter without a merged
    model.
    """
    shipped_folder = FOLDER_BY_TINY_MODEL.get(name)
    if shipped_folder is not None and (shipped_folder / "model.safetensors").is_file():
        return str(shipped_folder)
    if name in TINY_MODELS:
        return _build_tiny_model(name)
    folder = Path(name)
    is_adapter = (folder / ADAPTER_CONFIG_FILE).is_file()
    is_whole_model = (folder / "config.json").is_file()
    if not is_adapter or is_whole_model:
        return name
    merged = folder / MERGED_FOLDER
    if not (merged / "config.json").is_file():
        remedy = (
            f"make a model of it with `python -m adora_vl.export {quote(name)} OUT` and name OUT"
        )
        raise UserError(f"model: {name!r} holds a LoRA adapter alone; {remedy}")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{name} holds a LoRA adapter; its merged model is used: {merged}", file=sys.stderr)
    return str(merged)


def _build_tiny_model(name: str) -> str:
    """Return the folder of a tiny model, which `adora_vl.builtin` builds if it is missing.

    `adora_vl.builtin` runs in a process of its own, since this module may not import it.
    """
    build = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "adora_vl.builtin", "--find", name],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if build.returncode:
        raise UserError(
            f"model: {name!r} could not be built (above); mend that, or name another model"
        )
    return build.stdout.splitlines()[-1]  # the folder is printed last


def read_config(key: str, model: str, revision: str | None = None) -> PretrainedConfig:
    """Return the config of a model folder or hub id.

    Args:
        key: the user's key that names the model; errors begin with it.
        model: the folder or hub id.
        revision: of the hub id.

    Raises:
        UserError: for a kind of model that Transformers does not have, since code that comes with a
            model is never run.
        OSError, ValueError: of Transformers, where there is no config.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

    hub_options: dict[str, Any] = {
        "revision": revision,
        "local_files_only": uses_local_files_only(model),
    }
    config_dict, _ = PretrainedConfig.get_config_dict(model, **hub_options)
    model_type = config_dict.get("model_type")
    if model_type is not None and model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{key}: {model!r} has model_type {model_type}, which Transformers {__version__} does "
            "not have, and code that comes with a model is not run here; name a model of the "
            f"families {KNOWN_FAMILIES_TEXT}, or another of Transformers"
        )
    return AutoConfig.from_pretrained(model, trust_remote_code=False, **hub_options)


def model_hash(model: str, revision: str | None = None) -> str | None:
    """Return a text that identifies the weights, settings and tokenizer of a model.

    For a model folder it is the `content_hash` of its files. For a hub id it is the commit that the
    revision stands for now, since a branch such as `main` moves. It is None if the commit is
    unknown.
    """
    folder = Path(model)
    if folder.is_dir():
        paths: set[Path] = set()
        for pattern in _HASHED_FILE_PATTERNS:
            paths.update(folder.glob(pattern))
        return content_hash(paths)
    try:
        commit: str | None = read_config("model", model, revision)._commit_hash
    except (OSError, ValueError):  # loading the model will say what is wrong
        return None
    return commit


def load_config(model: str, revision: str | None = None) -> PretrainedConfig:
    """Return the model's config alone.

    Raises `UserError` where `model` is neither a model folder nor a reachable hub id, or is of a
    kind that Transformers does not have.
    """
    key_and_value = f"model_name_or_path: {model!r}"
    folder = Path(model)
    if folder.is_file():
        raise UserError(f"{key_and_value} is a file; name the folder of a saved model")
    lacks_config = folder.is_dir() and not (folder / "config.json").is_file()
    if lacks_config:
        raise UserError(f"{key_and_value} is a folder without a config.json; name a saved model")
    try:
        return read_config("model_name_or_path", model, revision)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key_and_value} is neither a model folder here nor a model of the hub that can be "
            f"reached ({load_failure_reason(model, error)})"
        ) from error


def auto_class(config: PretrainedConfig) -> Any:
    """Return Transformers' auto class for a model of this config.

    There is one class for models that see images, and one for models that read text alone.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def load_model(name: str, init_kwargs: Mapping[str, Any]) -> Any:
    """Load a model as TRL does, but with the auto class for the config of its revision.

    TRL would choose the class by the config of the newest revision. `init_kwargs`: arguments of
    `from_pretrained`, such as the `revision`.
    """
    from trl.trainer.utils import create_model_from_path

    config = read_config("model", name, init_kwargs.get("revision"))
    model = create_model_from_path(name, auto_class(config), **init_kwargs)
    repair_generation_config(model)
    return model


def check_weights(key: str, name: str) -> None:
    """Raise `UserError` for a model folder whose weights are missing or cut off.

    Only the headers of safetensors files are read. A hub id, and a folder in the older format
    (`pytorch_model.bin`), are not checked. `key`: the user's key that names the model.
    """
    folder = Path(name)
    weight_files = sorted(folder.glob("*.safetensors"))
    has_older_format = not weight_files and bool(list(folder.glob("pytorch_model*.bin")))
    if not folder.is_dir() or has_older_format:
        return
    if not weight_files:
        raise UserError(
            f"{key}: {name!r} has no weights (*.safetensors); name the folder of a saved model"
        )
    # `file` is the one that is being read, which the message below names. Only a model in several
    # files has an index.
    file = folder / "model.safetensors.index.json"
    try:
        indexed_names: list[str] = []
        if file.is_file():
            index = json.loads(file.read_text(encoding="utf-8"))
            indexed_names = sorted(set(index["weight_map"].values()))
        missing_names = [part for part in indexed_names if not (folder / part).is_file()]
        if missing_names:
            raise UserError(
                f"{key}: {name!r} has no {missing_names[0]}, which its index names; copy or download it "
                "again"
            )
        for file in weight_files:
            with safe_open(file, framework="pt"):  # reads the header, and compares lengths
                pass
    except UserError:  # of `missing_names`
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        why = describe_error(error)
        raise UserError(
            f"{key}: {str(file)!r} is damaged ({why}); copy or download it again"
        ) from error


def restore_weights(model: PreTrainedModel, folder: Path) -> None:
    """Put the weights that `save_pretrained` wrote into `folder` back into a model.

    If the model is a `PeftModel`, only its adapters are read. For example, the adapter `default` is
    read from `folder`, and the adapter `ref` from `folder/ref`. Raises `RunError` where a tensor of
    an adapter is missing in the files, or has no place in the adapter.
    """
    from accelerate.utils import is_peft_model

    if not is_peft_model(model):
        # Files of Qwen2.5-VL have other names (`visual.blocks`) than its modules
        # (`model.visual.blocks`), and `from_pretrained` converts them.
        saved_model = type(model).from_pretrained(folder, dtype="auto")
        model.load_state_dict(saved_model.state_dict())
        return
    for name in model.peft_config:
        restore_adapter(model, name, folder if name == "default" else folder / name)


def restore_adapter(model: PeftModel, name: str, folder: Path) -> None:
    """Put the weights in `folder` into the adapter of a `PeftModel` that is called `name`.

    Collective under ZeRO-3, which shards parameters. Raises `RunError` where a tensor of the
    adapter is missing in the files, or a tensor of the files has no place in the adapter.
    """
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    adapter_text = f"the adapter {name} of {str(folder)!r}"
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        raise RunError(
            f"{adapter_text}: there is no {ADAPTER_CONFIG_FILE}; name a checkpoint of a run with "
            "this adapter"
        )
    saved_tensors = load_peft_weights(str(folder), device="cpu")
    adapter_tensors = get_peft_model_state_dict(
        model, adapter_name=name, save_embedding_layers=False
    )
    missing_names = adapter_tensors.keys() - saved_tensors.keys()
    if missing_names:
        raise RunError(
            f"{adapter_text}: {len(missing_names)} tensors are missing, the first is "
            f"{min(missing_names)}"
        )
    adapter_parameters = [
        parameter for path, parameter in model.named_parameters() if name in path.split(".")
    ]
    with gathered_parameters(adapter_parameters):
        loaded = set_peft_model_state_dict(model, saved_tensors, adapter_name=name)
    unexpected_names = loaded.unexpected_keys
    if unexpected_names:
        raise RunError(
            f"{adapter_text}: {len(unexpected_names)} tensors have no place in the model, the "
            f"first is {min(unexpected_names)}"
        )


def gathered_parameters(parameters: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return a context in which parameters that ZeRO-3 shards are whole and can be changed.

    When the context ends, all ranks get the values that rank 0 has. Entering and leaving it are
    collective calls. Without ZeRO-3 it does nothing.
    """
    from transformers.integrations import is_deepspeed_zero3_enabled

    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return cast(
        "AbstractContextManager[Any]",
        # At the end the values of rank 0 are distributed.
        deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0),
    )


def load_processor(model: str, revision: str | None = None) -> Any:
    """Load a processor (or, for a text-only model, a tokenizer) with left padding, as TRL does.

    Raises `UserError` where the model has none that Transformers can load.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(
            model,
            revision=revision,
            truncation_side="left",
            padding_side="left",
            local_files_only=uses_local_files_only(model),
            trust_remote_code=False,
        )
    # All errors are caught: a file that is cut off raises a different one for each kind of file.
    except Exception as error:
        raise UserError(
            f"model_name_or_path: the processor of {model!r} cannot be loaded "
            f"({describe_error(error)}); save or download it again"
        ) from error


def pixel_limits(image_processor: BaseImageProcessor) -> dict[str, int] | None:
    """Return an image processor's limits, such as `{"min_pixels": 3136, "max_pixels": 12845056}`.

    The result is None without an image processor, and for one that does not limit pixels.
    """
    size = dict(getattr(image_processor, "size", None) or {})
    if not {"shortest_edge", "longest_edge"} <= size.keys():
        return None
    # In these processors the two names stand for numbers of pixels, not for lengths of edges.
    return {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}


def limit_pixels(processor: ProcessorMixin, min_pixels: int | None, max_pixels: int | None) -> None:
    """Set the limits of the processor's images, in pixels; None keeps the processor's own limit.

    Raises `UserError` where `min_pixels` exceeds `max_pixels`, or the model has no such limits.
    """
    if min_pixels is None and max_pixels is None:
        return
    image_processor: Any = getattr(processor, "image_processor", None)
    limits = pixel_limits(image_processor)
    if limits is None:
        fault = " has no image processor"
        if image_processor:
            fault = "'s image processor has no limits in pixels"
        raise UserError(f"min_pixels/max_pixels: this model{fault}; remove the keys")
    if min_pixels is None:
        min_pixels = limits["min_pixels"]
    if max_pixels is None:
        max_pixels = limits["max_pixels"]
    if not 0 < min_pixels <= max_pixels:
        raise UserError(
            f"min_pixels: {min_pixels} must be above 0 and at most max_pixels: {max_pixels}"
        )
    # In these processors the two names stand for numbers of pixels, not for lengths of edges.
    image_processor.size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
