# SPDX-License-Identifier: Apache-2.0
"""Claim: a fresh copy of the code is at its first step within seconds, and a wrong command is answered at once.

  python3 end_to_end/test_startup.py [--times=3] [--slack=1.0]

What a user types is run in a copy of the committed files with an empty home directory (no compile cache, no tokenizer),
then again with what the first run left there; the medians of --times must stay within LIMITS times --slack. The limits
are for two quiet cores; machines that others use too need slack.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import re
import shutil
import statistics
import subprocess
import time

from end_to_end import runs

LIMITS = {  # seconds
    "first step, everything new": 10.0,
    "first step, caches filled": 5.0,
    "imports of train.py": 1.5,
    "mistyped key": 0.5,
    "mesh that does not fit": 3.0,
}


def start(copy, home, *arguments):
  """train.py of a copy of the code, as a user starts it; its output can be read."""
  environment = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "JAX_", "XLA_"))}
  return subprocess.Popen(
      [sys.executable, *arguments], cwd=copy, env=environment | {"HOME": home}, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def seconds_to_first_step(copy, home, run_name):
  """From the start of the process to the line of the first completed step."""
  begin, said = time.monotonic(), []
  with start(copy, home, "MaxText/train.py", "configs/base.yml", f"run_name={run_name}") as process:
    for line in process.stdout:
      said.append(line)
      if line.startswith("completed step: 1/"):
        seconds = time.monotonic() - begin
        process.kill()
        return seconds
  raise runs.Failed(f"no first step: {''.join(said)[-600:]}")


def seconds_to_refusal(copy, home, argument, pattern):
  """Until a wrong argument has been answered: exit code 2 and one line that matches the pattern."""
  begin = time.monotonic()
  with start(copy, home, "MaxText/train.py", "configs/base.yml", "run_name=wrong", argument) as process:
    said = process.communicate()[0]
  seconds = time.monotonic() - begin
  complaints = [line for line in said.splitlines() if re.search("Error|Traceback", line)]
  runs.check(process.returncode == 2 and len(complaints) == 1 and re.search(pattern, complaints[0]),
             f"{argument} gave exit code {process.returncode}: {said[-600:]}")
  return seconds


def seconds_to_import(copy, home):
  begin = time.monotonic()
  with start(copy, home, "-c", "import MaxText.train") as process:
    said = process.communicate()[0]
  runs.check(process.returncode == 0, said[-600:])
  return time.monotonic() - begin


def claim(place, times, slack):
  measured = {name: [] for name in LIMITS}
  for number in range(times):
    copy, home = (os.path.join(place.logs, f"{name}{number}") for name in ("copy", "home"))
    os.makedirs(home)
    for file in subprocess.check_output(["git", "ls-files"], cwd=runs.ROOT, text=True).splitlines():
      os.makedirs(os.path.dirname(os.path.join(copy, file)), exist_ok=True)
      shutil.copy2(os.path.join(runs.ROOT, file), os.path.join(copy, file), follow_symlinks=False)
    seconds = [
        seconds_to_first_step(copy, home, "cold"),
        seconds_to_first_step(copy, home, "warm"),
        seconds_to_import(copy, home),
        seconds_to_refusal(copy, home, "stesp=3", "steps"),
        seconds_to_refusal(copy, home, "ici_fsdp_parallelism=3", "ici_fsdp_parallelism=3"),
    ]
    for name, value in zip(LIMITS, seconds, strict=True):
      measured[name].append(value)
  medians = {name: statistics.median(values) for name, values in measured.items()}
  figures = ", ".join(f"{name} {value:.2f} s (limit {LIMITS[name]:g})" for name, value in medians.items())
  late = [name for name, value in medians.items() if value > slack * LIMITS[name]]
  runs.check(not late, f"{figures}: too late with slack {slack:g}: {', '.join(late)}")
  return f"{figures}; medians of {times}, slack {slack:g}"


if __name__ == "__main__":
  runs.judge(__file__, claim, times=3, slack=1.0)
