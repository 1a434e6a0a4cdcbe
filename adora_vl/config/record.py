"""Keys for the record of the rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RecordOptions:
    """Inherited by `AdoraGRPOConfig`."""

    adora_record_every: int = field(
        default=1,
        metadata={"help": "Record the rollouts of every n-th generation in output_dir/rollouts; 0 records none."},
    )
    adora_record_gb: float = field(
        default=2.0,
        metadata={"help": "Bound on the record in GB (10^9 bytes); the oldest steps are deleted beyond it."},
    )
