# SPDX-License-Identifier: Apache-2.0
"""Claim: two runs of the same command, dropout on, log the same numbers and end with the same state, bit for bit.

  python3 end_to_end/test_determinism.py [recipe.yml] [key=value ...] [--steps=20]
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

from end_to_end import runs


def claim(place, steps):
  for name in ("first", "second"):
    # Each compiles for itself: the same executable from a cache would prove less.
    place.train(name, f"steps={steps}", "jax_cache_dir=", "eval_interval=10")
  done, digest = place.check_equal("first", "second")
  return f"{done} steps twice: losses, gradient norms, evaluations and state equal (sha256 {digest[:12]})"


if __name__ == "__main__":
  runs.judge(__file__, claim, steps=20)
