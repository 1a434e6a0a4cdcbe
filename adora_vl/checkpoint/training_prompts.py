"""The prompts that a model was trained with, and what ended its answers; evaluation uses the same.

A run's `manifest.json` has them with the whole config. What is exported from a run takes them along
in a file of its own.
"""

import json
from pathlib import Path
from typing import Any

from adora_vl.checkpoint.run_files import read_run_manifest
from adora_vl.utils.files import read_json_object, replace_file

PROMPTS_FILE = "training_prompts.json"
# The keys of a config on which the tokens of a prompt depend, and the one that says what ends an
# answer.
_PROMPT_KEYS = (
    "adora_system_prompt",
    "adora_prompt",
    "chat_template_kwargs",
    "generation_kwargs",
)


def read_training_config(model: str | None) -> dict[str, Any]:
    """Read the config of the training that wrote a model; empty for any other model.

    The model may be the folder of the run, or a checkpoint or the folder `merged` in it. For a
    model that was exported to another folder, only the keys of its prompts are known.
    """
    folder = Path(model) if model else None
    if folder is None or not folder.is_dir():
        return {}
    exported = read_json_object(folder / PROMPTS_FILE)
    if exported:
        return {key: exported[key] for key in _PROMPT_KEYS if key in exported}
    for directory in (folder, folder.resolve().parent):
        manifest = read_run_manifest(directory)
        if manifest:
            config = manifest.get("config")
            return config if isinstance(config, dict) else {}
    return {}


def write_training_prompts(model: Path, exported: Path) -> None:
    """Write the prompts that a model was trained with into the folder that it is exported to.

    Nothing is written where they are not known.

    Args:
        model: the folder of the run or of its checkpoint.
        exported: the folder of the exported model.
    """
    config = read_training_config(str(model))
    prompts = {key: config[key] for key in _PROMPT_KEYS if key in config}
    if prompts:
        replace_file(exported / PROMPTS_FILE, json.dumps(prompts, indent=2) + "\n")
