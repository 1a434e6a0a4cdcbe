"""What the road refuses before weights are loaded, where no command could ask for it."""

import pytest
from datasets import Dataset

from adora_vl.config import AdoraGRPOConfig
from adora_vl.preflight.check_data import _check_stream
from adora_vl.utils.errors import UserError


def test_a_streamed_data_set_is_not_shuffled_by_another_seed():
    """`data_seed` is refused with a streamed data set, which TRL shuffles by `seed`."""
    rows = Dataset.from_list([{"prompt": "Find x."}] * 4)
    config = AdoraGRPOConfig(
        use_cpu=True, bf16=False, output_dir="nowhere", max_steps=10, data_seed=3
    )
    _check_stream(config, rows)
    with pytest.raises(UserError, match="^data_seed: 3, but a streamed data set"):
        _check_stream(config, rows.to_iterable_dataset())
