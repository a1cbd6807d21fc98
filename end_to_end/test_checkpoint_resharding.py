# SPDX-License-Identifier: Apache-2.0
"""Claim: a checkpoint resumes on any other mesh, and the losses go on within 1e-5 of those of the mesh it came from.

  python3 end_to_end/test_checkpoint_resharding.py [recipe.yml] [key=value ...]
  MESHES="ici_fsdp_parallelism=-1; ici_fsdp_parallelism=4 ici_tensor_parallelism=-1" python3 ...    on real devices

Every mesh goes on from the checkpoint of the one before it for ten steps; the run it is compared with never leaves the
first. Without MESHES they are of 1, 8, 4, 8 and 1 fake CPU devices. In bfloat16 give --tolerance=0.001.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

from end_to_end import runs

ROWS = 8
FAKE = [  # devices, mesh
    (1, ""),
    (8, "ici_fsdp_parallelism=8"),
    (4, "ici_fsdp_parallelism=2 ici_tensor_parallelism=2"),
    (8, "ici_data_parallelism=2 ici_fsdp_parallelism=2 ici_sequence_parallelism=2"),
    (1, ""),
]
STEPS = 10


def claim(place, tolerance):
  if os.environ.get("MESHES"):
    meshes = [(mesh.strip(), {}) for mesh in os.environ["MESHES"].split(";")]
  else:
    meshes = [(f"{mesh} per_device_batch_size={ROWS / devices}",
               {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}) for devices, mesh in FAKE]
  # A small constant rate: at a large one rounding grows to chaos within tens of steps on any one mesh, too.
  common = ["lr_schedule_type=constant", "warmup_steps=0", "learning_rate=1e-4", "eval_interval=-1"]
  steps = STEPS * len(meshes)
  mesh, environment = meshes[0]
  place.train("stays", *common, *mesh.split(), f"steps={steps}", f"learning_rate_schedule_steps={steps}", **environment)
  for leg, (mesh, environment) in enumerate(meshes, 1):
    place.train("moves", *common, *mesh.split(), f"steps={leg * STEPS}", f"learning_rate_schedule_steps={steps}",
                **environment)
    if leg > 1:
      runs.check(f"restored step {(leg - 1) * STEPS} " in place.log("moves"), f"no resume on mesh {mesh}")
  losses = {name: [row["learning/loss"] for row in place.rows(name)] for name in ("stays", "moves")}
  runs.check(len(losses["moves"]) == len(losses["stays"]) == steps, f"not {steps} steps: {losses}")
  worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses["moves"], losses["stays"], strict=True))
  runs.check(worst <= tolerance, f"losses differ by {worst:.1e}, allowed {tolerance:.0e}")
  return f"{len(meshes)} meshes, {STEPS} steps each: losses within {worst:.1e} of the first mesh's"


if __name__ == "__main__":
  runs.judge(__file__, claim, tolerance=1e-5)
