"""Weights on their way into an engine.

They are sent one at a time, an adapter is merged into them, and the engine keeps them when the
trainer frees its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor
from transformers import AutoModelForImageTextToText

from adora_vl.builtin import DEFAULT_FAMILY, TINY_FAMILIES
from adora_vl.builtin.processor import build_processor
from adora_vl.builtin.tiny_vl import build_model
from adora_vl.export import export
from adora_vl.models.families import COMPONENTS, component_of, freeze
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.weight_sync import (
    adapter_only_settings,
    can_merge,
    merged_parameters,
    push_weights,
    refuse_unmergeable,
    reset_caches,
)
from adora_vl.utils.errors import RolloutError, UserError
from tests.support.adapters import LORA_OPTIONS_BY_KIND, float64_model, policy_with_adapter
from tests.support.stand_ins import settings_of_engine

NAMES = ["first", "second", "third"]


class FakeRunner:
    """A fake of vLLM's model runners, and of the model in them.

    The runner on a GPU copies each tensor (`load_weights`). The one on a CPU keeps tensors until a
    layer is complete (`reload_weights`), so it needs tensors that nobody changes.
    """

    def __init__(self, device: str, events: list[str]) -> None:
        self.device = torch.device(device)
        self.events = events
        self.model = self
        self.received_tensors: dict[str, Tensor] = {}

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights_iterator:
            self.events.append(f"engine takes {name}")
            self.received_tensors[name] = tensor

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> set[str]:
        for name, tensor in weights:
            self.events.append(f"engine takes {name}")
            self.received_tensors[name] = tensor.clone()
        return {name for name, _ in weights}


def test_a_gathered_weight_is_taken_before_the_next_is_gathered_and_outlives_it(subtests):
    """The engine takes each weight before the next one is gathered, and keeps its values.

    ZeRO-3 gathers one weight at a time and frees it. Here it is filled with NaN in place of that.
    """
    for device in ("cpu", "cuda"):
        with subtests.test(device):
            events: list[str] = []

            def gathered(events: list[str] = events) -> Iterator[tuple[str, Tensor]]:
                for number, name in enumerate(NAMES):
                    events.append(f"gather {name}")
                    parameter = torch.full((3,), float(number))
                    yield name, parameter
                    parameter.fill_(torch.nan)  # as ZeRO-3 frees what it has gathered

            runner = FakeRunner(device, events)
            executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
            llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))
            push_weights(llm, gathered())
            assert events == [
                event for name in NAMES for event in (f"gather {name}", f"engine takes {name}")
            ]
            assert {name: tensor.tolist() for name, tensor in runner.received_tensors.items()} == {
                name: [float(number)] * 3 for number, name in enumerate(NAMES)
            }


def test_an_engine_that_keeps_its_prefix_cache_is_an_error():
    """An error is raised if vLLM does not clear its prefix cache after a sync.

    Otherwise the engine would answer with the keys and values of older weights.
    """
    cleared_caches: list[str] = []
    encoder = SimpleNamespace(reset_encoder_cache=lambda: cleared_caches.append("encoder"))
    reset_caches(SimpleNamespace(reset_prefix_cache=lambda: True, llm_engine=encoder))
    assert cleared_caches == ["encoder"]
    with pytest.raises(RolloutError, match="did not reset its prefix cache"):
        reset_caches(SimpleNamespace(reset_prefix_cache=lambda: False, llm_engine=encoder))


def policy_and_original_weights(
    dtype: torch.dtype,
    family: str = DEFAULT_FAMILY,
    targets: Sequence[str] = ("q_proj", "up_proj", "fc1"),
    **options: Any,
) -> tuple[PeftModel, dict[str, Tensor]]:
    """Return a tiny policy with a random LoRA adapter, and its weights without the adapter by name.

    `targets`: the layers that the adapter changes. `options`: further options of the adapter.
    """
    model = build_model(build_processor(["Find x."]).tokenizer, family=family).to(dtype)
    original = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    config = LoraConfig(r=4, target_modules=list(targets), **options)
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model, original


def undivided_weights(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a context that does nothing, in place of one in which sharded weights are gathered."""
    return nullcontext()


def tensors_of_sync(
    model: PeftModel, is_included: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Return the tensors that a sync of this policy sends, by name.

    `is_included`: tells by its name whether a tensor is sent.
    """
    return {
        name: tensor.clone()
        for name, tensor in merged_parameters(model, undivided_weights, is_included)
    }


def test_after_the_first_sync_only_the_layers_that_an_adapter_touches_go():
    """With `changed_only` only weights with an adapter, and modules saved with it, are sent.

    The engine has the other weights already.
    """
    model, original = policy_and_original_weights(torch.float32, modules_to_save=["lm_head"])
    changed_tensors = merged_parameters(
        model, undivided_weights, lambda name: True, changed_only=True
    )
    names = [name for name, _ in changed_tensors]
    adapted_names = {name for name in original if "q_proj" in name or "up_proj" in name}
    assert sorted(names) == sorted(adapted_names | {"lm_head.weight"})


@pytest.mark.parametrize("lora_kind", LORA_OPTIONS_BY_KIND)
def test_only_an_adapter_that_vllm_computes_whole_goes_alone(lora_kind):
    """The adapter is sent alone only for three kinds of LoRA, which vLLM computes itself.

    vLLM can add LoRA to linear layers. For any other kind merged weights are sent.
    """
    options = dict(LORA_OPTIONS_BY_KIND[lora_kind])
    model, _ = policy_and_original_weights(
        torch.float32, targets=options.pop("target_modules", ("q_proj",)), **options
    )
    assert (adapter_only_settings(model) is not None) == (lora_kind in {"plain", "rslora", "head"})


# Forms of LoRA of which PEFT activates one adapter at a time.
KINDS_WITH_ONE_ACTIVE_ADAPTER = {
    "modules_to_save",
    "tokens",
    "biases of the base",
}
# PEFT's config class of every other kind of adapter.
CONFIG_CLASS_BY_OTHER_KIND = {
    kind.name: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if kind.name != "LORA"
}
# Options of adapters that put tokens before the prompt.
PROMPT_TOKEN_OPTIONS = {
    "num_virtual_tokens": 2,
    "task_type": "CAUSAL_LM",
    "num_layers": 2,
    "token_dim": 96,
    "num_attention_heads": 4,
}
# Options without which an adapter of this kind cannot be made for the small model.
OPTIONS_BY_KIND: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "IA3": {"feedforward_modules": []},
    "VBLORA": {"vector_length": 16},
    "C3A": {"block_size": 48},
    "ROAD": {"group_size": 16},
    "OFT": {"r": 0},
    "BEFT": {"target_modules": ["q_proj"]},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [5]},
    "P_TUNING": PROMPT_TOKEN_OPTIONS,
    "PROMPT_TUNING": PROMPT_TOKEN_OPTIONS,
    "PREFIX_TUNING": PROMPT_TOKEN_OPTIONS,
    "MULTITASK_PROMPT_TUNING": PROMPT_TOKEN_OPTIONS,
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
}
# Such an adapter adds tokens, or works with more than one product of matrices: nothing can be
# merged.
KINDS_THAT_CHANGE_NO_WEIGHT = {
    "P_TUNING",
    "PROMPT_TUNING",
    "PREFIX_TUNING",
    "LILY",
    "POLY",
    "XLORA",
}
# Made for other families of models, or from packages that are not installed.
UNTESTED_KINDS = {
    "ADAMSS",
    "ADAPTION_PROMPT",
    "CARTRIDGE",
    "CPT",
    "MULTITASK_PROMPT_TUNING",
    "PSOFT",
    "SHADOW",
}


@pytest.fixture(scope="module")
def base():
    """Return the tiny model without an adapter, in float64."""
    return float64_model()


def assert_sent_is_merged(base, model):
    """Check the tensors that a sync sends, and return the names of those that differ from the base.

    Each name of the base comes once, with the value of PEFT's own merging. A model of these tensors
    answers as the policy does, and the policy stays as it is.
    """
    assert can_merge(model, lambda parameters: nullcontext())
    state_before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sent_tensors = tensors_of_sync(model)
    assert list(sent_tensors) == [name for name, _ in base.named_parameters()]
    assert all(
        torch.equal(state_before[name], tensor) for name, tensor in model.state_dict().items()
    ), "the policy is changed"
    merged = dict(deepcopy(model).merge_and_unload().named_parameters())
    wrong = [name for name, tensor in sent_tensors.items() if not torch.equal(tensor, merged[name])]
    assert wrong == []
    engine = deepcopy(base).eval()
    engine.load_state_dict(sent_tensors, strict=False)
    input_ids = torch.arange(3, 20)[None]
    policy_logits = model(input_ids=input_ids).logits
    engine_logits = engine(input_ids=input_ids).logits
    # DEFT computes in float32, whatever the weights are.
    assert torch.allclose(policy_logits, engine_logits, rtol=0, atol=1e-5)
    return {
        name
        for name, tensor in sent_tensors.items()
        if not torch.equal(tensor, base.get_parameter(name))
    }


@pytest.mark.parametrize(
    ("lora_kind", "second_adapter"),
    [(lora_kind, None) for lora_kind in LORA_OPTIONS_BY_KIND]
    + [
        (lora_kind, "ref")
        for lora_kind in LORA_OPTIONS_BY_KIND
        if "bias" not in LORA_OPTIONS_BY_KIND[lora_kind]
    ]
    + [
        (lora_kind, "active")
        for lora_kind in LORA_OPTIONS_BY_KIND
        if lora_kind not in KINDS_WITH_ONE_ACTIVE_ADAPTER
    ],
)
def test_every_form_of_lora_is_sent_as_peft_merges_it(base, lora_kind, second_adapter):
    """A sync has the weights of PEFT's `merge_and_unload`, and leaves the policy as it is.

    `second_adapter`: another adapter of the policy: TRL's copy for the reference, "ref", or one
    that is "active" too.
    """
    model = policy_with_adapter(
        base,
        LoraConfig(
            **{"r": 4, "target_modules": ["q_proj", "up_proj"], **LORA_OPTIONS_BY_KIND[lora_kind]}
        ),
        second_adapter=second_adapter,
    )
    changed_names = assert_sent_is_merged(base, model)
    assert changed_names, "the adapter changes nothing"


@pytest.mark.parametrize("lora_kind", ["dora", "embedding", "tokens", "modules_to_save"])
def test_an_export_of_a_checkpoint_has_what_the_engine_was_sent(base, lora_kind, tmp_path):
    """An exported model has the merged weights, equal to those of a sync."""
    base.save_pretrained(tmp_path / "base")
    build_processor(["Find x."]).save_pretrained(tmp_path / "base")
    model = policy_with_adapter(
        base,
        LoraConfig(r=4, **{"target_modules": ["q_proj"], **LORA_OPTIONS_BY_KIND[lora_kind]}),
        second_adapter="ref",
    )
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict()
    wrong = [
        name
        for name, tensor in tensors_of_sync(model).items()
        if not torch.equal(tensor, exported[name])
    ]
    assert wrong == []


@pytest.mark.parametrize("kind", sorted(CONFIG_CLASS_BY_OTHER_KIND.keys() - UNTESTED_KINDS))
def test_every_other_adapter_is_sent_as_peft_merges_it_or_refused(base, kind):
    """Kinds of adapters other than LoRA are merged as PEFT's own `merge_and_unload` does it.

    Those that PEFT cannot merge, since they change no weight, are refused in one line.
    """
    fields = CONFIG_CLASS_BY_OTHER_KIND[kind].__dataclass_fields__
    usual = {"target_modules": ["q_proj", "o_proj"], "r": 4, "lora_r": 4}
    options: dict[str, Any] = {name: value for name, value in usual.items() if name in fields}
    options |= OPTIONS_BY_KIND.get(kind, {})
    model = policy_with_adapter(base, CONFIG_CLASS_BY_OTHER_KIND[kind](**options))
    if kind not in KINDS_THAT_CHANGE_NO_WEIGHT:
        changed_names = assert_sent_is_merged(base, model)
        assert changed_names, "the adapter changes nothing"
        return
    with pytest.raises(UserError, match=f"^peft_config: {kind}: PEFT cannot merge this adapter"):
        refuse_unmergeable(model, undivided_weights)


def test_a_bias_of_lora_is_sent_where_the_layer_has_one_and_else_refused(base):
    """With `lora_bias` an adapter can be merged into a layer with a bias, and into no other.

    The layer `q_proj` has a bias, to which the adapter's is added, and `o_proj` has none.
    """

    def with_bias(target: str) -> PeftModel:
        config = LoraConfig(r=4, lora_bias=True, target_modules=[target])
        return policy_with_adapter(base, config)

    assert_sent_is_merged(base, with_bias("q_proj"))
    with pytest.raises(UserError, match="^peft_config: LORA: PEFT cannot merge this adapter"):
        refuse_unmergeable(with_bias("o_proj"), undivided_weights)


def test_every_part_of_another_family_is_sent_merged(subtests):
    """An adapter of any family's model is merged in all parts: language, vision, projector.

    The towers and mergers of some families have other layers: `linear_fc1` and `linear_fc2`.
    """
    for family in set(TINY_FAMILIES) - {DEFAULT_FAMILY}:
        with subtests.test(family):
            model, original = policy_and_original_weights(
                torch.float32, family, targets=("q_proj", "down_proj", "linear_fc2")
            )
            tensors = tensors_of_sync(model)
            assert tensors.keys() == original.keys()
            changed_names = {
                name for name in tensors if not torch.equal(tensors[name], original[name])
            }
            ends = ("q_proj.weight", "down_proj.weight", "linear_fc2.weight")
            assert changed_names == {name for name in original if name.endswith(ends)}
            assert {component_of(name) for name in changed_names} == set(COMPONENTS)
            merged = dict(model.merge_and_unload().named_parameters())
            assert all(
                torch.allclose(tensors[name], merged[name], atol=1e-6) for name in changed_names
            )


def test_twenty_syncs_leave_bfloat16_weights_as_they_were():
    """A sync leaves the policy's own weights unchanged, and every later sync sends the same.

    Merging an adapter and taking it out again, as TRL does, would round weights each time.
    """
    model, original = policy_and_original_weights(torch.bfloat16)
    first = tensors_of_sync(model)
    for _ in range(20):
        later = tensors_of_sync(model)
    assert all(torch.equal(first[name], later[name]) for name in first)
    # By the names that the weights have without PEFT's wrappers.
    base = {
        name_in_policy.replace(".base_layer", "").removeprefix("base_model.model."): parameter
        for name_in_policy, parameter in model.named_parameters()
    }
    assert all(torch.equal(base[name], tensor) for name, tensor in original.items())
    assert first["lm_head.weight"].dtype == torch.bfloat16


def test_a_part_that_is_not_wanted_is_neither_merged_nor_sent():
    """Without the vision tower, for example, only the language model's weights are sent."""
    model, original = policy_and_original_weights(torch.float32)
    tensors = tensors_of_sync(model, lambda name: "visual" not in name)
    assert tensors.keys() == {name for name in original if "visual" not in name}


def test_the_engine_gets_merged_weights_first_all_and_then_those_that_can_change():
    """The first sync sends all merged weights, and a later one those that the adapter changes.

    The adapter is in the language model and the vision tower. An engine that has discarded its
    weights in its sleep gets all again.
    """
    model, original = policy_and_original_weights(torch.float32)
    merged = tensors_of_sync(model)
    engine: Any = object.__new__(AdoraVLLMGeneration)
    engine.model = model
    engine.mode = "colocate"
    engine.enable_sleep_mode = False
    engine._engine_has_all_parameters = False
    engine._dist = SimpleNamespace(gather_params=lambda _: nullcontext())
    engine.settings = settings_of_engine()
    first = dict(engine._iter_named_params())

    assert first.keys() == original.keys()
    assert all(torch.equal(first[name], merged[name]) for name in merged)
    engine._engine_has_all_parameters = True
    later = dict(engine._iter_named_params())
    assert {component_of(name) for name in later} == {"language_model", "vision_tower"}, (
        "none is in the projector"
    )
    assert all(torch.equal(later[name], merged[name]) for name in later)
    engine.enable_sleep_mode = True  # sleep has discarded the weights
    assert dict(engine._iter_named_params()).keys() == original.keys()


class FakeClient:
    """A fake of TRL's client of a server; `syncs` has what each sync announced and sent."""

    def __init__(self) -> None:
        # For each sync the tensors that it announced, then those that it sent: name, dtype, shape.
        self.syncs: list[tuple[list[str], list[str]]] = []

    def update_named_params(
        self, announced: list[Any], tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Record the announced and the sent tensors as lines of name, dtype and shape."""
        announced_lines = [f"{name} {dtype} {shape}" for name, dtype, shape in announced]
        sent_lines = []
        for name, tensor in tensors:
            dtype_name = str(tensor.dtype).removeprefix("torch.")
            sent_lines.append(f"{name} {dtype_name} {list(tensor.shape)}")
        self.syncs.append((announced_lines, sent_lines))

    def reset_prefix_cache(self) -> None:
        pass


def test_every_sync_with_a_server_sends_the_tensors_that_it_announced(subtests):
    """A sync with a server announces exactly the tensors that it sends, and sends all each time.

    vLLM makes its buffers by what is announced, and rebuilds a layer if any part of it comes.
    """
    frozen = build_model(build_processor(["Find x."]).tokenizer)
    freeze(frozen, ["vision_tower"])
    for kind, model in {
        "frozen": frozen,
        "LoRA": policy_and_original_weights(torch.float32)[0],
    }.items():
        with subtests.test(kind):
            engine: Any = object.__new__(AdoraVLLMGeneration)
            engine.__dict__.update(
                model=model,
                mode="server",
                enable_sleep_mode=False,
                _engine_has_all_parameters=False,
            )
            engine.__dict__.update(
                _weight_metadata=None, _count_seconds=nullcontext, vllm_client=FakeClient()
            )
            engine.settings = settings_of_engine()
            engine.server_group = SimpleNamespace(on_first_rank=lambda do: None)
            engine.accelerator = SimpleNamespace(is_main_process=True)
            engine._dist = SimpleNamespace(gather_params=lambda _: nullcontext())
            for _ in range(3):
                engine.sync_weights()
            (_, sent_at_first), *later_syncs = engine.vllm_client.syncs
            all_names = [name for name, _ in frozen.named_parameters()]
            assert [line.split()[0] for line in sent_at_first] == all_names
            assert later_syncs == [(sent_at_first, sent_at_first)] * 2
