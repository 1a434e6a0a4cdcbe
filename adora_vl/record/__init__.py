"""What a run writes: rollouts, metrics, manifest, model card.

To add a column to the record of rollouts, add its type to `_TYPE_BY_COLUMN` in `rollouts`, its
value to `_graded_columns` in `recorder`, and a row to `docs/report.md`.
"""
