"""Keys of the record of the rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field

from adora_vl.errors import UserError


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

    def check_record(self) -> None:
        """Raises `UserError`."""
        if self.adora_record_every < 0:
            raise UserError(f"adora_record_every: {self.adora_record_every} must be 0 (no record) or more")
        if not self.adora_record_gb > 0:
            raise UserError(f"adora_record_gb: {self.adora_record_gb} must be above 0; adora_record_every: 0 is off")
