# SPDX-License-Identifier: Apache-2.0
"""Claim: training learns: the last evaluation loss, or the mean of the last ten losses without one, is below a limit.

  python3 end_to_end/test_convergence.py                                           the default config as it stands
  python3 end_to_end/test_convergence.py configs/maxtext_1b.yml dataset_type=... --below=2.6       256 chips
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import math

from end_to_end import runs


def claim(place, below):
  place.train("learns")
  rows, evals = place.rows("learns"), place.rows("learns", "eval.jsonl")
  losses = [row["learning/loss"] for row in rows]
  loss, kind = (evals[-1]["eval/loss"], "evaluation") if evals else (sum(losses[-10:]) / 10, "training")
  found = f"{kind} loss {loss:.4f} after {rows[-1]['step']} steps, from {losses[0]:.3f}"
  runs.check(math.isfinite(loss) and loss < below, f"{found}: not below {below}")
  return f"{found}, below {below}"


if __name__ == "__main__":
  runs.judge(__file__, claim, ["configs/base.yml"], below=4.8)
