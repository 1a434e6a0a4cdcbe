#!/usr/bin/env bash
# The main job on the embedded default. Called by `make demo`, which installs first.
# GRPO=1 also trains plain GRPO now. Otherwise the last table shows a stored score of it beside ADORA's.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-runs/demo}"
py=.venv/bin/python
export TOKENIZERS_PARALLELISM=false

rm -rf "$out/before" "$out/after" "$out/adora" "$out/after-grpo" "$out/grpo" # of an earlier demo

evaluate() { # MODEL OUTPUT: the 600 held-out problems, greedy
  $py -m eval.geometry3k run --model "$1" --data "$out/data" --output "$2" --max-tokens 48
}
train() { # OUTPUT and options
  .venv/bin/accelerate launch --config_file configs/accelerate/cpu.yaml -m adora_vl.train \
    --config configs/train/smoke_cpu.yaml --dataset_name "$out/data" --output_dir "$@"
}

echo "== 1/5 Data: drawn geometry problems, 56 x 56 pixels"
$py -m data_prep synthetic --output "$out/data" --rows 4096 --test-rows 600 --overwrite
echo "== 2/5 Before: 600 held-out problems, greedy"
evaluate adora_vl/models/tiny/pretrained "$out/before"
echo "== 3/5 Training: GRPO with ADORA attenuation, rollouts by vLLM"
train "$out/adora"
echo "== 4/5 After: the same problems"
evaluate "$out/adora" "$out/after"
grpo=benchmarks/stored/demo_grpo.json
if [ "${GRPO:-0}" != 0 ]; then
  echo "== 4/5 Beside it: plain GRPO, trained and evaluated in the same way"
  train "$out/grpo" --adora_mode off
  evaluate "$out/grpo" "$out/after-grpo"
  grpo="$out/after-grpo/score.json"
fi
echo "== 5/5 What was learned"
$py -m adora_vl.report.gain "$out/before/score.json" "$out/after/score.json" --beside "GRPO=$grpo"
$py -m adora_vl.report "$out/adora" --output "$out/report.html" # every rollout, for a browser
