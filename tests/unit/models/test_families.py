"""The families of models against Transformers' own classes.

Further tests freeze parts by their names, and load models of no known family.
"""

import json
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlavaConfig,
)
from trl import ModelConfig

from adora_vl.builtin.processor import build_processor
from adora_vl.builtin.tiny_vl import build_model
from adora_vl.config import AdoraGRPOConfig
from adora_vl.data import images as images_module
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.models import families
from adora_vl.models.check import PARTS_THAT_NEED_FAMILY, check_family
from adora_vl.models.load import load_config, load_processor
from adora_vl.packing.packed_forward import can_share_prompts
from adora_vl.utils.errors import UserError
from tests.support.families import FAMILIES_WITH_VISION, build_on_meta, family_config
from tests.support.tiny_run import train_tiny_run


def test_the_side_of_an_image_token_is_that_of_transformers_defaults(subtests):
    """The side of an image token is patch size times merge size, in Transformers' defaults.

    The bounds of pixels are whole image tokens.
    """
    for family in FAMILIES_WITH_VISION:
        with subtests.test(family):
            vision = families.FAMILIES[family].vision
            config = AutoConfig.for_model(family).vision_config
            assert vision is not None
            assert vision.token_side == config.patch_size * config.spatial_merge_size
            assert images_module.VISION_BY_FAMILY[family] is vision
            assert (
                vision.min_pixels % vision.token_side**2
                == vision.max_pixels % vision.token_side**2
                == 0
            )
            assert (families.DEEPSTACK_FIELD in vision.feature_fields) == bool(
                getattr(config, "deepstack_visual_indexes", None)
            )


# The modules inside of the vision tower that are the projector, by family.
PROJECTOR_MODULES_BY_FAMILY = {
    "qwen2_vl": {"merger"},
    "qwen2_5_vl": {"merger"},
    "qwen3_5": {"merger"},
    "qwen3_vl": {"merger", "deepstack_merger_list"},
}


def test_every_parameter_is_in_its_part(subtests):
    """The modules that Transformers builds decide: all of `visual` but its mergers is the tower."""
    for family in FAMILIES_WITH_VISION:
        with subtests.test(family):
            model = build_on_meta(family_config(family)).model
            parts: set[str] = set()
            for name, _ in model.named_parameters():
                module, submodule, *_ = name.split(".")
                expected = "vision_tower"
                if module == "language_model":
                    expected = "language_model"
                elif submodule in PROJECTOR_MODULES_BY_FAMILY[family]:
                    expected = "projector"
                assert families.component_of(f"model.{name}") == expected, name
                parts.add(expected)
            assert parts == set(families.COMPONENTS)
    assert families.component_of("lm_head.weight") == "language_model"
    adapter = "base_model.model.model.visual.blocks.0.mlp.up_proj.lora_A.default.weight"
    assert families.component_of(adapter) == "vision_tower"


def test_what_can_share_a_prompt():
    """Families whose layers all have full attention share prompts; others do not."""
    families_that_share = {
        family for family in families.FAMILIES if families.shares_prompts(family_config(family))
    }
    assert families_that_share == {"qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}, (
        "Qwen3.5 has layers of linear attention"
    )
    sliding_config = family_config("qwen2")
    sliding_config.layer_types = ["full_attention", "sliding_attention"]
    assert not families.shares_prompts(sliding_config)
    assert not families.shares_prompts(LlamaConfig())
    assert can_share_prompts(build_on_meta(family_config("qwen3_vl")).config)


def notes_on_family(config: Any, **changed_keys: Any) -> list[str]:
    """Check the family of a model with this config, and return the notes for the user.

    `changed_keys`: keys of the run that are not as by default.
    """
    keys = {"output_dir": "x", "use_cpu": True, "bf16": False, "report_to": "none", **changed_keys}
    return check_family(
        ModelConfig(model_name_or_path="some/model"), AdoraGRPOConfig(**keys), config
    )


STOCK_IMAGE_KEYS: dict[str, Any] = {"adora_stock_step": [*PARTS_THAT_NEED_FAMILY]}


def test_a_known_family_says_nothing_but_what_is_off():
    """Only Qwen3.5, whose linear attention cannot share a prompt, has a note."""
    assert all(
        notes_on_family(AutoConfig.for_model(family)) == []
        for family in families.FAMILIES
        if family != "qwen3_5"
    )
    (note,) = notes_on_family(AutoConfig.for_model("qwen3_5"))
    assert "linear attention" in note
    assert "share_prompt" in note


def test_a_config_that_the_engine_would_run_otherwise_is_refused(subtests):
    """A config without `mrope_interleaved` is refused with vLLM, and accepted without it.

    Transformers interleaves whatever the config says, so only the engine is off, by up to 0.03
    nats.
    """
    # (a family, the words that its notes have without vLLM, one text for each note)
    for family, words_of_notes in (("qwen3_vl", []), ("qwen3_5", ["linear attention"])):
        with subtests.test(family):
            config = AutoConfig.for_model(family)
            assert "mrope_interleaved" not in (config.text_config.rope_parameters or {})
            notes = notes_on_family(config, use_vllm=False)
            for note, words in zip(notes, words_of_notes, strict=True):
                assert words in note
            with pytest.raises(
                UserError, match=r"mrope_interleaved in the rope_parameters .* set it to true"
            ):
                notes_on_family(config, use_vllm=True)
            config.text_config.rope_parameters = {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_interleaved": True,
            }
            if family == "qwen3_5":
                with pytest.raises(
                    UserError,
                    match="use_vllm: true, but on a CPU vLLM computes the linear attention",
                ):
                    notes_on_family(config, use_vllm=True)
            else:
                assert notes_on_family(config, use_vllm=True) == []


def test_a_family_with_images_that_is_not_in_the_table_is_refused_in_one_line():
    """LLaVA is refused with the keys that train it the way of stock TRL, and noted with them."""
    with pytest.raises(
        UserError, match=r"'some/model' has model_type llava.*qwen3_vl.*stock_step: .*CONTRIBUTING"
    ):
        notes_on_family(LlavaConfig())
    with pytest.raises(UserError, match=r"set .*adora_freeze: \[\] to train"):
        notes_on_family(LlavaConfig(), adora_freeze=["projector"], **STOCK_IMAGE_KEYS)
    (note,) = notes_on_family(LlavaConfig(), **STOCK_IMAGE_KEYS)
    assert "the way of stock TRL" in note
    assert "\n" not in note


def test_a_kind_that_transformers_lacks_is_named_and_its_code_is_not_run(tmp_path, monkeypatch):
    """A model type that Transformers lacks is refused in one line, and its own code is not run.

    Transformers would ask whether to run the code beside the config, as for early InternVL.
    """
    config = {
        "model_type": "internvl_chat",
        "auto_map": {"AutoConfig": "configuration.InternVLChatConfig"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration.py").write_text("raise SystemExit('run')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (load_config, ChatProcessor):
        with pytest.raises(UserError) as caught:
            load(str(tmp_path))
        assert "model_type internvl_chat, which Transformers" in str(caught.value)
        assert "qwen3_vl" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_nobody_is_asked_whether_to_run_the_code_of_a_tokenizer(tmp_path, monkeypatch):
    """A tokenizer with a class of its own is refused, and its code is not run.

    Transformers has the model, but not the tokenizer's class, and would ask whether to run it.
    """
    LlamaConfig().save_pretrained(tmp_path)
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenization.py").write_text("raise SystemExit('run')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (load_processor, ChatProcessor):
        with pytest.raises(UserError, match="cannot be loaded"):
            load(str(tmp_path))


def test_a_language_model_that_is_not_in_the_table_only_shares_no_prompt():
    """Llama has no images, so that only sharing prompts is off, and one note says so."""
    (note,) = notes_on_family(LlamaConfig())
    assert "model_type llama" in note
    assert "everything else works" in note


@pytest.mark.slow
def test_what_still_works_without_an_entry_works(tmp_path, monkeypatch, capsys):
    """A model of a family without an entry trains with the parts that need the entry as in TRL.

    With other settings it is refused before a weight is loaded. It is the tiny model, whose entry
    is taken away.
    """
    monkeypatch.delitem(families.FAMILIES, "qwen2_5_vl")
    keys: dict[str, Any] = {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "adora_stock_step": "skip_old_pass",
        "save_strategy": "no",
    }
    with pytest.raises(AssertionError):
        train_tiny_run(tmp_path / "refused", **keys)
    assert (
        "has model_type qwen2_5_vl, which is not among the known families"
        in capsys.readouterr().err
    )
    train_tiny_run(
        tmp_path / "run",
        **{**keys, "adora_stock_step": f"skip_old_pass,{','.join(PARTS_THAT_NEED_FAMILY)}"},
    )
    assert "the way of stock TRL" in capsys.readouterr().out
    assert (tmp_path / "run" / "model.safetensors").is_file()


def build_random_tiny_model() -> Any:
    """Return a tiny model with random weights."""
    return build_model(build_processor(["Find x."]).tokenizer)


def test_one_key_freezes_one_part_and_no_other(subtests):
    """Each of `COMPONENTS`, frozen, has all frozen parameters, and the others are trained."""
    for component in families.COMPONENTS:
        with subtests.test(component):
            model = build_random_tiny_model()
            families.freeze(model, [component])
            frozen_names = []
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    frozen_names.append(name)
            assert {families.component_of(name) for name in frozen_names} == {component}
            other_components = frozenset(families.COMPONENTS) - {component}
            assert families.trainable_components(model) == other_components


def test_building_leaves_the_callers_random_state_alone():
    """The numbers that torch draws next are those without a model built in between."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build_random_tiny_model()
    assert torch.equal(torch.rand(3), expected)
