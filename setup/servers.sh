#!/usr/bin/env bash
# Trains on some GPUs of a machine while vLLM servers sample on the others, one server a GPU.
#
#   SERVER_GPUS=4,5,6,7 TRAINER_GPUS=0,1,2,3 setup/servers.sh MODEL --config configs/train/X.yaml --output_dir runs/x
#   SERVER_GPUS=none TRAINER_GPUS=none ACCELERATE_CONFIG=configs/accelerate/cpu.yaml \
#     SERVER_OPTIONS=--no-enable-chunked-prefill setup/servers.sh ...   # on a CPU
#
# What comes after MODEL goes to `adora_vl.train`. SERVER_OPTIONS are further options of each server, such as
# '--dtype bfloat16 --mm-processor-kwargs {"max_pixels":1003520}', which have to be those of the training. The servers
# listen on 127.0.0.1, from SERVER_PORT (8100) on, and say where their logs are. Weights travel by
# /dev/shm, or by WEIGHTS_FOLDER: in a container /dev/shm often holds 64 MB, and a model needs its own size. No other user
# can read them there. A server that does not answer in SERVER_WAIT (3600) seconds ends the script.
# As a Slurm job on one node: sbatch --nodes 1 --gpus-per-node 8 --signal=B:TERM@900 setup/servers.sh MODEL ...
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

model="${1:?usage: SERVER_GPUS=... TRAINER_GPUS=... setup/servers.sh MODEL [options of adora_vl.train]}"
shift
: "${SERVER_GPUS:?the GPUs of the servers, such as 4,5,6,7}" "${TRAINER_GPUS:?the GPUs of the trainer, such as 0,1,2,3}"
logs="$(mktemp -d /tmp/adora-servers.XXXXXX)"
weights="$(mktemp -d "${WEIGHTS_FOLDER:-/dev/shm}/adora-weights.XXXXXX")"
python="${PYTHON:-.venv/bin/python}"
IFS=, read -ra gpus <<<"$SERVER_GPUS"
servers=() addresses=()

finish() {
  if [ "${#servers[@]}" -gt 0 ]; then kill "${servers[@]}" 2>/dev/null || true; fi
  wait || true
  rm -rf "$weights"
}
trap finish EXIT

first="${SERVER_PORT:-8100}"
for number in "${!gpus[@]}"; do
  port=$((first + number))
  if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    echo "port $port is in use, perhaps by servers of another run; set SERVER_PORT" >&2
    exit 2
  fi
  visible=()
  [ "${gpus[$number]}" = none ] || visible=("CUDA_VISIBLE_DEVICES=${gpus[$number]}")
  # shellcheck disable=SC2086 # several words
  env "${visible[@]}" VLLM_SERVER_DEV_MODE=1 VLLM_HOST_IP=127.0.0.1 "$python" -m vllm.entrypoints.openai.api_server \
    --model "$model" --host 127.0.0.1 --port "$port" --generation-config vllm --enable-scale-out \
    --logprobs-mode raw_logprobs ${SERVER_OPTIONS:-} >"$logs/$port.log" 2>&1 &
  servers+=("$!")
  addresses+=("http://127.0.0.1:$port")
done
echo "servers: ${addresses[*]}; their logs are in $logs"

# A proxy of the environment knows nothing of 127.0.0.1.
health='import sys, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(sys.argv[1] + "/health", timeout=5)'
said="$SECONDS"
for number in "${!addresses[@]}"; do
  log="$logs/$((first + number)).log"
  until "$python" -c "$health" "${addresses[$number]}" 2>/dev/null; do
    kill -0 "${servers[$number]}" 2>/dev/null || { tail -n 20 "$log" >&2; exit 1; }
    if ((SECONDS >= ${SERVER_WAIT:-3600})); then
      echo "${addresses[$number]} does not answer after $SECONDS s; its log is $log, and SERVER_WAIT=SECONDS waits longer" >&2
      exit 1
    elif ((SECONDS - said >= 60)); then
      said="$SECONDS"
      echo "waiting for ${addresses[$number]} since $SECONDS s; its log is $log" >&2
    fi
    sleep 2
  done
done

visible=()
[ "$TRAINER_GPUS" = none ] || visible=("CUDA_VISIBLE_DEVICES=$TRAINER_GPUS")
processes="$(awk -F, '{print NF}' <<<"$TRAINER_GPUS")"
# The trainer is a child that gets the signals of this script, so that it saves before the servers end.
env "${visible[@]}" "${LAUNCH:-.venv/bin/accelerate}" launch \
  --config_file "${ACCELERATE_CONFIG:-configs/accelerate/zero3.yaml}" --num_processes "$processes" \
  -m adora_vl.train --model_name_or_path "$model" --use_vllm true --vllm_mode server --adora_weight_transfer "$weights" \
  --vllm_server_base_url "$(IFS=,; echo "${addresses[*]}")" "$@" &
trainer="$!"
trap 'kill -TERM "$trainer" 2>/dev/null' TERM INT HUP
code=0
wait "$trainer" || code=$?
while kill -0 "$trainer" 2>/dev/null; do # a signal ends `wait` before the trainer has saved
  wait "$trainer" && code=0 || code=$?
done
exit "$code"
