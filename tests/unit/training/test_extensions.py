"""Extensions from a user's file: which are refused, and that an extension may change an image.

An extension is a class whose methods are called at certain points of a training step. If it changes
an image for the engine alone, engine and trainer cannot be compared there.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.config.schema import parse
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.packing.image_store import PASSING, ImageCache, effective_settings
from adora_vl.rollout.importance import ImportanceRatio
from adora_vl.rollout.rollouts import Rollout, SamplingRequest, SamplingResult, StepKey
from adora_vl.rollout.turns import append_result
from adora_vl.training.extensions import (
    build_extensions,
    check_extensions,
    extension_costs,
    extension_hashes,
)
from adora_vl.training.generation import Generation
from adora_vl.training.guards import DriftGuard
from adora_vl.types import Batch, engine_comparison_mask
from adora_vl.utils.errors import UserError
from tests.support.step_context import step_context

CPU_ARGV = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "x"]
VLLM_ARGV = ["--use_vllm", "true", "--vllm_mode", "colocate"]
# A user's file with two extensions, and a function that is none.
EXTENSION_SOURCE = """
from dataclasses import dataclass
from typing import ClassVar
from adora_vl.training.extensions import Extension

@dataclass
class Plain(Extension):
    strength: float = 1.0
    def check(self, keys):
        if keys.beta:
            raise ValueError("strength: it goes without a KL term")
    def check_model(self, model_config):
        if self.strength > 5:
            raise ValueError(f"strength: {self.strength} is too much for {model_config.model_type}")
    def costs(self, keys):
        return "a second pass" if self.strength > 1 else ""

@dataclass
class Elsewhere(Extension):
    changes_images: ClassVar[bool] = True

def function(): pass
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with the user's file `mine.py` in it."""
    (tmp_path / "mine.py").write_text(EXTENSION_SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_with_extensions(extensions: str, *argv: str) -> Any:
    """Return the config of a run with these extensions, written as YAML, and further arguments."""
    return parse([*CPU_ARGV, "--adora_extensions", extensions, *argv])[1]


def test_an_extension_comes_from_a_file_with_its_options_and_is_known_by_it(user_folder):
    """Options are converted, the extension's own checks are called, and its file is hashed."""
    keys = config_with_extensions("{mine.py:Plain: {strength: 3}}")
    chosen = build_extensions(keys)
    assert [*chosen] == ["Plain"]
    assert chosen["Plain"].strength == 3.0  # type: ignore[attr-defined]
    check_extensions(chosen, AutoConfig.from_pretrained(PRETRAINED_FOLDER))
    assert extension_costs(chosen, keys) == ["Plain: a second pass"]
    hashes_before = extension_hashes(keys)
    (user_folder / "mine.py").write_text(EXTENSION_SOURCE + "# edited")
    assert hashes_before.keys() == {"mine.py"}
    assert extension_hashes(keys) != hashes_before
    keys_without_extension = parse(CPU_ARGV)[1]
    assert build_extensions(keys_without_extension) == {}
    assert extension_hashes(keys_without_extension) == {}
    assert extension_costs({}, keys_without_extension) == []


def test_the_extension_of_the_page_is_one(user_folder):
    """The extension on the page sets the advantages of the longest answers to 0.

    The longest 0.3 of four answers is one, that of nine tokens.
    """
    page = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()
    _, code = page.split("```python\n# my_extensions.py\n")
    (user_folder / "my_extensions.py").write_text(code.partition("```")[0])
    keys = config_with_extensions("{my_extensions.py:NothingFromTheLongest: {share: 0.3}}")
    (extension,) = build_extensions(keys).values()
    log: dict[str, float] = {}
    extension.start(step_context(log), None)
    mask = torch.arange(9) < torch.tensor([2, 9, 4, 5])[:, None]
    batch: Batch = {"completion_mask": mask, "advantages": torch.ones(4)}
    generation = Generation(key=StepKey(mode="train", step=0, micro=0), group_size=4)
    advantages: Any = None
    extension.after_weighing(generation, batch, advantages)

    assert batch["advantages"].tolist() == [1, 0, 1, 1]
    assert log == {"longest/left_out": 0.25}


# (extensions, further arguments of the command, a pattern of the line that refuses them)
WRONG_EXTENSIONS: list[tuple[str, list[str], str]] = [
    ("{noisy: {share: 1}}", [], "'noisy' names no extension; write FILE.py:EXTENSION"),
    ("{mine.py:Plian: {}}", [], "no extension 'Plian' there; it has Plain, Elsewhere"),
    ("{mine.py:function: {}}", [], "function is no extension"),
    ("{mine.py:Plain: 3}", [], "^adora_extensions.Plain: 3 is not a mapping of its options"),
    ("{mine.py:Plain: {strenth: 3}}", [], "^adora_extensions.Plain: unknown option 'strenth'"),
    ("{mine.py:Plain: {strength: a}}", [], "^adora_extensions.Plain.strength: 'a' is not a number"),
    ("{mine.py:Plain: {}}", ["--beta", "0.1"], "^adora_extensions.Plain.strength: it goes without"),
    ("{mine.py:Elsewhere: {}}", [], "Elsewhere samples .* on other images, which needs use_vllm"),
    (
        "{mine.py:Elsewhere: {}}",
        [*VLLM_ARGV, "--adora_rollouts.old_logps", "engine"],
        "Elsewhere samples .* leave out adora_rollouts.old_logps: engine",
    ),
]


def test_what_does_not_fit_is_named_in_one_line(user_folder):
    """Each wrong entry of `adora_extensions` is refused with the line in `WRONG_EXTENSIONS`."""
    wrong = {}
    for extensions, argv, expected in WRONG_EXTENSIONS:
        with pytest.raises(UserError) as refused:
            build_extensions(config_with_extensions(extensions, *argv))
        if not refused.match(expected) or "\n" in str(refused.value):
            wrong[extensions] = str(refused.value)
    assert wrong == {}
    assert build_extensions(config_with_extensions("{mine.py:Elsewhere: {}}", *VLLM_ARGV))
    with pytest.raises(UserError, match=r"Plain.strength: 9.0 is too much for qwen2_5_vl"):
        model = AutoConfig.from_pretrained(PRETRAINED_FOLDER)
        check_extensions(
            build_extensions(config_with_extensions("{mine.py:Plain: {strength: 9}}")), model
        )


def test_a_rollout_that_saw_other_images_cannot_be_compared_at_any_token():
    """A rollout for which the engine saw other images keeps none of the engine's log-probabilities.

    All of its tokens count as stale, as if earlier weights had sampled them: none is compared with
    the policy.
    """
    request = SamplingRequest(
        prompt_ids=[1],
        images=[],
        group=0,
        max_tokens=3,
        max_length=9,
    )
    result = SamplingResult(tokens=[5, 6], logps=[-0.1, -0.2])
    for saw_trainer_images, logps, stale_tokens in (
        (True, [-0.1, -0.2], 0),
        (False, [None, None], 2),
    ):
        rollout = append_result(
            Rollout(),
            request,
            result,
            step=4,
            max_turn_tokens=None,
            stop_criteria=None,
            saw_trainer_images=saw_trainer_images,
        )
        assert rollout.logps == logps
        assert rollout.stale_tokens(step=4) == stale_tokens
        assert rollout.policy_mask == [True, True], "the policy has sampled them all the same"


class MeasuredRun(NamedTuple):
    """What a step measures of the difference between engine and policy."""

    ratio_BC: torch.Tensor  # policy over engine
    metrics: dict[str, float]


def measure_drift(saw_other_images: list[bool]) -> MeasuredRun:
    """Measure the drift of two rollouts of two tokens.

    The engine's log-probabilities are 0.1 nats off in the first rollout, and 3 in the second.

    `saw_other_images`: for each rollout whether the engine saw other images. Its log-probabilities
    are then unknown.
    """
    logged: dict[str, float] = {}
    context = step_context(
        logged,
        adora_max_drift=5.0,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=3.0,
    )
    policy_logps_BC = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    engine_logps_BC = torch.tensor([[-1.1, -2.1], [-4.0, -5.0]])
    engine_logps_BC[torch.tensor(saw_other_images)] = math.nan
    micro_batch: Batch = {
        "completion_mask": torch.ones(2, 2),
        "sampling_per_token_logps": engine_logps_BC,
        "stale_tokens": torch.tensor([2 if other else 0 for other in saw_other_images]),
    }
    DriftGuard(context).check(
        policy_logps_BC, engine_logps_BC, engine_comparison_mask(micro_batch), step=0
    )
    metrics = ImportanceRatio(context).add_to_batch(micro_batch, policy_logps_BC)
    value_by_name = {metric.name: metric.value for metric in metrics}
    return MeasuredRun(
        ratio_BC=micro_batch["importance_sampling_ratio"], metrics={**logged, **value_by_name}
    )


def test_neither_drift_nor_ratio_looks_at_rollouts_that_saw_other_images():
    """A rollout that saw other images has the importance ratio 1, and no metric counts it.

    Here that is the second one, in which the engine is 3 nats off.
    """
    measured = measure_drift([False, True])
    assert measured.ratio_BC[0].tolist() == pytest.approx([math.exp(0.1)] * 2)
    assert measured.ratio_BC[1].tolist() == [1.0, 1.0]
    assert measured.metrics["adora/drift"] == pytest.approx(0.1, abs=1e-6)
    for figure in ("mean", "min"):
        name = f"sampling/importance_sampling_ratio/{figure}"
        assert measured.metrics[name] == pytest.approx(math.exp(0.1))
    both_compared = measure_drift([False, False])
    # (0.1 + 3) / 2 nats
    assert both_compared.metrics["adora/drift"] == pytest.approx(1.55), "the second one counts"
    # Without a mask an engine that scored nothing counts as infinitely far away, and stops the run.
    assert "adora/drift" not in measure_drift([True, True]).metrics


def test_the_cache_of_images_does_not_keep_what_is_seen_once():
    """An image that is marked with `PASSING` is processed, but not kept in the cache.

    An extension marks so an image that it has changed for one rollout, which no other one sees.
    """
    processor = Qwen2VLImageProcessor(min_pixels=784, max_pixels=3136)
    cache = ImageCache(2**20)
    settings = effective_settings(processor, {})
    image = Image.effect_noise((56, 28), 90).convert("RGB")
    processed_image = cache.get(processor, image, settings)
    bytes_before = cache.cached_bytes
    image_seen_once = image.rotate(180)
    image_seen_once.info[PASSING] = True
    processed_once = cache.get(processor, image_seen_once, settings)
    assert not torch.equal(processed_once.frames_RF, processed_image.frames_RF)
    assert cache.cached_bytes == bytes_before
    assert cache.get(processor, image, settings) is processed_image
