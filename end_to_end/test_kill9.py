# SPDX-License-Identifier: Apache-2.0
"""Claim: kill -9 at any moment costs only time: the run ends as the one that was never killed, bit for bit.

  python3 end_to_end/test_kill9.py [recipe.yml] [key=value ...] [--kills=10] [--seed=0]

A third of the kills comes at a random moment of the start (imports, compilation, restoring), a third at one between
steps, a third in a save: when its directory, its manifest, or the removal of an old checkpoint shows. After the last
start every step stands once in metrics.jsonl, every number and the final state equal those of the uninterrupted run,
and nothing is left of the saves that were cut short.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import random
import time

from end_to_end import runs

PERIOD = 4
SAVE_SIGNS = ("*.saving", "*.saving/manifest.json", "*.deleting")


def claim(place, kills, seed):
  draw, steps = random.Random(seed), 20 * kills
  given = [f"steps={steps}", f"checkpoint_period={PERIOD}", "eval_interval=20", "max_num_checkpoints_to_keep=2"]
  place.train("whole", *given)
  begin = time.monotonic()
  place.train("start", *given, "steps=1")  # from here on compiled steps come from the cache
  start_seconds = time.monotonic() - begin

  lost, moments = [], {"start": 0, "step": 0, "save": 0}
  for number in range(kills):
    moment, before = ("step", "save", "start")[number % 3], place.last_step("killed")
    process = place.start("killed", *given)
    if moment == "start":
      deadline = time.monotonic() + draw.uniform(0.0, start_seconds)
      while time.monotonic() < deadline and place.last_step("killed") <= before:
        time.sleep(0.002)
    else:
      target = max(before + 1, round(draw.uniform(number, number + 1) * steps / (kills + 1)))
      while process.poll() is None and place.last_step("killed") < target:
        time.sleep(0.002)
      if moment == "step":
        time.sleep(draw.uniform(0.0, 0.03))
      else:
        place.watch("killed", process, [draw.choice(SAVE_SIGNS)])
        time.sleep(draw.uniform(0.0, 0.02))
    process.kill()
    code = process.wait()
    runs.check(code == -9, f"kill {number + 1} came too late: exit code {code}: {place.log('killed').strip()[-600:]}")
    moments[moment] += 1
    reached = place.last_step("killed")
    whole = [int(name) for name in place.checkpoints("killed") if name.isdecimal()] if reached else []
    lost.append(reached - max(whole, default=0))
  place.train("killed", *given)

  done, digest = place.check_equal("killed", "whole")
  left = [name for name in place.checkpoints("killed") if not name.isdecimal()]
  runs.check(not left, f"left over in the checkpoint directory: {', '.join(left)}")
  counts = ", ".join(f"{count} in a {moment}" for moment, count in moments.items())
  return (f"{kills} kills ({counts}), {done} steps each logged once, numbers and state equal (sha256 {digest[:12]}), "
          f"at most {max(lost)} steps done again with a checkpoint every {PERIOD}, nothing left over")


if __name__ == "__main__":
  runs.judge(__file__, claim, kills=10, seed=0)
