"""A model that wants to sample image tokens trains all the same, with and without vLLM."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from adora_vl.models.load import load_processor
from adora_vl.models.tiny.build import PRETRAINED
from adora_vl.prompts import conversation_with_images
from adora_vl.rollout.tokens import never_sampled_ids
from data_prep.synthetic.generate import generate
from tests.integration.support import REPOSITORY, launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def eager_model(tmp_path_factory):
    """The tiny model with output rows of the vision tokens that beat its own favourites."""
    folder = tmp_path_factory.mktemp("eager")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(PRETRAINED, dtype=torch.float32)
    processor = load_processor(str(PRETRAINED))
    digits = processor.tokenizer.convert_tokens_to_ids(list("0123456789"))
    banned = never_sampled_ids(processor.tokenizer)
    with torch.no_grad():
        model.lm_head.weight[banned] = model.lm_head.weight[digits].mean(dim=0) * 3
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    row = next(iter(generate(1)))
    text = processor.apply_chat_template(
        conversation_with_images(row["problem"], 1), add_generation_prompt=True, tokenize=False
    )
    inputs = processor(text=[text], images=row["images"], return_tensors="pt")
    torch.manual_seed(0)
    sampled = model.generate(**inputs, max_new_tokens=30, do_sample=True, num_return_sequences=16)
    completions = sampled[:, inputs["input_ids"].shape[1] :]
    assert torch.isin(completions, torch.tensor(banned)).any(), "the model does not even want to: nothing is tested"
    return folder


@pytest.mark.parametrize("use_vllm", ["true", "false"])
def test_it_trains(eager_model, tmp_path, use_vllm):
    done = launch(
        "cpu", "-m", "adora_vl.train", "--config", str(REPOSITORY / "configs" / "train" / "smoke_cpu.yaml"),
        "--model_name_or_path", str(eager_model), "--output_dir", str(tmp_path / "out"), "--max_steps", "2",
        "--per_device_train_batch_size", "16", "--save_strategy", "no", "--adora_synthetic_rows", "64",
        "--use_vllm", use_vllm, "--adora_max_drift", "null",
    )  # fmt: skip
    assert "Trained 2 steps" in done.stdout
