"""What Transformers and TRL would refuse with a traceback once the weights are loaded is one line before that."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, model_validator
from transformers import PreTrainedModel
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.optimizer import check_optimizer, check_schedule, schedule_of
from adora_vl.config.run_checks import check_divided_engine
from adora_vl.errors import UserError, in_one_line
from adora_vl.export import main as export
from adora_vl.models.tiny.build import PRETRAINED
from adora_vl.train import main
from tests.tiny_run import arguments

NEED_KWARGS = {
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "reduce_lr_on_plateau",
    "greedy",
    "warmup_stable_decay",
}


def config(**keys: Any) -> AdoraGRPOConfig:
    return AdoraGRPOConfig(use_cpu=True, bf16=False, output_dir="nowhere", max_steps=10, **keys)


@pytest.mark.parametrize("name", [kind.value for kind in SchedulerType])
def test_a_schedule_is_made_before_the_run_or_refused(name: str) -> None:
    """Each of Transformers' schedules alone, with an argument that no schedule has, and with one that is no number."""
    alone = {**vars(config()), "lr_scheduler_type": name, "lr_scheduler_kwargs": None, "get_warmup_steps": lambda _: 0}
    try:
        check_schedule(SimpleNamespace(**alone))
    except UserError as error:
        assert name in NEED_KWARGS and str(error).startswith("lr_scheduler_kwargs: {} does not fit lr_scheduler_type: ")
    else:
        schedule_of(SimpleNamespace(**alone), 10)
    with pytest.raises(UserError, match=f"^lr_scheduler_kwargs: .*no_such.* lr_scheduler_type: {name}"):
        check_schedule(SimpleNamespace(**{**alone, "lr_scheduler_kwargs": {"no_such": 1}}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "half"])
def test_a_schedule_whose_rate_is_no_number_is_refused(value: object) -> None:
    """Transformers makes a rate of 0 of NaN, and the run learns nothing."""
    with pytest.raises(UserError, match="^lr_scheduler_kwargs: .*"):
        check_schedule(config(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": value}))


@pytest.mark.parametrize("name", [kind.value for kind in OptimizerNames])
def test_an_optimizer_is_made_before_the_run_or_refused(name: str) -> None:
    try:
        check_optimizer(config(optim=name))
    except UserError as error:
        assert str(error).startswith(f"optim: {name} ") and str(error).endswith("use adamw_torch")
        assert not name.startswith("adamw_torch") or name in ("adamw_torch_xla", "adamw_torch_npu_fused",
            "adamw_torch_4bit", "adamw_torch_8bit")  # fmt: skip


@pytest.mark.parametrize("given", ["lr=nan", "foo", "a=1,b", "=1", "a=-inf", ","])
def test_arguments_of_an_optimizer_that_are_none(given: str) -> None:
    with pytest.raises(UserError, match="^optim_args: .* is not NAME=VALUE"):
        check_optimizer(config(optim_args=given))
    check_optimizer(config(optim_args="beta1=0.9, eps=1e-8"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs: {} does not fit lr_scheduler_type: cosine"),
        ({"optim": "adamw_bnb_8bit"}, "optim: adamw_bnb_8bit is not installed"),
        ({"optim_args": "foo"}, "optim_args: 'foo' is not"),
        ({"fsdp": "full_shard"}, "needs several processes"),
        (
            {"use_peft": "true", "lora_target_modules": "q_proj,v_prj"},
            "lora_target_modules: 'v_prj' is no module of this",
        ),
        (
            {"use_peft": "true", "lora_target_modules": "q_proj,v_proj", "lora_modules_to_save": "lm_hed"},
            "lora_modules_to_save: 'lm_hed' is no module of this model; did you mean 'lm_head'?",
        ),
        ({"save_strategy": "best"}, "save_strategy: best needs Transformers' own evaluation"),
        ({"remove_unused_columns": "true"}, "remove_unused_columns: true takes the columns away"),
        ({"sync_ref_model": "true"}, "sync_ref_model: true with beta: 0"),
        ({"use_transformers_continuous_batching": "true"}, "set use_vllm: true instead"),
        ({"push_to_hub": "true"}, "push_to_hub: true, but HF_HUB_OFFLINE is set"),
        ({"deepspeed": __file__}, "is not a JSON file with a mapping in it"),
        ({"trust_remote_code": "true"}, "trust_remote_code: true: code that comes with a model is not run here"),
        ({"model_init_kwargs": '{"trust_remote_code": true}'}, "trust_remote_code: true: code that comes with a model"),
    ],
    ids=str,
)
def test_the_command_says_so(
    words: dict[str, str], said: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_weights(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded before the input was checked")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", no_weights)
    assert main(arguments(tmp_path / "run", **words)) == 2
    assert said in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", [None, 0, 5, 3000], ids=str)
def test_weights_that_are_missing_or_cut_off(
    size: int | None, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a download that was broken off."""
    model = tmp_path / "model"
    shutil.copytree(PRETRAINED, model)
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink() if size is None else weights.write_bytes(content[:size])
    assert main(arguments(tmp_path / "run", model_name_or_path=model)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: model_name_or_path: ") and ("has no weights" in said or "is damaged" in said)
    assert export([str(model), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: RUN: ")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}', "has no model-2.safetensors, which"),
        ("{", "model.safetensors.index.json' is damaged"),
        ("[]", "model.safetensors.index.json' is damaged"),
    ],
    ids=["a part is missing", "cut off", "no mapping"],
)
def test_weights_in_several_files_are_all_there(
    index: str, said: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training and export both refuse them, and neither leaves anything behind."""
    model = tmp_path / "model"
    shutil.copytree(PRETRAINED, model)
    (model / "model.safetensors.index.json").write_text(index)
    assert main(arguments(tmp_path / "run", model_name_or_path=model)) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert export([str(model), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_processor_that_is_cut_off(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(PRETRAINED, model)
    (model / "tokenizer.json").write_text("{")
    assert main(arguments(tmp_path / "run", model_name_or_path=model)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: model_name_or_path: the processor of {str(model)!r} cannot be loaded (")


@pytest.mark.parametrize(("key", "value"), [("dtype", "foo"), ("no_such_argument", 1)])
def test_what_the_model_does_not_take_is_one_line_of_the_user(
    key: str, value: object, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(tmp_path / "run", model_init_kwargs=json.dumps({key: value}))
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: model_init_kwargs: {key}: {value!r} is refused")


@pytest.mark.parametrize("parts", [2, 3])
def test_an_engine_that_cannot_be_divided(parts: int, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One process, and three attention heads."""
    words = arguments(tmp_path / "run", use_vllm="true", vllm_tensor_parallel_size=parts)
    assert main(words) == 2
    expected = f"error: vllm_tensor_parallel_size: {parts} does not divide the 1 processes; "
    assert capsys.readouterr().err.splitlines()[-1].startswith(expected)


def test_an_engine_whose_heads_cannot_be_divided() -> None:
    config: Any = SimpleNamespace(use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=2)
    heads = SimpleNamespace(num_attention_heads=3, num_key_value_heads=1)
    tower = SimpleNamespace(num_heads=4, intermediate_size=8)
    model: Any = SimpleNamespace(get_text_config=lambda: heads, vision_config=tower)
    with pytest.raises(UserError, match="^vllm_tensor_parallel_size: 2 does not divide the 3 attention heads"):
        check_divided_engine(config, model, 4)
    heads.num_attention_heads = 4
    check_divided_engine(config, model, 4)
    tower.num_heads = 5
    with pytest.raises(UserError, match="does not divide the 5 attention heads of its vision tower"):
        check_divided_engine(config, model, 4)
    tower.num_heads, tower.intermediate_size = 4, 9
    with pytest.raises(UserError, match="does not divide the 9 columns of its vision tower's MLP"):
        check_divided_engine(config, model, 4)
    tower.intermediate_size, heads.num_key_value_heads = 8, 3
    with pytest.raises(UserError, match="does not divide the 3 key-value heads"):
        check_divided_engine(config, model, 4)
    config.vllm_mode = "server"
    check_divided_engine(config, model, 3)


def test_an_error_of_pydantic_says_what_was_wrong() -> None:
    class Two(BaseModel):
        heads: int

    with pytest.raises(ValidationError) as wrong:
        Two.model_validate({"heads": "many"})
    assert in_one_line(wrong.value) == (
        "ValidationError: Input should be a valid integer, unable to parse string as an integer"
    )

    class Whole(BaseModel):
        """Such an error names no field."""

        @model_validator(mode="after")
        def refuse(self) -> Whole:
            raise ValueError("the engine is too small")

    with pytest.raises(ValidationError) as wrong:
        Whole()
    assert in_one_line(wrong.value) == "ValidationError: Value error, the engine is too small"


def test_what_goes_wrong_while_loading_ends_in_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(run: object) -> None:
        raise RuntimeError("no room\nfor it")

    monkeypatch.setattr("adora_vl.train.build_trainer", fails)
    assert main(arguments(tmp_path / "run")) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: the model or the engine could not be loaded (RuntimeError: no room)"
