"""The rows that a run trains on: read, mixed, checked, and marked where an image cannot be read."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import (
    Dataset,
    DatasetInfo,
    Features,
    Image,
    List,
    concatenate_datasets,
    interleave_datasets,
)

from adora_vl.data.dataset import load_split, refuse_test_variants
from adora_vl.data.images import UnreadableImageError, decoded_image, upright_rgb_copy
from adora_vl.data.prompts import Template, conversations, read_template
from adora_vl.data.rows import (
    fault_in_prompt,
    has_choices,
    images_of,
    require_sound_rows,
    rows_without_pixels,
)
from adora_vl.data.shared_images import as_image_with_digest
from adora_vl.utils.errors import UserError, describe_error


@dataclass(frozen=True)
class UnreadableImage:
    """Takes the place of an image that cannot be decoded in a row's `images`."""

    reason: str


def decoded_rows(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return rows with their images decoded; it is the transform of a `datasets.Dataset`.

    `rows` has the values of each column, as `datasets` calls a transform. Unreadable images become
    `UnreadableImage`.
    """
    if "images" not in rows:
        return rows
    images_of_rows = []
    for row_images in rows["images"]:
        images_of_rows.append([_decoded_or_unreadable(stored) for stored in row_images or []])
    return {**rows, "images": images_of_rows}


def _decoded_or_unreadable(stored: dict[str, Any]) -> Any:
    """Return the picture of a stored image; an `UnreadableImage` where it cannot be decoded.

    `stored` has its `bytes`, or else a `path`, which may be a web address.
    """
    try:
        encoded = stored["bytes"]
        if encoded is None and Path(stored["path"] or "").is_file():
            encoded = Path(stored["path"]).read_bytes()
        if encoded is None:  # a web address, which `datasets` fetches
            return as_image_with_digest(upright_rgb_copy(Image().decode_example(stored)))
        return as_image_with_digest(decoded_image(encoded, first_frame=True))
    except UnreadableImageError as error:
        return UnreadableImage(str(error))
    # Pillow raises what its formats raise: OSError, SyntaxError, struct.error, ...
    except Exception as error:
        return UnreadableImage(describe_error(error))


def only_decodes_rows(dataset: object) -> bool:
    """Return whether reading a row only decodes it, so that it may be read early, on any thread.

    A transform of the user's may draw random numbers, and so may a data set of the user's own
    class.
    """
    if not isinstance(dataset, Dataset):
        return False
    has_transform = dataset.format["type"] == "custom"
    transform = dataset.format["format_kwargs"].get("transform")
    return not has_transform or transform is decoded_rows


def with_decoded_images(dataset: Dataset) -> Dataset:
    """Return a data set whose images are decoded on access, to `UnreadableImage` if that fails.

    `datasets` itself would raise an error in the data loader of one rank, without the row's id,
    while the other ranks wait.
    """
    feature = dataset.features.get("images")
    if not isinstance(feature, List) or not isinstance(feature.feature, Image):
        return dataset
    assert dataset._indices is None, "the table has to be in the order of the rows"
    # `cast_column` would write all images to the disk once more. What is stored is the same with
    # and without decoding, so the table can be used as it is.
    info = DatasetInfo(features=Features({**dataset.features, "images": List(Image(decode=False))}))
    return Dataset(dataset.data, info, dataset.split).with_transform(decoded_rows)


def unreadable_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the id of each row with an image that could not be read, and why: [("geo/17", "...")].

    Each id is returned once.
    """
    reason_by_id: dict[str, str] = {}
    for number, row in enumerate(rows):
        row_id = str(row.get("id", f"#{number} of the batch"))
        for image in images_of(row):
            if isinstance(image, UnreadableImage):
                reason_by_id.setdefault(row_id, image.reason)
    return list(reason_by_id.items())


# Chooses the rows to train on: takes the rows of all data sets and the texts of their problems, and
# returns the indices of the chosen ones, ascending.
RowChooser = Callable[[Dataset, Sequence[str]], Sequence[int]]


def load_rows(
    script_args: Any, folders: Sequence[str], seed: int, choose_rows: RowChooser | None = None
) -> Dataset:
    """Return the rows with a conversational `prompt` column; images are decoded on access.

    Args:
        script_args: the script arguments, with the keys of the data.
        folders: the prepared data sets.
        seed: the seed of the mixture.
        choose_rows: chooses the rows to train on, before data sets are mixed by their shares; None
            for all rows.

    Raises:
        UserError: the data cannot be used.
    """
    split = script_args.dataset_train_split
    prompt_template = None
    if script_args.adora_prompt:
        prompt_template = read_template(script_args.adora_prompt)
    datasets = []
    texts = []  # the text of each row's message, for all data sets
    for folder in folders:
        dataset = load_split(folder, split)
        where = f"dataset: {folder!r} split {split!r}"
        if "prompt" in dataset.column_names:
            raise UserError(
                f"{where} has a column 'prompt', which is the name of what a training makes of a "
                "row; rename it, or prepare the data with `python -m data_prep`"
            )
        refuse_test_variants(dataset, where=where, folder=Path(folder))
        require_sound_rows(rows_without_pixels(dataset.data.table), where)
        texts += problem_texts(dataset, prompt_template, where)
        datasets.append(dataset)
    _require_different_ids(datasets, folders)
    dataset = _concatenate(datasets)
    image_counts = pc.list_value_length(dataset.data.table["images"]).to_pylist()
    messages = conversations(texts, image_counts, script_args.adora_system_prompt)
    dataset = with_decoded_images(dataset.add_column("prompt", messages))
    chosen_rows = range(len(dataset)) if choose_rows is None else choose_rows(dataset, texts)
    if script_args.adora_mixture is None or len(datasets) == 1:
        return dataset if len(chosen_rows) == len(dataset) else dataset.select(chosen_rows)
    counts = _count_by_dataset(chosen_rows, datasets)
    if 0 in counts:
        raise UserError(
            f"adora_mixture: {Path(folders[counts.index(0)]).name} has a share, but "
            "adora_overlong_prompts: drop leaves none of its rows; remove it from dataset_name, or "
            "raise the limit"
        )
    # Indices into `chosen_rows`, of which some come several times.
    mixture = draw_mixture(counts, script_args.adora_mixture, seed)
    return dataset.select([chosen_rows[index] for index in mixture])


def _concatenate(datasets: Sequence[Dataset]) -> Dataset:
    """Return the rows of all data sets as one; a column that one of them lacks is null there.

    Raises `UserError` where they have columns of different types.
    """
    if len(datasets) == 1:
        return datasets[0]
    try:
        return concatenate_datasets(datasets)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"dataset_name: the data sets have columns of different types ({error}); prepare them "
            "in one way"
        ) from error


def _count_by_dataset(chosen_rows: Sequence[int], datasets: Sequence[Dataset]) -> list[int]:
    """Return how many of the chosen rows come from each data set.

    `chosen_rows` are ascending indices, which go on from one data set to the next. For example, two
    data sets of 5 rows have the indices 0 to 4 and 5 to 9, and the chosen rows 1, 4, 5 are 2 and 1
    of them.
    """
    dataset_ends = accumulate(len(dataset) for dataset in datasets)
    # How many chosen rows there are up to the end of each data set.
    counts_up_to_end = [bisect_left(chosen_rows, end) for end in dataset_ends]
    return [count - count_before for count_before, count in pairwise([0, *counts_up_to_end])]


def problem_texts(dataset: Dataset, prompt_template: Template | None, where: str) -> list[str]:
    """Return the text of each row's message: its problem, or the template filled with its columns.

    Args:
        dataset: the rows.
        prompt_template: the user's template (`adora_prompt`); None for the problem alone.
        where: names the data set in errors.

    Raises:
        UserError: a column does not exist, or the text of a row has a token of the model, or
            `<image>` another number of times than the row has images.
    """
    if prompt_template is None:
        return list(dataset["problem"])
    prompt_template.check_columns(dataset.column_names, where)
    table = dataset.data.table
    image_counts = pc.list_value_length(table["images"]).to_pylist()
    # Only the columns of the template are read, and not the images.
    wanted_columns = dict.fromkeys(("id", *prompt_template.columns))  # each once
    columns = [name for name in wanted_columns if name in dataset.column_names]
    texts = []
    for row, image_count in zip(table.select(columns).to_pylist(), image_counts, strict=True):
        text = prompt_template(row)
        fault = fault_in_prompt(text, image_count)
        if fault:
            raise UserError(f"adora_prompt: row {row['id']} of {where}: {fault}")
        texts.append(text)
    return texts


def script_arguments_for_fingerprint(script_args: Any, table: pa.Table) -> Any:
    """Return a copy of the script arguments for the fingerprint, which a resumed run has to match.

    `adora_prompt` is None in the copy if the template gives each row its problem alone, so that a
    run with such a template and one without any can resume each other. `table` has the rows.
    """
    arguments = copy(script_args)
    if script_args.adora_prompt:
        prompt_template = read_template(script_args.adora_prompt)
        if prompt_template.asks_the_problem_alone(with_choices=has_choices(table)):
            arguments.adora_prompt = None
    return arguments


def draw_mixture(sizes: Sequence[int], shares: Sequence[float], seed: int) -> list[int]:
    """Return random indices of rows in concatenated data sets, each at least once.

    Rows of a data set that is too small for its share are repeated.

    Args:
        sizes: how many rows each data set has.
        shares: the share of each data set in the mixture; they need not add up to 1.
        seed: the seed of the draws.
    """
    # What is interleaved are the indices of rows, in data sets of their own. So no row is read.
    index_datasets = []
    for start, end in pairwise([0, *accumulate(sizes)]):
        index_datasets.append(Dataset.from_dict({"row": list(range(start, end))}))
    probabilities = [share / sum(shares) for share in shares]
    mixture = interleave_datasets(
        index_datasets,
        probabilities=probabilities,
        seed=seed,
        stopping_strategy="all_exhausted",
    )
    return list(mixture["row"])


def _require_different_ids(datasets: Sequence[Dataset], folders: Sequence[str]) -> None:
    """Raise `UserError` where two rows share an id, by which rollouts are recorded and shown."""
    folder_of_id: dict[Any, str] = {}
    for dataset, folder in zip(datasets, folders, strict=True):
        ids = dataset.data.table["id"].to_pylist()
        for row_id, count in Counter(ids).items():
            if count > 1:
                raise UserError(
                    f"dataset_name: {folder!r} has the row {row_id!r} twice; give each row its own "
                    "id"
                )
        for row_id in ids:
            if row_id in folder_of_id:
                names = f"{Path(folder_of_id[row_id]).name} and {Path(folder).name}"
                raise UserError(
                    f"dataset_name: {names} both have a row {row_id!r}; convert one with another "
                    "--name"
                )
        folder_of_id.update(dict.fromkeys(ids, folder))
