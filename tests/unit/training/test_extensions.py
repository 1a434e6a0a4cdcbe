"""Extensions from a user's file: which are refused, and that an extension may change an image.

An extension is a class whose methods are called at certain points of a training step. If it changes
an image for the engine alone, engine and trainer cannot be compared there.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.packing.image_store import PASSING, ImageCache, effective_settings
from adora_vl.rollout.rollouts import Rollout, SamplingRequest, SamplingResult, StepKey
from adora_vl.rollout.turns import append_result
from adora_vl.training.extensions import (
    build_extensions,
    check_extensions,
    extension_costs,
    extension_hashes,
)
from adora_vl.training.generation import Generation
from adora_vl.types import Batch
from adora_vl.utils.errors import UserError
from tests.support.commands import parse
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
        merge_key=0,
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
