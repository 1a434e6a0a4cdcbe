"""A config of another trainer as one of ours: `python -m adora_vl.migrate easyr1|verl|swift|trl
CONFIG`.

Every value names where it came from, also defaults of theirs that stand in no file, and what has no
counterpart is listed with what that means. The result is a beginning to look through, not a promise
of equal runs.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from adora_vl.config.help import read_keys
from adora_vl.utils.cli import Parser, dotted, exit_code_of, path, read_mapping, yaml_line
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file

# By our key, or by a name in capitals for a value that only enters a computation: the other trainer's
# key and its default.
Names = Mapping[str, tuple[str, Any]]
_W = "worker.actor."
_M = "worker.actor.model."
_O = "worker.rollout."
_P = "actor_rollout_ref.model."
_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."
# EasyR1's key and default, then verl's. EasyR1's keys are those of its `examples/config.yaml`, and its
# defaults those of its code; verl's are both from `ppo_trainer.yaml`.
_RAY: Mapping[str, tuple[str, Any, str, Any]] = {
    "model_name_or_path": (f"{_M}model_path", None, f"{_P}path", None),
    "PROMPTS": ("data.rollout_batch_size", 512, "data.train_batch_size", 1024),
    "MINIBATCH": (f"{_W}global_batch_size", 256, f"{_A}ppo_mini_batch_size", 256),
    "per_device_train_batch_size": (
        f"{_W}micro_batch_size_per_device_for_update",
        4,
        f"{_A}ppo_micro_batch_size_per_gpu",
        4,
    ),
    "num_generations": (f"{_O}n", 1, f"{_R}n", 1),
    "epsilon": (f"{_W}clip_ratio_low", 0.2, f"{_A}clip_ratio_low", 0.2),
    "epsilon_high": (f"{_W}clip_ratio_high", 0.3, f"{_A}clip_ratio_high", 0.2),
    "delta": (f"{_W}clip_ratio_dual", 3.0, f"{_A}clip_ratio_c", 3.0),
    "LOSS": (f"{_W}loss_avg_mode", "token", f"{_A}loss_agg_mode", "token-mean"),
    "KL": ("algorithm.use_kl_loss", False, f"{_A}use_kl_loss", False),
    "KL_COEF": ("algorithm.kl_coef", 1e-3, f"{_A}kl_loss_coef", 1e-3),
    "KL_KIND": ("algorithm.kl_penalty", "kl", f"{_A}kl_loss_type", "low_var_kl"),
    "learning_rate": (f"{_W}optim.lr", 1e-6, f"{_A}optim.lr", 1e-6),
    "weight_decay": (f"{_W}optim.weight_decay", 0.01, f"{_A}optim.weight_decay", 0.01),
    "lr_scheduler_type": (
        f"{_W}optim.lr_scheduler_type",
        "constant",
        f"{_A}optim.warmup_style",
        "constant",
    ),
    "max_grad_norm": (f"{_W}max_grad_norm", 1.0, f"{_A}grad_clip", 1.0),
    "num_iterations": (f"{_W}ppo_epochs", 1, f"{_A}ppo_epochs", 1),
    "entropy_coef": ("", None, f"{_A}entropy_coeff", None),
    "gradient_checkpointing": (
        f"{_M}enable_gradient_checkpointing",
        True,
        f"{_P}enable_gradient_checkpointing",
        True,
    ),
    "LORA": (f"{_M}lora.rank", 0, f"{_P}lora_rank", 0),
    "lora_alpha": (f"{_M}lora.alpha", 16, f"{_P}lora_alpha", 16),
    "lora_target_modules": (
        f"{_M}lora.target_modules",
        "all-linear",
        f"{_P}target_modules",
        "all-linear",
    ),
    "temperature": (f"{_O}temperature", 1.0, f"{_R}temperature", 1.0),
    "top_p": (f"{_O}top_p", 1.0, f"{_R}top_p", 1.0),
    "vllm_gpu_memory_utilization": (
        f"{_O}gpu_memory_utilization",
        0.6,
        f"{_R}gpu_memory_utilization",
        0.5,
    ),
    "vllm_tensor_parallel_size": (
        f"{_O}tensor_parallel_size",
        2,
        f"{_R}tensor_model_parallel_size",
        2,
    ),
    "adora_vllm_enforce_eager": (f"{_O}enforce_eager", None, f"{_R}enforce_eager", None),
    "adora_vllm_max_num_batched_tokens": ("", None, f"{_R}max_num_batched_tokens", None),
    "REWARD": ("worker.reward.reward_function", None, "custom_reward_function.path", None),
    "EVALUATE": ("trainer.val_freq", -1, "trainer.test_freq", -1),
}
_EASYR1: Names = {key: (name, default) for key, (name, default, _, _) in _RAY.items() if name}
_VERL: Names = {key: (name, default) for key, (_, _, name, default) in _RAY.items()}
# The keys of ms-swift that TRL has under another name.
_SWIFT: Mapping[str, str] = {
    "model": "model_name_or_path",
    "system": "adora_system_prompt",
    "vllm_max_model_len": "vllm_max_model_length",
    "lora_rank": "lora_r",
    "target_modules": "lora_target_modules",
}
_LOSSES = {"token": "dapo", "token-mean": "dapo", "seq": "grpo", "seq-mean-token-mean": "grpo"}
_TRACKERS = ("wandb", "tensorboard", "swanlab", "mlflow", "trackio")
# What it means that a key is left out, by a part of its name.
_MEANS = {
    "fsdp": "how the model is divided is in configs/accelerate: zero3.yaml, zero3_offload.yaml",
    "offload": "configs/accelerate/zero3_offload.yaml keeps the optimizer in the host's memory",
    ".ref.": "the reference model is divided as the policy is",
    "val_": "evaluations are greedy here: adora_eval",
    "critic": "no critic: GRPO has none",
    "ray": "no Ray: `accelerate launch` starts the processes",
    "padding": "always so here",
}


@dataclass
class Migration:
    """A config of another trainer, and the keys of ours that it became so far.

    `theirs`: its values by dotted names. `keys`: by each of our keys its value, and where it came
    from. `unmatched`: by each of its names without a counterpart what that means. `used`: the names
    that were read.
    """

    theirs: Mapping[str, Any]
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of one of the other trainer's names, or its default.

        Raises `UserError` where the default is a number and the value is not.
        """
        self.used.add(name)
        value = self.theirs.get(name)
        if isinstance(value, str) and "${" in value:
            self.unmatched[name] = f"{value} is computed; write the value itself"
            value = None
        if value is None:
            return default
        if isinstance(default, int | float) and not isinstance(value, int | float):
            try:
                # YAML reads 1e-6 as a text.
                number = float(value)
            except (ValueError, TypeError):
                raise UserError(f"CONFIG: {name}: {value!r:.60} is not a number") from None
            return int(number) if number.is_integer() else number
        return value

    def put(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set one of our keys.

        `names`: the names that the value comes from; one that the file does not have is marked as
        a default. `note`: what to say beside them.
        """
        sources = [name if name in self.theirs else f"{name} (default)" for name in names]
        self.keys[key] = (value, "; ".join(filter(None, (", ".join(sources), note))))

    def take(self, key: str, name: str, default: Any = None) -> None:
        """Set one of our keys to the value of a name, if that is set or has a default."""
        value = self.get(name, default)
        if value is not None:
            self.put(key, value, name)


def _ray(names: Names, move: Migration, folder: Path) -> None:
    """Convert a config of EasyR1 or verl.

    Their batches count prompts, their micro-batches count answers, and their steps are generations.
    """
    lora = names["LORA"][0]
    rank = move.get(*names["LORA"])
    for key, (name, default) in names.items():
        if key.islower() and (rank or not key.startswith("lora_")):
            move.take(key, name, default)
    if rank:
        move.put("use_peft", True, lora)
        move.put("lora_r", rank, lora)
    if move.get("worker.actor.model.freeze_vision_tower", False):
        move.put("adora_freeze", ["vision_tower"], "worker.actor.model.freeze_vision_tower")
    move.put("use_vllm", True, note="rollouts by vLLM")
    move.put("vllm_mode", "colocate", note="in the training's processes")
    move.put(
        "vllm_enable_sleep_mode",
        True,
        note="frees the engine's memory in the policy step, as theirs",
    )
    note = "theirs corrects nothing; this one goes with top_p"
    move.put("vllm_importance_sampling_mode", "token_truncate", note=note)
    move.put("bf16", True, note="as theirs")
    _loss(move, names)
    _data(move, names, folder)
    _steps(move, names, _batches(move, names))


def _batches(move: Migration, names: Names) -> int:
    """Convert the sizes of batches. Returns the number of optimizer steps of a generation."""
    gpus = int(move.get("trainer.n_gpus_per_node", 8)) * int(move.get("trainer.nnodes", 1))
    prompts = move.get(*names["PROMPTS"])
    prompts_per_step = move.get(*names["MINIBATCH"])
    answers = move.get(*names["num_generations"])
    rows = move.get(*names["per_device_train_batch_size"])
    for key, size, name in (
        ("gradient_accumulation_steps", prompts_per_step, names["MINIBATCH"][0]),
        ("steps_per_generation", prompts, names["PROMPTS"][0]),
    ):
        micro_batches = size * answers / (rows * gpus)
        product = f"{name} {size} x {answers} answers / ({rows} x {gpus} GPUs)"
        if micro_batches < 1 or micro_batches != int(micro_batches):
            raise UserError(
                f"CONFIG: {product} is {micro_batches:g}, no whole number; change a size so that "
                "it is one"
            )
        move.put(key, int(micro_batches), note=product)
    return max(1, int(prompts // prompts_per_step))


def _loss(move: Migration, names: Names) -> None:
    """Convert the advantage estimator, the loss and its KL term."""
    estimator = "algorithm.adv_estimator"
    method = move.get(estimator, "grpo")
    if method == "grpo":
        move.put("adora_method", "grpo", estimator, note="adora for ADORA")
    else:
        move.unmatched[estimator] = f"{method} is not here; docs/methods.md has what is"
    mode, default = names["LOSS"]
    averaging = move.get(mode, default)
    if averaging in _LOSSES:
        move.put("loss_type", _LOSSES[averaging], mode)
    else:
        move.unmatched[mode] = (
            f"{averaging} is no loss_type here; the default is dapo, a mean over tokens"
        )
    if not move.get("algorithm.norm_adv_by_std_in_grpo", True):
        move.put("scale_rewards", "none", "algorithm.norm_adv_by_std_in_grpo")
    has_kl = move.get(*names["KL"]) and not move.get("algorithm.disable_kl", False)
    coefficient = move.get(*names["KL_COEF"])
    kind = move.get(*names["KL_KIND"])
    move.put("beta", coefficient if has_kl else 0.0, names["KL"][0], names["KL_COEF"][0])
    if has_kl and kind != "low_var_kl":
        kl_kind, _ = names["KL_KIND"]
        move.unmatched[kl_kind] = f"{kind}: TRL estimates the KL as low_var_kl does"


def _data(move: Migration, names: Names, folder: Path) -> None:
    """Convert data sets, columns, lengths, prompts and the reward function.

    `folder`: that of the config, in which its files are looked for.
    """
    train_files = _listed(move.get("data.train_files", ""))
    files = [str(folder / file if (folder / file).exists() else file) for file in train_files]
    move.put("dataset_name", files, "data.train_files")
    theirs = {
        "problem": ("prompt", "prompt"),
        "answer": ("answer", "answer"),
        "images": ("image", "images"),
    }
    columns = {
        ours: move.get(f"data.{name}_key", default) for ours, (name, default) in theirs.items()
    }
    move.put("adora_columns", columns, *(f"data.{name}_key" for name, _ in theirs.values()))
    prompt = int(move.get("data.max_prompt_length", 512))
    response = int(move.get("data.max_response_length", 512))
    move.put("max_completion_length", response, "data.max_response_length")
    move.put(
        "vllm_max_model_length",
        prompt + response,
        "data.max_prompt_length",
        "data.max_response_length",
    )
    for key in ("min_pixels", "max_pixels", "seed"):
        move.take(key, f"data.{key}")
    if move.get("data.filter_overlong_prompts", False):
        move.put("adora_overlong_prompts", "drop", "data.filter_overlong_prompts")
    if move.get("data.shuffle", True) is False:
        move.put("shuffle_dataset", False, "data.shuffle")
    validation_files = move.get("data.val_files")
    if validation_files:
        move.unmatched["data.val_files"] = (
            f"{validation_files}: adora_eval: [problems=FOLDER] asks a folder that data_prep made"
        )
    if names is _VERL:
        move.unmatched["reward_model.ground_truth"] = (
            "stands inside verl's rows; `python -m data_prep convert` reads them"
        )
    else:
        move.put("adora_system_prompt", None, note="EasyR1 asks without one")
    template = move.get("data.format_prompt")
    if template:
        _template(move, "data.format_prompt", folder / str(template))
    reward = move.get(*names["REWARD"])
    if reward:
        function = move.get("custom_reward_function.name", "compute_score")
        entry = reward if ":" in str(reward) else f"{reward}:{function}"
        move.put("adora_reward", [entry], names["REWARD"][0], note="called in its own form")


def _steps(move: Migration, names: Names, updates: int) -> None:
    """Convert the length of the run, its checkpoints, evaluations and trackers.

    `updates`: the number of optimizer steps of a generation, which EasyR1 and verl call a step.
    """
    move.used |= {"trainer.project_name", "trainer.n_gpus_per_node", "trainer.nnodes"}
    move.put(
        "output_dir",
        f"runs/{move.get('trainer.experiment_name', 'run')}",
        "trainer.experiment_name",
    )
    for name in ("trainer.total_epochs", "trainer.total_episodes"):
        move.take("num_train_epochs", name)
    for name in ("trainer.max_steps", "trainer.total_training_steps"):
        steps = move.get(name, -1)
        if steps > 0:
            move.put("max_steps", int(steps) * updates, name)
    note = f"x {updates} optimizer steps"
    save_every = int(move.get("trainer.save_freq", -1))
    limit = int(move.get("trainer.save_limit", -1))
    if save_every > 0:
        move.put("save_steps", save_every * updates, "trainer.save_freq", note=note)
        move.put("save_total_limit", limit if limit > 0 else None, "trainer.save_limit")
    evaluate, default = names["EVALUATE"]
    evaluate_every = int(move.get(evaluate, default))
    if evaluate_every > 0:
        move.put("eval_strategy", "steps", evaluate)
        move.put("eval_steps", evaluate_every * updates, evaluate, note=note)
        move.put(
            "eval_on_start",
            bool(move.get("trainer.val_before_train", True)),
            "trainer.val_before_train",
        )
    logger = move.get("trainer.logger", ["console", "wandb"])
    trackers = [tracker for tracker in _listed(logger) if tracker in _TRACKERS]
    move.put("report_to", trackers or "none", "trainer.logger")


def _listed(value: object) -> list[str]:
    """The texts of a list, or the words of a text."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return str(value).split()


def _template(move: Migration, name: str, file: Path) -> None:
    """Convert a prompt in Jinja that has no other variable than the problem."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        move.unmatched[name] = (
            f"{str(file)!r} cannot be read; write its text as adora_prompt, with {{problem}} in it"
        )
        return
    # NUL stands for the problem until the braces of our own templates are doubled.
    template = re.sub(r"{{\s*content\s*(\|\s*trim\s*)?}}", "\0", text)
    if "{{" in template or "{%" in template or "\0" not in template:
        move.unmatched[name] = (
            "more than the problem stands in it; write it as adora_prompt, with {problem} in it"
        )
        return
    escaped = template.replace("{", "{{").replace("}", "}}")
    move.put("adora_prompt", escaped.replace("\0", "{problem}"), name)


def _swift(move: Migration, folder: Path) -> None:
    """Convert a config of ms-swift, the file that `swift rlhf` takes."""
    if move.get("rlhf_type", "grpo") != "grpo":
        raise UserError(
            f"CONFIG: rlhf_type: {move.theirs['rlhf_type']} is not grpo, and nothing else is "
            "trained here"
        )
    for name, key in _SWIFT.items():
        move.take(key, name)
    for name, key in (("dataset", "dataset_name"), ("reward_funcs", "adora_reward")):
        entries = move.get(name)
        if entries:
            move.put(key, _listed(entries), name)
    if move.get("tuner_type", move.get("train_type", "lora")) == "lora":
        move.put("use_peft", True, "train_type")
    parts = {
        "freeze_vit": "vision_tower",
        "freeze_aligner": "projector",
        "freeze_llm": "language_model",
    }
    frozen = [part for name, part in parts.items() if move.get(name, False)]
    if frozen:
        move.put("adora_freeze", frozen, *(name for name in parts if move.theirs.get(name)))
    if move.get("dynamic_sample", False):
        move.put(
            "adora_rollouts",
            {"refill": int(move.get("max_resample_times", 3))},
            "max_resample_times",
        )
    sleep_level = move.get("sleep_level")
    if sleep_level is not None:
        move.put("vllm_enable_sleep_mode", bool(int(sleep_level)), "sleep_level")
    _trl(move, folder)


def _trl(move: Migration, folder: Path) -> None:
    """Convert a config of TRL, whose keys are ours too."""
    for name in [name for name in move.theirs if name not in move.used and name in read_keys()]:
        move.take(name, name)


TRAINERS: Mapping[str, Callable[[Migration, Path], None]] = {
    "easyr1": partial(_ray, _EASYR1),
    "verl": partial(_ray, _VERL),
    "swift": _swift,
    "trl": _trl,
}


def convert_config(trainer: str, config: Path, reward: str | None = None) -> Migration:
    """Convert the config of another trainer to our keys.

    `reward`: FILE.py:FUNCTION in place of the config's own reward. Raises `UserError`.
    """
    content = read_mapping("CONFIG", config)
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat.update(dotted(key, value))
    move = Migration(content if trainer == "trl" else flat)
    TRAINERS[trainer](move, config.parent)
    if reward:
        move.put("adora_reward", [reward], note="--reward")
    for name in move.theirs.keys() - move.used - move.unmatched.keys():
        meaning = next(
            (text for part, text in _MEANS.items() if part in name), "no counterpart here"
        )
        move.unmatched[name] = f"{yaml_line(move.theirs[name]):.60}: {meaning}"
    return move


def yaml_text(move: Migration, trainer: str, config: Path) -> str:
    """The YAML file with our keys, and where each value came from."""
    lines = [
        f"# From {config.name} of {trainer}, by `python -m adora_vl.migrate {trainer}`. Look it "
        "through."
    ]
    entries = [(f"{key}: {yaml_line(value)}", source) for key, (value, source) in move.keys.items()]
    lines += [f"{entry:<50} # {source}" for entry, source in entries]
    if move.unmatched:
        lines += ["", "# Without a counterpart:"]
        lines += [f"#   {name}: {meaning}" for name, meaning in sorted(move.unmatched.items())]
    return "\n".join(lines) + "\n"


def _write(options: argparse.Namespace) -> None:
    """Write the converted config, and print what has no counterpart."""
    move = convert_config(options.trainer, options.config, options.reward)
    output = options.output or options.config.with_suffix(".adora.yaml")
    if output.exists():
        raise UserError(f"output: {str(output)!r} is there; choose another name with --output")
    replace_file(output, yaml_text(move, options.trainer, options.config))
    print(f"{output}: {len(move.keys)} keys{'. Without a counterpart:' if move.unmatched else ''}")
    for name, meaning in sorted(move.unmatched.items()):
        print(f"  {name}: {meaning}")
    print(f"Next: python -m adora_vl.train --config {output} --dry-run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(
        prog="python -m adora_vl.migrate", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("trainer", choices=list(TRAINERS), help="whose config it is")
    parser.add_argument("config", type=path, metavar="CONFIG", help="its YAML file")
    parser.add_argument(
        "--output", type=path, metavar="FILE", help="default: CONFIG with .adora.yaml at its end"
    )
    parser.add_argument(
        "--reward",
        metavar="FILE.py:FUNCTION",
        help="the reward function, in its own form or in TRL's",
    )
    return exit_code_of(lambda: _write(parser.parse_args(arguments)), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
