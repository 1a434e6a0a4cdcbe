"""README.md of every saved model: how it was made, what came out, how to load and prompt it."""

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
    """README.md of the model in `folder`, whose training is at `state`. One process calls this."""
    replace_file(folder / "README.md", model_card(manifest, state.log_history, state.global_step))


def model_card(manifest: Mapping[str, Any], history: Sequence[Mapping[str, Any]], step: int) -> str:
    """`manifest` is that of the run (it may be empty), `history` is its log, and `step` is the step
    of the weights.
    """
    config = manifest.get("config", {})
    model = manifest.get("model", {})
    name = str(model.get("name") or "")
    sees = bool(model.get("sees_images", True))
    asked_with = manifest.get("prompt", config.get("adora_prompt"))
    load = (_ADAPTER if config.get("use_peft") or model.get("base") else "") + _how_to_load(
        config, asked_with, sees
    )
    about = "geometric diagrams" if sees else "problems in words"
    starts = manifest.get("starts") or [{}]
    origin = {name: manifest.get(name) for name in ("device", "commit")}
    origin |= {"started": starts[0].get("time"), "starts": len(starts)}
    sections = [
        _front_matter(name, sees),
        f"# {short_name(name) or 'Model'}, {amount(step, 'step')} of {recipe_of(config)}",
        f"Trained with adora_vl to reason about {about} by reinforcement learning (ADORA: arXiv "
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


def _front_matter(name: str, sees: bool) -> str:
    """The metadata that the hub reads. The base model is only named if its name is a hub id."""
    is_folder = not name or Path(name).exists() or name.startswith(("/", "."))
    base = [] if is_folder else [f"base_model: {json.dumps(name)}"]
    kind, tags = (
        ("image-text-to-text", "[grpo, adora, geometry]")
        if sees
        else ("text-generation", "[grpo, adora]")
    )
    lines = ["library_name: transformers", f"pipeline_tag: {kind}", *base, f"tags: {tags}"]
    return "\n".join(["---", *lines, "---"])


def _how_to_load(config: Mapping[str, Any], asked_with: str | None, sees: bool) -> str:
    system = config.get("adora_system_prompt", SYSTEM_PROMPT)
    told = f'[{{"type": "text", "text": {system!r}}}]' if sees else repr(system)
    first = f'\n    {{"role": "system", "content": {told}}},' if system else ""
    asked = '[{"type": "image"}, {"type": "text", "text": problem}]' if sees else "problem"
    messages = f'[{first}\n    {{"role": "user", "content": {asked}}},\n]'
    longest = config.get("max_completion_length") or 4096
    load = (_LOAD if sees else _LOAD_TEXT).format(messages=messages, max_new_tokens=longest)
    if not asked_with:
        return load
    if asked_with == DEFAULT_PROMPT:
        problem = template(asked_with)({"problem": "Find x.", "choices": ["12", "13"]})
        return (
            f"{load}\n\nIn the training the choices of a problem stood below it:\n"
            f"\n```text\n{problem}\n```"
        )
    return (
        f"{load}\n\nIn the training the text of a problem was made of its columns: "
        f"`{_cell(asked_with)}`"
    )


def _data(data: Mapping[str, Any]) -> str:
    """Folders are shown by name only: their paths describe the machine, not the data."""
    rows = (
        [("dataset", data_name(data) if data.get("sets") else _named(data["folder"]))]
        if "folder" in data
        else []
    )
    rows += [(key, value) for key, value in data.items() if key not in ("folder", "sets")]
    for one in data.get("sets") or ():
        facts = [f"share {one['share']:g}"] if "share" in one else []
        facts += [_named(one[key]) for key in ("source", "input", "revision") if one.get(key)]
        rows.append((Path(one["folder"]).name, ", ".join(facts)))
    return _table([(key, _named(value)) for key, value in rows])


def _named(value: Any) -> Any:
    return Path(value).name if str(value).startswith(("/", ".")) else value


def _figures(history: Sequence[Mapping[str, Any]]) -> str:
    rows = figure_rows(history)
    if not rows:
        return "Nothing was logged before this was saved."
    said = (
        "Means over the logged steps, of sampled answers to training problems: not comparable "
        "with a benchmark."
    )
    lines = [
        "| | first fifth | last fifth |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join([said, "", *lines])


def _table(entries: Sequence[tuple[str, Any]]) -> str:
    known = [(key, value) for key, value in entries if value is not None and value != ""]
    rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in known]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else "Not recorded."


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.replace("|", "\\|").replace("\n", " ")
