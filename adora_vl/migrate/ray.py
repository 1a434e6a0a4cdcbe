"""What EasyR1 and verl have in common, since EasyR1 began as a copy of verl.

Their batches count prompts, their micro-batches count answers, and their steps are generations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from adora_vl.migrate.migration import Migration, Names, words_in
from adora_vl.utils.errors import UserError

_LOSSES = {"token": "dapo", "token-mean": "dapo", "seq": "grpo", "seq-mean-token-mean": "grpo"}
# Their names of the loss that TRL has by default, and of those whose ratio is a whole answer's.
_CLIPPED_LOSSES = ("default", "vanilla")
_SEQUENCE_LOSSES = ("gspo", "gspo_token")
_TRACKERS = ("wandb", "tensorboard", "swanlab", "mlflow", "trackio")
_ESTIMATOR = "algorithm.adv_estimator"


@dataclass(frozen=True)
class Layout:
    """How the answers of a generation are divided.

    `gpus`: of the whole run. `updates`: the optimizer steps that learn from a generation, which
    EasyR1 and verl count as one step.
    """

    gpus: int
    updates: int


def convert_model(move: Migration, names: Names) -> None:
    """Convert the model, its optimizer and the engine, whose keys have one counterpart each."""
    for key, (name, default) in names.items():
        if key.islower() and not key.startswith("lora_"):
            move.take(key, name, default)
    model_name, _ = names["model_name_or_path"]
    if not move.get(model_name):
        move.remark(f"model missing: {model_name} is not set; write model_name_or_path")
    move.put("use_vllm", True, note="rollouts by vLLM")
    move.put("vllm_mode", "colocate", note="in the training's processes")
    note = "theirs corrects nothing; this one goes with top_p"
    move.put("vllm_importance_sampling_mode", "token_truncate", note=note)
    move.put("bf16", True, note="as theirs")


def convert_lora(move: Migration, names: Names) -> None:
    """Convert the adapter, if there is one.

    Ours without a list of layers is on every linear layer of the language model.
    """
    rank_name, default = names["LORA"]
    rank = move.get(rank_name, default)
    targets_name, all_linear = names["lora_target_modules"]
    targets = move.get(targets_name, all_linear)
    move.get(*names["lora_alpha"])
    skipped = ""
    if "EXCLUDED" in names:
        excluded_name, _ = names["EXCLUDED"]
        skipped = str(move.get(excluded_name) or "")
    if not rank:
        return
    move.put("use_peft", True, rank_name)
    move.put("lora_r", rank, rank_name)
    move.take("lora_alpha", *names["lora_alpha"])
    move.put("lora_dropout", 0.0, note="theirs has none")
    if skipped and "visual" not in skipped:
        move.remark(f"{excluded_name}: {skipped} has no counterpart; name lora_target_modules")
    if targets != all_linear:
        move.put("lora_target_modules", targets, targets_name)
        if "visual" in skipped:
            move.put("adora_freeze", ["vision_tower", "projector"], excluded_name)
    elif "visual" in skipped:
        move.remark(
            f"LoRA: {all_linear} without {skipped} is what use_peft alone means: every linear "
            "layer of the language model"
        )
    else:
        move.put("lora_target_modules", all_linear, targets_name, note="the vision tower's too")


def convert_batches(move: Migration, names: Names) -> Layout:
    """Convert the sizes of batches.

    Theirs are prompts of a generation and of an optimizer step, ours are passes of
    `per_device_train_batch_size` answers over all GPUs. Raises `UserError` where they do not divide.
    """
    processes = move.positive("trainer.n_gpus_per_node", 8)
    gpus = processes * move.positive("trainer.nnodes", 1)
    prompts_name, prompts_default = names["PROMPTS"]
    prompts = move.positive(prompts_name, prompts_default)
    minibatch_name, minibatch_default = names["MINIBATCH"]
    prompts_per_step = move.positive(minibatch_name, minibatch_default)
    answers = move.positive(*names["num_generations"])
    rows = move.positive(*names["per_device_train_batch_size"])
    for key, size, name in (
        ("gradient_accumulation_steps", prompts_per_step, minibatch_name),
        ("steps_per_generation", prompts, prompts_name),
    ):
        micro_batches = size * answers / (rows * gpus)
        product = f"{name} {size} x {answers} answers / ({rows} x {gpus} GPUs)"
        if micro_batches < 1 or micro_batches != int(micro_batches):
            raise UserError(
                f"CONFIG: {product} is {micro_batches:g}, no whole number; change a size so that "
                "it is one"
            )
        move.put(key, int(micro_batches), note=product)
    if prompts % prompts_per_step:
        raise UserError(
            f"CONFIG: {prompts_name}: {prompts} is no multiple of {minibatch_name}: "
            f"{prompts_per_step}; make it one"
        )
    passes = move.positive(*names["num_iterations"])
    return Layout(gpus=gpus, updates=prompts // prompts_per_step * passes)


def convert_loss(move: Migration, names: Names) -> None:
    """Convert the advantage estimator, the loss and its KL term."""
    estimator = move.get(_ESTIMATOR, "grpo")
    move.put("adora_method", "grpo", _ESTIMATOR, note="adora for ADORA")
    if estimator != "grpo":
        move.unmatched[_ESTIMATOR] = f"{estimator} is no method here; docs/methods.md has all"
        move.remark(f"method: {_ESTIMATOR}: {estimator} became grpo; docs/methods.md has all")
    mode, default = names["LOSS"]
    averaging = move.get(mode, default)
    if averaging in _LOSSES:
        move.put("loss_type", _LOSSES[averaging], mode)
    else:
        move.put("loss_type", "dapo", note="a mean over tokens")
        move.unmatched[mode] = f"{averaging} is no loss_type; dapo is a mean over tokens"
        move.remark(f"loss: {mode}: {averaging} became dapo, a mean over tokens")
    _convert_policy_loss(move, names)
    if not move.get("algorithm.norm_adv_by_std_in_grpo", True):
        move.put("scale_rewards", "none", "algorithm.norm_adv_by_std_in_grpo")
    _convert_kl(move, names)


def _convert_policy_loss(move: Migration, names: Names) -> None:
    """Convert what the loss makes of the ratio of new to old policy.

    Their losses are named apart from how they are averaged, and TRL's `loss_type` says both. One
    that TRL lacks becomes the clipped loss, and a remark says so.
    """
    name, default = names["POLICY_LOSS"]
    loss = str(move.get(name, default))
    if loss in _CLIPPED_LOSSES:
        return
    if loss in _SEQUENCE_LOSSES:
        move.put("importance_sampling_level", "sequence", name)
        move.put("loss_type", "grpo", name, note="GSPO, a mean over answers")
    elif loss == "cispo":
        bound_name, high = names["epsilon_high"]
        cap = 1 + move.get(bound_name, high)
        # TRL's key is the cap of the ratio itself, and its loss has no lower and no second bound
        move.put("epsilon_high", cap, bound_name, note="1 + theirs: TRL caps the ratio itself")
        move.put("loss_type", "cispo", name)
        move.keys.pop("delta", None)
        move.remark(f"loss: {name}: cispo is TRL's, which bounds the ratio from above alone")
    elif loss == "sapo":
        move.put("loss_type", "sapo", name)
        move.keys.pop("delta", None)
    else:
        current_loss, _ = move.keys["loss_type"]
        move.unmatched[name] = f"{loss} is no loss_type; docs/methods.md has all"
        move.remark(f"loss: {name}: {loss} became {current_loss} with its clipped ratio")


def convert_reward_function(move: Migration, name: str, reward: str, options_name: str) -> None:
    """Name a reward function of theirs, which is called in its own form, with its arguments.

    `reward`: FILE.py:FUNCTION. `options_name`: their name of the mapping of arguments, whose
    values have dotted names.
    """
    prefix = f"{options_name}."
    options: dict[str, object] = {}
    for key in move.values:
        if key.startswith(prefix):
            option = key.removeprefix(prefix)
            options[option] = move.get(key)
    entry = {reward: options} if options else reward
    move.put("adora_reward", [entry], name, note="called in its own form")
    file, _, _ = reward.rpartition(":")
    if move.source.find(file) is None:
        move.remark(f"reward: {file} is not here; copy it, or name it with --reward")


def _convert_kl(move: Migration, names: Names) -> None:
    """Convert the KL term, whose gradient in TRL is another one by default."""
    has_loss, _ = names["KL"]
    has_kl = move.get(*names["KL"]) and not move.get("algorithm.disable_kl", False)
    coefficient_name, default = names["KL_COEF"]
    coefficient = move.get(coefficient_name, default)
    kind_name, default_kind = names["KL_KIND"]
    kind = move.get(kind_name, default_kind)
    move.put("beta", coefficient if has_kl else 0.0, has_loss, coefficient_name)
    if not has_kl:
        return
    note = "theirs does not weight the KL by the ratio of policies, TRL does by default"
    move.put("use_bias_correction_kl", False, note=note)
    if kind != "low_var_kl":
        move.unmatched[kind_name] = f"{kind}: TRL estimates the KL as low_var_kl does"
        move.remark(f"KL: {kind_name}: {kind} became low_var_kl, which TRL has alone")


def convert_data(move: Migration, columns: Mapping[str, str], sources: list[str]) -> None:
    """Convert data sets, columns, lengths and sizes of images.

    `columns`: our names and theirs. `sources`: the names that the columns come from.
    """
    files = words_in(move.get("data.train_files", []))
    files, splits = move.split_off(files, "@")
    if files:
        move.put("dataset_name", [move.path_of(file) for file in files], "data.train_files")
    else:
        move.put("dataset_name", ["DATA"], "data.train_files", note="to be named")
        move.remark("data missing: data.train_files is not set; write dataset_name")
    if splits:
        move.put("dataset_train_split", splits[0], "data.train_files")
    if len(splits) > 1:
        move.remark(f"data: {', '.join(splits)}: one split for all is read, {splits[0]}")
    move.put("adora_columns", dict(columns), *sources)
    move.remark(
        f"answers read as: the column {columns['answer']}, graded as mathematics unless the "
        "reward is your own; adora_columns says which column is what"
    )
    prompt = move.positive("data.max_prompt_length", 512)
    response = move.positive("data.max_response_length", 512)
    move.put("max_completion_length", response, "data.max_response_length")
    move.put(
        "vllm_max_model_length",
        prompt + response,
        "data.max_prompt_length",
        "data.max_response_length",
    )
    if move.get("data.filter_overlong_prompts", False):
        move.put("adora_overlong_prompts", "drop", "data.filter_overlong_prompts")
    if move.get("data.shuffle", True) is False:
        move.put("shuffle_dataset", False, "data.shuffle")


def convert_steps(move: Migration, names: Names, layout: Layout) -> None:
    """Convert the length of the run, its checkpoints, evaluations and trackers.

    Their steps are generations, and ours optimizer steps, of which a generation has
    `layout.updates`.
    """
    move.used |= {"trainer.project_name"}
    run_name = re.sub(r"[^\w.-]+", "_", str(move.get("trainer.experiment_name", "run")))
    move.put("output_dir", f"runs/{run_name}", "trainer.experiment_name")
    epochs_name, default_epochs = names["EPOCHS"]
    move.take("num_train_epochs", epochs_name, default_epochs)
    move.take("num_train_epochs", "trainer.total_episodes")
    note = f"x {layout.updates} optimizer steps a generation"
    for name in ("trainer.max_steps", "trainer.total_training_steps"):
        steps = move.get(name, -1)
        if steps > 0:
            move.put("max_steps", int(steps) * layout.updates, name, note=note)
    save_every = int(move.get("trainer.save_freq", -1))
    limit = int(move.get("trainer.save_limit", -1))
    if save_every > 0:
        move.put("save_steps", save_every * layout.updates, "trainer.save_freq", note=note)
        move.put("save_total_limit", limit if limit > 0 else None, "trainer.save_limit")
    _convert_warmup(move, names, layout)
    _remark_evaluation(move, names, layout)
    logger = move.get("trainer.logger", ["console", "wandb"])
    trackers = [tracker for tracker in words_in(logger) if tracker in _TRACKERS]
    move.put("report_to", trackers or "none", "trainer.logger")


def _convert_warmup(move: Migration, names: Names, layout: Layout) -> None:
    """Convert the warm-up of the learning rate, in steps or as a share of the run.

    Transformers reads a number below 1 as a share.
    """
    steps_name, _ = names["WARMUP_STEPS"]
    share_name, _ = names["WARMUP_SHARE"]
    steps = move.get(steps_name, -1)
    share = move.get(share_name, 0.0)
    if steps > 0:
        move.put("warmup_steps", int(steps) * layout.updates, steps_name)
    elif share > 0:
        move.put("warmup_steps", share, share_name, note="a share of the run")


def _remark_evaluation(move: Migration, names: Names, layout: Layout) -> None:
    """Say how to evaluate during training, for which ours needs a prepared folder."""
    name, default = names["EVALUATE"]
    every = int(move.get(name, default))
    files = words_in(move.get("data.val_files", []))
    starts = bool(move.get("trainer.val_before_train", True))
    if not files and every <= 0:
        return
    data = " ".join(files) or "your problems"
    move.unmatched["data.val_files"] = f"{data}: adora_eval asks a folder that data_prep made"
    lines = (
        f"eval_strategy: steps, eval_steps: {every * layout.updates}, "
        f"eval_on_start: {str(starts).lower()}"
    )
    keys = f"; with {lines}" if every > 0 else ""
    move.remark(
        f"evaluation without data: {data} has to be prepared by `python -m data_prep convert`, "
        f"then adora_eval: [problems=FOLDER]{keys}"
    )
