"""The objects that Python code passes to the trainer: a model, data sets, functions.

They are checked here before a weight is loaded, and hashed, so that a run that resumes can tell
whether it has got the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa  # pyarrow ships no types
import pyarrow.compute as pc
import torch
import xxhash
from datasets import Dataset, IterableDataset

from adora_vl.data.loading import only_decodes
from adora_vl.data.prompt_lengths import Size, sizes_in
from adora_vl.data.prompts import problem_with_messages, with_tools
from adora_vl.models.load import model_hash
from adora_vl.rewards.choose import NAMES, RewardSet, choose_rewards
from adora_vl.utils.errors import UserError
from adora_vl.utils.own_files import function_name, is_own, source_hash

if TYPE_CHECKING:
    from peft import PeftConfig

_ROWS = 1000  # rows that are read at once
_IMAGE_COLUMNS = ("images", "image")


AnyDatasets: TypeAlias = Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset]


@dataclass(frozen=True)
class Datasets:
    """The rows to train on, and those that TRL evaluates on."""

    train: Dataset | IterableDataset
    evaluate: AnyDatasets | None = None


def rewards_from_python(reward_funcs: object, output_dir: Path) -> RewardSet:
    """Return the reward functions of the trainer's `reward_funcs`.

    `reward_funcs` is what TRL takes, or what the key `adora_reward` takes: a function, the name of
    a reward model, a preset, FILE.py:FUNCTION, a mapping with options, or a list of these; None is
    none. Raises `UserError`.
    """
    if reward_funcs is None:
        requests: list[Any] = []
    elif isinstance(reward_funcs, list | tuple):
        requests = [*reward_funcs]
    else:
        requests = [reward_funcs]
    reward_models = [request for request in requests if _is_reward_model(request)]
    presets = [
        request
        for request in requests
        if isinstance(request, Mapping | str) and request not in reward_models
    ]
    chosen = RewardSet((), (), {})
    if presets:
        chosen = choose_rewards(presets, output_dir=output_dir)
    chosen_pairs = zip(chosen.entries, chosen.functions, strict=True)
    entries: list[str] = []
    functions: list[Any] = []
    hashes = {**chosen.hashes}
    for request in requests:
        if request in presets:
            # a mapping may have several presets
            count = len(request) if isinstance(request, Mapping) else 1
            for entry, function in islice(chosen_pairs, count):
                entries.append(entry)
                functions.append(function)
            continue
        if not isinstance(request, str) and not callable(request):
            raise UserError(
                f"reward_funcs: {request!r:.80} is no function; give a function, a preset or a "
                "list of them"
            )
        name = request if isinstance(request, str) else function_name(request)
        entry = f"{name} of Python" if name in NAMES else name
        entries.append(entry)
        functions.append(request)
        hashes[entry] = _identity_of_reward(request)
    pairs = zip(entries, functions, strict=True)
    tried = {entry for entry, function in pairs if _can_be_tried(function)}
    return RewardSet(
        entries=tuple(entries),
        functions=tuple(functions),
        hashes=hashes,
        from_python=frozenset(tried),
    )


def _is_reward_model(request: object) -> bool:
    """Return whether an entry names a reward model, which TRL loads: a hub id, or a folder."""
    if not isinstance(request, str) or is_own(request):
        return False
    return "/" in request or Path(request).is_dir()


def _identity_of_reward(function: Any) -> str:
    """Return a text that tells this reward from others, by a model's weights or a source."""
    if isinstance(function, torch.nn.Module):
        return identity_of_model(function)
    if isinstance(function, str):
        return model_hash(function) or function
    return source_hash(function)


def _can_be_tried(function: Any) -> bool:
    """Return whether a reward is a function of the user's, which is called once before the run.

    A reward model is not loaded yet at that time, and our own functions are known to work.
    """
    module = getattr(function, "__module__", None) or type(function).__module__
    is_ours = module.startswith("adora_vl.")
    return callable(function) and not isinstance(function, torch.nn.Module) and not is_ours


def with_tool_descriptions(dataset: Any, schemas: Sequence[Mapping[str, Any]]) -> Any:
    """Return a data set, or each of a mapping of them, with the tools in its system messages.

    `schemas`: the JSON schemas of the tools. Raises `UserError` for a prompt that is a text.
    """
    if not schemas or dataset is None:
        return dataset
    if isinstance(dataset, Mapping):
        return {name: with_tool_descriptions(part, schemas) for name, part in dataset.items()}

    def described(row: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt": _describe_tools(row["prompt"], schemas)}

    # `map` would decode all images; of a stored table only the column of the prompts is read.
    if not is_stored(dataset):
        return dataset.map(described)
    rows = dataset.select_columns("prompt").with_format(None)
    prompts = [described(row)["prompt"] for row in rows]
    return dataset.remove_columns("prompt").add_column("prompt", prompts)


def _describe_tools(prompt: Any, schemas: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the messages of a prompt, with the tools in the first one, the system message."""
    first = prompt[0] if prompt else None
    if not isinstance(first, Mapping):
        raise UserError(
            'train_dataset: with tools a prompt has to be messages, such as [{"role": "user", '
            '"content": "..."}]'
        )
    has_system_message = first["role"] == "system"
    system_text = first["content"] if has_system_message else None
    if has_system_message and not isinstance(system_text, str):
        system_text = "".join(part.get("text") or "" for part in first["content"])
    content: Any = with_tools(system_text, schemas)
    if not isinstance(first["content"], str):
        # Arrow wants the same keys in the parts of every message.
        empty_part = dict.fromkeys(first["content"][0])
        content = [{**empty_part, "type": "text", "text": content}]
    remaining = prompt[1:] if has_system_message else prompt
    return [{"role": "system", "content": content}, *remaining]


def check_prompts(dataset: Dataset) -> bool:
    """Return whether any row of a data set from Python has an image.

    Raises `UserError` without a column `prompt`, and for a row with images whose prompt is a text.
    """
    if "prompt" not in dataset.column_names:
        raise UserError(
            f"train_dataset: lacks the column 'prompt' (it has {', '.join(dataset.column_names)})"
        )
    any_images = False
    for name, prompt, sizes in prompts_of(dataset):
        any_images = any_images or bool(sizes)
        if sizes and isinstance(prompt, str):
            remedy = 'write the prompt as messages, such as [{"role": "user", "content": "..."}]'
            raise UserError(
                f"train_dataset: row {name} has images and a text as its prompt; {remedy}"
            )
    return any_images


def refuse_unusable_prompts(key: str, dataset: Any, tokens: Sequence[str]) -> None:
    """Check the finished prompts of a data set, or of each of a mapping of them.

    `tokens`: the control tokens of the model, which no prompt may contain. The rows of a stream
    are checked when they are drawn. Raises `UserError` for the first row with a fault
    (`problem_with_messages`).
    """
    if isinstance(dataset, Mapping):
        for part in dataset.values():
            refuse_unusable_prompts(key, part, tokens)
    # The rows of a command have a transform too, which decodes images and changes no text.
    if not (is_stored(dataset) or only_decodes(dataset)) or "prompt" not in dataset.column_names:
        return
    first_number = 0
    for table in _tables(dataset, ["id", "prompt"]):
        names = _names_of_rows(table, first_number)
        first_number += table.num_rows
        for name, prompt in zip(names, table["prompt"].to_pylist(), strict=True):
            fault = problem_with_messages(prompt, tokens)
            if fault is not None:
                raise UserError(f"{key}: row {name}: {fault}")


def prompts_of(dataset: Dataset) -> Iterator[tuple[str, Any, Sequence[Size | None]]]:
    """Return the id, the prompt and the sizes of the images of each row; no image is decoded.

    A row without an `id` has its number in its place.
    """
    first_number = 0
    for table in _tables(dataset, ["id", "prompt", *_IMAGE_COLUMNS]):
        names = _names_of_rows(table, first_number)
        prompts = table["prompt"].to_pylist()
        first_number += table.num_rows
        yield from zip(map(str, names), prompts, _sizes(table), strict=True)


def _names_of_rows(table: pa.Table, first_number: int) -> Sequence[Any]:
    """Return the ids of the rows of a table; without them their numbers, from `first_number` on."""
    if "id" in table.column_names:
        ids: list[Any] = table["id"].to_pylist()
        return ids
    return range(first_number, first_number + table.num_rows)


def fewest_images(dataset: object) -> int | None:
    """Return the number of images of the row with the fewest.

    None where it cannot be known without decoding rows: for a stream, and behind a transform.
    """
    if not isinstance(dataset, Dataset) or not (is_stored(dataset) or only_decodes(dataset)):
        return None
    if not set(_IMAGE_COLUMNS) & set(dataset.column_names):
        return 0
    fewest = [min(_image_counts(table), default=None) for table in _tables(dataset, _IMAGE_COLUMNS)]
    return min((count for count in fewest if count is not None), default=None)


def _image_counts(table: pa.Table) -> list[int]:
    """Return the number of images of each row; nothing is decoded."""
    name = "images" if "images" in table.column_names else "image"
    kind = table.schema.field(name).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return [int(has_image) for has_image in pc.is_valid(table[name]).to_pylist()]
    return [count or 0 for count in pc.list_value_length(table[name]).to_pylist()]


def _sizes(table: pa.Table) -> Iterator[Sequence[Size | None]]:
    """Return the sizes of the images of each row; of a column `image` there is one in each row."""
    if "images" in table.column_names and pa.types.is_list(table.schema.field("images").type):
        return sizes_in(table)
    if "image" in table.column_names:
        images = table["image"].combine_chunks()
        offsets = pa.array(range(len(images) + 1), pa.int32())
        lists = pa.ListArray.from_arrays(offsets, images)
        return sizes_in(pa.table({"images": lists}))
    return iter([()] * table.num_rows)


def _tables(dataset: Dataset, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Return the rows in their order, as they are stored, in tables of up to `_ROWS` rows."""
    names = [name for name in dataset.column_names if columns is None or name in columns]
    plain = dataset.select_columns(names).with_format("arrow")
    for first in range(0, len(plain), _ROWS):
        yield plain[first : first + _ROWS]


def is_stored(dataset: object) -> bool:
    """Return whether the rows can be read before the run, as they will be trained on.

    The rows of a stream cannot, nor what a transform makes of the stored ones.
    """
    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def identity_of_rows(dataset: Dataset | IterableDataset) -> str:
    """Return a text that tells these rows from others: their number and a hash of all of them.

    Images that lie in files count by their bytes. A stream is known by its columns alone.
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
    """Return the files of the images whose bytes are not in the table itself."""
    for name in _IMAGE_COLUMNS:
        # A column of plain values has no images.
        if name not in table.column_names or not pa.types.is_nested(table.schema.field(name).type):
            continue
        for value in table[name].to_pylist():
            images = value if isinstance(value, list) else [value]
            for image in images:
                if isinstance(image, Mapping) and image.get("path") and not image.get("bytes"):
                    yield str(image["path"])


def identity_of_model(model: torch.nn.Module) -> str:
    """Return a text that tells this model object from others.

    It holds the class, and a hash of the config, of those of its adapters, and of every byte of
    its weights and stored buffers. Under ZeRO-3 a rank has no whole tensor, and none is read.
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


def adapter_text(peft_config: PeftConfig) -> str:
    """PEFT's config as JSON, for a fingerprint; sets are sorted, as their order is random."""

    def plain(value: object) -> object:
        return sorted(value) if isinstance(value, set) else str(value)

    return json.dumps(peft_config.to_dict(), default=plain, sort_keys=True)
