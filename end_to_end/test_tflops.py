# SPDX-License-Identifier: Apache-2.0
"""Claim: the train step computes at least so many TFLOP/s per device (the step line's count) at its median step.

  python3 end_to_end/test_tflops.py [recipe.yml] [key=value ...] --at_least=TFLOPS [--steps=20]
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import json
import subprocess

from end_to_end import runs


def claim(place, at_least, steps):
  out = os.path.join(place.logs, "bench.jsonl")
  command = [sys.executable, "end_to_end/bench.py", *place.arguments, f"--steps={steps}", f"--out={out}"]
  ended = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=False)
  runs.check(ended.returncode == 0, f"bench.py ended with exit code {ended.returncode}: {ended.stderr.strip()[-600:]}")
  with open(out, encoding="utf-8") as file:
    row = json.load(file)
  speed = row["reference_tflops_per_device"]
  found = (f"{speed:.4g} TFLOP/s per device ({row['device_kind']}, {row['median_step_seconds']:.4f} s per step, "
           f"{row['per_device_tokens_per_second']:,.0f} tokens/s)")
  runs.check(speed >= at_least, f"{found}: less than {at_least}")
  return f"{found}, at least {at_least}"


if __name__ == "__main__":
  runs.judge(__file__, claim, ["configs/base.yml"], at_least=0.01, steps=20)
