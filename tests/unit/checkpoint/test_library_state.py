"""What libraries hold in memory and do not save comes back, or a line says what is missing."""

from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn

from adora_vl.checkpoint.run_files import list_run_entries
from adora_vl.checkpoint.store import mark_checkpoint_complete
from adora_vl.checkpoint.trl_state import (
    REFERENCE_FOLDER,
    LossSums,
    SyncedReferenceModel,
)
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.utils.errors import RunError, UserError
from tests.support.adapters import LORA_OPTIONS_BY_KIND, float64_model, policy_with_adapter


@pytest.fixture(scope="module")
def base_model() -> Any:
    """Return a small language model in float64."""
    return float64_model()


def load_checkpoint_into(model: Any, folder: Any) -> None:
    """Load a checkpoint into a model, as a trainer that resumes does."""
    trainer: Any = object.__new__(AdoraGRPOTrainer)
    trainer.__dict__.update(model=model, _dist=SimpleNamespace())
    trainer._load_from_checkpoint(str(folder))


@pytest.mark.parametrize(
    "lora_kind",
    [lora_kind for lora_kind in LORA_OPTIONS_BY_KIND if lora_kind != "biases of the base"],
)
def test_every_adapter_is_read_back_the_trained_one_and_the_reference(
    base_model, lora_kind, tmp_path
):
    """A resume reads both adapters of a policy: `default`, which is trained, and `ref`.

    `ref` is the reference policy. Each kind of LoRA is tried. 1 is added to the weights of both
    adapters before they are saved.
    """
    config = LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "up_proj"], **LORA_OPTIONS_BY_KIND[lora_kind]}
    )
    start = policy_with_adapter(base_model, config, second_adapter="ref")
    trained = deepcopy(start)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "default" in name or ".ref" in name:
                parameter += 1
    trained.save_pretrained(tmp_path)
    assert (tmp_path / "ref").is_dir()
    assert {path.name for path in list_run_entries(tmp_path)} >= {"ref"}

    def differing_names() -> list[str]:
        """Return the tensors that differ between the trained policy and the one that resumes."""
        start_tensors = start.state_dict()
        return [
            name
            for name, tensor in trained.state_dict().items()
            if not torch.equal(tensor, start_tensors[name])
        ]

    names_before = differing_names()
    load_checkpoint_into(start, tmp_path)

    assert any("default" in name for name in names_before)
    assert any("ref" in name for name in names_before)
    assert differing_names() == []


def test_an_adapter_that_does_not_fit_ends_in_one_line(base_model, tmp_path):
    """An adapter with a tensor missing, one too many or no config is refused, with the reason."""
    model = policy_with_adapter(
        base_model, LoraConfig(r=4, target_modules=["q_proj"]), second_adapter="ref"
    )
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    first, *_ = sorted(tensors)
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, file)
    with pytest.raises(
        RunError, match=f"^the adapter default .*1 tensors are missing, the first is {first}"
    ):
        load_checkpoint_into(model, tmp_path)
    save_file({**tensors, "base_model.model.other.lora_A.weight": torch.zeros(1)}, file)
    with pytest.raises(RunError, match="1 tensors have no place in the model"):
        load_checkpoint_into(model, tmp_path)
    save_file(tensors, file)
    (tmp_path / "ref" / "adapter_config.json").unlink()
    with pytest.raises(RunError, match=r"^the adapter ref of .*there is no adapter_config.json"):
        load_checkpoint_into(model, tmp_path)


def moving_reference(model: Any, moves: bool = True) -> SyncedReferenceModel:
    """What saves and loads the reference model that `sync_ref_model` moves."""
    return SyncedReferenceModel(model, moves=moves, is_main=True, gather=nullcontext)


def test_a_reference_that_was_moved_comes_back_and_stays_after_its_syncs_end(tmp_path):
    """A reference that `sync_ref_model` moved is restored, also after a run without syncs.

    That run loads the moved reference and saves it as it was. A reference that was never moved is
    not saved.
    """
    moved_model = nn.Linear(3, 2)
    start = nn.Linear(3, 2)
    moving_reference(moved_model).save(tmp_path / "first")
    reference_without_syncs = moving_reference(start, moves=False)
    reference_without_syncs.load(tmp_path / "first")
    reference_without_syncs.save(tmp_path / "second")
    restored_model = nn.Linear(3, 2)
    moving_reference(restored_model).load(tmp_path / "second")
    assert all(
        torch.equal(saved, restored)
        for saved, restored in zip(
            moved_model.parameters(), restored_model.parameters(), strict=True
        )
    )
    moving_reference(nn.Linear(3, 2), moves=False).save(tmp_path / "third")
    assert not (tmp_path / "third").exists(), "one that never moves is the base model"


def test_a_checkpoint_without_the_reference_or_with_another_one_is_refused(tmp_path):
    """A saved reference is refused if its tensors do not fit the model, and so is a missing one.

    The saved one has a weight and no bias.
    """
    moving_reference(nn.Linear(3, 2, bias=False)).save(tmp_path)
    with pytest.raises(RunError, match="bias of the reference model is missing"):
        moving_reference(nn.Linear(3, 2)).load(tmp_path)
    with pytest.raises(RunError, match="this reference model has no weight"):
        moving_reference(nn.ReLU()).load(tmp_path)
    for file in (tmp_path / REFERENCE_FOLDER).iterdir():
        file.unlink()
    with pytest.raises(UserError, match="has no reference model, which sync_ref_model: true"):
        moving_reference(nn.Linear(3, 2)).load(tmp_path)


def test_each_rank_gets_its_own_sum_of_losses_and_another_number_of_ranks_their_mean(
    tmp_path, monkeypatch
):
    """A resumed rank gets its sum of losses since the last log; with other ranks, the mean of all.

    Transformers sets these sums to 0 at each start. The checkpoint is of two ranks: this one, whose
    sum is 0.1, and one whose sum 0.5 comes from the replaced `gather_object`.
    """
    monkeypatch.setattr(
        "adora_vl.checkpoint.trl_state.gather_object", lambda values: [*values, 0.5]
    )

    def trainer(rank: int, ranks: int, **sums: object) -> Any:
        return SimpleNamespace(
            accelerator=SimpleNamespace(process_index=rank, num_processes=ranks), **sums
        )

    assert LossSums(trainer(rank=0, ranks=2)).metadata() == {}, "the training has not begun"
    stopped = trainer(
        rank=0,
        ranks=2,
        _tr_loss=torch.tensor(0.1),
        _total_loss_scalar=2.25,
        _globalstep_last_logged=4,
    )
    mark_checkpoint_complete(tmp_path, LossSums.with_all_ranks(LossSums(stopped).metadata()))
    # the two ranks of the checkpoint had 0.1 and 0.5
    for rank, ranks, expected_sum in (
        (0, 2, 0.1),
        (1, 2, 0.5),
        (0, 1, (0.1 + 0.5) / 2),
    ):
        begun = trainer(
            rank,
            ranks,
            _tr_loss=torch.tensor(0.0),
            _total_loss_scalar=0.0,
            _globalstep_last_logged=0,
        )
        restore = LossSums(begun)
        restore.on_train_begin(None, None, None)
        assert begun._total_loss_scalar == 0, "nothing was read"
        restore.load(tmp_path)
        restore.on_train_begin(None, None, None)
        restore.on_train_begin(None, None, None)  # the sums are written once
        assert float(begun._tr_loss) == pytest.approx(expected_sum)
        assert (begun._total_loss_scalar, begun._globalstep_last_logged) == (2.25, 4)
