"""What EasyR1 and verl have in common, since EasyR1 began as a copy of verl.

Their batches count prompts, their micro-batches count answers, and their steps are generations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from adora_vl.migrate.migration import Migration, split_at_sign, to_words
from adora_vl.utils.errors import UserError

# TRL's `loss_type` by what EasyR1 and verl call the way in which the loss is averaged: over all
# tokens, or over the means of the answers.
_LOSS_TYPE_BY_AVERAGING = {
    "token": "dapo",
    "token-mean": "dapo",
    "seq": "grpo",
    "seq-mean-token-mean": "grpo",
}
# What EasyR1 and verl call the loss that TRL has by default, and the losses whose ratio is that of
# a whole answer.
_CLIPPED_LOSSES = ("default", "vanilla")
_SEQUENCE_LOSSES = ("gspo", "gspo_token")
_TRACKERS = ("wandb", "tensorboard", "swanlab", "mlflow", "trackio")
_ESTIMATOR_KEY = "algorithm.adv_estimator"


@dataclass(frozen=True)
class GenerationLayout:
    """How the answers of a generation are divided among GPUs and optimizer steps."""

    gpus: int
    """The number of GPUs of the whole run."""
    optimizer_steps: int
    """The number of optimizer steps on a generation, which EasyR1 and verl count as one step."""


def convert_direct_keys(migration: Migration) -> None:
    """Convert the keys of model, optimizer and engine that have one counterpart each.

    These are the keys of `migration.key_map`, with two exceptions: names in capitals are none of
    our keys, and `convert_lora` converts the keys of LoRA.
    """
    for key, (name, default) in migration.key_map.items():
        is_our_key = key.islower()
        if is_our_key and not key.startswith("lora_"):
            migration.copy_key(key, name, default)
    if not migration.get_mapped("model_name_or_path"):
        model_name = migration.mapped_name("model_name_or_path")
        migration.add_remark(f"model missing: {model_name} is not set; write model_name_or_path")
    migration.set_key("use_vllm", True, note="rollouts by vLLM")
    migration.set_key("vllm_mode", "colocate", note="in the training's processes")
    note = "theirs corrects nothing; this one goes with top_p"
    migration.set_key("vllm_importance_sampling_mode", "token_truncate", note=note)
    migration.set_key("bf16", True, note="as theirs")


def convert_lora(migration: Migration) -> None:
    """Convert the LoRA adapter, if the run has one.

    Without `lora_target_modules` an adapter of this package is on every linear layer of the
    language model, and on none of the vision tower. So the layers become:

        all linear layers               lora_target_modules: all-linear
        all linear layers, not vision   no key, and a remark
        a list of layers                lora_target_modules: that list
        a list of layers, not vision    that list, and adora_freeze: vision tower and projector

    The key `LORA_RANK` of `migration.key_map` is 0 without an adapter. `LORA_EXCLUDED` is a regular
    expression of the layers without adapter; only verl has it.
    """
    rank = migration.get_mapped("LORA_RANK")
    targets_name, all_linear = migration.key_map["lora_target_modules"]
    targets = migration.get(targets_name, all_linear)
    # read in any case, so that it is not listed as a key without a counterpart
    alpha = migration.get_mapped("lora_alpha")
    excluded_layers = ""
    if "LORA_EXCLUDED" in migration.key_map:
        excluded_name = migration.mapped_name("LORA_EXCLUDED")
        excluded_layers = str(migration.get(excluded_name) or "")
    if not rank:
        return
    excludes_vision = "visual" in excluded_layers
    rank_name = migration.mapped_name("LORA_RANK")
    migration.set_key("use_peft", True, rank_name)
    migration.set_key("lora_r", rank, rank_name)
    migration.set_key("lora_alpha", alpha, migration.mapped_name("lora_alpha"))
    migration.set_key("lora_dropout", 0.0, note="theirs has none")
    if excluded_layers and not excludes_vision:
        migration.add_remark(
            f"{excluded_name}: {excluded_layers} has no counterpart; name lora_target_modules"
        )
    if targets != all_linear:
        migration.set_key("lora_target_modules", targets, targets_name)
        if excludes_vision:
            migration.set_key("adora_freeze", ["vision_tower", "projector"], excluded_name)
    elif excludes_vision:
        migration.add_remark(
            f"LoRA: {all_linear} without {excluded_layers} is what use_peft alone means: every linear "
            "layer of the language model"
        )
    else:
        migration.set_key(
            "lora_target_modules", all_linear, targets_name, note="the vision tower's too"
        )


def convert_batches(migration: Migration) -> GenerationLayout:
    """Convert the sizes of batches, and return how a generation is divided.

    EasyR1 and verl count the prompts of a generation and of an optimizer step. TRL counts passes,
    in each of which every GPU has `per_device_train_batch_size` answers. For example, 8 GPUs with 4
    answers each make a pass of 32 answers. With 5 answers to a prompt:

        512 prompts of a generation       512 x 5 / 32 = 80   steps_per_generation
        128 prompts of an optimizer step  128 x 5 / 32 = 20   gradient_accumulation_steps

    A generation then has 512 / 128 = 4 optimizer steps, times `num_iterations`.

    Raises:
        UserError: the answers of a step or of a generation are no whole number of passes.
    """
    processes = migration.get_count("trainer.n_gpus_per_node", 8)
    gpus = processes * migration.get_count("trainer.nnodes", 1)
    key_map = migration.key_map
    generation_name = migration.mapped_name("PROMPTS_PER_GENERATION")
    prompts_per_generation = migration.get_count(*key_map["PROMPTS_PER_GENERATION"])
    step_name = migration.mapped_name("PROMPTS_PER_STEP")
    prompts_per_step = migration.get_count(*key_map["PROMPTS_PER_STEP"])
    group_size = migration.get_count(*key_map["num_generations"])
    micro_batch_size = migration.get_count(*key_map["per_device_train_batch_size"])

    def set_passes(key: str, prompts: int, name: str) -> None:
        """Set one of TRL's keys to the number of passes that the answers to these prompts take."""
        passes = prompts * group_size / (micro_batch_size * gpus)
        formula = f"{name} {prompts} x {group_size} answers / ({micro_batch_size} x {gpus} GPUs)"
        if passes < 1 or passes != int(passes):
            raise UserError(
                f"CONFIG: {formula} is {passes:g}, no whole number; change a size so that it is one"
            )
        migration.set_key(key, int(passes), note=formula)

    set_passes("gradient_accumulation_steps", prompts_per_step, step_name)
    set_passes("steps_per_generation", prompts_per_generation, generation_name)
    if prompts_per_generation % prompts_per_step:
        raise UserError(
            f"CONFIG: {generation_name}: {prompts_per_generation} is no multiple of {step_name}: "
            f"{prompts_per_step}; make it one"
        )
    steps_per_iteration = prompts_per_generation // prompts_per_step
    iterations = migration.get_count(*key_map["num_iterations"])
    return GenerationLayout(gpus=gpus, optimizer_steps=steps_per_iteration * iterations)


def convert_loss(migration: Migration) -> None:
    """Convert the advantage estimator, the loss and its KL term.

    The key `LOSS_AVERAGING` of `migration.key_map` is how the loss is averaged, such as `token`.
    """
    estimator = migration.get(_ESTIMATOR_KEY, "grpo")
    migration.set_key("adora_method", "grpo", _ESTIMATOR_KEY, note="adora for ADORA")
    if estimator != "grpo":
        migration.unmatched[_ESTIMATOR_KEY] = (
            f"{estimator} is no method here; docs/methods.md has all"
        )
        migration.add_remark(
            f"method: {_ESTIMATOR_KEY}: {estimator} became grpo; docs/methods.md has all"
        )
    averaging_name = migration.mapped_name("LOSS_AVERAGING")
    averaging = migration.get_mapped("LOSS_AVERAGING")
    if averaging in _LOSS_TYPE_BY_AVERAGING:
        migration.set_key("loss_type", _LOSS_TYPE_BY_AVERAGING[averaging], averaging_name)
    else:
        migration.set_key("loss_type", "dapo", note="a mean over tokens")
        meaning = f"{averaging} is no loss_type; dapo is a mean over tokens"
        migration.unmatched[averaging_name] = meaning
        migration.add_remark(f"loss: {averaging_name}: {averaging} became dapo, a mean over tokens")
    _convert_policy_loss(migration)
    if not migration.get("algorithm.norm_adv_by_std_in_grpo", True):
        migration.set_key("scale_rewards", "none", "algorithm.norm_adv_by_std_in_grpo")
    _convert_kl(migration)


def _convert_policy_loss(migration: Migration) -> None:
    """Convert how the loss uses the ratio of the new to the old policy: clipped, GSPO, CISPO, SAPO.

    EasyR1 and verl have one key for the ratio and one for the averaging. TRL's `loss_type` says
    both. A loss that TRL lacks becomes the clipped loss, and a remark says so.
    """
    name = migration.mapped_name("POLICY_LOSS")
    loss = str(migration.get_mapped("POLICY_LOSS"))
    if loss in _CLIPPED_LOSSES:
        return
    if loss in _SEQUENCE_LOSSES:
        migration.set_key("importance_sampling_level", "sequence", name)
        migration.set_key("loss_type", "grpo", name, note="GSPO, a mean over answers")
    elif loss == "cispo":
        bound_name = migration.mapped_name("epsilon_high")
        cap = 1 + migration.get_mapped("epsilon_high")
        # Theirs is how far the ratio may exceed 1, TRL's key is the largest ratio itself. TRL's
        # CISPO has no lower bound, and no second bound (`delta`).
        migration.set_key(
            "epsilon_high", cap, bound_name, note="1 + theirs: TRL caps the ratio itself"
        )
        migration.set_key("loss_type", "cispo", name)
        migration.keys.pop("delta", None)
        migration.add_remark(
            f"loss: {name}: cispo is TRL's, which bounds the ratio from above alone"
        )
    elif loss == "sapo":
        migration.set_key("loss_type", "sapo", name)
        # the second bound of the clipped loss, which SAPO does not have
        migration.keys.pop("delta", None)
    else:
        current_loss = migration.keys["loss_type"].value
        migration.unmatched[name] = f"{loss} is no loss_type; docs/methods.md has all"
        migration.add_remark(f"loss: {name}: {loss} became {current_loss} with its clipped ratio")


def convert_reward_function(
    migration: Migration, name: str, reward: str, options_name: str
) -> None:
    """Set `adora_reward` to a reward function that was written for the other trainer.

    This package calls it with the same arguments as the other trainer does.

    Args:
        migration: the config that is converted.
        name: the other trainer's key that names the function.
        reward: FILE.py:FUNCTION.
        options_name: the other trainer's key of a mapping of further arguments; each argument has
            the dotted name `<options_name>.<argument>`.
    """
    prefix = f"{options_name}."
    options: dict[str, object] = {}
    for key in migration.values:
        if key.startswith(prefix):
            option = key.removeprefix(prefix)
            options[option] = migration.get(key)
    entry = {reward: options} if options else reward
    migration.set_key("adora_reward", [entry], name, note="called in its own form")
    file, _, _ = reward.rpartition(":")
    if migration.source.find_path(file) is None:
        migration.add_remark(f"reward: {file} is not here; copy it, or name it with --reward")


def _convert_kl(migration: Migration) -> None:
    """Convert the KL term of the loss.

    The other trainer does not multiply it by the ratio of new to old policy, so TRL must not
    either (`use_bias_correction_kl`).
    """
    has_kl = migration.get_mapped("USES_KL") and not migration.get("algorithm.disable_kl", False)
    coefficient = migration.get_mapped("KL_COEF")
    estimator = migration.get_mapped("KL_ESTIMATOR")
    beta = coefficient if has_kl else 0.0
    migration.set_key(
        "beta", beta, migration.mapped_name("USES_KL"), migration.mapped_name("KL_COEF")
    )
    if not has_kl:
        return
    note = "theirs does not weight the KL by the ratio of policies, TRL does by default"
    migration.set_key("use_bias_correction_kl", False, note=note)
    if estimator != "low_var_kl":
        estimator_name = migration.mapped_name("KL_ESTIMATOR")
        migration.unmatched[estimator_name] = (
            f"{estimator}: TRL estimates the KL as low_var_kl does"
        )
        migration.add_remark(
            f"KL: {estimator_name}: {estimator} became low_var_kl, which TRL has alone"
        )


def convert_data(migration: Migration, columns: Mapping[str, str], sources: list[str]) -> None:
    """Convert data sets, their columns, and the lengths of prompts and answers.

    Args:
        migration: the config that is converted.
        columns: the name of a column in the data by our name of it, such as `answer`.
        sources: the other trainer's keys that the names of the columns come from.
    """
    files = to_words(migration.get("data.train_files", []))
    # `geometry3k@train` names a split
    files, splits = split_at_sign(files, "@")
    if files:
        migration.set_key(
            "dataset_name", [migration.resolve_path(file) for file in files], "data.train_files"
        )
    else:
        migration.set_key("dataset_name", ["DATA"], "data.train_files", note="to be named")
        migration.add_remark("data missing: data.train_files is not set; write dataset_name")
    if splits:
        migration.set_key("dataset_train_split", splits[0], "data.train_files")
    if len(splits) > 1:
        migration.add_remark(f"data: {', '.join(splits)}: one split for all is read, {splits[0]}")
    migration.set_key("adora_columns", dict(columns), *sources)
    migration.add_remark(
        f"answers read as: the column {columns['answer']}, graded as mathematics unless the "
        "reward is your own; adora_columns says which column is what"
    )
    prompt_tokens = migration.get_count("data.max_prompt_length", 512)
    answer_tokens = migration.get_count("data.max_response_length", 512)
    migration.set_key("max_completion_length", answer_tokens, "data.max_response_length")
    migration.set_key(
        "vllm_max_model_length",
        prompt_tokens + answer_tokens,
        "data.max_prompt_length",
        "data.max_response_length",
    )
    if migration.get("data.filter_overlong_prompts", False):
        migration.set_key("adora_overlong_prompts", "drop", "data.filter_overlong_prompts")
    if migration.get("data.shuffle", True) is False:
        migration.set_key("shuffle_dataset", False, "data.shuffle")


def convert_steps(migration: Migration, layout: GenerationLayout) -> None:
    """Convert the length of the run, its checkpoints, evaluations and trackers.

    A step of EasyR1 and verl is a generation. TRL counts optimizer steps, and a generation has
    `layout.optimizer_steps` of them.
    """
    migration.ignore("trainer.project_name")
    run_name = re.sub(r"[^\w.-]+", "_", str(migration.get("trainer.experiment_name", "run")))
    migration.set_key("output_dir", f"runs/{run_name}", "trainer.experiment_name")
    migration.copy_key("num_train_epochs", *migration.key_map["EPOCHS"])
    migration.copy_key("num_train_epochs", "trainer.total_episodes")
    note = f"x {layout.optimizer_steps} optimizer steps a generation"
    for name in ("trainer.max_steps", "trainer.total_training_steps"):
        steps = migration.get(name, -1)
        if steps > 0:
            migration.set_key("max_steps", int(steps) * layout.optimizer_steps, name, note=note)
    steps_between_saves = int(migration.get("trainer.save_freq", -1))
    max_checkpoints = int(migration.get("trainer.save_limit", -1))
    if steps_between_saves > 0:
        migration.set_key(
            "save_steps",
            steps_between_saves * layout.optimizer_steps,
            "trainer.save_freq",
            note=note,
        )
        # -1 keeps all checkpoints
        save_total_limit = max_checkpoints if max_checkpoints > 0 else None
        migration.set_key("save_total_limit", save_total_limit, "trainer.save_limit")
    _convert_warmup(migration, layout)
    _remark_evaluation(migration, layout)
    logger = migration.get("trainer.logger", ["console", "wandb"])
    trackers = [tracker for tracker in to_words(logger) if tracker in _TRACKERS]
    migration.set_key("report_to", trackers or "none", "trainer.logger")


def _convert_warmup(migration: Migration, layout: GenerationLayout) -> None:
    """Convert the warm-up of the learning rate, which is in steps or a share of the run.

    Transformers has one key for both, and reads a number below 1 as a share. Its schedule
    `constant` never warms up, while `constant` of the other trainers does if they have a warm-up.

    The keys `WARMUP_STEPS` and `WARMUP_SHARE` of `migration.key_map` are the length of the warm-up.
    """
    steps_name = migration.mapped_name("WARMUP_STEPS")
    share_name = migration.mapped_name("WARMUP_SHARE")
    steps = migration.get(steps_name, -1)
    share = migration.get(share_name, 0.0)
    if steps > 0:
        migration.set_key("warmup_steps", int(steps) * layout.optimizer_steps, steps_name)
    elif share > 0 and steps < 0:  # 0 steps are no warm-up, whatever the share is
        migration.set_key("warmup_steps", share, share_name, note="a share of the run")
    else:
        return
    if migration.keys["lr_scheduler_type"].value == "constant":
        schedule_name = migration.mapped_name("lr_scheduler_type")
        note = "theirs warms up, TRL's constant does not"
        migration.set_key("lr_scheduler_type", "constant_with_warmup", schedule_name, note=note)


def _remark_evaluation(migration: Migration, layout: GenerationLayout) -> None:
    """Add a remark on how to evaluate during training, since that cannot be converted.

    An evaluation of this package needs a folder of problems that data_prep has prepared.
    """
    # -1 without evaluations
    steps_between = int(migration.get_mapped("STEPS_PER_EVALUATION"))
    files = to_words(migration.get("data.val_files", []))
    evaluates_at_start = bool(migration.get("trainer.val_before_train", True))
    if not files and steps_between <= 0:
        return
    data = " ".join(files) or "your problems"
    migration.unmatched["data.val_files"] = f"{data}: adora_eval asks a folder that data_prep made"
    keys_text = ""
    if steps_between > 0:
        keys_text = (
            f"; with eval_strategy: steps, eval_steps: {steps_between * layout.optimizer_steps}, "
            f"eval_on_start: {str(evaluates_at_start).lower()}"
        )
    migration.add_remark(
        f"evaluation without data: {data} has to be prepared by `python -m data_prep convert`, "
        f"then adora_eval: [problems=FOLDER]{keys_text}"
    )
