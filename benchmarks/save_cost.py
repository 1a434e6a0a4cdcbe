"""What a checkpoint costs beside stock TRL's: `python benchmarks/save_cost.py --width 768 --repeats 5`.

One trainer saves by turns in TRL's way (straight into its folder) and in ours (beside, flushed, hashed, renamed), and
the newest one is verified as a resume would. Prints medians and ratios; TRL does not flush, so its seconds end when the
data are in the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from datasets import Dataset
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration
from trl import GRPOTrainer

from adora_vl.checkpoint.store import problem_of
from adora_vl.config import AdoraGRPOConfig
from adora_vl.models.tiny.architecture import build_config
from adora_vl.models.tiny.build import PRETRAINED
from adora_vl.prompts import conversation
from adora_vl.rewards import reward_function
from adora_vl.trainer import AdoraGRPOTrainer
from data_prep.schema import FEATURES
from data_prep.synthetic.generate import generate


def build(folder: Path, width: int) -> AdoraGRPOTrainer:
    """A trainer after one step, so that the optimizer has its state. `width`: hidden size of the language model."""
    processor = AutoProcessor.from_pretrained(PRETRAINED)
    config = build_config(processor.tokenizer)
    config.text_config.hidden_size = config.vision_config.out_hidden_size = width
    config.text_config.intermediate_size = 4 * width
    config.text_config.num_attention_heads = width // config.text_config.head_dim
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    rows = list(generate(2))
    data = Dataset.from_list(rows, features=FEATURES)
    data = data.add_column("prompt", [conversation(row["problem"]) for row in rows])
    arguments = AdoraGRPOConfig(
        output_dir=str(folder / "run"), use_cpu=True, bf16=False, max_steps=1, per_device_train_batch_size=2,
        num_generations=2, max_completion_length=2, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = AdoraGRPOTrainer(str(folder / "model"), reward_function("adora"), arguments, train_dataset=data)
    trainer.train()
    return trainer


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        trainer = build(Path(temporary), options.width)
        checkpoint = Path(temporary) / "run" / "checkpoint-1"
        times: dict[str, list[float]] = {"stock TRL's save": [], "ours": [], "verify at resume": []}
        size = {}
        for _ in range(options.repeats):
            for name, save in (
                ("stock TRL's save", GRPOTrainer._save_checkpoint),
                ("ours", type(trainer)._save_checkpoint),
            ):
                shutil.rmtree(checkpoint, ignore_errors=True)
                times[name].append(seconds(partial(save, trainer, trainer.model, None)))
                size[name] = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
            times["verify at resume"].append(seconds(lambda: problem_of(checkpoint)))
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters in float32, {options.repeats} repeats, medians")
    base = statistics.median(times["stock TRL's save"])
    for name, values in times.items():
        middle = statistics.median(values)
        megabytes = f"{size[name] / 1e6:10.1f} MB" if name in size else ""
        print(f"{name:18}{middle:8.2f} s {middle / base:6.2f} x{megabytes}")


if __name__ == "__main__":
    main()
