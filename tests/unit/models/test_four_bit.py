"""A base in 4 bits: its gradients, its engine, what is trained and saved, and its GPU memory."""

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig
from trl import ModelConfig
from vllm import LLM

from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer
from adora_vl.export import main as export
from adora_vl.models.adapter import load_merged
from adora_vl.models.four_bit import (
    FrozenBase,
    four_bit_folder,
    four_bit_parameter_bytes,
    prevent_repacking,
)
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.models.shape import config_for_planning, model_shape
from adora_vl.rollout.llm import PolicyLLM
from tests.support.adapters import TEXT_MODULES_PATTERN, sft_adapter
from tests.support.launch import run_command as run_in_process
from tests.support.tiny_run import tiny_run_arguments, train_tiny_run

INIT_KWARGS = {"dtype": torch.bfloat16, "device_map": None}
FOUR_BIT_KEYS = {"load_in_4bit": "true", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def adora_home(tmp_path_factory):
    """Keep bases in 4 bits in a folder of this module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADORA_VL_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def sft_folder(tmp_path_factory):
    """Write an adapter in which some layers have another rank, which vLLM's reader passes over."""
    ranks: dict[str, Any] = {"rank_pattern": {"up_proj": 12}, "alpha_pattern": {"up_proj": 6}}
    return sft_adapter(tmp_path_factory.mktemp("sft") / "adapter", modules_to_save=None, **ranks)


@pytest.fixture(scope="module")
def base_folder(adora_home):
    """Return the folder of the tiny model in 4 bits, with its scales quantized too."""
    return four_bit_folder(str(PRETRAINED_FOLDER), "main", ModelConfig(use_bnb_nested_quant=True))


def test_gradients_come_through_4_bits_after_a_pass_without_them_and_vision_and_head_stay_whole(
    base_folder, sft_folder
):
    """Only the language model's linear layers are in 4 bits, and LoRA on top gets gradients."""
    model = load_merged(base_folder, (), INIT_KWARGS)
    prevent_repacking(model)
    four_bit_layers = {
        name for name, module in model.named_modules() if isinstance(module, Linear4bit)
    }
    assert len(four_bit_layers) == 7 * 3, "the linear layers of three decoder layers"
    assert not any("visual" in name or "lm_head" in name for name in four_bit_layers)
    config = config_for_planning(str(PRETRAINED_FOLDER))[0]
    shape = model_shape(
        config,
        dtype="bfloat16",
        bytes_per_four_bit_parameter=four_bit_parameter_bytes(has_nested_scales=True),
    )
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert shape.base_bytes(2) == pytest.approx(parameter_bytes, rel=0.01)
    assert shape.base_bytes(2) < 2 * shape.total_parameters
    policy = PeftModel.from_pretrained(model, sft_folder, is_trainable=True)
    ids = torch.arange(20, 40)[None]
    policy.eval()
    with torch.no_grad():
        policy(input_ids=ids)
    policy.train()
    policy(input_ids=ids, labels=ids).loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in policy.parameters()
        if parameter.requires_grad
    )


def test_python_code_needs_no_dtype_beside_a_quantization_config(adora_home, tmp_path):
    """A base in 4 bits is bfloat16 where Python code sets no dtype, as in TRL's examples of QLoRA.

    TRL's default is float32, which no base in 4 bits may have.
    """
    row = {"prompt": [{"role": "user", "content": "Find x."}], "answer": "1"}
    trainer = AdoraGRPOTrainer(
        "tiny",
        reward_funcs="accuracy",
        args=AdoraGRPOConfig(
            str(tmp_path / "run"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            num_generations=4,
            max_steps=1,
        ),
        train_dataset=Dataset.from_list([row] * 4),
        quantization_config=BitsAndBytesConfig(load_in_4bit=True),
        peft_config=LoraConfig(target_modules=["q_proj"]),
    )
    base = trainer.model.get_base_model()
    assert base.dtype == torch.bfloat16
    assert any(isinstance(module, Linear4bit) for module in base.modules())


@pytest.mark.slow
def test_two_steps_on_the_engine_s_own_4_bits_from_an_adapter_and_what_comes_out(
    adora_home, sft_folder, tmp_path
):
    """Engine and policy agree, only the adapter is sent, and the export is near the policy."""
    run = tmp_path / "run"
    run_keys = {
        "max_steps": 2,
        "model_name_or_path": sft_folder,
        "beta": 0.1,
        "learning_rate": 0.1,
        **FOUR_BIT_KEYS,
    }
    process = run_in_process(
        [
            sys.executable,
            "-m",
            "adora_vl.train",
            *tiny_run_arguments(run, use_vllm="true", **run_keys),
        ]
    )
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert all(0 < entry["adora/drift"] < 0.05 for entry in log[:2]), [
        entry["adora/drift"] for entry in log[:2]
    ]
    assert all(0 < entry["adora/sync_mb"] < 0.2 for entry in log[:2]), (
        "the adapter alone is sent, at every step"
    )
    assert log[0]["kl"] == 0 < log[1]["kl"]
    adapter_before = load_file(sft_folder / "adapter_model.safetensors")
    adapter_after = load_file(run / "adapter_model.safetensors")
    assert all(
        not torch.equal(adapter_before[name], adapter_after[name])
        and adapter_after[name].dtype == torch.float32
        for name in adapter_before
    )
    assert f"adora_vl.export {run} {run / 'merged'}" in process.stdout
    assert f"Model         {run}  (the adapter alone, as after 4 bits" in process.stdout
    base_folder = json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert export([str(run), str(tmp_path / "out")]) == 0
    policy = PeftModel.from_pretrained(load_merged(base_folder, (), INIT_KWARGS), run)
    prevent_repacking(policy)
    assert load_processor(str(tmp_path / "out")).chat_template, "as the evaluators load it"
    names = [
        set(load_file(folder / "model.safetensors"))
        for folder in (tmp_path / "out", PRETRAINED_FOLDER)
    ]
    assert names[0] == names[1], "named as in the model's own files"
    whole_base_policy = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER), run
    )
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").float()
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        policy_probs = policy.eval()(input_ids=ids).logits.softmax(-1)
        exported_probs = exported.eval()(input_ids=ids).logits.softmax(-1)
        whole_base_probs = whole_base_policy.eval()(input_ids=ids).logits.softmax(-1)
    assert (
        5 * (policy_probs - exported_probs).abs().sum()
        < (policy_probs - whole_base_probs).abs().sum()
    ), "by the base that it was trained on"


@pytest.mark.slow
def test_a_run_in_4_bits_goes_on_from_its_checkpoint_to_the_bit(adora_home, tmp_path):
    """A run of two steps and one that was resumed after the first have the same adapter."""
    new_adapter_keys = {
        **FOUR_BIT_KEYS,
        "use_peft": "true",
        "lora_dropout": 0,
        "lora_target_modules": TEXT_MODULES_PATTERN,
        "bnb_4bit_quant_type": "fp4",
    }
    uninterrupted = train_tiny_run(tmp_path / "a", max_steps=2, save_steps=1, **new_adapter_keys)
    interrupted = train_tiny_run(tmp_path / "b", max_steps=1, save_steps=1, **new_adapter_keys)
    train_tiny_run(interrupted, max_steps=2, save_steps=1, **new_adapter_keys)
    expected = load_file(uninterrupted / "adapter_model.safetensors")
    resumed = load_file(interrupted / "adapter_model.safetensors")
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_the_adapter_that_is_sent_has_each_layer_s_scaling_and_is_no_view_of_the_policy_s(
    base_folder, sft_folder, monkeypatch
):
    """The engine's own scaling is 1, and what it does with tensors leaves the policy alone."""
    from vllm.lora.lora_model import LoRAModel

    from adora_vl.rollout import weight_sync

    policy = PeftModel.from_pretrained(
        load_merged(base_folder, (), INIT_KWARGS), sft_folder, is_trainable=True
    )
    lora_layers = {
        name: layer
        for name, layer in policy.named_modules()
        if "default" in getattr(layer, "lora_A", ())
    }
    values_before = {
        name: layer.lora_B["default"].weight.clone() for name, layer in lora_layers.items()
    }
    received: dict[str, Any] = {}

    class SilentManager:
        modules: Mapping[str, Any] = MappingProxyType({})

        def __getattr__(self, name: str) -> Any:
            return lambda adapter: None

    def receive_adapter(number, tensors, helper, **options):
        received.update({name: tensor.clone() for name, tensor in tensors.items()})
        assert helper.vllm_lora_scaling_factor == 1
        for tensor in tensors.values():
            tensor.mul_(2)  # as vLLM does with what is on its device
        return SimpleNamespace(loras={})

    monkeypatch.setattr(LoRAModel, "from_lora_tensors", receive_adapter)
    lora_worker = SimpleNamespace(
        _adapter_manager=SilentManager(),
        lora_config=SimpleNamespace(lora_dtype=None, max_lora_rank=16),
    )
    monkeypatch.setattr(
        weight_sync,
        "_model_runner",
        lambda llm: SimpleNamespace(lora_manager=lora_worker, get_model=object),
    )
    sent = weight_sync.adapter_tensors(policy, lambda parameters: nullcontext())
    weight_sync.push_adapter(SimpleNamespace(adapter=SimpleNamespace(lora_int_id=1)), sent)
    assert len(received) == 2 * len(lora_layers)
    scalings = set()
    for name, layer in lora_layers.items():
        assert torch.equal(layer.lora_B["default"].weight, values_before[name]), (
            "ten syncs would have grown it a thousandfold"
        )
        assert torch.equal(
            received[f"{name}.lora_B.weight"], values_before[name] * layer.scaling["default"]
        )
        scalings.add(layer.scaling["default"])
    assert scalings == {8 / 4, 6 / 12}, "alpha / r, of most layers and of `up_proj`"


def test_one_copy_of_the_base_is_on_the_card_and_the_engine_keeps_its_own(monkeypatch):
    """The policy's base is on the host while the engine is awake; the engine sleeps at level 1."""
    events: list[Any] = []
    monkeypatch.setattr(LLM, "sleep", lambda self, level: events.append(level))
    monkeypatch.setattr(
        LLM, "wake_up", lambda self, tags: events.append((tags, llm.frozen_base.is_on_host))
    )
    monkeypatch.setattr(LLM, "generate", lambda self, *args, **named: named["lora_request"])
    llm: Any = object.__new__(PolicyLLM)
    llm.frozen_base = FrozenBase(torch.nn.Linear(2, 2).requires_grad_(False))
    llm.adapter = "policy"
    for tags in ("weights", "kv_cache"):
        llm.wake_up(tags=tags)
    assert llm.generate([]) == "policy"
    llm.sleep(level=2)
    assert events == [("weights", True), ("kv_cache", True), 1], (
        "level 2 would discard what no sync brings back"
    )
    assert not llm.frozen_base.is_on_host
    with llm.awake():
        llm.wake_up(tags="weights")
        llm.sleep(level=2)
        assert llm.frozen_base.is_on_host, "it stays away as long as the engine is awake"
    assert llm.frozen_base.is_on_host
