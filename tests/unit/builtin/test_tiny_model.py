"""The tiny model: shipped small, built reproducibly, with Qwen's own classes."""

import json
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoProcessor

from adora_vl.builtin import WarmStart, builtin_data
from adora_vl.builtin.builtin_data import RECIPE_BY_TINY_MODEL
from adora_vl.builtin.small_model import train_and_save
from adora_vl.builtin.tiny_perimeter import PerimeterStart
from adora_vl.builtin.tiny_text import TextStart
from adora_vl.builtin.tiny_vl import SLIP_SHARE_BY_FAMILY
from adora_vl.builtin.tiny_zoom import ZoomStart
from adora_vl.data.prompts import conversation_with_images
from adora_vl.models.load import FOLDER_BY_TINY_MODEL, PRETRAINED_FOLDER
from adora_vl.rollout.prompt_tokens import never_sampled_ids
from adora_vl.synthetic.families import PLAIN_FAMILY_BY_NAME
from adora_vl.synthetic.generate import generate

SHORT_PLAN_BY_START = {  # plans of the starts that take no time
    "tiny": WarmStart(steps=3, short_prompt_steps=1, batch_size=4, rows=16),
    "tiny_perimeter": PerimeterStart(
        steps=2, short_prompt_steps=1, teacher_steps=1, batch_size=4, rows=12
    ),
    "tiny_text": TextStart(steps=2, batch_size=4, rows=8),
    "tiny_zoom": ZoomStart(steps=1, teacher_steps=1, batch_size=2),
}


def test_the_shipped_model_is_small_untied_and_tells_how_it_was_made():
    assert sum(file.stat().st_size for file in PRETRAINED_FOLDER.iterdir()) < 4e6
    config = AutoConfig.from_pretrained(PRETRAINED_FOLDER)
    assert config.architectures == ["Qwen2_5_VLForConditionalGeneration"]
    assert not config.tie_word_embeddings
    facts = json.loads((PRETRAINED_FOLDER / "build.json").read_text())
    assert facts["slips"] == SLIP_SHARE_BY_FAMILY
    assert facts["plan"] == json.loads(json.dumps(WarmStart().__dict__))


@pytest.mark.slow
@pytest.mark.parametrize("start", RECIPE_BY_TINY_MODEL)
def test_building_twice_gives_the_same_bytes(start, tmp_path):
    for name in ("a", "b"):
        train_and_save(
            tmp_path / name, SHORT_PLAN_BY_START[start], RECIPE_BY_TINY_MODEL[start].prepare
        )
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "build.json"} <= set(files)
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]  # nothing temporary is left


def test_its_processor_is_qwens_with_qwens_special_tokens():
    processor = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert len(never_sampled_ids(processor.tokenizer)) == 5
    row = next(iter(generate(1)))
    text = processor.apply_chat_template(
        conversation_with_images(row["problem"], 1), add_generation_prompt=True, tokenize=False
    )
    assert text.startswith("<|im_start|>system\nPlease reason step by step")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = processor(text=[text], images=row["images"], return_tensors="pt")["input_ids"][0].tolist()
    assert ids.count(processor.image_token_id) == 4  # 56 x 56 pixels
    words = "Any text: αβγ, 5 \\sqrt { 3 }, 12.5 cm² ✓"
    assert processor.tokenizer.decode(processor.tokenizer(words)["input_ids"]) == words


def test_a_conversation_without_a_system_prompt_gets_qwens_default():
    processor = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    messages = conversation_with_images("Find x.", 1, system_prompt=None)
    text = processor.apply_chat_template(messages, tokenize=False)
    assert text.startswith(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_sta"
    )


def test_the_teacher_knows_every_family():
    assert [
        family for family in PLAIN_FAMILY_BY_NAME if not 0 < SLIP_SHARE_BY_FAMILY.get(family, 0) < 1
    ] == []


def test_a_start_that_a_wheel_lacks_is_built_in_the_cache_at_its_first_use(tmp_path, monkeypatch):
    monkeypatch.setenv("ADORA_VL_HOME", str(tmp_path))
    name = "tiny_perimeter"
    monkeypatch.setitem(FOLDER_BY_TINY_MODEL, name, tmp_path / "nowhere")
    monkeypatch.setitem(
        builtin_data.RECIPE_BY_TINY_MODEL,
        name,
        builtin_data.TinyModelRecipe(SHORT_PLAN_BY_START[name], RECIPE_BY_TINY_MODEL[name].prepare),
    )
    assert builtin_data.resolve_model(name) == str(tmp_path / name)
    written = (tmp_path / name / "model.safetensors").stat().st_mtime_ns
    assert builtin_data.resolve_model(name) == str(tmp_path / name)
    assert (tmp_path / name / "model.safetensors").stat().st_mtime_ns == written


def test_a_wheel_has_the_weights_of_one_model():
    package = Path(builtin_data.__file__).parents[1]
    packed = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [
        file for pattern in packed["package-data"]["adora_vl"] for file in package.glob(pattern)
    ]
    assert [file.parent for file in files if file.suffix == ".safetensors"] == [PRETRAINED_FOLDER]
    assert sum(file.stat().st_size for file in files) < 5e6
