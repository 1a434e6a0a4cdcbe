"""What EasyR1 and verl have in common, since EasyR1 began as a copy of verl.

Their batches count prompts, their micro-batches count answers, and their steps are generations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from adora_vl.migrate.migration import Migration, Names, words_in
from adora_vl.utils.errors import UserError

# TRL's `loss_type` by their name of how the loss is averaged: over all tokens, or over the means of
# the answers.
_LOSSES = {"token": "dapo", "token-mean": "dapo", "seq": "grpo", "seq-mean-token-mean": "grpo"}
# Their names of the loss that TRL has by default, and of those whose ratio is a whole answer's.
_CLIPPED_LOSSES = ("default", "vanilla")
_SEQUENCE_LOSSES = ("gspo", "gspo_token")
_TRACKERS = ("wandb", "tensorboard", "swanlab", "mlflow", "trackio")
_ESTIMATOR = "algorithm.adv_estimator"


@dataclass(frozen=True)
class Layout:
    """How the answers of a generation are divided among GPUs and optimizer steps.

    `gpus`: those of the whole run. `updates`: the optimizer steps that learn from a generation, which
    EasyR1 and verl count as one step.
    """

    gpus: int
    updates: int


def convert_model(migration: Migration, names: Names) -> None:
    """Convert the model, its optimizer and the engine, whose keys have one counterpart each."""
    for key, (name, default) in names.items():
        if key.islower() and not key.startswith("lora_"):
            migration.copy(key, name, default)
    model_name, _ = names["model_name_or_path"]
    if not migration.get(model_name):
        migration.remark(f"model missing: {model_name} is not set; write model_name_or_path")
    migration.put("use_vllm", True, note="rollouts by vLLM")
    migration.put("vllm_mode", "colocate", note="in the training's processes")
    note = "theirs corrects nothing; this one goes with top_p"
    migration.put("vllm_importance_sampling_mode", "token_truncate", note=note)
    migration.put("bf16", True, note="as theirs")


def convert_lora(migration: Migration, names: Names) -> None:
    """Convert the adapter, if there is one.

    Ours without a list of layers is on every linear layer of the language model.
    """
    rank_name, default = names["LORA"]
    rank = migration.get(rank_name, default)
    targets_name, all_linear = names["lora_target_modules"]
    targets = migration.get(targets_name, all_linear)
    migration.get(*names["lora_alpha"])
    skipped = ""
    if "EXCLUDED" in names:
        excluded_name, _ = names["EXCLUDED"]
        skipped = str(migration.get(excluded_name) or "")
    if not rank:
        return
    migration.put("use_peft", True, rank_name)
    migration.put("lora_r", rank, rank_name)
    migration.copy("lora_alpha", *names["lora_alpha"])
    migration.put("lora_dropout", 0.0, note="theirs has none")
    if skipped and "visual" not in skipped:
        migration.remark(f"{excluded_name}: {skipped} has no counterpart; name lora_target_modules")
    if targets != all_linear:
        migration.put("lora_target_modules", targets, targets_name)
        if "visual" in skipped:
            migration.put("adora_freeze", ["vision_tower", "projector"], excluded_name)
    elif "visual" in skipped:
        migration.remark(
            f"LoRA: {all_linear} without {skipped} is what use_peft alone means: every linear "
            "layer of the language model"
        )
    else:
        migration.put(
            "lora_target_modules", all_linear, targets_name, note="the vision tower's too"
        )


def convert_batches(migration: Migration, names: Names) -> Layout:
    """Convert the sizes of batches.

    Theirs are prompts of a generation and of an optimizer step, ours are passes of
    `per_device_train_batch_size` answers over all GPUs. Raises `UserError` where they do not divide.
    """
    processes = migration.count_of("trainer.n_gpus_per_node", 8)
    gpus = processes * migration.count_of("trainer.nnodes", 1)
    prompts_name, prompts_default = names["PROMPTS"]
    prompts_per_generation = migration.count_of(prompts_name, prompts_default)
    minibatch_name, minibatch_default = names["MINIBATCH"]
    prompts_per_step = migration.count_of(minibatch_name, minibatch_default)
    answers = migration.count_of(*names["num_generations"])
    micro_batch_size = migration.count_of(*names["per_device_train_batch_size"])
    for key, prompt_count, name in (
        ("gradient_accumulation_steps", prompts_per_step, minibatch_name),
        ("steps_per_generation", prompts_per_generation, prompts_name),
    ):
        micro_batches = prompt_count * answers / (micro_batch_size * gpus)
        product = f"{name} {prompt_count} x {answers} answers / ({micro_batch_size} x {gpus} GPUs)"
        if micro_batches < 1 or micro_batches != int(micro_batches):
            raise UserError(
                f"CONFIG: {product} is {micro_batches:g}, no whole number; change a size so that "
                "it is one"
            )
        migration.put(key, int(micro_batches), note=product)
    if prompts_per_generation % prompts_per_step:
        raise UserError(
            f"CONFIG: {prompts_name}: {prompts_per_generation} is no multiple of {minibatch_name}: "
            f"{prompts_per_step}; make it one"
        )
    passes = migration.count_of(*names["num_iterations"])
    return Layout(gpus=gpus, updates=prompts_per_generation // prompts_per_step * passes)


def convert_loss(migration: Migration, names: Names) -> None:
    """Convert the advantage estimator, the loss and its KL term."""
    estimator = migration.get(_ESTIMATOR, "grpo")
    migration.put("adora_method", "grpo", _ESTIMATOR, note="adora for ADORA")
    if estimator != "grpo":
        migration.unmatched[_ESTIMATOR] = f"{estimator} is no method here; docs/methods.md has all"
        migration.remark(f"method: {_ESTIMATOR}: {estimator} became grpo; docs/methods.md has all")
    mode, default = names["LOSS"]
    averaging = migration.get(mode, default)
    if averaging in _LOSSES:
        migration.put("loss_type", _LOSSES[averaging], mode)
    else:
        migration.put("loss_type", "dapo", note="a mean over tokens")
        migration.unmatched[mode] = f"{averaging} is no loss_type; dapo is a mean over tokens"
        migration.remark(f"loss: {mode}: {averaging} became dapo, a mean over tokens")
    _convert_policy_loss(migration, names)
    if not migration.get("algorithm.norm_adv_by_std_in_grpo", True):
        migration.put("scale_rewards", "none", "algorithm.norm_adv_by_std_in_grpo")
    _convert_kl(migration, names)


def _convert_policy_loss(migration: Migration, names: Names) -> None:
    """Convert what the loss makes of the ratio of new to old policy.

    Their losses are named apart from how they are averaged, and TRL's `loss_type` says both. One
    that TRL lacks becomes the clipped loss, and a remark says so.
    """
    name, default = names["POLICY_LOSS"]
    loss = str(migration.get(name, default))
    if loss in _CLIPPED_LOSSES:
        return
    if loss in _SEQUENCE_LOSSES:
        migration.put("importance_sampling_level", "sequence", name)
        migration.put("loss_type", "grpo", name, note="GSPO, a mean over answers")
    elif loss == "cispo":
        bound_name, high = names["epsilon_high"]
        cap = 1 + migration.get(bound_name, high)
        # TRL's key is the cap of the ratio itself, and its loss has no lower and no second bound
        migration.put("epsilon_high", cap, bound_name, note="1 + theirs: TRL caps the ratio itself")
        migration.put("loss_type", "cispo", name)
        migration.keys.pop("delta", None)
        migration.remark(f"loss: {name}: cispo is TRL's, which bounds the ratio from above alone")
    elif loss == "sapo":
        migration.put("loss_type", "sapo", name)
        migration.keys.pop("delta", None)
    else:
        current_loss, _ = migration.keys["loss_type"]
        migration.unmatched[name] = f"{loss} is no loss_type; docs/methods.md has all"
        migration.remark(f"loss: {name}: {loss} became {current_loss} with its clipped ratio")


def convert_reward_function(
    migration: Migration, name: str, reward: str, options_name: str
) -> None:
    """Name a reward function of theirs, which is called in its own form, with its arguments.

    `reward`: FILE.py:FUNCTION. `options_name`: their name of the mapping of arguments, whose
    values have dotted names.
    """
    prefix = f"{options_name}."
    options: dict[str, object] = {}
    for key in migration.values:
        if key.startswith(prefix):
            option = key.removeprefix(prefix)
            options[option] = migration.get(key)
    entry = {reward: options} if options else reward
    migration.put("adora_reward", [entry], name, note="called in its own form")
    file, _, _ = reward.rpartition(":")
    if migration.source.find(file) is None:
        migration.remark(f"reward: {file} is not here; copy it, or name it with --reward")


def _convert_kl(migration: Migration, names: Names) -> None:
    """Convert the KL term, whose gradient in TRL is another one by default."""
    has_loss, _ = names["KL"]
    has_kl = migration.get(*names["KL"]) and not migration.get("algorithm.disable_kl", False)
    coefficient_name, default = names["KL_COEF"]
    coefficient = migration.get(coefficient_name, default)
    kind_name, default_kind = names["KL_KIND"]
    kind = migration.get(kind_name, default_kind)
    migration.put("beta", coefficient if has_kl else 0.0, has_loss, coefficient_name)
    if not has_kl:
        return
    note = "theirs does not weight the KL by the ratio of policies, TRL does by default"
    migration.put("use_bias_correction_kl", False, note=note)
    if kind != "low_var_kl":
        migration.unmatched[kind_name] = f"{kind}: TRL estimates the KL as low_var_kl does"
        migration.remark(f"KL: {kind_name}: {kind} became low_var_kl, which TRL has alone")


def convert_data(migration: Migration, columns: Mapping[str, str], sources: list[str]) -> None:
    """Convert data sets, columns, lengths and sizes of images.

    `columns`: our names and theirs. `sources`: the names that the columns come from.
    """
    files = words_in(migration.get("data.train_files", []))
    files, splits = migration.split_off(files, "@")
    if files:
        migration.put(
            "dataset_name", [migration.path_of(file) for file in files], "data.train_files"
        )
    else:
        migration.put("dataset_name", ["DATA"], "data.train_files", note="to be named")
        migration.remark("data missing: data.train_files is not set; write dataset_name")
    if splits:
        migration.put("dataset_train_split", splits[0], "data.train_files")
    if len(splits) > 1:
        migration.remark(f"data: {', '.join(splits)}: one split for all is read, {splits[0]}")
    migration.put("adora_columns", dict(columns), *sources)
    migration.remark(
        f"answers read as: the column {columns['answer']}, graded as mathematics unless the "
        "reward is your own; adora_columns says which column is what"
    )
    prompt = migration.count_of("data.max_prompt_length", 512)
    response = migration.count_of("data.max_response_length", 512)
    migration.put("max_completion_length", response, "data.max_response_length")
    migration.put(
        "vllm_max_model_length",
        prompt + response,
        "data.max_prompt_length",
        "data.max_response_length",
    )
    if migration.get("data.filter_overlong_prompts", False):
        migration.put("adora_overlong_prompts", "drop", "data.filter_overlong_prompts")
    if migration.get("data.shuffle", True) is False:
        migration.put("shuffle_dataset", False, "data.shuffle")


def convert_steps(migration: Migration, names: Names, layout: Layout) -> None:
    """Convert the length of the run, its checkpoints, evaluations and trackers.

    Their steps are generations, and ours optimizer steps, of which a generation has
    `layout.updates`.
    """
    migration.used |= {"trainer.project_name"}
    run_name = re.sub(r"[^\w.-]+", "_", str(migration.get("trainer.experiment_name", "run")))
    migration.put("output_dir", f"runs/{run_name}", "trainer.experiment_name")
    epochs_name, default_epochs = names["EPOCHS"]
    migration.copy("num_train_epochs", epochs_name, default_epochs)
    migration.copy("num_train_epochs", "trainer.total_episodes")
    note = f"x {layout.updates} optimizer steps a generation"
    for name in ("trainer.max_steps", "trainer.total_training_steps"):
        steps = migration.get(name, -1)
        if steps > 0:
            migration.put("max_steps", int(steps) * layout.updates, name, note=note)
    save_every = int(migration.get("trainer.save_freq", -1))
    limit = int(migration.get("trainer.save_limit", -1))
    if save_every > 0:
        migration.put("save_steps", save_every * layout.updates, "trainer.save_freq", note=note)
        migration.put("save_total_limit", limit if limit > 0 else None, "trainer.save_limit")
    _convert_warmup(migration, names, layout)
    _remark_evaluation(migration, names, layout)
    logger = migration.get("trainer.logger", ["console", "wandb"])
    trackers = [tracker for tracker in words_in(logger) if tracker in _TRACKERS]
    migration.put("report_to", trackers or "none", "trainer.logger")


def _convert_warmup(migration: Migration, names: Names, layout: Layout) -> None:
    """Convert the warm-up of the learning rate, in steps or as a share of the run.

    Transformers reads a number below 1 as a share.
    """
    steps_name, _ = names["WARMUP_STEPS"]
    share_name, _ = names["WARMUP_SHARE"]
    steps = migration.get(steps_name, -1)
    share = migration.get(share_name, 0.0)
    if steps > 0:
        migration.put("warmup_steps", int(steps) * layout.updates, steps_name)
    elif share > 0:
        migration.put("warmup_steps", share, share_name, note="a share of the run")


def _remark_evaluation(migration: Migration, names: Names, layout: Layout) -> None:
    """Remark how to evaluate during training, for which ours needs a prepared folder."""
    name, default = names["EVALUATE"]
    every = int(migration.get(name, default))
    files = words_in(migration.get("data.val_files", []))
    starts = bool(migration.get("trainer.val_before_train", True))
    if not files and every <= 0:
        return
    data = " ".join(files) or "your problems"
    migration.unmatched["data.val_files"] = f"{data}: adora_eval asks a folder that data_prep made"
    lines = (
        f"eval_strategy: steps, eval_steps: {every * layout.updates}, "
        f"eval_on_start: {str(starts).lower()}"
    )
    keys = f"; with {lines}" if every > 0 else ""
    migration.remark(
        f"evaluation without data: {data} has to be prepared by `python -m data_prep convert`, "
        f"then adora_eval: [problems=FOLDER]{keys}"
    )
