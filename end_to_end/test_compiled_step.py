# SPDX-License-Identifier: Apache-2.0
"""Claim: with its train step compiled ahead of time, a run is at its first step many times sooner, and learns the same.

  python3 end_to_end/test_compiled_step.py [--at_least=5.0] [RECIPE key=value ...]

train_compile.py writes the step of a model with unrolled layers, for the devices of this machine. Then train.py starts
with that file and without it, both without jax's compile cache: their losses must be equal bit for bit, and the time
from the start of the process to the first completed step must differ by the factor --at_least. A last start with
another learning rate must load the file too, and learn something else.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import re
import subprocess
import time

from end_to_end import runs

# Every switch of the model, layers unrolled: much work for the compiler in few kernels. XLA's flags: its own default of
# LLVM's effort, and products as plain calls, for those of its library are prepared anew in every process's first step.
MODEL = [
    "configs/base.yml", "base_num_decoder_layers=6", "scan_layers=false", "remat_policy=full", "dtype=bfloat16",
    "normalization=layer", "attention_bias=all", "mlp_bias=true", "logits_bias=true", "mlp_activations=[gelu,linear]",
    "use_qk_norm=true", "query_scaling=per_dim", "attn_logits_soft_cap=50", "final_logits_soft_cap=30",
    "dropout_rate=0.1", "input_dropout_rate=0.1", "gradient_accumulation_steps=2", "num_vocab_tiling=2",
    "z_loss_multiplier=1e-4", "update_rms_cap=1.0", "record_internal_nn_metrics=true", "per_device_batch_size=2",
    "max_target_length=128", "dataset_type=synthetic", "tokenizer_type=byte", "steps=3", "eval_interval=-1",
    "enable_checkpointing=false", "enable_tensorboard=false",
    "xla_flags=--xla_backend_optimization_level=3 --xla_cpu_experimental_ynn_fusion_type=",
]  # fmt: skip


def seconds_to_first_step(place, name, *more):
  """Trains to the end; seconds from the start of the process to the first completed step, and what it has said."""
  begin, said, seconds = time.monotonic(), "", 0.0
  with subprocess.Popen(
      [sys.executable, "MaxText/train.py", *place.arguments, "jax_cache_dir=", *more, f"run_name={name}"],
      cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
    for line in process.stdout:
      said += line
      if not seconds and line.startswith("completed step: "):
        seconds = time.monotonic() - begin
  runs.check(process.returncode == 0 and seconds, f"run {name} ended with {process.returncode}: {said[-600:]}")
  return seconds, said


def losses(place, name):
  return [row["learning/loss"] for row in place.rows(name)]


def claim(place, at_least):
  file = os.path.join(place.logs, "train_step")
  compiling = subprocess.run(
      [sys.executable, "train_compile.py", *place.arguments, f"compiled_trainstep_file={file}"],
      cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
  runs.check(compiling.returncode == 0, f"train_compile.py: {compiling.stdout[-600:]}")

  loaded, said = seconds_to_first_step(place, "loaded", f"compiled_trainstep_file={file}")
  loading = re.search(r"loaded the compiled train step from .* in ([\d.]+) s", said)
  runs.check(loading, f"the file was not loaded: {said[-600:]}")
  compiled, said = seconds_to_first_step(place, "compiled")
  share = re.search(r" compile ([\d.]+) s", said)
  runs.check(losses(place, "loaded") == losses(place, "compiled"),
             f"losses {losses(place, 'loaded')}, not {losses(place, 'compiled')}")

  seconds_to_first_step(place, "changed", f"compiled_trainstep_file={file}", "learning_rate=1e-3")
  runs.check(losses(place, "changed")[0] == losses(place, "loaded")[0]
             and losses(place, "changed")[-1] != losses(place, "loaded")[-1], "another learning rate changes nothing")

  figures = (f"first step after {loaded:.2f} s with the file of {os.path.getsize(file) / 2**20:.1f} MiB "
             f"({loading[1]} s to load), after {compiled:.2f} s without ({share[1]} s waiting for the compiler): "
             f"{compiled / loaded:.1f} times sooner")
  runs.check(compiled >= at_least * loaded, f"{figures}, not {at_least:g}")
  return f"{figures}; {len(losses(place, 'loaded'))} equal losses"


if __name__ == "__main__":
  runs.judge(__file__, claim, recipe=MODEL, at_least=5.0)
