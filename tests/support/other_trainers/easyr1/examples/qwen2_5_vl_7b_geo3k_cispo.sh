#!/bin/bash

set -x

MODEL_PATH=Qwen/Qwen2.5-VL-7B-Instruct  # or a folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.loss_type=cispo \
    worker.rollout.max_num_batched_tokens=22528 \
    worker.reward.reward_function_kwargs='{"format_weight":0.2}' \
    trainer.experiment_name=qwen2_5_vl_7b_geo_cispo \
    trainer.n_gpus_per_node=8
