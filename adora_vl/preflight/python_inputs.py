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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pyarrow as pa  # pyarrow ships no types
import pyarrow.compute as pc
import torch
import xxhash
from datasets import Dataset, IterableDataset

from adora_vl.data.loading import only_decodes_rows
from adora_vl.data.prompt_lengths import Size, stored_image_sizes
from adora_vl.data.prompts import fault_in_messages, with_tools
from adora_vl.models.load import model_hash
from adora_vl.rewards.choose import REWARD_NAMES, RewardSet, choose_rewards
from adora_vl.rewards.entries import canonical_reward_name, normalize_reward_entries
from adora_vl.utils.cli import to_json_types
from adora_vl.utils.errors import UserError
from adora_vl.utils.own_files import function_name, is_users_file, source_hash
from adora_vl.utils.secrets import without_secrets

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import ProcessorMixin

_TABLE_ROWS = 1000  # rows that are read at once
_IMAGE_COLUMNS = ("images", "image")


AnyDatasets: TypeAlias = Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset]


@dataclass(frozen=True)
class Datasets:
    """The data sets of Python code: the rows to train on, and those that TRL evaluates on."""

    train: Dataset | IterableDataset
    evaluate: AnyDatasets | None = None

    @property
    def by_key(self) -> list[tuple[str, Dataset | IterableDataset]]:
        """Each data set, with the argument that has it; `eval_dataset` may have several."""
        evaluated = self.evaluate
        parts = evaluated.values() if isinstance(evaluated, Mapping) else [evaluated]
        pairs: list[tuple[str, Dataset | IterableDataset]] = [("train_dataset", self.train)]
        return pairs + [("eval_dataset", part) for part in parts if part is not None]


def rewards_from_python(reward_funcs: object, output_dir: Path) -> RewardSet:
    """Return the reward functions that Python code passes to the trainer as `reward_funcs`.

    An entry may be what TRL takes, a function or the name of a reward model. It may also be what
    the key `adora_reward` takes: a preset, FILE.py:FUNCTION, or a mapping of these to options.

    `reward_funcs`: an entry, a list of entries, or None. Raises `UserError` for anything else, and
    for a name that occurs twice.
    """
    if reward_funcs is None:
        rewards: list[Any] = []
    elif isinstance(reward_funcs, list | tuple):
        rewards = [*reward_funcs]
    else:
        rewards = [reward_funcs]
    # The entries that the key takes are loaded together, as for a command.
    rewards_of_key = [reward for reward in rewards if _is_adora_reward_entry(reward)]
    loaded = RewardSet(entries=(), functions=(), hashes={})
    if rewards_of_key:
        loaded = choose_rewards(rewards_of_key, output_dir=output_dir)
    remaining_loaded = zip(loaded.entries, loaded.functions, strict=True)
    entries: list[str] = []
    functions: list[Any] = []
    hashes = {**loaded.hashes}
    for reward in rewards:
        if _is_adora_reward_entry(reward):
            # A mapping stands for one reward for each of its names.
            count = len(reward) if isinstance(reward, Mapping) else 1
            for entry, function in islice(remaining_loaded, count):
                entries.append(entry)
                functions.append(function)
            continue
        entry = _name_of_python_reward(reward)
        if entry in entries:
            raise UserError(
                f"reward_funcs: two rewards have the name {entry!r}, by which log, record and "
                "resuming tell them apart; rename one of them"
            )
        entries.append(entry)
        functions.append(reward)
        hashes[entry] = _hash_reward(reward)
    tried_entries: set[str] = set()
    for entry, function in zip(entries, functions, strict=True):
        if _is_users_function(function):
            tried_entries.add(entry)
    return RewardSet(
        entries=tuple(entries),
        functions=tuple(functions),
        hashes=hashes,
        from_python=frozenset(tried_entries),
    )


def _name_of_python_reward(reward: object) -> str:
    """Return the name of a function or reward model that Python code passes, as TRL takes them.

    The name differs from all names of the presets: a function with the name of a preset becomes
    `NAME of Python`. Raises `UserError` for anything else.
    """
    if not isinstance(reward, str) and not callable(reward):
        raise UserError(
            f"reward_funcs: {reward!r:.80} is no function; give a function, a preset or a "
            "list of them"
        )
    name = reward if isinstance(reward, str) else function_name(reward)
    # Other names of the presets count too, so the canonical name is compared.
    return f"{name} of Python" if canonical_reward_name(name) in REWARD_NAMES else name


def rewards_as_json(reward_funcs: object) -> str:
    """Return the entries of `reward_funcs` in their order as JSON, for a fingerprint.

    Options of an entry count, but not the address of a judge, which may change in the middle of a
    run. A function or a model is written by its name, since `RewardSet.hashes` has its content. For
    example, `[accuracy, my_function]` becomes `["accuracy", "my_function"]`.
    """
    rewards = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    entries: list[Any] = []
    for reward in rewards:
        if isinstance(reward, Mapping | str) or reward is None:
            entries.append(without_secrets(to_json_types(reward)))
        else:
            entries.append(function_name(reward))
    # `normalize_reward_entries` leaves out the address of a judge.
    return json.dumps(normalize_reward_entries(entries), default=str)


def _is_adora_reward_entry(reward: object) -> bool:
    """Return whether an entry of `reward_funcs` is one that the key `adora_reward` takes.

    These are presets, FILE.py:FUNCTION, and mappings of them to their options.
    """
    return isinstance(reward, Mapping | str) and not _is_reward_model(reward)


def _is_reward_model(reward: object) -> bool:
    """Return whether an entry names a reward model, which TRL loads: a hub id, or a folder."""
    if not isinstance(reward, str) or is_users_file(reward):
        return False
    return "/" in reward or Path(reward).is_dir()


def _hash_reward(reward: Any) -> str:
    """Return a text that tells this reward from others, for the run's fingerprint.

    It has a hash of a model's weights or of a function's source.
    """
    if isinstance(reward, torch.nn.Module):
        return hash_model_object(reward)
    if isinstance(reward, str):
        return model_hash(reward) or reward
    return source_hash(reward)


def _is_users_function(reward: Any) -> bool:
    """Return whether a reward is a function of the user's, which is called once before the run.

    A reward model is not loaded at that time, and the functions of this project are known to work.
    """
    module = getattr(reward, "__module__", None) or type(reward).__module__
    is_of_this_project = module.startswith("adora_vl.")
    is_model = isinstance(reward, torch.nn.Module)
    return callable(reward) and not is_model and not is_of_this_project


def with_tool_descriptions(dataset: Any, schemas: Sequence[Mapping[str, Any]]) -> Any:
    """Return a data set whose system messages describe the tools.

    Args:
        dataset: A data set, a mapping of names to data sets, or None.
        schemas: The JSON schemas of the tools; empty without tools.

    Raises `UserError` for a prompt that is a text and no list of messages.
    """
    if not schemas or dataset is None:
        return dataset
    if isinstance(dataset, Mapping):
        return {name: with_tool_descriptions(part, schemas) for name, part in dataset.items()}

    def described_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt": _describe_tools(row["prompt"], schemas)}

    # The prompts of a stream, and those that a transform makes, are changed when they are read.
    if not is_plain_table(dataset):
        return dataset.map(described_prompt)
    # `map` would decode all images of a table. So only its prompts are read here.
    rows = dataset.select_columns("prompt").with_format(None)
    prompts = [_describe_tools(row["prompt"], schemas) for row in rows]
    if dataset.column_names == ["prompt"]:
        # Without a column a table has no rows either, to which one could be added.
        return Dataset.from_dict({"prompt": prompts})
    return dataset.remove_columns("prompt").add_column("prompt", prompts)


def _describe_tools(prompt: Any, schemas: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the messages of a prompt with a description of the tools in the system message.

    A system message is added if there is none. `schemas`: the JSON schemas of the tools. Raises
    `UserError` for a prompt that is no list of messages.
    """
    first_message = prompt[0] if prompt else None
    if not isinstance(first_message, Mapping):
        raise UserError(
            'train_dataset: with tools a prompt has to be messages, such as [{"role": "user", '
            '"content": "..."}]'
        )
    first_content = first_message["content"]
    system_text = system_message_text(prompt)
    has_system_message = system_text is not None
    content: Any = with_tools(system_text, schemas)
    if not isinstance(first_content, str):
        # Contents are lists of parts here. Arrow wants the same keys in the parts of all messages.
        # So the new part gets all keys of an old part, with None as their values.
        null_by_key = dict.fromkeys(first_content[0])
        content = [{**null_by_key, "type": "text", "text": content}]
    remaining_messages = prompt[1:] if has_system_message else prompt
    return [{"role": "system", "content": content}, *remaining_messages]


def system_message_text(prompt: str | Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of a prompt's system message; None for a prompt without one.

    The message's content is a text, or a list of parts as chat templates take it. `prompt`: a list
    of messages, or a text.
    """
    if not prompt or isinstance(prompt, str) or prompt[0].get("role") != "system":
        return None
    content = prompt[0]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def any_row_has_images(dataset: Dataset) -> bool:
    """Return whether any row of a data set from Python has an image.

    Raises `UserError` without a column `prompt`, with two columns of images, and for a row with
    images whose prompt is a text.
    """
    if "prompt" not in dataset.column_names:
        raise UserError(
            f"train_dataset: lacks the column 'prompt' (it has {', '.join(dataset.column_names)}); "
            "add the messages that ask each row, or load prepared data and tables with "
            "adora_vl.load_problems"
        )
    if set(_IMAGE_COLUMNS) <= set(dataset.column_names):
        raise UserError(
            "train_dataset: has the columns 'image' and 'images', of which TRL would read the second "
            "alone; remove one of them"
        )
    any_images = False
    for row in iterate_prompts(dataset):
        if not row.image_sizes:
            continue
        any_images = True
        if isinstance(row.prompt, str):
            remedy = 'write the prompt as messages, such as [{"role": "user", "content": "..."}]'
            raise UserError(
                f"train_dataset: row {row.name} has images and a text as its prompt; {remedy}"
            )
    return any_images


def refuse_unusable_prompts(key: str, dataset: Any, tokens: Sequence[str]) -> None:
    """Raise `UserError` for the first prompt that cannot be used, such as one without a message.

    The rows of a stream are checked when they are drawn.

    Args:
        key: The argument or key with the data set, for the error.
        dataset: A data set, a mapping of names to data sets, or None.
        tokens: The control tokens of the model, which no prompt may contain.
    """
    if isinstance(dataset, Mapping):
        for part in dataset.values():
            refuse_unusable_prompts(key, part, tokens)
        return
    # The rows of a command have a transform, but it only decodes images, and changes no text.
    are_texts_as_stored = is_plain_table(dataset) or only_decodes_rows(dataset)
    if not are_texts_as_stored or "prompt" not in dataset.column_names:
        return
    first_number = 0
    for table in arrow_tables(dataset, ["id", "prompt"]):
        names = row_names(table, first_number)
        first_number += table.num_rows
        for name, prompt in zip(names, table["prompt"].to_pylist(), strict=True):
            fault = fault_in_messages(prompt, tokens)
            if fault is not None:
                raise UserError(f"{key}: row {name}: {fault}")


class PromptRow(NamedTuple):
    """A row's name, its prompt, and the sizes of its images, None for an unreadable one.

    The name is the row's `id`, or else its number.
    """

    name: str
    prompt: Any
    image_sizes: Sequence[Size | None]


def iterate_prompts(dataset: Dataset) -> Iterator[PromptRow]:
    """Yield the prompt of each row with the sizes of its images; no image is decoded."""
    first_number = 0
    for table in arrow_tables(dataset, ["id", "prompt", *_IMAGE_COLUMNS]):
        names = row_names(table, first_number)
        first_number += table.num_rows
        prompts = table["prompt"].to_pylist()
        for name, prompt, sizes in zip(names, prompts, _image_sizes(table), strict=True):
            yield PromptRow(name=str(name), prompt=prompt, image_sizes=sizes)


def row_names(table: pa.Table, first_number: int) -> Sequence[Any]:
    """Return the ids of a table's rows; without a column `id` their numbers in the data set.

    `first_number`: the number of the table's first row.
    """
    if "id" in table.column_names:
        ids: list[Any] = table["id"].to_pylist()
        return ids
    return range(first_number, first_number + table.num_rows)


def fewest_images(dataset: object) -> int | None:
    """Return the number of images of the row that has the fewest; None for a data set without rows.

    It is also None where the number cannot be told without decoding every row: for a stream, and
    for a data set with a transform that may change the images.
    """
    are_images_as_stored = is_plain_table(dataset) or only_decodes_rows(dataset)
    if not isinstance(dataset, Dataset) or not are_images_as_stored:
        return None
    if set(_IMAGE_COLUMNS).isdisjoint(dataset.column_names):
        return 0
    image_counts: list[int] = []
    for table in arrow_tables(dataset, _IMAGE_COLUMNS):
        image_counts += _image_counts(table)
    return min(image_counts, default=None)


def _image_counts(table: pa.Table) -> list[int]:
    """Return the number of images of each row of a table; no image is decoded.

    For example, a column `images` with the lists [a, b], [] and null gives 2, 0, 0.
    """
    name = "images" if "images" in table.column_names else "image"
    column_type = table.schema.field(name).type
    if pa.types.is_list(column_type) or pa.types.is_large_list(column_type):
        # The length of a null is null.
        return [count or 0 for count in pc.list_value_length(table[name]).to_pylist()]
    return [int(has_image) for has_image in pc.is_valid(table[name]).to_pylist()]


def _image_sizes(table: pa.Table) -> Iterator[Sequence[Size | None]]:
    """Yield the sizes of the images of each row of a table; no image is decoded.

    The table has a column `images` with lists, or a column `image` with one in each row, or none.
    """
    if "images" in table.column_names and pa.types.is_list(table.schema.field("images").type):
        return stored_image_sizes(table)
    if "image" in table.column_names:
        # The images become a column of lists with one image each. List i goes from i to i + 1.
        images = table["image"].combine_chunks()
        offsets = pa.array(range(len(images) + 1), pa.int32())
        lists = pa.ListArray.from_arrays(offsets, images)
        return stored_image_sizes(pa.table({"images": lists}))
    return iter([()] * table.num_rows)


def arrow_tables(dataset: Dataset, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a data set in their order, as they are stored, up to `_TABLE_ROWS` at once.

    `columns`: the columns to read; None: all. Columns that the data set lacks are ignored.
    """
    names = [name for name in dataset.column_names if columns is None or name in columns]
    arrow_rows = dataset.select_columns(names).with_format("arrow")
    for first in range(0, len(arrow_rows), _TABLE_ROWS):
        yield arrow_rows[first : first + _TABLE_ROWS]


def is_plain_table(dataset: object) -> bool:
    """Return whether a data set is a table whose rows are used as they are stored.

    It is not for a stream, nor with a transform, which changes the rows when they are read.
    """
    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def hash_rows(dataset: Dataset | IterableDataset) -> str:
    """Return a text that tells these rows from others: their number and a hash of all of them.

    If an image is a file, the bytes of the file count. A stream is known by its columns alone.
    """
    if not isinstance(dataset, Dataset):
        return f"a stream of {dataset.column_names}"
    digest = hashlib.sha256(str(sorted(dataset.features.items())).encode())
    for table in arrow_tables(dataset):
        # The rows are written without metadata and in one chunk, so that only their values count.
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, table.schema.remove_metadata()) as stream:
            stream.write_table(table.combine_chunks().replace_schema_metadata(None))
        digest.update(buffer.getvalue())
        for path in _image_paths(table):
            with suppress(OSError):
                digest.update(Path(path).read_bytes())
    return f"{len(dataset)} rows {digest.hexdigest()[:16]}"


def _image_paths(table: pa.Table) -> Iterator[str]:
    """Yield the paths of the images that are files, and not bytes in the table itself."""
    for name in _IMAGE_COLUMNS:
        # A column of plain values has no images.
        if name not in table.column_names or not pa.types.is_nested(table.schema.field(name).type):
            continue
        for value in table[name].to_pylist():
            images = value if isinstance(value, list) else [value]
            for image in images:
                if isinstance(image, Mapping) and image.get("path") and not image.get("bytes"):
                    yield str(image["path"])


def hash_processor(processor: ProcessorMixin) -> str:
    """Return a text that tells a processor, or a tokenizer, from others: a hash of what it does.

    The hash is of its chat templates, its vocabulary, and the settings for images. How it was used
    before, such as with padding, does not count.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    image_processor = getattr(processor, "image_processor", None)
    image_settings = image_processor.to_json_string() if image_processor is not None else ""
    parts = [
        type(processor).__name__,
        getattr(processor, "chat_template", None),
        tokenizer.chat_template,
        sorted(tokenizer.get_vocab().items()),
        image_settings,
    ]
    return xxhash.xxh3_128(repr(parts).encode()).hexdigest()


def hash_model_object(model: torch.nn.Module) -> str:
    """Return a text that tells a model object from others: its class and a hash of its content.

    The content is its config, the configs of its adapters, and every byte of its weights and stored
    buffers. Under ZeRO-3 a rank has no whole tensors, so the weights do not count.
    """
    config = getattr(model, "config", None)
    adapter_configs = getattr(model, "peft_config", {})
    digest = xxhash.xxh3_128()
    if config is not None:
        digest.update(config.to_json_string().encode())
    for name, adapter_config in adapter_configs.items():
        digest.update(f"{name} {adapter_config_as_json(adapter_config)}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        # An empty tensor cannot be viewed as bytes.
        if tensor.numel() > 0:
            tensor_bytes = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(tensor_bytes.numpy())
    return f"{type(model).__name__} {digest.hexdigest()}"


def adapter_config_as_json(peft_config: PeftConfig) -> str:
    """Return PEFT's config as JSON, for a fingerprint.

    Its sets are sorted, because their order is random.
    """

    def as_json_value(value: object) -> object:
        return sorted(value) if isinstance(value, set) else str(value)

    return json.dumps(peft_config.to_dict(), default=as_json_value, sort_keys=True)
