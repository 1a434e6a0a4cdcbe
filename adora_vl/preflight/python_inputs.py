"""What Python gives as objects: a model, data sets, functions; what is refused, and how a run knows
them again.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.compute as pc
import torch
import xxhash
from datasets import Dataset, IterableDataset
from trl import ModelConfig
from trl.trainer.utils import get_config_model_id

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.loading import only_decodes
from adora_vl.data.prompt_lengths import Size, sizes_in
from adora_vl.data.prompts import problem_with_messages, with_tools
from adora_vl.models.load import model_hash
from adora_vl.rewards.choose import NAMES, ChosenRewards, choose_rewards
from adora_vl.utils.errors import UserError
from adora_vl.utils.own_files import function_name, is_own, source_hash

_ROWS = 1000  # that are read at once
_COLUMNS = ("images", "image")


@dataclass(frozen=True)
class Datasets:
    """The rows to train on, and those that TRL evaluates on."""

    train: Dataset | IterableDataset
    evaluate: Any = None


def config_of(args: Any, model: Any) -> AdoraGRPOConfig:
    """The trainer's `args`; None is TRL's default.

    Raises `UserError` for another config than ours.
    """
    if args is None:
        return AdoraGRPOConfig(f"{_name_of(model).split('/')[-1]}-GRPO")
    if not isinstance(args, AdoraGRPOConfig):
        kind = f"a {type(args).__module__.partition('.')[0]}.{type(args).__name__}"
        remedy = "give its arguments to an AdoraGRPOConfig (from adora_vl import AdoraGRPOConfig)"
        raise UserError(
            f"args: {kind} has other defaults, and steps and batches worked out of them; {remedy}"
        )
    return args


def refuse_objects(
    train_dataset: Any, reward_funcs: Any, rollout_func: Any, environment_factory: Any
) -> None:
    """Raises `UserError` for an argument of the trainer that would be ignored, or fail after the
    weights are loaded.
    """
    if rollout_func:
        raise UserError(
            "rollout_func: a sampler of your own is not supported, because its rollouts have "
            "neither seeds nor log-probabilities that can be checked; use tools, or "
            "trl.GRPOTrainer"
        )
    if not isinstance(train_dataset, Dataset | IterableDataset):
        kind = "None" if train_dataset is None else f"a {type(train_dataset).__name__}"
        raise UserError(
            f"train_dataset: {kind} is no data set; make one, such as "
            "datasets.Dataset.from_list(rows)"
        )
    if not reward_funcs and environment_factory is None:
        raise UserError(
            f"reward_funcs: {reward_funcs} would train on nothing; give a function, a preset or a "
            "list"
        )


def _name_of(model: Any) -> str:
    return model if isinstance(model, str) else str(get_config_model_id(model.config) or "")


def model_keys(
    model: Any, config: AdoraGRPOConfig, peft_config: Any, quantised: Any = None
) -> ModelConfig:
    """What a command's keys would say of the model.

    `quantised`: `quantization_config`. Raises `UserError`.
    """
    init = dict(config.model_init_kwargs or {})
    quantised = quantised or init.pop("quantization_config", None)
    if quantised is not None and not getattr(quantised, "load_in_4bit", False):
        raise UserError(
            "quantization_config: only 4 bits are supported; give "
            "BitsAndBytesConfig(load_in_4bit=True)"
        )
    if not isinstance(model, str):
        if quantised or getattr(model, "quantization_method", None):
            raise UserError(
                "model: an object has no folder in 4 bits; give its name, and quantization_config"
            )
        attention = getattr(model.config, "_attn_implementation", None)
        init = {"dtype": model.dtype, "attn_implementation": attention, "revision": None}
    return ModelConfig(
        model_name_or_path=_name_of(model),
        model_revision=init.get("revision"),
        dtype=str(init.get("dtype", "float32")).removeprefix("torch."),
        attn_implementation=init.get("attn_implementation"),
        use_peft=peft_config is not None
        or (not isinstance(model, str) and hasattr(model, "peft_config")),
        load_in_4bit=quantised is not None,
        bnb_4bit_quant_type=getattr(quantised, "bnb_4bit_quant_type", "nf4"),
        use_bnb_nested_quant=bool(getattr(quantised, "bnb_4bit_use_double_quant", False)),
    )


def rewards_given(given: Any, output_dir: Path) -> ChosenRewards:
    """The trainer's `reward_funcs`, as in TRL, or as in the key; a name with a slash is a model.

    Raises `UserError`.
    """
    asked = [*given] if isinstance(given, list | tuple) else [] if given is None else [given]
    # with a slash, or of a folder, it is the name of a reward model, for which TRL looks
    models = [
        one
        for one in asked
        if isinstance(one, str) and not is_own(one) and ("/" in one or Path(one).is_dir())
    ]
    ours = [one for one in asked if isinstance(one, Mapping | str) and one not in models]
    chosen = choose_rewards(ours, output_dir=output_dir) if ours else ChosenRewards((), (), {})
    made = zip(chosen.entries, chosen.functions, strict=True)
    entries: list[str] = []
    functions: list[Any] = []
    hashes = {**chosen.hashes}
    for one in asked:
        if one in ours:
            for entry, function in islice(made, len(one) if isinstance(one, Mapping) else 1):
                entries.append(entry)
                functions.append(function)
            continue
        if not isinstance(one, str) and not callable(one):
            raise UserError(
                f"reward_funcs: {one!r:.80} is no function; give a function, a preset or a list "
                "of them"
            )
        name = one if isinstance(one, str) else function_name(one)
        entries.append(f"{name} of Python" if name in NAMES else name)
        functions.append(one)
        hashes[entries[-1]] = _identity_of_reward(one)
    tried = {entry for entry, one in zip(entries, functions, strict=True) if _can_be_tried(one)}
    return ChosenRewards(
        entries=tuple(entries),
        functions=tuple(functions),
        hashes=hashes,
        from_python=frozenset(tried),
    )


def _identity_of_reward(function: Any) -> str:
    """By what a run knows a reward of Python's again: a reward model by its weights, a function by
    its source.
    """
    if isinstance(function, torch.nn.Module):
        return identity_of_model(function)
    if isinstance(function, str):
        return model_hash(function) or function
    return source_hash(function)


def _can_be_tried(function: Any) -> bool:
    """Whether it is a function of the user's: a reward model is loaded later, and ours are known."""
    ours = (getattr(function, "__module__", None) or type(function).__module__).startswith(
        "adora_vl."
    )
    return callable(function) and not isinstance(function, torch.nn.Module) and not ours


def told_of_tools(dataset: Any, schemas: Sequence[Mapping[str, Any]]) -> Any:
    """The data set, or each of several, with the tools in its system messages.

    Raises `UserError` for a text prompt.
    """
    if not schemas or dataset is None:
        return dataset
    if isinstance(dataset, Mapping):
        return {name: told_of_tools(each, schemas) for name, each in dataset.items()}

    def told(row: Mapping[str, Any]) -> dict[str, Any]:
        first = row["prompt"][0] if row["prompt"] else None
        if not isinstance(first, Mapping):
            raise UserError(
                'train_dataset: with tools a prompt has to be messages, such as [{"role": "user", '
                '"content": "..."}]'
            )
        has_one = first["role"] == "system"
        said = first["content"] if has_one else None
        if has_one and not isinstance(said, str):
            said = "".join(part.get("text") or "" for part in first["content"])
        text: Any = with_tools(said, schemas)
        if not isinstance(first["content"], str):
            text = [{**dict.fromkeys(first["content"][0]), "type": "text", "text": text}]
        return {"prompt": [{"role": "system", "content": text}, *row["prompt"][has_one:]]}

    if not is_stored(dataset):
        return dataset.map(told)
    made = [told(row)["prompt"] for row in dataset.select_columns("prompt").with_format(None)]
    return dataset.remove_columns("prompt").add_column("prompt", made)


def check_prompts(dataset: Dataset) -> bool:
    """Whether a row of a data set of Python's has an image.

    Raises `UserError` for a row that cannot be asked.
    """
    if "prompt" not in dataset.column_names:
        raise UserError(
            f"train_dataset: lacks the column 'prompt' (it has {', '.join(dataset.column_names)})"
        )
    pictured = False
    for name, prompt, sizes in prompts_of(dataset):
        pictured = pictured or bool(sizes)
        if sizes and isinstance(prompt, str):
            remedy = 'write the prompt as messages, such as [{"role": "user", "content": "..."}]'
            raise UserError(
                f"train_dataset: row {name} has images and a text as its prompt; {remedy}"
            )
    return pictured


def refuse_unusable_prompts(key: str, dataset: Any, tokens: Sequence[str]) -> None:
    """Hold the finished prompts of a data set, or of each of several, against `tokens` of the
    model's own. Those of a stream are held against them when they come.

    Raises `UserError` for the first row with a fault (`problem_with_messages`).
    """
    if isinstance(dataset, Mapping):
        for one in dataset.values():
            refuse_unusable_prompts(key, one, tokens)
    # A command's rows have a transform, too, which decodes pictures and changes no text.
    if not (is_stored(dataset) or only_decodes(dataset)) or "prompt" not in dataset.column_names:
        return
    number = 0
    for table in _tables(dataset, ["id", "prompt"]):
        named = "id" in table.column_names
        names = table["id"].to_pylist() if named else range(number, number + table.num_rows)
        number += table.num_rows
        for name, prompt in zip(names, table["prompt"].to_pylist(), strict=True):
            fault = problem_with_messages(prompt, tokens)
            if fault is not None:
                raise UserError(f"{key}: row {name}: {fault}")


def prompts_of(dataset: Dataset) -> Iterator[tuple[str, Any, Sequence[Size | None]]]:
    """The id, the prompt and the sizes of the images of each row; no image is decoded."""
    number = 0
    for table in _tables(dataset, ["id", "prompt", *_COLUMNS]):
        names = (
            table["id"].to_pylist()
            if "id" in table.column_names
            else range(number, number + table.num_rows)
        )
        prompts = table["prompt"].to_pylist()
        number += table.num_rows
        yield from zip(map(str, names), prompts, _sizes(table), strict=True)


def fewest_pictures(dataset: Any) -> int | None:
    """How many the row with the fewest has; None where that cannot be told without reading rows."""
    if not isinstance(dataset, Dataset) or not (is_stored(dataset) or only_decodes(dataset)):
        return None
    if not set(_COLUMNS) & set(dataset.column_names):
        return 0
    fewest = [min(_counts(table), default=None) for table in _tables(dataset, _COLUMNS)]
    return min((count for count in fewest if count is not None), default=None)


def _counts(table: pa.Table) -> list[int]:
    """How many pictures each row has; nothing is decoded."""
    name = "images" if "images" in table.column_names else "image"
    kind = table.schema.field(name).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return [int(there) for there in pc.is_valid(table[name]).to_pylist()]
    return [count or 0 for count in pc.list_value_length(table[name]).to_pylist()]


def _sizes(table: pa.Table) -> Iterator[Sequence[Size | None]]:
    if "images" in table.column_names and pa.types.is_list(table.schema.field("images").type):
        return sizes_in(table)
    if "image" in table.column_names:
        one = table["image"].combine_chunks()
        lists = pa.ListArray.from_arrays(pa.array(range(len(one) + 1), pa.int32()), one)
        return sizes_in(pa.table({"images": lists}))
    return iter([()] * table.num_rows)


def _tables(dataset: Dataset, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The rows in their order, as they are stored."""
    kept = [name for name in dataset.column_names if columns is None or name in columns]
    plain = dataset.select_columns(kept).with_format("arrow")
    for first in range(0, len(plain), _ROWS):
        yield plain[first : first + _ROWS]


def is_stored(dataset: Any) -> bool:
    """Whether its rows can be looked at beforehand: not those of a stream, and not what a transform
    makes of them.
    """
    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def identity_of_rows(dataset: Any) -> str:
    """Rows and a hash of all, of images by their bytes, to know them again; of a stream its
    columns.
    """
    if not isinstance(dataset, Dataset):
        return f"a stream of {dataset.column_names}"
    digest = hashlib.sha256(str(sorted(dataset.features.items())).encode())
    for table in _tables(dataset):
        stored = pa.BufferOutputStream()
        with pa.ipc.new_stream(stored, table.schema.remove_metadata()) as stream:
            stream.write_table(table.combine_chunks().replace_schema_metadata(None))
        digest.update(stored.getvalue())
        for path in _paths(table):
            with suppress(OSError):
                digest.update(Path(path).read_bytes())
    return f"{len(dataset)} rows {digest.hexdigest()[:16]}"


def _paths(table: pa.Table) -> Iterator[str]:
    """Of the images whose bytes lie elsewhere."""
    for name in (name for name in _COLUMNS if name in table.column_names):
        for value in (
            table[name].to_pylist() if pa.types.is_nested(table.schema.field(name).type) else ()
        ):
            for image in value if isinstance(value, list) else [value]:
                if isinstance(image, Mapping) and image.get("path") and not image.get("bytes"):
                    yield str(image["path"])


def identity_of_model(model: torch.nn.Module) -> str:
    """By what a run knows a model object again: its class, its config, those of its adapters, and
    every byte of its weights and stored buffers. Under ZeRO-3 a rank has no whole tensor, and none
    is read.
    """
    config = getattr(model, "config", None)
    adapters = getattr(model, "peft_config", {})
    digest = xxhash.xxh3_128()
    digest.update(config.to_json_string().encode() if config is not None else b"")
    for name, adapter in adapters.items():
        digest.update(f"{name} {adapter_text(adapter)}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            stored = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(stored.numpy())
    return f"{type(model).__name__} {digest.hexdigest()}"


def adapter_text(peft_config: Any) -> str:
    """PEFT's config for a fingerprint."""

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, set) else str(value)

    return json.dumps(peft_config.to_dict(), default=plain, sort_keys=True)
