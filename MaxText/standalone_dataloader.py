# SPDX-License-Identifier: Apache-2.0
"""Runs the input of a training run without the training: how fast it is, where it stalls, what is in its rows.

  python3 MaxText/standalone_dataloader.py configs/base.yml [recipe.yml ...] [key=value ...]

Makes `steps` batches and throws them away. With standalone_process_count it makes the rows of one host of so many, with
compile_topology those of a machine that is not here. Without run_name nothing is left behind.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  CONFIG = interpreter.start(need_run_name=False)

import contextlib
import tempfile
import time

import numpy as np

from MaxText import data, errors, pyconfig, sharding

STALL = 5.0  # times the median: a batch that takes longer stalls a training that needs every one in time
SHOWN_CHARS = 200  # of each segment


def local_rows(cfg):
  """(low, high): the rows of a global batch that the process of standalone_process_index makes. Raises ConfigError."""
  index, count, rows = cfg.standalone_process_index, cfg.standalone_process_count, cfg.global_batch_size
  if index >= count or rows % count:
    raise errors.ConfigError(f"standalone_process_index={index} must be less than standalone_process_count={count},"
                             f" which must divide the {rows} rows of a batch. Change them, or per_device_batch_size.")
  return index * rows // count, (index + 1) * rows // count


def describe(batch, words):
  """Lines that show the rows of a batch dict: their segments, where these stand, their weight and text."""
  for number, (ids, targets, positions, segments, weights) in enumerate(zip(*(batch[key] for key in (
      "inputs", "targets", "positions", "segmentations", "loss_weights")), strict=True)):
    yield f"  row {number}: {int(weights.sum())} of {len(ids)} targets count"
    for segment in range(1, int(segments.max()) + 1):
      at = np.flatnonzero(segments == segment)
      tokens = [*ids[at].tolist(), int(targets[at[-1]])]
      text = repr(words.decode(tokens)) if words else str(tokens)
      more = f" ... ({len(text)} characters)" if len(text) > SHOWN_CHARS else ""
      yield (f"    segment {segment}, columns {at[0]} to {at[-1]}, positions {positions[at[0]]} to {positions[at[-1]]},"
             f" weight {weights[at].sum():g}: {text[:SHOWN_CHARS]}{more}")


def run(cfg):
  """Makes the batches of a resolved config and prints what is to be said of them. Raises RunError."""
  begin = time.perf_counter()
  low, high = local_rows(cfg)
  opened = data.open(cfg)
  print(opened.summary)
  print(f"host {cfg.standalone_process_index} of {cfg.standalone_process_count}: rows {low} to {high - 1} of the"
        f" {cfg.global_batch_size} of a batch; opened in {time.perf_counter() - begin:.1f} s", flush=True)
  took, tokens = [], 0
  if isinstance(opened.train, data.SEQUENTIAL):  # cannot be entered elsewhere
    for row in range(0, cfg.standalone_first_step * cfg.global_batch_size, cfg.global_batch_size):
      opened.train.rows(row + low, row + high)
  with contextlib.closing(opened), data.batches(
      opened.train, cfg.standalone_first_step, cfg.global_batch_size, None, prefetch=cfg.prefetch_batches,
      count=cfg.steps, local_rows=(low, high)) as batches:
    end = time.perf_counter()
    for step, batch in enumerate(batches, cfg.standalone_first_step):
      took.append(time.perf_counter() - end)
      tokens += int(batch["loss_weights"].sum())
      if step - cfg.standalone_first_step < cfg.standalone_show_batches:
        print(f"batch {step}:")
        print("\n".join(describe(batch, opened.tokenizer)), flush=True)
      time.sleep(cfg.standalone_step_seconds)
      end = time.perf_counter()
  if not took:
    print("no batch: the data are over")
    return
  first, rest = took[0], np.array(took[1:] or took)
  seconds, slots = float(rest.sum()), len(rest) * (high - low) * cfg.max_target_length
  speed = tokens / len(took) * len(rest) / max(seconds, 1e-9)
  print(f"{len(took)} batches, {tokens:,} tokens, fill {tokens / (slots * len(took) / len(rest)):.4f}; the first after"
        f" {first:.2f} s")
  if cfg.standalone_step_seconds:
    busy = seconds + len(rest) * cfg.standalone_step_seconds
    print(f"waited {seconds:.3f} s of {busy:.3f} s ({seconds / busy:.2%}) for batches between steps of"
          f" {cfg.standalone_step_seconds:g} s")
    return
  median = float(np.median(rest))
  print(f"{speed:,.0f} tokens/s; a batch takes {1e3 * median:.2f} ms (median), {1e3 * np.quantile(rest, 0.99):.2f} ms"
        f" (99th percentile), {1e3 * rest.max():.2f} ms (longest); {int((rest > STALL * median).sum())} of {len(rest)}"
        f" took over {STALL:g} medians")


def main(cfg):
  """Runs the input of `cfg` (loaded, not yet resolved); a run without a name goes to a folder that is removed."""
  with tempfile.TemporaryDirectory(prefix="maxtext-") as directory:
    if not cfg.run_name:
      cfg = cfg.replace(base_output_directory=directory, run_name="standalone")
    cfg = pyconfig.resolve(cfg, [] if cfg.compile_topology else sharding.find_devices())
    run(cfg)


if __name__ == "__main__":
  with errors.as_exit_codes():
    main(CONFIG)
