# SPDX-License-Identifier: Apache-2.0
"""Claim: SIGTERM or SIGINT saves the current step and ends with code 75; the same command goes on as if nothing was.

  python3 end_to_end/test_preemption.py [recipe.yml] [key=value ...] [--signals=6] [--seed=0] [--seconds=30]

The signals come at random moments from the first line of output on: while compiling and restoring, in steps, saves and
evaluations. Each start must end within --seconds and leave a checkpoint of the last step it logged.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import random
import signal
import time

from end_to_end import runs


def claim(place, signals, seed, seconds):
  draw, steps = random.Random(seed), 20 * signals
  given = [f"steps={steps}", "checkpoint_period=7", "eval_interval=10"]
  place.train("whole", *given)

  waits, early = [], 0
  for number in range(signals):
    said = len(place.log("stopped")) if number else 0
    process = place.start("stopped", *given)
    while process.poll() is None and "config: " not in place.log("stopped")[said:]:
      time.sleep(0.002)
    if number % 3 == 2:
      time.sleep(draw.uniform(0.0, 2.0))
    else:
      target = max(place.last_step("stopped") + 1, round(draw.uniform(number, number + 1) * steps / (signals + 1)))
      while process.poll() is None and place.last_step("stopped") < target:
        time.sleep(0.002)
      time.sleep(draw.uniform(0.0, 0.1))
    begin = time.monotonic()
    process.send_signal(draw.choice((signal.SIGTERM, signal.SIGINT)))
    place.expect(process, "stopped", 75)
    waits.append(time.monotonic() - begin)
    reached = place.last_step("stopped")
    saved = [int(name) for name in place.checkpoints("stopped") if name.isdecimal()] if reached else []
    runs.check(reached == max(saved, default=0), f"signal {number + 1}: logged step {reached}, checkpoints are {saved}")
    early += "before the first step" in place.log("stopped")[said:]
  runs.check(max(waits) <= seconds, f"a start ended only {max(waits):.1f} s after the signal")
  place.train("stopped", *given)

  done, digest = place.check_equal("stopped", "whole")
  return (f"{signals} signals ({early} before the first step of their start), exit code 75 within {max(waits):.2f} s, "
          f"no step lost, {done} steps with the numbers and state of the uninterrupted run (sha256 {digest[:12]})")


if __name__ == "__main__":
  runs.judge(__file__, claim, signals=6, seed=0, seconds=30.0)
