#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# 16B on 2 slices of v5e-256: bash configs/16b.sh run_name=NAME [key=value ...]
# PROGRAM=train_compile.py bash configs/16b.sh compile_topology=v5e-256 compile_topology_num_slices=2 compiles it.
configs=$(dirname "$(readlink -f "$0")")
exec python3 "$configs/../${PROGRAM:-MaxText/train.py}" "$configs/maxtext_16b.yml" dcn_data_parallelism=2 "$@"
