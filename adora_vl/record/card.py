"""README.md of a saved model: how it was trained, its metrics, how to load and prompt it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.data.prompts import DEFAULT_PROMPT, SYSTEM_PROMPT, read_template
from adora_vl.record.manifest import data_name, describe_recipe, short_model_name
from adora_vl.record.summary import metric_rows
from adora_vl.utils.cli import pluralize
from adora_vl.utils.files import replace_file

if TYPE_CHECKING:
    from transformers import TrainerState

# Keys of the config that a reader of the card looks for first, in this order
_RECIPE_KEYS = (
    "adora_method",
    "adora_truncated",
    "adora_reward",
    "num_generations",
    "learning_rate",
    "lr_scheduler_type",
    "beta",
    "loss_type",
    "scale_rewards",
    "temperature",
    "max_completion_length",
    "min_pixels",
    "max_pixels",
    "use_peft",
    "seed",
)

# Code that loads a model, to be copied: with pictures, and for a model of text alone
_LOAD_VISION = """```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

folder = "."  # where this file lies
processor = AutoProcessor.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
image = Image.open("diagram.png").convert("RGB")
problem = "Find x."
messages = {messages}
text = processor.apply_chat_template(messages, add_generation_prompt=True)
inputs = processor(text=[text], images=[image], return_tensors="pt").to(model.device)
tokens = model.generate(**inputs, max_new_tokens={max_new_tokens}, do_sample=False)
print(processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])
```"""
_LOAD_TEXT = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file lies
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
problem = "Ada says: Ben is a knave. Ben says: Ada is a knight. Who is what?"
messages = {messages}
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
tokens = model.generate(**inputs.to(model.device), max_new_tokens={max_new_tokens}, do_sample=False)
print(tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])
```"""
_ADAPTER_NOTE = """Trained as a LoRA adapter. Where this folder holds an `adapter_config.json`, merge it into its base \
model first: `python -m adora_vl.export <this folder> OUT`. Then, in OUT:

"""


def write_card(manifest: Mapping[str, Any], folder: Path, state: TrainerState) -> None:
    """Write README.md, the model card, beside a saved model. One process calls this.

    Args:
        manifest: the manifest of the run; it may be empty.
        folder: the folder of the model.
        state: the state of the training when the model was saved, with the log history.
    """
    text = model_card(manifest, history=state.log_history, step=state.global_step)
    replace_file(folder / "README.md", text)


def model_card(manifest: Mapping[str, Any], history: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return the text of README.md: how the model was trained, its metrics, how to load it.

    Args:
        manifest: the manifest of the run (`run_manifest`); it may be empty.
        history: the log history.
        step: the optimizer step of the weights.
    """
    config = manifest.get("config", {})
    model = manifest.get("model", {})
    name = str(model.get("name") or "")
    sees_images = bool(model.get("sees_images", True))
    loading_section = _how_to_load(config, manifest.get("prompt"), sees_images)
    # The manifest has `base` where the run was started from an adapter.
    is_adapter = config.get("use_peft") or model.get("base")
    if is_adapter:
        loading_section = _ADAPTER_NOTE + loading_section
    subject = "geometric diagrams" if sees_images else "problems in words"
    starts = manifest.get("starts") or [{}]
    origin = {key: manifest.get(key) for key in ("device", "commit")}
    origin |= {"started": starts[0].get("time"), "starts": len(starts)}
    steps_text = pluralize(step, "step")
    title = f"{short_model_name(name) or 'Model'}, {steps_text} of {describe_recipe(config)}"
    sections = [
        _front_matter(name, sees_images),
        f"# {title}",
        f"Trained with adora_vl to reason about {subject} by reinforcement learning (ADORA: arXiv "
        "2602.10019). The licence is that of the base model and of the data.",
        "## Load and prompt it",
        loading_section,
        "## Recipe",
        _markdown_table([(key, config[key]) for key in _RECIPE_KEYS if key in config]),
        "## Data",
        _data_table(manifest.get("data", {})),
        "## Figures of the training",
        _metric_table(history),
        "## Made with",
        _markdown_table([*manifest.get("versions", {}).items(), *origin.items()]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(name: str, sees_images: bool) -> str:
    """Return the metadata of a model card in YAML, which the Hugging Face hub reads.

    Args:
        name: the base model. A folder is left out, since the hub takes only ids.
        sees_images: whether the model takes pictures.
    """
    is_hub_id = bool(name) and not name.startswith(("/", ".")) and not Path(name).exists()
    if sees_images:
        task = "image-text-to-text"
        tags = "[grpo, adora, geometry]"
    else:
        task = "text-generation"
        tags = "[grpo, adora]"
    lines = ["---", "library_name: transformers", f"pipeline_tag: {task}"]
    if is_hub_id:
        lines.append(f"base_model: {json.dumps(name)}")
    lines += [f"tags: {tags}", "---"]
    return "\n".join(lines)


def _how_to_load(config: Mapping[str, Any], prompt: str | None, sees_images: bool) -> str:
    """Return the section of the model card with code that loads the model and asks it a problem.

    The section also says how the training turned problems into prompts.

    Args:
        config: the recorded config of the run.
        prompt: the template of the training's prompts; empty or None where a prompt was the
            problem alone.
        sees_images: whether the model takes pictures.
    """
    system = config.get("adora_system_prompt", SYSTEM_PROMPT)
    if sees_images:
        code = _LOAD_VISION
        system_content = f'[{{"type": "text", "text": {system!r}}}]'
        user_content = '[{"type": "image"}, {"type": "text", "text": problem}]'
    else:
        code = _LOAD_TEXT
        system_content = repr(system)
        user_content = "problem"
    system_message = ""
    if system:
        system_message = f'\n    {{"role": "system", "content": {system_content}}},'
    messages = f'[{system_message}\n    {{"role": "user", "content": {user_content}}},\n]'
    max_new_tokens = config.get("max_completion_length") or 4096
    section = code.format(messages=messages, max_new_tokens=max_new_tokens)
    if not prompt:
        # A prompt was the problem alone.
        return section
    if prompt == DEFAULT_PROMPT:
        problem = read_template(prompt)({"problem": "Find x.", "choices": ["12", "13"]})
        return (
            f"{section}\n\nIn the training the choices of a problem stood below it:\n"
            f"\n```text\n{problem}\n```"
        )
    return (
        f"{section}\n\nIn the training the text of a problem was made of its columns: "
        f"`{_markdown_cell(prompt)}`"
    )


def _data_table(data: Mapping[str, Any]) -> str:
    """Return the table of the training's data sets in Markdown.

    A folder is written by its name, since its path would describe the machine.

    `data`: the entry `data` of the run's manifest. For several data sets it has the list `sets`,
    and each of them gets a row.
    """
    rows: list[tuple[str, Any]] = []
    if "folder" in data:
        name = data_name(data) if data.get("sets") else _without_path(data["folder"])
        rows.append(("dataset", name))
    for key, value in data.items():
        if key not in ("folder", "sets"):
            rows.append((key, value))
    for data_set in data.get("sets") or ():
        details = []
        if "share" in data_set:
            details.append(f"share {data_set['share']:g}")
        for key in ("source", "input", "revision"):
            if data_set.get(key):
                details.append(_without_path(data_set[key]))
        rows.append((Path(data_set["folder"]).name, ", ".join(details)))
    return _markdown_table([(key, _without_path(value)) for key, value in rows])


def _without_path(value: object) -> Any:
    """Return the name of a file or folder where the value is a path; any other value as it is."""
    return Path(str(value)).name if str(value).startswith(("/", ".")) else value


def _metric_table(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the metrics of the first and the last steps as a table in Markdown, with a caution."""
    rows = metric_rows(history)
    if not rows:
        return "Nothing was logged before this was saved."
    caution = (
        "Means over the logged steps, of sampled answers to training problems: not comparable "
        "with a benchmark."
    )
    table_lines = ["| | first fifth | last fifth |", "|---|---|---|"]
    for row in rows:
        table_lines.append(f"| {row.title} | {row.first_mean} | {row.last_mean} |")
    return "\n".join([caution, "", *table_lines])


def _markdown_table(entries: Sequence[tuple[str, Any]]) -> str:
    """Return a table in Markdown with a row for each key and value; empty values are left out."""
    rows = [
        f"| {_markdown_cell(key)} | {_markdown_cell(value)} |"
        for key, value in entries
        if value is not None and value != ""
    ]
    if not rows:
        return "Not recorded."
    return "\n".join(["| | |", "|---|---|", *rows])


def _markdown_cell(value: object) -> str:
    """Return a value as text for a table cell in Markdown, where | and line ends have a meaning."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.replace("|", "\\|").replace("\n", " ")
