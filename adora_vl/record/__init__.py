"""What a run writes: rollouts, figures, manifest, model card.

To add a column to the record of rollouts, add its type to `_TYPES` in `rollouts`, its value to
`_columns` in `recorder`, and a row to `docs/report.md`.
"""
