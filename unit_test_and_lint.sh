#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up what is missing, then ruff and the tests.
#
#   bash unit_test_and_lint.sh [pytest arguments]     the fast tests: minutes on two cores
#   SLOW=1 bash unit_test_and_lint.sh                 then the slow ones too: TensorFlow, torch, compiling for TPUs
#
# Exit code: pytest's, or 1 if only ruff complains.

set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
DEV=1 bash setup.sh || exit
VENV=${VENV:-${VIRTUAL_ENV:-.venv}}
python=$VENV/bin/python

"$python" -m ruff check .
lint=$?

# Compiled steps are kept between runs: most of the time is XLA's. Each worker compiles with what threads it finds, so
# more workers than cores only wait for each other.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.pytest_cache/jax}
workers=$(("$(getconf _NPROCESSORS_ONLN)" < 4 ? $(getconf _NPROCESSORS_ONLN) : 4))
"$python" -m pytest -n "$workers" "$@"
tests=$?
if [ -n "${SLOW:-}" ] && [ "$tests" = 0 ]; then
  "$python" -m pytest -m slow "$@"
  tests=$?
  [ "$tests" != 5 ] || tests=0 # none of those asked for is slow
fi

[ "$lint" = 0 ] || echo "ruff complains, see above" >&2
[ "$tests" = 0 ] || exit "$tests"
exit "$lint"
