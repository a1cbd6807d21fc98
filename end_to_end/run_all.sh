#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Every test of this folder at a size for CPUs, one after the other, all of them even if one fails.
#
#   bash end_to_end/run_all.sh [RESULTS.jsonl]     a line of JSON of each test is added to that file
#
# EVAL_DATA: a folder with the evaluation files that test_evals.py reads; without it that test is left out.
#
# Prints PASS or FAIL and figures of each, then how many. Exit code: 1 if one failed.

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export RESULTS=${1:-}
passed=0 failed=""

run() {
  if python3 "$@"; then passed=$((passed + 1)); else failed="$failed ${1##*/}"; fi
}

run end_to_end/test_checkpointing.py
run end_to_end/test_checkpoint_resharding.py
run end_to_end/test_determinism.py
run end_to_end/test_preemption.py
run end_to_end/test_kill9.py
run end_to_end/test_convergence.py
run end_to_end/test_decode.py --at_least=0.4 # whoever runs this may have company
run end_to_end/test_convert.py
if [ -n "${EVAL_DATA:-}" ]; then run end_to_end/test_evals.py --data="$EVAL_DATA"; fi
run end_to_end/test_tflops.py
run end_to_end/test_compiled_step.py --at_least=4 # as above
run end_to_end/test_data.py --at_least=0.6 # as above; the aim is 0.85
# All recipes take 20 minutes; the one with figures to reach takes 3.
if python3 -c 'import libtpu' 2>/dev/null; then run end_to_end/test_aot.py --only="maxtext 16b"; fi
run end_to_end/test_startup.py --slack=3 # as above

echo "$passed passed, failed:${failed:- none}"
[ -z "$failed" ]
