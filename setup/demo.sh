#!/usr/bin/env bash
# The main job on the embedded default. Called by `make demo`, which installs first.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-runs/demo}"
py=.venv/bin/python
export TOKENIZERS_PARALLELISM=false

rm -rf "$out/before" "$out/after" "$out/adora" # of an earlier demo

echo "== 1/5 Data: drawn geometry problems, 56 x 56 pixels"
$py -m data_prep synthetic --output "$out/data" --rows 4096 --test-rows 600 --overwrite
echo "== 2/5 Before: 600 held-out problems, greedy"
$py -m eval.geometry3k run --model adora_vl/models/tiny/pretrained --data "$out/data" --output "$out/before" --max-tokens 48
echo "== 3/5 Training: GRPO with ADORA attenuation, rollouts by vLLM"
.venv/bin/accelerate launch --config_file configs/accelerate/cpu.yaml -m adora_vl.train \
  --config configs/train/smoke_cpu.yaml --dataset_name "$out/data" --output_dir "$out/adora"
echo "== 4/5 After: the same problems"
$py -m eval.geometry3k run --model "$out/adora" --data "$out/data" --output "$out/after" --max-tokens 48
echo "== 5/5 What was learned"
$py -m adora_vl.report.gain "$out/before/score.json" "$out/after/score.json"
$py -m adora_vl.report "$out/adora" --output "$out/report.html" # every rollout, for a browser
