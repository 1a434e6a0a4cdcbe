"""From nothing to the tiny model's folder: problems, vocabulary, weights, warm start."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

from adora_vl.models.tiny.architecture import DEFAULT_FAMILY, build_model
from adora_vl.models.tiny.place import check_place, save_built
from adora_vl.models.tiny.processor import build_processor, processor_around
from adora_vl.models.tiny.warm_start import SLIPS, WarmStart, warm_start
from adora_vl.prompts import SYSTEM_PROMPT
from data_prep.synthetic.generate import generate

PRETRAINED = Path(__file__).parent / "pretrained"  # shipped with the package: it is small, and a demo starts at once
_VOCABULARY_ROWS = 2000
_DATA_SEED = 1000  # other problems than any training run draws by default


def build_tiny_model(folder: Path, plan: WarmStart | None = None, family: str = DEFAULT_FAMILY) -> dict[str, object]:
    """Build, warm-start and save the tiny model and its processor. Returns and saves (`build.json`) how it was made.

    Without steps in the `plan` the weights are random. Other families than the first have its tokenizer. `folder`
    appears complete or not at all. The same versions and number of threads give the same weights. Raises `UserError`
    where `folder` holds anything else than such a model.
    """
    check_place(folder)
    plan = plan or WarmStart()
    rows = list(generate(plan.rows, seed=_DATA_SEED)) if plan.steps or family == DEFAULT_FAMILY else []
    if family == DEFAULT_FAMILY:
        texts = [f"system user assistant {SYSTEM_PROMPT}\n"] * 50
        texts += [f"{r['problem']}\n{r['meta']['solution']}\n{r['meta']['slip']}" for r in rows[:_VOCABULARY_ROWS]]
        processor = build_processor(texts)
    else:
        processor = processor_around(AutoTokenizer.from_pretrained(PRETRAINED), family)
    model = build_model(processor.tokenizer, seed=plan.seed, family=family)
    loss = warm_start(model, processor, rows, plan) if plan.steps else None
    facts: dict[str, object] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "final_loss": None if loss is None else round(loss, 4),
        "slips": SLIPS,
        "plan": asdict(plan),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
    }
    save_built(folder, model, processor, facts)
    return facts
