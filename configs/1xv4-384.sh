#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# 52B on 1 slice of v4-384: bash configs/1xv4-384.sh run_name=NAME [key=value ...]
# PROGRAM=train_compile.py bash configs/1xv4-384.sh compile_topology=v4-384 compile_topology_num_slices=1 compiles it.
configs=$(dirname "$(readlink -f "$0")")
exec python3 "$configs/../${PROGRAM:-MaxText/train.py}" "$configs/maxtext_52b.yml" dcn_data_parallelism=1 \
  per_device_batch_size=10 gradient_accumulation_steps=1 "$@"
