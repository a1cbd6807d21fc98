# SPDX-License-Identifier: Apache-2.0
"""Claim: ten steps are five and, resumed, five more: every logged number and the final state, bit for bit.

  python3 end_to_end/test_checkpointing.py [recipe.yml] [key=value ...] [--steps=10]
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

from end_to_end import runs


def claim(place, steps):
  half = steps // 2
  given = [f"learning_rate_schedule_steps={steps}", f"checkpoint_period={half}", f"eval_interval={half}"]
  place.train("whole", *given, f"steps={steps}")
  place.train("halves", *given, f"steps={half}")
  runs.check(place.last_step("halves") == half, f"the first half ended with step {place.last_step('halves')}")
  place.train("halves", *given, f"steps={steps}")
  runs.check(f"restored step {half} " in place.log("halves"), "the second half did not resume from the first")
  done, digest = place.check_equal("halves", "whole")
  return f"{done} steps = {half} + {steps - half}, losses, gradient norms and state equal (sha256 {digest[:12]})"


if __name__ == "__main__":
  runs.judge(__file__, claim, steps=10)
