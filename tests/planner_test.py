# SPDX-License-Identifier: Apache-2.0
"""planner.py: what it tries for a target, what it keeps, what it prints."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from MaxText import planner, pyconfig
from tests.train_compile_test import GIB, REPO, SMALL, needs_tpu_compiler, run

TARGET = ["compile_topology=v5e-16", *SMALL]


def resolved(*arguments):
  return pyconfig.resolve(pyconfig.load(["configs/base.yml", *arguments], need_run_name=False), [])


# --- What is tried ----------------------------------------------------------------------------------------------------


def test_only_what_plan_names_is_varied_and_the_given_choice_is_among_them():
  cfg = resolved(*TARGET, "plan=[batch]", "per_device_batch_size=7", "remat_policy=minimal")
  given, every = planner.choices(cfg)
  assert given == planner.Choice(7.0, "minimal", 1, 16, 1) and given in every
  assert {choice[1:] for choice in every} == {given[1:]}
  assert {1, 8, 128} < {choice.batch for choice in every}


def test_meshes_fill_the_slice_and_go_together_with_the_model():
  cfg = resolved(*TARGET, "plan=[mesh]", "compile_topology_num_slices=2", "base_num_kv_heads=2")
  _, every = planner.choices(cfg)
  assert all(choice.data * choice.fsdp * choice.tensor == 16 for choice in every)
  assert {choice.data for choice in every} == {1, 2, 4, 8}
  assert all(planner.resolve(cfg, choice).num_slices == 2 for choice in every)
  assert {choice.tensor for choice in every} == {1, 2}  # more shards than heads go together with nothing


def test_the_guess_prefers_less_recomputation_and_fewer_exchanges():
  cfg = resolved(*TARGET, "plan=[batch,remat,mesh]", "base_num_query_heads=16", "base_num_kv_heads=16")

  def guess(*choice):
    return planner.guess(planner.resolve(cfg, planner.Choice(*choice)))

  assert guess(4, "minimal", 1, 16, 1) > guess(4, "full", 1, 16, 1)
  assert guess(4, "full", 1, 16, 1) > guess(4, "full", 1, 2, 8)
  assert guess(16, "full", 1, 16, 1) >= guess(1, "full", 1, 16, 1)


def test_the_least_memory_is_the_state_and_what_the_policy_keeps():
  def least(*keys):
    return planner.least_bytes(resolved(*TARGET, "per_device_batch_size=8", "dtype=bfloat16", *keys))

  layers, tokens, width = 3, 8 * 256, 256
  assert least("remat_policy=save_out_proj") - least("remat_policy=full") == pytest.approx(
      2 * layers * tokens * (2 * 128 + 2 * 128 + width))  # q of two heads, k and v of one, the output projection
  state = 3 * 4 * (3 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512) + 512 * 256)
  assert least("remat_policy=full") == pytest.approx(state / 16 + 2 * layers * tokens * width, rel=0.01)


# --- What is kept -----------------------------------------------------------------------------------------------------


def test_a_report_is_kept_under_all_that_shapes_it_and_nothing_else(tmp_path):
  choice = planner.Choice(1.0, "full", 1, 16, 1)

  def path(*keys, mode="full"):
    return planner.Plan(resolved(*TARGET, f"plan_directory={tmp_path}", *keys), []).path(choice, mode)

  assert path() == path("run_name=x", "steps=7", "plan_minutes=3", "base_output_directory=elsewhere")
  others = [path(mode="fast"), path("base_mlp_dim=1024"), path("compile_topology=v5e-8"), path("dtype=float32"),
            path("compile_topology_num_slices=2"), path("attention=dot")]  # fmt: skip
  assert len({path(), *others}) == 7


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.timeout(900)
def test_a_plan_ranks_what_it_compiled_and_goes_on_where_it_stopped(tmp_path):
  arguments = ["compile_topology=v5e-4", *SMALL, "base_num_kv_heads=2", "plan=[batch,mesh]", "remat_policy=full",
               f"plan_directory={tmp_path}", "plan_processes=2"]  # fmt: skip
  first = run(*arguments, "plan_minutes=0.7")
  kept = len(os.listdir(tmp_path))
  assert first.returncode == 0 and kept >= 2, first.stderr

  second = run(*arguments, "plan_minutes=3")
  assert second.returncode == 0, second.stderr
  assert second.stdout.count("(known)") >= kept
  table = [float(line.split()[1].replace(",", "")) for line in second.stdout.splitlines() if re.match(r" *\d+ +[\d,]+ ",
                                                                                                   line)]
  assert len(table) >= 3 and table == sorted(table, reverse=True)

  # The command of the winner gives the estimate of its rank; the lower bound of memory is one.
  command = shlex.split(second.stdout.strip().splitlines()[-1])
  assert command[:2] == ["python3", "train_compile.py"] and not any(word.startswith("plan") for word in command)
  path = tmp_path / "winner"
  keep = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH") if key in os.environ}
  subprocess.run([sys.executable, *command[1:], f"compile_report_file={path}"], cwd=REPO, env=keep, check=True,
                 capture_output=True)
  r = json.loads(path.read_text())
  assert r["estimate"]["tokens_per_second_per_device"] == pytest.approx(table[0], rel=1e-3)
  winner = resolved(*[word for word in command[2:] if "=" in word])
  assert planner.least_bytes(winner) <= r["memory"]["peak_bytes"] < 15.75 * GIB


@pytest.mark.slow
@needs_tpu_compiler
def test_a_plan_in_which_nothing_fits_says_so_and_ends_with_exit_code_6(tmp_path):
  done = run("compile_topology=v5e-4", "global_parameter_scale=16", "plan=[remat]", "per_device_batch_size=64",
             "plan_minutes=2", f"plan_directory={tmp_path}")
  assert (done.returncode, done.stderr.count("\n")) == (6, 1), done.stderr
  assert "nothing that was tried fits v5e-4" in done.stderr
