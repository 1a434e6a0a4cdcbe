"""PEFT adapters as models: read from a folder or the hub, merged into their base, or trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download

from adora_vl.models.load import (
    ADAPTER_CONFIG_FILE,
    gathered_parameters,
    load_model,
    model_hash,
    restore_adapter,
)
from adora_vl.utils.errors import UserError, describe_error
from adora_vl.utils.hub import load_failure_reason, uses_local_files_only

if TYPE_CHECKING:  # importing it takes seconds, for which the help of a command need not wait
    from peft import PeftConfig, PeftModel
    from trl import ModelConfig

_MODEL_CONFIG_FILE = "config.json"  # a folder with this file is a whole model, not an adapter alone
# The files that are fetched for an adapter on the hub: its weights, and its processor if it has
# one.
_FETCHED_FILE_PATTERNS = (
    "adapter_model.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
)
# The name in an adapter_config.json for each of TRL's keys.
_PEFT_NAME_BY_KEY = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_task_type": "task_type",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder or on the hub."""

    name: str  # its folder or hub id
    folder: Path  # that folder, or the local copy of an adapter on the hub
    config: Any  # PEFT's config, with which the adapter goes on training
    base: str  # folder or hub id of the model that it was trained on, which may be an adapter too
    revision: str | None  # the revision of a base on the hub

    @property
    def commit(self) -> str | None:
        """The commit of an adapter on the hub; None for a local one.

        The hub's cache names the folder of a local copy after its commit.
        """
        return None if self.folder == Path(self.name) else self.folder.name


def read_adapters(key: str, name: str, revision: str | None = None) -> list[Adapter]:
    """Return the adapter that a user names as the model, and the adapters that it was trained on.

    For example, an adapter `b` that was trained on an adapter `a` of a whole model gives [b, a].
    The list is empty for a whole model. Adapters on the hub are fetched.

    Args:
        key: the user's key, which errors begin with.
        name: folder or hub id of the model.
        revision: the revision of an adapter on the hub. If `name` is a local folder, it is the
            revision of the adapter's base, unless the adapter's config names one.

    Raises:
        UserError: where an adapter cannot be read, or is its own base.
    """
    adapters: list[Adapter] = []
    while (folder := _adapter_folder(key, name, revision)) is not None:
        if any(folder.samefile(adapter.folder) for adapter in adapters):
            raise UserError(f"{key}: the adapter {name!r} is its own base; name another one")
        adapters.append(_read_adapter(key, name, folder, revision))
        name = adapters[-1].base
        revision = adapters[-1].revision
    return adapters


def _adapter_folder(key: str, name: str, revision: str | None) -> Path | None:
    """Return the folder of an adapter, fetched from the hub if need be; None for any other model.

    A whole model also has a `config.json`, and an adapter has only an `adapter_config.json`. The
    arguments are those of `read_adapters`.
    """
    local_folder = Path(name)
    if local_folder.is_dir():
        is_adapter = (local_folder / ADAPTER_CONFIG_FILE).is_file()
        is_whole_model = (local_folder / _MODEL_CONFIG_FILE).is_file()
        return local_folder if is_adapter and not is_whole_model else None
    is_hub_id = name.count("/") == 1
    if not is_hub_id or not _hub_has_file(name, revision, ADAPTER_CONFIG_FILE):
        return None
    if _hub_has_file(name, revision, _MODEL_CONFIG_FILE):
        return None
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            local_files_only=uses_local_files_only(name),
            allow_patterns=[*_FETCHED_FILE_PATTERNS],
            ignore_patterns="*/*",  # folders inside, such as those of checkpoints
        )
        return Path(folder)
    except OSError as error:
        why = load_failure_reason(name, error)
        raise UserError(
            f"{key}: the adapter {name!r} cannot be fetched from the hub ({why}); try again"
        ) from error


def _hub_has_file(name: str, revision: str | None, file: str) -> bool:
    """Return whether a model of the hub has a file; False if the hub cannot tell."""
    from transformers.utils import cached_file

    try:
        path = cached_file(
            name, file, revision=revision, local_files_only=uses_local_files_only(name)
        )
        return path is not None
    except (OSError, ValueError):  # if there is no such model, loading it will say what is wrong
        return False


def _read_adapter(key: str, name: str, folder: Path, revision: str | None) -> Adapter:
    """Read an adapter's config from `folder`.

    Args:
        key: the user's key, which errors begin with.
        name: the adapter's folder or hub id, as the user names it.
        folder: where the adapter's files are here.
        revision: as in `read_adapters`.

    Raises:
        UserError: where peft is missing, the config cannot be read, or it names no base.
    """
    file = f"{key}: {str(folder / ADAPTER_CONFIG_FILE)!r}"
    if find_spec("peft") is None:
        raise UserError(
            f"{key}: {str(folder)!r} is an adapter, but peft is not installed; install "
            "adora-vl[lora]"
        )
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(folder)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(
            f"{file} cannot be read ({describe_error(error)}); copy it again"
        ) from error
    if not config.base_model_name_or_path:
        raise UserError(
            f"{file} names no base_model_name_or_path; write the folder or hub id of the base there"
        )
    config.inference_mode = False
    base_revision = config.revision or None
    # An adapter in a folder has no revision, so the user's revision is meant for its base.
    is_local = folder == Path(name)
    if not base_revision and is_local:
        base_revision = revision
    return Adapter(
        name=name,
        folder=folder,
        config=config,
        base=str(config.base_model_name_or_path),
        revision=base_revision,
    )


def check_lora_keys(adapter: Adapter, model: ModelConfig, set_keys: Collection[str]) -> None:
    """Raise `UserError` where a user's LoRA key differs from the adapter that is trained further.

    Args:
        adapter: the adapter, which keeps its settings.
        model: the keys of the model, with those of LoRA.
        set_keys: the keys that the user has set; the others are not compared.
    """
    for key, peft_name in _PEFT_NAME_BY_KEY.items():
        value = getattr(model, key)
        adapter_value = _normalise_setting(getattr(adapter.config, peft_name, None))
        if key in set_keys and _normalise_setting(value) != adapter_value:
            raise UserError(
                f"{key}: {value}, but the adapter {adapter.name!r} has {peft_name}: "
                f"{adapter_value} and goes on training as it is; leave the key out, or set "
                "use_peft: true to merge this adapter and train a new one"
            )


def _normalise_setting(value: Any) -> Any:
    """Return a LoRA setting in one form, so that a user's and an adapter's can be compared by `==`.

    The cases, in the order of the code:

        {"v_proj", "q_proj"}    ["q_proj", "v_proj"]; an empty collection becomes None
        "q_proj"                ["q_proj"], since PEFT stores a single name either way
        member of an Enum       its value
        anything else, as 16    unchanged
    """
    if isinstance(value, list | tuple | set):
        return sorted(map(str, value)) or None
    if isinstance(value, str) and value.isidentifier():
        return [value]
    return getattr(value, "value", value)


# the ranks that vLLM has kernels for
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def vllm_lora_rank(config: PeftConfig) -> int:
    """Return the `max_lora_rank` for vLLM: the smallest rank that is enough for every layer.

    For example, layers with the ranks 8 and 24 give 32. Raises `UserError` for a rank above the
    largest that vLLM has kernels for.
    """
    # `rank_pattern` gives some layers a rank of their own.
    layer_ranks = (config.rank_pattern or {}).values()
    rank = max([config.r, *layer_ranks])
    large_enough = [vllm_rank for vllm_rank in _VLLM_RANKS if vllm_rank >= rank]
    if not large_enough:
        raise UserError(
            f"lora_r: {rank} is above {_VLLM_RANKS[-1]}, the largest rank that vLLM serves; set a "
            "smaller one"
        )
    return large_enough[0]


def hash_adapters(adapters: Sequence[Adapter], base: str) -> str:
    """Return the commits, or content hashes, of adapters and their base as one text for a manifest.

    For example, adapters with the commits c1 and c2 on a base c3 give `c1 on c2 on c3`.

    `adapters`: [b, a] if b was trained on a, and a on the base. `base`: the commit or content hash
    of the base.
    """
    hashes = [adapter.commit or str(model_hash(str(adapter.folder))) for adapter in adapters]
    return " on ".join([*hashes, base])


def find_processor_folder(adapters: Sequence[Adapter], base: str, *, reads_images: bool) -> str:
    """Return the folder of the first adapter that has a processor, or the base if none has one.

    The adapter's processor may have another chat template than the processor of the base.
    `reads_images`: whether the model reads images, and so needs an image processor.
    """
    file_names = ["tokenizer_config.json"]
    if reads_images:
        file_names = ["processor_config.json", "preprocessor_config.json"]
    for adapter in adapters:
        if any((adapter.folder / name).is_file() for name in file_names):
            return str(adapter.folder)
    return base


def load_merged(base: str, adapters: Sequence[Adapter], init_kwargs: Mapping[str, Any]) -> Any:
    """Load the base and merge `adapters` into its weights, in its dtype.

    Args:
        base: its folder or hub id.
        adapters: [b, a] if b was trained on a, and a on the base.
        init_kwargs: arguments of `from_pretrained`.
    """
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.integrations import is_deepspeed_zero3_enabled

    model = load_model(base, init_kwargs)
    # In 4 bits the sum of weights and adapter would be rounded again.
    if adapters and getattr(model, "is_loaded_in_4bit", False):
        model = model.dequantize()
        # When the model is saved, Transformers would convert it back to 4 bits. The public option
        # `save_original_format=False` prevents this, but saves tensors under the names of modules,
        # which are not their names in the model's files. So the conversions to 4 bits are removed.
        conversions = model._weight_conversions
        model._weight_conversions = [
            conversion for conversion in conversions if not _is_to_four_bit(conversion)
        ]
    for adapter in reversed(adapters):  # from the base upwards
        peft_model = get_peft_model(model, adapter.config)
        restore_adapter(peft_model, name="default", folder=adapter.folder)
        if is_deepspeed_zero3_enabled():
            # PEFT cannot merge the part of a weight that a rank has, so each layer is gathered
            # first.
            for layer in peft_model.modules():
                if isinstance(layer, BaseTunerLayer):
                    with gathered_parameters(layer.parameters()):
                        layer.merge()
        model = peft_model.merge_and_unload()
    return model


def _is_to_four_bit(conversion: object) -> bool:
    """Return whether Transformers' conversion of saved weights has a step of bitsandbytes."""
    steps = getattr(conversion, "operations", ())
    return any(type(step).__module__.endswith("bitsandbytes") for step in steps)


def load_policy(base: str, adapters: Sequence[Adapter], init_kwargs: Mapping[str, Any]) -> Any:
    """Return a `PeftModel` that trains the first adapter, with the others merged into its base.

    That adapter gets initial weights here. `load_adapter_weights` loads its saved ones later.

    Args:
        base: folder or hub id of the base.
        adapters: [b, a] if b was trained on a, and a on the base. Then b is trained.
        init_kwargs: arguments of `from_pretrained`.
    """
    from peft import get_peft_model

    trained_adapter, *merged_adapters = adapters
    model = load_merged(base, merged_adapters, init_kwargs)
    return get_peft_model(model, trained_adapter.config)


@contextmanager
def without_reference_adapter(policy: PeftModel) -> Iterator[None]:
    """Hide TRL's reference adapter `ref` from PEFT inside the block, so that it is not saved.

    PEFT would look for `ref` in the state that ZeRO-3 gathers, which has only the policy's adapter.
    """
    reference_config = policy.peft_config.pop("ref", None)
    try:
        yield
    finally:
        if reference_config is not None:
            policy.peft_config["ref"] = reference_config


def record_base(policy: PeftModel, merged_adapters: Sequence[Adapter]) -> None:
    """Write name and commit of the model that the trained adapter belongs on into its config.

    PEFT itself writes the name of the base (`base_model_name_or_path`), but no commit. If other
    adapters were merged into the base, the config gets the name of the last one that was merged.

    `merged_adapters`: the adapters between the trained one and the base, the last merged one first.
    """
    config = policy.peft_config["default"]
    commit = getattr(policy.config, "_commit_hash", None)
    if merged_adapters:
        last_merged = merged_adapters[0]
        commit = last_merged.commit
        is_local = commit is None
        name_or_path = str(last_merged.folder.resolve()) if is_local else last_merged.name
        config.base_model_name_or_path = name_or_path
    config.revision = commit


def cast_trained_to_float32(policy: PeftModel) -> None:
    """Cast the trained parameters, and TRL's reference adapter `ref`, to float32.

    In bfloat16 rounding would swallow nearly every update. But PEFT leaves `modules_to_save` in
    bfloat16 if the base is, and TRL leaves all adapters of a base in 4 bits in it.
    """
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad or ".ref." in name:
            parameter.data = parameter.data.float()


def load_adapter_weights(policy: PeftModel, adapter: Adapter) -> None:
    """Load an adapter's weights into the policy, which goes on training them.

    TRL's reference adapter `ref`, if there is one, begins with the same weights.
    """
    cast_trained_to_float32(policy)
    for name in policy.peft_config:
        restore_adapter(policy, name, adapter.folder)
