#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# 22B on 4 slices of v4-128: bash configs/4xv4-128.sh run_name=NAME [key=value ...]
# PROGRAM=train_compile.py bash configs/4xv4-128.sh compile_topology=v4-128 compile_topology_num_slices=4 compiles it.
configs=$(dirname "$(readlink -f "$0")")
exec python3 "$configs/../${PROGRAM:-MaxText/train.py}" "$configs/maxtext_22b.yml" dcn_data_parallelism=4 "$@"
