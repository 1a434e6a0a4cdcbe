"""Times whole steps of `trl.GRPOTrainer` beside ours in alternation, without an engine.

Both train LoRA on a model with random weights, in batches of 8. Ours runs in two ways. By default a
large card has room to recompute no layer, which is faster and takes more memory than stock. With
all layers recomputed, as stock does it, speed is compared at like memory.

Both trainers learn from the same recorded rollouts, which take the place of `generate`, so that the
policy's part is judged by itself and no time goes into sampling. At the full size each turn is a
process of its own, so that none finds the memory of another, and each has a line as soon as it
ends. The peak of ours is held against what the dry run predicts for these shapes, and with all
layers recomputed against stock's.
"""

import gc
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoProcessor,
    PretrainedConfig,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from trl import GRPOConfig, GRPOTrainer, ModelConfig

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.sharding import Sharding
from adora_vl.data.prompt_lengths import PromptLengths
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.models.shape import model_shape
from adora_vl.planning.memory import CUDA_CONTEXT_BYTES, predict_memory
from adora_vl.planning.plan import build_memory_setup
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.utils.files import GIB
from benchmarks.gpu.setting import JUDGED_ON_GPU_ONLY, Setting
from benchmarks.gpu.streaming import TARGETS
from benchmarks.gpu.table import CheckLine, at_most_line, skipped_line, verdict_line
from benchmarks.measure import Clock
from benchmarks.sized_inputs import sized_problems
from benchmarks.step_run import reward

STOCK = "stock"
OURS = "ours"
OURS_RECOMPUTED = "ours, all layers recomputed"
WAYS = (STOCK, OURS, OURS_RECOMPUTED)
ROWS_A_STEP = 8  # one group
_TEXT_TOKEN_RANGE = (20, 600)  # ids of the tiny model's processor that stand for text
STEPS_TRAINED = 3  # of a turn; the first warms up and is not counted
_SPECIAL_TOKEN_KEYS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)


@dataclass
class MeasuredRun:
    """What the counted steps of one turn took."""

    seconds: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    peak: int = 0  # bytes that torch's allocator held on the GPU
    prompt: int = 0  # tokens of the longest prompt
    finite: bool = True  # all gradient norms are, and not all of them 0


def run(setting: Setting) -> Iterator[CheckLine]:
    """Run all ways by turns, and compare their seconds, their gradients and their memory."""
    config = model_shapes(setting)
    side = 448 if setting.full else 56
    completion = 1024 if setting.full else 8
    turns: dict[str, list[MeasuredRun]] = {way: [] for way in WAYS}
    rounds = 2 if setting.full else 1
    with tempfile.TemporaryDirectory() as folder:
        for number, way in product(range(1, rounds + 1), WAYS):
            take_turn = partial(
                _run_turn,
                setting,
                config=config,
                way=way,
                side=side,
                completion=completion,
                folder=Path(folder),
            )
            turn = run_in_process(take_turn) if setting.full else take_turn()
            turns[way].append(turn)
            yield turn_line(f"{way}: turn {number}", turn)
    yield from second_lines(setting, turns)
    prompt = turns[OURS][0].prompt
    predicted_bytes = predict_peak_bytes(
        setting, config=config, side=side, completion=completion, prompt=prompt
    )
    peak_bytes = {way: max(turn.peak for turn in turns[way]) for way in WAYS}
    yield from memory_lines(setting, peak_bytes, predicted_bytes)


def turn_line(title: str, turn: MeasuredRun) -> CheckLine:
    """Return the seconds and the peak of a turn, ok where its gradient norms are finite."""
    seconds = ", ".join(f"{spent:.3g}" for spent in turn.seconds)
    peak = f", peak {turn.peak / GIB:.3g} GiB" if turn.peak else ""
    gradients = "gradients finite" if turn.finite else "gradients not finite"
    return verdict_line(
        title,
        figure=f"{seconds} s a step{peak}, {gradients}",
        bound="gradient norms finite, not all 0",
        ok=turn.finite,
        source="trainer's log",
    )


def run_in_process(turn: Callable[[], MeasuredRun]) -> MeasuredRun:
    """Take a turn in a process of its own, which leaves nothing behind on the card."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(turn).result()


class RecordedRollouts:
    """Takes the place of a model's `generate`: the same answers of full length, in every way."""

    def __init__(self, completion: int, last_token: int) -> None:
        self.completion = completion
        self.last_token = last_token
        self.calls = 0

    def __call__(self, inputs: Tensor | None = None, **options: object) -> Tensor:
        """Return the prompts, (B, P), with an answer behind each, (B, P + C)."""
        prompts = options["input_ids"] if inputs is None else inputs
        assert isinstance(prompts, Tensor)
        generator = torch.Generator().manual_seed(self.calls)
        self.calls += 1
        shape = (len(prompts), self.completion)
        answers = torch.randint(
            _TEXT_TOKEN_RANGE[0], _TEXT_TOKEN_RANGE[1], shape, generator=generator
        )
        answers[:, -1] = self.last_token
        return torch.cat([prompts, answers.to(prompts.device)], dim=1)


def model_shapes(setting: Setting) -> PretrainedConfig:
    """Return the config of the 3B model with the special tokens of the tiny model's processor.

    There is no other processor without a hub.
    """
    config = setting.config(
        "3B", layers=36 if setting.full else 2, eye_layers=32 if setting.full else 2
    )
    tiny = AutoConfig.from_pretrained(PRETRAINED_FOLDER)
    for name in _SPECIAL_TOKEN_KEYS:
        setattr(config, name, getattr(tiny, name))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.text_config, name, getattr(tiny.text_config, name))
    return config


def build_lora(setting: Setting) -> LoraConfig:
    """Return the LoRA config of our recipe, on the language model alone."""
    targets = rf".*language_model.*\.({'|'.join(TARGETS)})"
    return LoraConfig(
        r=64 if setting.full else 4, lora_alpha=128, target_modules=targets, task_type="CAUSAL_LM"
    )


def trainer_config(
    setting: Setting, way: str, side: int, completion: int, folder: Path
) -> GRPOConfig:
    """Return the config of a trainer whose step is one group of 8 rollouts.

    The config follows `adora_3b_1gpu_lora.yaml` in each key that shapes a micro-batch.

    Args:
        setting: the size and the device.
        way: one of `WAYS`: `stock` is TRL's own config.
        side: the side of the pictures, which are squares, in pixels.
        completion: the most tokens of an answer.
        folder: where the trainer may write.
    """
    keys: dict[str, Any] = {
        "output_dir": str(folder / way),
        "use_vllm": False,
        "use_cpu": not setting.on_gpu,
        "bf16": setting.on_gpu,
        "gradient_checkpointing": setting.on_gpu,
        "per_device_train_batch_size": ROWS_A_STEP,
        "num_generations": ROWS_A_STEP,
        "max_completion_length": completion,
        "max_steps": STEPS_TRAINED,
        "learning_rate": 1e-5,
        "beta": 0.0,
        "loss_type": "grpo",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 3,
    }
    if way == STOCK:
        return GRPOConfig(**keys)
    if way == OURS_RECOMPUTED:
        keys["adora_recompute"] = "all"
    return AdoraGRPOConfig(
        **keys, min_pixels=side * side, max_pixels=side * side, adora_method="grpo"
    )


def _run_turn(
    setting: Setting, config: PretrainedConfig, way: str, side: int, completion: int, folder: Path
) -> MeasuredRun:
    """Train a new model with a new trainer for a few steps, and return what they took."""
    processor = AutoProcessor.from_pretrained(
        PRETRAINED_FOLDER, padding_side="left", truncation_side="left"
    )
    processor.image_processor.size = {"shortest_edge": side * side, "longest_edge": side * side}
    model = setting.model(config, torch.bfloat16 if setting.on_gpu else torch.float32)
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.generation_config.pad_token_id = config.text_config.pad_token_id
    model.generate = RecordedRollouts(completion, config.text_config.eos_token_id)
    trainer_class = GRPOTrainer if way == STOCK else AdoraGRPOTrainer
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=trainer_config(setting, way, side, completion, folder),
        train_dataset=sized_problems(4 * STEPS_TRAINED, (side, side)),
        processing_class=processor,
        peft_config=build_lora(setting),
    )
    turn = MeasuredRun()
    clock = DeviceClock(setting)
    trainer.add_callback(StepFigures(setting, turn, clock))
    _record_prompt_lengths(trainer, turn)
    if way == STOCK:
        clock.around(trainer, "_generate", "rollout")
    else:
        clock.around(trainer.parts.sampler, "sample", "rollout")
    clock.around(trainer, "_get_per_token_logps_and_entropies", "log-probabilities")
    clock.around(trainer.accelerator, "backward", "backward")
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    norms = [float(entry["grad_norm"]) for entry in logs]
    turn.finite = bool(norms) and all(math.isfinite(norm) for norm in norms) and any(norms)
    if setting.on_gpu:
        turn.peak = torch.cuda.max_memory_reserved(setting.device)
    trainer.accelerator.free_memory()
    del trainer, model
    gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()
    return turn


class DeviceClock(Clock):
    """A `Clock` whose phases end when the device has finished them."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        _synchronize(self.setting)
        with super().phase(name):
            yield
            _synchronize(self.setting)


class StepFigures(TrainerCallback):
    """Writes down what each step but the first took."""

    def __init__(self, setting: Setting, turn: MeasuredRun, clock: Clock) -> None:
        self.setting = setting
        self.turn = turn
        self.clock = clock

    def on_train_begin(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.setting.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.setting.device)

    def on_step_begin(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _synchronize(self.setting)
        self.clock.seconds.clear()
        self.started = time.perf_counter()

    def on_step_end(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the seconds of a step and of its phases; the first step warms up."""
        _synchronize(self.setting)
        if state.global_step == 1:
            return
        total = time.perf_counter() - self.started
        phases = dict(self.clock.seconds)
        self.turn.seconds.append(total)
        for name, spent in {**phases, "other": total - sum(phases.values())}.items():
            self.turn.phases[name].append(spent)


def _synchronize(setting: Setting) -> None:
    """Wait until the GPU, if there is one, has finished all operations so far."""
    if setting.on_gpu:
        torch.cuda.synchronize(setting.device)


def _record_prompt_lengths(trainer: GRPOTrainer, turn: MeasuredRun) -> None:
    """Let `turn.prompt` follow the longest prompt, in tokens, that the policy computes."""
    compute_logps = trainer._get_per_token_logps_and_entropies

    def record_and_compute(
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: object,
        **kwargs: object,
    ) -> object:
        turn.prompt = max(turn.prompt, input_ids.size(1) - logits_to_keep)
        return compute_logps(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = record_and_compute


def second_lines(setting: Setting, turns: dict[str, list[MeasuredRun]]) -> Iterator[CheckLine]:
    """Compare the medians of the ways' seconds, by phase.

    Two ratios are judged for each way of ours, over stock's. One is of the policy's part alone, its
    pass for log-probabilities and the backward pass. The other is of the whole step.
    """
    medians: dict[str, dict[str, float]] = {}
    for way, way_turns in turns.items():
        names = {name for turn in way_turns for name in turn.phases}
        medians[way] = {
            name: statistics.median([spent for turn in way_turns for spent in turn.phases[name]])
            for name in sorted(names)
        }
        medians[way]["step"] = statistics.median(
            [spent for turn in way_turns for spent in turn.seconds]
        )
        figure = ", ".join(f"{name} {spent:.3g} s" for name, spent in medians[way].items())
        yield verdict_line(
            f"{way}: seconds",
            figure,
            "more than 0",
            medians[way]["step"] > 0,
            "medians of the counted steps",
        )
    for way in (OURS, OURS_RECOMPUTED):
        yield from ratio_lines(setting, way, medians[way], stock=medians[STOCK])


def ratio_lines(
    setting: Setting, way: str, seconds: dict[str, float], stock: dict[str, float]
) -> Iterator[CheckLine]:
    """Judge the seconds of one of our ways by those of stock, both by phase."""
    policy_seconds = seconds["log-probabilities"] + seconds["backward"]
    policy_seconds_of_stock = stock["log-probabilities"] + stock["backward"]
    ratios = {"policy's pass and backward": policy_seconds / policy_seconds_of_stock}
    ratios["whole step"] = seconds["step"] / stock["step"]
    bounds = (1.0, 1.1)  # of the policy's part, and of the whole step, which has more noise
    for (part, ratio), bound in zip(ratios.items(), bounds, strict=True):
        name = f"{way}, of stock's seconds: {part}"
        if setting.on_gpu:
            yield at_most_line(
                name,
                value=ratio,
                bound=bound,
                unit="",
                source="else our way costs time; a tenth of a whole step is noise",
            )
        else:
            yield skipped_line(name, JUDGED_ON_GPU_ONLY, f"{ratio:.2f}")


def memory_lines(
    setting: Setting, peak_bytes: dict[str, int], predicted_bytes: int
) -> Iterator[CheckLine]:
    """Judge the peak of ours by the dry run, and with all layers recomputed by stock's peak.

    `peak_bytes` has the peak of each of `WAYS`. `predicted_bytes` is of ours by default.
    """
    predicted = predicted_bytes / GIB
    if not setting.on_gpu:
        reason = (
            "a process's memory on a CPU is no card's; tests/unit/planning judges the formulas "
            "there"
        )
        yield skipped_line("peak memory", reason, f"{predicted:.2g} GiB predicted")
        return
    peaks = {way: peak_bytes[way] / GIB for way in WAYS}
    yield verdict_line(
        f"{STOCK}: peak memory",
        figure=f"{peaks[STOCK]:.3g} GiB",
        bound="more than 0",
        ok=peaks[STOCK] > 0,
        source="what torch's allocator reserved",
    )
    yield at_most_line(
        f"{OURS}: peak memory",
        value=peaks[OURS],
        bound=predicted,
        unit="GiB",
        source="the dry run's prediction without the context",
    )
    yield at_most_line(
        f"{OURS_RECOMPUTED}: peak memory",
        value=peaks[OURS_RECOMPUTED],
        bound=peaks[STOCK],
        unit="GiB",
        source="stock's peak: it recomputes all layers too",
    )
    yield at_most_line(
        f"{OURS}: prediction, of the peak",
        value=predicted / peaks[OURS],
        bound=1.5,
        unit="",
        source="more would refuse what fits",
    )


def predict_peak_bytes(
    setting: Setting, config: PretrainedConfig, side: int, completion: int, prompt: int
) -> int:
    """Return the bytes of ours in its worst phase, as the dry run computes them for this card.

    Lengths are in tokens, and `side` is in pixels.
    """
    args = trainer_config(setting, OURS, side, completion, Path("unused"))
    assert isinstance(args, AdoraGRPOConfig)
    shape = model_shape(
        config, dtype="bfloat16" if setting.on_gpu else "float32", peft_config=build_lora(setting)
    )
    image = (side // shape.patch_size // shape.merge_size) ** 2
    lengths = PromptLengths(["row"], [prompt], [image])
    setup = build_memory_setup(
        args,
        model=ModelConfig(attn_implementation="sdpa"),
        shape=shape,
        sharding=Sharding(),
        lengths=lengths,
    )
    if not setting.on_gpu:
        return predict_memory(setup, 80 * GIB).peak_bytes
    # By default the card's own memory decides how many layers are recomputed.
    card_bytes = torch.cuda.get_device_properties(setting.device).total_memory
    return predict_memory(setup, card_bytes).peak_bytes - CUDA_CONTEXT_BYTES
