# SPDX-License-Identifier: Apache-2.0
"""The benchmark measures the trainer's own step, counts FLOPs three ways, and a set outlives its members."""

import json
import subprocess
import sys
import types

import jax
import pytest
import yaml

from end_to_end import bench
from MaxText import errors, pyconfig, sharding, train
from tests.tiny import tiny

TINY = [
    "base_emb_dim=32", "base_num_query_heads=2", "base_num_kv_heads=2", "head_dim=16", "base_mlp_dim=64",
    "vocab_size=256", "max_target_length=32", "per_device_batch_size=1",
]  # fmt: skip
QUICK = ["--steps=4", "--warmup=2"]
FIGURES = {
    "name", "command", "date", "commit", "cpu", "cores", "versions", "environment", "platform", "device_kind",
    "num_devices", "num_hosts", "mesh", "dtype", "attention", "num_parameters", "rows_per_step", "row_tokens", "steps",
    "warmup_steps", "steps_in_flight", "median_step_seconds", "p90_step_seconds", "mean_step_seconds",
    "host_cpu_seconds_per_step",
    "tokens_per_second", "per_device_tokens_per_second", "reference_tflops_per_device", "model_tflops_per_device",
    "causal_tflops_per_device", "reference_mfu", "model_mfu", "causal_mfu", "peak_device_bytes", "peak_host_bytes",
    "compile_seconds", "data_wait_fraction", "loss_start", "loss_end", "load_average_start", "load_average_end",
}  # fmt: skip


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def run(*arguments):
  command = [sys.executable, "end_to_end/bench.py", *arguments]
  return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run_prints_a_table_and_adds_a_complete_line(tmp_path, capsys):
  out = tmp_path / "results" / "bench.jsonl"
  out.parent.mkdir()
  out.write_text('{"name": "earlier"}\n')
  bench.main(["configs/base.yml", *TINY, "base_num_decoder_layers=2", *QUICK, f"--out={out}"])
  earlier, row = rows(out)
  assert earlier == {"name": "earlier"}
  assert set(row) >= FIGURES
  assert (row["num_devices"], row["rows_per_step"], row["row_tokens"]) == (8, 8, 32)
  assert row["steps_in_flight"] == 1, "on CPU every step is waited for"
  assert row["per_device_tokens_per_second"] == pytest.approx(32 / row["median_step_seconds"])
  assert row["command"].startswith("python3 end_to_end/bench.py configs/base.yml base_emb_dim=32")
  assert row["versions"].keys() >= {"python", "jax", "jaxlib", "flax", "optax"}
  assert 0 <= row["data_wait_fraction"] < 1 and row["peak_host_bytes"] > 10**8
  table = capsys.readouterr().out
  for words in ("step, median", "tokens/s", "TFLOP/s, MFU -", "GiB of host memory", "waiting for data"):
    assert words in table

  # The three counts, written out by hand.
  matrices = 2 * (4 * 32 * 2 * 16 + 3 * 32 * 64) + 256 * 32
  scores = 12 * 2 * 2 * 16 * 32
  assert row["reference_gflop_per_token"] * 1e9 == pytest.approx(6 * row["num_parameters"] + scores)
  assert row["model_gflop_per_token"] * 1e9 == pytest.approx(6 * matrices + scores)
  assert row["causal_gflop_per_token"] * 1e9 == pytest.approx(6 * matrices + scores / 2)


def test_a_loss_that_is_not_finite_is_no_result(tmp_path):
  out = tmp_path / "bench.jsonl"
  with pytest.raises(errors.NumericsError, match="loss nan|loss inf|gradient norm"):
    bench.main(["configs/base.yml", *TINY, "base_num_decoder_layers=1", "norm_epsilon=1e-30", "embedding_init_std=0.0",
                "position_embedding=none", *QUICK, f"--out={out}"])
  assert not out.exists()


def test_a_state_too_large_for_the_device_is_refused_before_compiling():
  cfg = tiny(devices=8)
  mesh = sharding.make_mesh(cfg, jax.devices())
  with sharding.use(mesh, cfg.logical_axis_rules):
    _, abstract = train.abstract_state(cfg, mesh)
  device = types.SimpleNamespace(device_kind="small card", memory_stats=lambda: {"bytes_limit": 10_000})
  with pytest.raises(errors.DoesNotFit, match="gradients take 0.0 GB per device; small card gives 0.0 GB"):
    bench.check_fits(abstract, device)
  device.memory_stats = lambda: {"bytes_limit": 10**9}
  bench.check_fits(abstract, device)


@pytest.mark.parametrize("arguments", [[], ["--steps=0", "configs/base.yml"], ["--stesp=3"], ["--set=tpu"]])
def test_a_wrong_command_line_ends_with_code_2(arguments):
  with pytest.raises(SystemExit) as end:
    bench.main(arguments)
  assert end.value.code == 2


def test_a_mistyped_key_is_one_line_and_code_2():
  ended = run("configs/base.yml", "stesp=3")
  assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1 and "steps" in ended.stderr


def test_a_set_goes_on_after_a_member_that_fails_and_says_so(tmp_path, monkeypatch, capfd):
  monkeypatch.setitem(bench.SETS, "gpu", (
      bench.Member("broken", "configs/base.yml heads=3"),
      bench.Member("sound", "configs/base.yml base_num_decoder_layers=1", tokens_per_second=1e5, tflops=2.5)))
  out = tmp_path / "bench.jsonl"
  code = bench.main(["--set=gpu", *TINY, *QUICK, f"--out={out}"])
  lines = capfd.readouterr().out.splitlines()
  broken, sound = [next(line for line in lines[-2:] if line.startswith(name)) for name in ("broken", "sound")]
  assert code == 1
  assert "exit code 2: ConfigError: " in broken
  assert "100,000" in sound and " 2.5 " in sound
  assert [row["name"] for row in rows(out)] == ["sound"]


def test_what_does_not_fit_is_measured_smaller_and_what_hangs_is_ended(tmp_path, monkeypatch, capsys):
  asked = []

  def end(command, timeout, **_):
    asked.append(command[2:])
    if "base_num_decoder_layers=1" in command:
      figures = dict.fromkeys(FIGURES, 1.0)
      bench.append(command[-1].removeprefix("--out="), figures)
      return types.SimpleNamespace(returncode=0)
    if "configs/base.yml" in command:
      raise subprocess.TimeoutExpired(command, timeout)
    return types.SimpleNamespace(returncode=errors.DOES_NOT_FIT)

  monkeypatch.setattr(bench.subprocess, "run", end)
  monkeypatch.setitem(bench.SETS, "gpu", (
      bench.Member("big", "configs/rosetta_gpt_5b.yml", "base_num_decoder_layers=1", 13_258, 432.8),
      bench.Member("hung", "configs/base.yml")))
  code = bench.main(["--set=gpu", "vocab_size=512", f"--out={tmp_path / 'bench.jsonl'}"])
  table = capsys.readouterr().out
  assert [("base_num_decoder_layers=1" in command, "vocab_size=512" in command) for command in asked] == [
      (False, True), (True, True), (False, True)]
  assert "big base_num_decoder_layers=1" in table and "432.8" in table
  assert "13,258" not in table, "tokens/s of fewer layers are no comparison"
  assert "took more than 150 s" in table and code == 1


@pytest.mark.parametrize("member", [*bench.SETS["gpu"], *bench.SETS["cpu"]], ids=lambda member: member.name)
def test_the_members_of_the_sets_are_sound_configs_for_one_device(member):
  kind = types.SimpleNamespace(platform="cuda", device_kind="NVIDIA H200", slice_index=0)
  for more in {"", member.smaller}:
    cfg = pyconfig.resolve(pyconfig.load([*member.arguments.split(), *more.split(), "run_name=x"]), [kind])
    assert cfg.num_devices == 1
    if "configs/rosetta" in member.arguments:
      recipe = yaml.safe_load(open(member.arguments.split()[0]).read())
      assert cfg.emb_dim == recipe["base_emb_dim"] and cfg.vocab_size == recipe["vocab_size"]


@pytest.mark.slow
def test_the_gpu_set_runs_through_at_a_size_for_cpus(tmp_path):
  out = tmp_path / "bench.jsonl"
  ended = run("--set=gpu", *TINY, *QUICK, f"--out={out}", "--limit=900")
  assert ended.returncode == 0, ended.stdout[-2000:]
  assert [row["name"] for row in rows(out)] == [member.name for member in bench.SETS["gpu"]]
