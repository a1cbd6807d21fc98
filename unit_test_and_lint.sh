#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up what is missing, then ruff and the tests.
#
#   bash unit_test_and_lint.sh [pytest arguments]     the fast tests: minutes on two cores
#   SLOW=1 bash unit_test_and_lint.sh                 the slow ones too: TensorFlow, torch, compiling for TPUs
#
# Exit code: pytest's, or 1 if only ruff complains.

set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
DEV=1 bash setup.sh || exit
VENV=${VENV:-${VIRTUAL_ENV:-.venv}}
python=$VENV/bin/python

"$python" -m ruff check .
lint=$?
[ "$lint" = 0 ] || echo "ruff complains, see above; the tests follow" >&2

# Compiled steps are kept between runs: most of the time is XLA's. More workers than cores only wait for each other.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.pytest_cache/jax}
cores=$(getconf _NPROCESSORS_ONLN)
"$python" -m pytest -n $((cores < 8 ? cores : 8)) ${SLOW:+-m ""} "$@" && exit "$lint"
