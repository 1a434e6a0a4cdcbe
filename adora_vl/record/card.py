"""README.md of a saved model: how it was trained, its figures, how to load and prompt it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.data.prompts import DEFAULT_PROMPT, SYSTEM_PROMPT, template
from adora_vl.record.manifest import data_name, recipe_of, short_name
from adora_vl.record.summary import figure_rows
from adora_vl.utils.cli import amount
from adora_vl.utils.files import replace_file

if TYPE_CHECKING:
    from transformers import TrainerState

# Keys of the recipe that a reader looks for first, in this order
_RECIPE = (
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

_LOAD = """```python
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
_ADAPTER = """Trained as a LoRA adapter. Where this folder holds an `adapter_config.json`, merge it into its base \
model first: `python -m adora_vl.export <this folder> OUT`. Then, in OUT:

"""


def write_card(manifest: Mapping[str, Any], folder: Path, state: TrainerState) -> None:
    """Write README.md of the model in `folder`; one process calls this.

    `state` is that of the training when the model was saved, with the log history.
    """
    replace_file(folder / "README.md", model_card(manifest, state.log_history, state.global_step))


def model_card(manifest: Mapping[str, Any], history: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return the text of README.md.

    Args:
        manifest: the manifest of the run; it may be empty.
        history: the log history.
        step: the optimizer step of the weights.
    """
    config = manifest.get("config", {})
    model = manifest.get("model", {})
    name = str(model.get("name") or "")
    sees_images = bool(model.get("sees_images", True))
    prompt = manifest.get("prompt", config.get("adora_prompt"))
    load = _how_to_load(config, prompt, sees_images)
    if config.get("use_peft") or model.get("base"):
        load = _ADAPTER + load
    subject = "geometric diagrams" if sees_images else "problems in words"
    starts = manifest.get("starts") or [{}]
    origin = {key: manifest.get(key) for key in ("device", "commit")}
    origin |= {"started": starts[0].get("time"), "starts": len(starts)}
    sections = [
        _front_matter(name, sees_images),
        f"# {short_name(name) or 'Model'}, {amount(step, 'step')} of {recipe_of(config)}",
        f"Trained with adora_vl to reason about {subject} by reinforcement learning (ADORA: arXiv "
        "2602.10019). The licence is that of the base model and of the data.",
        "## Load and prompt it",
        load,
        "## Recipe",
        _table([(key, config[key]) for key in _RECIPE if key in config]),
        "## Data",
        _data(manifest.get("data", {})),
        "## Figures of the training",
        _figures(history),
        "## Made with",
        _table([*manifest.get("versions", {}).items(), *origin.items()]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(name: str, sees_images: bool) -> str:
    """Return the metadata that the hub reads.

    The base model is only named if its name is a hub id.
    """
    is_folder = not name or Path(name).exists() or name.startswith(("/", "."))
    base = [] if is_folder else [f"base_model: {json.dumps(name)}"]
    if sees_images:
        kind = "image-text-to-text"
        tags = "[grpo, adora, geometry]"
    else:
        kind = "text-generation"
        tags = "[grpo, adora]"
    lines = ["library_name: transformers", f"pipeline_tag: {kind}", *base, f"tags: {tags}"]
    return "\n".join(["---", *lines, "---"])


def _how_to_load(config: Mapping[str, Any], prompt: str | None, sees_images: bool) -> str:
    """Return code that loads the model and asks it a problem.

    It says too how prompts were made of problems. `prompt` is the template of the training's
    prompts; empty or None where a prompt was the problem alone.
    """
    system = config.get("adora_system_prompt", SYSTEM_PROMPT)
    if sees_images:
        code = _LOAD
        system_content = f'[{{"type": "text", "text": {system!r}}}]'
        user_content = '[{"type": "image"}, {"type": "text", "text": problem}]'
    else:
        code = _LOAD_TEXT
        system_content = repr(system)
        user_content = "problem"
    system_message = f'\n    {{"role": "system", "content": {system_content}}},' if system else ""
    messages = f'[{system_message}\n    {{"role": "user", "content": {user_content}}},\n]'
    max_new_tokens = config.get("max_completion_length") or 4096
    load = code.format(messages=messages, max_new_tokens=max_new_tokens)
    if not prompt:
        return load
    if prompt == DEFAULT_PROMPT:
        problem = template(prompt)({"problem": "Find x.", "choices": ["12", "13"]})
        return (
            f"{load}\n\nIn the training the choices of a problem stood below it:\n"
            f"\n```text\n{problem}\n```"
        )
    return (
        f"{load}\n\nIn the training the text of a problem was made of its columns: "
        f"`{_cell(prompt)}`"
    )


def _data(data: Mapping[str, Any]) -> str:
    """Return the table of the data; folders stand by name, since paths describe the machine."""
    rows: list[tuple[str, Any]] = []
    if "folder" in data:
        name = data_name(data) if data.get("sets") else _without_path(data["folder"])
        rows.append(("dataset", name))
    for key, value in data.items():
        if key not in ("folder", "sets"):
            rows.append((key, value))
    for source in data.get("sets") or ():
        facts = []
        if "share" in source:
            facts.append(f"share {source['share']:g}")
        for key in ("source", "input", "revision"):
            if source.get(key):
                facts.append(_without_path(source[key]))
        rows.append((Path(source["folder"]).name, ", ".join(facts)))
    return _table([(key, _without_path(value)) for key, value in rows])


def _without_path(value: object) -> Any:
    """Return the name of a file or folder where the value is a path; any other value as it is."""
    return Path(str(value)).name if str(value).startswith(("/", ".")) else value


def _figures(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the figures before and after, with a caution."""
    rows = figure_rows(history)
    if not rows:
        return "Nothing was logged before this was saved."
    caution = (
        "Means over the logged steps, of sampled answers to training problems: not comparable "
        "with a benchmark."
    )
    lines = [
        "| | first fifth | last fifth |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join([caution, "", *lines])


def _table(entries: Sequence[tuple[str, Any]]) -> str:
    """Return a table in Markdown of the entries that have a value."""
    filled = [(key, value) for key, value in entries if value is not None and value != ""]
    rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in filled]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else "Not recorded."


def _cell(value: object) -> str:
    """Return a value as text that does not break a table of Markdown."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.replace("|", "\\|").replace("\n", " ")
