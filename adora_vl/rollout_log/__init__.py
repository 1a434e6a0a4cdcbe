"""What a run leaves behind while it runs: the progress line, `metrics.jsonl`, and every rollout in Parquet."""
