"""What Python gives as objects is known again by all of it."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from adora_vl.data.prompts import with_tools
from adora_vl.models.load import PRETRAINED_FOLDER, limit_pixels, load_processor
from adora_vl.models.shape import refuse_embedding_adapters
from adora_vl.preflight.python_inputs import (
    hash_model_object,
    hash_processor,
    rewards_from_python,
    with_tool_descriptions,
)
from adora_vl.preflight.resolved_run import ResolvedRun
from adora_vl.utils.errors import UserError


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a small language model."""
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM(config)


def test_a_model_object_is_another_one_where_any_of_its_numbers_is(model):
    """A model with any other number in its weights has another hash; a copy has the same.

    Otherwise a run would resume with another base model, and say nothing. Every parameter is
    changed at its first, at a middle and at its last number.
    """
    identity = hash_model_object(model)
    assert identity == hash_model_object(deepcopy(model))
    for name, parameter in model.named_parameters():
        for position in (0, parameter.numel() // 3, parameter.numel() - 1):
            changed_model = deepcopy(model)
            with torch.no_grad():
                changed_model.get_parameter(name).view(-1)[position] += 1.0
            assert hash_model_object(changed_model) != identity, (name, position)


def test_a_model_object_is_another_one_with_another_dtype_config_or_adapter(model):
    """A model with another dtype, config or adapter has another hash; an equal adapter the same."""

    def with_adapter(alpha: int) -> Any:
        adapter = LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"])
        torch.manual_seed(0)
        return get_peft_model(deepcopy(model), adapter)

    bfloat16_model = deepcopy(model).to(torch.bfloat16)
    other_config = deepcopy(model)
    other_config.config.rope_theta = 5.0
    models = [model, bfloat16_model, other_config, with_adapter(alpha=4), with_adapter(alpha=8)]
    assert len(set(map(hash_model_object, models))) == len(models)
    assert hash_model_object(with_adapter(alpha=4)) == hash_model_object(with_adapter(alpha=4))


def test_a_reward_model_is_known_by_its_weights_and_a_function_by_its_source(tmp_path):
    """A reward model with one other weight has another hash; a reward function keeps its own.

    `hashes` has a hash by the name of each reward: "Linear" and "reward".
    """

    def reward(**columns: Any) -> list[float]:
        return [1.0]

    reward_model = torch.nn.Linear(4, 1)
    changed_model = deepcopy(reward_model)
    with torch.no_grad():
        changed_model.weight[0, 2] += 1.0
    hashes = rewards_from_python([reward_model, reward], tmp_path).hashes
    hashes_again = rewards_from_python([reward_model, reward], tmp_path).hashes
    hashes_of_changed = rewards_from_python([changed_model, reward], tmp_path).hashes
    assert hashes == hashes_again
    assert [name for name in hashes if hashes[name] != hashes_of_changed[name]] == ["Linear"]


def test_two_rewards_of_one_name_are_refused(tmp_path):
    """The record would have the rewards of the last one alone, and no change of the first."""

    def reward(completions: list[str], scale: float = 1.0, **columns: object) -> list[float]:
        return [scale] * len(completions)

    pairs = [
        [lambda **columns: [1.0], lambda **columns: [0.0]],
        [partial(reward, scale=1.0), partial(reward, scale=2.0)],
        [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)],
    ]
    for pair, name in zip(pairs, ("<lambda>", "reward", "Linear"), strict=True):
        with pytest.raises(UserError, match=f"^reward_funcs: two rewards have the name '{name}'"):
            rewards_from_python(pair, tmp_path)
    assert rewards_from_python([reward, "accuracy"], tmp_path).entries == ("reward", "accuracy")


def test_a_peft_model_with_an_adapter_on_its_head_is_refused(model):
    """A peft model with an adapter on the output layer is refused, since that would never learn.

    TRL computes log-probabilities from the weight of that layer alone.
    """
    untied = deepcopy(model)
    untied.config.tie_word_embeddings = False
    for target, refused in (("q_proj", False), ("lm_head", True)):
        peft_model = get_peft_model(deepcopy(untied), LoraConfig(r=2, target_modules=[target]))
        with pytest.raises(UserError, match="'lm_head' would never") if refused else nullcontext():
            refuse_embedding_adapters(peft_model)


def run_from_python(rows: Dataset) -> ResolvedRun:
    """Return a run that Python code has started on these rows, without its other parts."""
    run = object.__new__(ResolvedRun)
    vars(run).update(request=Mock(script_args=None), data=Mock(train_dataset=rows))
    return run


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "zoom"}}]])
def test_an_evaluation_on_the_way_asks_with_the_system_prompt_of_python_s_rows(tools):
    """An evaluation during training takes the system prompt from the rows that Python passes.

    Their messages may be texts or lists of parts. Descriptions of tools are part of the prompt.
    """
    as_parts = [{"type": "text", "text": "Think, "}, {"type": "text", "text": "then box."}]
    question = [{"type": "image", "text": None}, {"type": "text", "text": "How long is AB?"}]
    system_prompts = set[str | None]()
    for contents in (("Think, then box.", "How long is AB?"), (as_parts, question)):
        messages = [
            {"role": role, "content": content}
            for role, content in zip(("system", "user"), contents, strict=True)
        ]
        rows = with_tool_descriptions(Dataset.from_list([{"prompt": messages}]), tools)
        system_prompts.add(run_from_python(rows).system_prompt)
    assert system_prompts == {with_tools("Think, then box.", tools)}


def test_rows_of_python_without_a_system_message_have_no_system_prompt():
    for prompt in ("How long is AB?", [{"role": "user", "content": "How long is AB?"}]):
        assert run_from_python(Dataset.from_list([{"prompt": prompt}])).system_prompt is None


def test_a_processor_is_another_one_with_another_template_or_other_images_and_not_after_use():
    """A processor with another template, limit of pixels or vocabulary has another hash.

    One that was only used has the same, though a call leaves padding settings in its tokenizer.
    """

    def load() -> Any:
        return load_processor(str(PRETRAINED_FOLDER))

    other_template = load()
    other_template.chat_template += "{# #}"
    other_images = load()
    limit_pixels(other_images, 28 * 28, 56 * 56)
    other_vocabulary = load()
    other_vocabulary.tokenizer.add_tokens(["<new>"])
    used_processor = load()
    used_processor(text=["a", "a b"], padding=True, return_tensors="pt")
    other_processors = [other_template, other_images, other_vocabulary, load().tokenizer]
    identity = hash_processor(load())
    assert hash_processor(used_processor) == identity
    identities = {identity, *map(hash_processor, other_processors)}
    assert len(identities) == 1 + len(other_processors)
