#!/usr/bin/env bash
# The main job on the embedded default: GRPO and ADORA from one start. Called by `make demo`, which installs first.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-runs/demo}"
py=.venv/bin/python
export TOKENIZERS_PARALLELISM=false
# With one thread numbers are added in the same order each time, also on a busy machine: the demo can be repeated to the
# bit.
export OMP_NUM_THREADS=1

rm -rf "$out/before" "$out/after-grpo" "$out/grpo" "$out/after-adora" "$out/adora" # of an earlier demo

evaluate() { # MODEL OUTPUT: the 400 held-out problems, greedy
  # Transformers starts sooner than vLLM, which a model of this size does not need; the answers are the same.
  $py -m eval.problems run --model "$1" --data "$out/data" --output "$2" --max-tokens 60 --engine transformers
}
train() { # OUTPUT and options
  .venv/bin/accelerate launch --config_file configs/accelerate/cpu.yaml -m adora_vl.train \
    --config configs/train/demo_cpu.yaml --dataset_name "$out/data" --output_dir "$@"
}

echo "== 1/5 Data: drawn perimeters, 56 x 56 pixels. They were built to show the mechanism: guesses pay at first, workings later"
$py -m data_prep synthetic --output "$out/data" --families perimeter --rows 2000 --test-rows 400 --overwrite
echo "== 2/5 Before: 400 held-out problems, greedy"
evaluate adora_vl/builtin/pretrained_perimeter "$out/before"
echo "== 3/5 Training: plain GRPO, rollouts by vLLM"
train "$out/grpo" --adora_method grpo
evaluate "$out/grpo" "$out/after-grpo"
echo "== 4/5 Training: GRPO with ADORA attenuation, from the same start on the same problems"
train "$out/adora"
evaluate "$out/adora" "$out/after-adora"
echo "== 5/5 What was learned with GRPO and with ADORA, and whether the two differ"
$py -m eval.compare "$out/before" "$out/after-grpo" "$out/after-adora" --by family --by kind
$py -m eval.compare "$out/after-grpo" "$out/after-adora"
$py -m adora_vl.report "$out/grpo" "$out/adora" --output "$out/report.html" # both curves and every rollout
