"""The problems of a training from Python, as a data set that the trainer takes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from adora_vl.builtin.builtin_data import data_folders
from adora_vl.config import AdoraScriptArguments
from adora_vl.data.loading import load_rows
from adora_vl.data.prompts import DEFAULT_PROMPT


def load_problems(
    dataset_name: str | Path | Sequence[str | Path],
    split: str = "train",
    *,
    adora_columns: Mapping[str, Any] | None = None,
    adora_system_prompt: str | None = "boxed",
    adora_prompt: str | None = DEFAULT_PROMPT,
    adora_mixture: Sequence[float] | None = None,
    seed: int = 0,
) -> Dataset:
    """Load problems, with the conversation that asks each of them in the column `prompt`.

    A command with the same keys trains on the same rows, apart from those with overlong prompts,
    which are refused from Python. Several processes may load the same problems at once.

        train_dataset = load_problems("data/geometry3k")
        train_dataset = load_problems(
            "mine.csv", adora_columns={"problem": "question", "answer": "label"}
        )

    Args:
        dataset_name: a folder that `python -m data_prep` has made, `synthetic` or `knights`; with
            `adora_columns` a table, a folder with one, or a hub id. Several are mixed.
        split: the split to load, as `dataset_train_split`.
        adora_columns: which column of a table is what; None for prepared data.
        adora_system_prompt: `boxed`, `think`, `think_answer`, a `FILE.txt`, a text of more than one
            word, or None for no system prompt.
        adora_prompt: the text of a problem's message, made of the columns of its row; None for the
            problem alone.
        adora_mixture: the share of each of several data sets; None: every row once.
        seed: of the mixture; a command takes `data_seed` or `seed`.

    Returns:
        The rows, whose images are decoded when they are read. `answer` has the reference answers,
        and docs/data_formats.md the other columns.

    Raises:
        UserError: for data that cannot be used.
    """
    # Values of another type are left to the arguments, which refuse them by the key's name.
    names = [dataset_name] if isinstance(dataset_name, str | Path) else dataset_name
    columns = dict(adora_columns) if isinstance(adora_columns, Mapping) else adora_columns
    keys: dict[str, Any] = {
        "dataset_name": names,
        "dataset_train_split": split,
        "adora_columns": columns,
        "adora_system_prompt": adora_system_prompt,
        "adora_prompt": adora_prompt,
        "adora_mixture": adora_mixture,
    }
    script = AdoraScriptArguments(**keys)
    return load_rows(script, data_folders(script), seed)
