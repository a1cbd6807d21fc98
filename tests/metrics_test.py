# SPDX-License-Identifier: Apache-2.0
"""FLOP counts, the recorder's files, TensorBoard events, the ledger."""

import json
import os
import pathlib
import pty
import re
import select
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from MaxText import errors, metrics, pyconfig, topology

CHILD = """
import sys
import time
sys.path[:0] = [".", "tests"]
from MaxText import interpreter
from metrics_test import *
"""


def child(code, *args):
  """Runs `code`, which knows this file's names, in a new process."""
  return subprocess.run([sys.executable, "-c", CHILD + code, *map(str, args)], check=False, text=True,
                        capture_output=True)


# --- FLOP count ----------------------------------------------------------------------------------------------------


def shape(layers, emb, mlp, heads, head, vocab, length, kv=None, activations=1):
  return SimpleNamespace(
      num_decoder_layers=layers, emb_dim=emb, mlp_dim=mlp, num_query_heads=heads, num_kv_heads=kv or heads,
      head_dim=head, vocab_size=vocab, max_target_length=length, mlp_activations=("gelu",) * activations)


@pytest.mark.parametrize("cfg, gflops, causal", [
    (shape(12, 768, 3072, 12, 64, 50304, 2048), 0.968, 0.855),
    (shape(24, 4096, 16384, 32, 128, 50304, 2048), 32.64, 31.43),
    (shape(96, 12288, 49152, 96, 128, 50257, 2048), 1076.4, 1061.9),
    (shape(32, 4096, 11008, 32, 128, 32000, 4096, activations=2), 46.09, 42.86),
    (shape(40, 5120, 13824, 40, 128, 32000, 4096, activations=2), 87.18, 82.14),
    (shape(80, 8192, 28672, 64, 128, 32000, 4096, kv=8, activations=2), 444.5, 428.4),
])  # fmt: skip
def test_model_flops_are_those_published_for_gpt_and_llama(cfg, gflops, causal):
  assert metrics.model_flops_per_token(cfg, causal=False) / 1e9 == pytest.approx(gflops, rel=5e-4)
  assert metrics.model_flops_per_token(cfg, causal=True) / 1e9 == pytest.approx(causal, rel=5e-4)


def test_the_step_line_counts_every_parameter_and_all_of_the_attention():
  cfg = shape(16, 2560, 8192, 8, 256, 32768, 2048)
  per_step = metrics.train_flops_per_token(cfg, 1_091_000_000) * 12 * 2048
  assert per_step == 6 * 1_091_000_000 * 2048 * 12 + 12 * 8 * 16 * 256 * 2048**2 * 12


# --- The ledger ----------------------------------------------------------------------------------------------------


def test_the_ledger_sums_to_the_wall_clock_since_the_script_began_whatever_its_process_did_before():
  code = """
begin = time.perf_counter()
interpreter.ensure()
time.sleep(0.1)
ledger = metrics.Ledger()
with ledger.measure("compile"):
  time.sleep(0.1)
ledger.end_init()
with ledger.measure("step"):
  with ledger.measure("data_wait"):
    time.sleep(0.1)
time.sleep(0.1)
seconds = ledger.seconds()
print(sum(seconds.values()), time.perf_counter() - begin)
assert all(0.1 <= seconds[kind] < 1 for kind in ("compile", "data_wait", "other")), seconds
assert seconds["step"] < 0.1 and 0.1 < seconds["init"] < 1
"""
  # One process for both: bash goes over into its last command, as in "bash setup.sh && python3 train.py".
  done = subprocess.run(["bash", "-c", 'sleep 1 && exec "$0" -c "$1"', sys.executable, CHILD + code], check=False,
                        text=True, capture_output=True)
  assert done.returncode == 0, done.stderr
  total, wall = map(float, done.stdout.split())
  assert total == pytest.approx(wall, abs=0.05)


# --- The recorder --------------------------------------------------------------------------------------------------


def config(directory, **overrides):
  """A resolved config of 8 rows of 32 tokens, made without importing jax, so that child processes start fast."""
  keys = {"run_name": "run", "base_output_directory": str(directory), "steps": 10, "vocab_size": 320,
          "max_target_length": 32, "per_device_batch_size": 8.0, "enable_tensorboard": False} | overrides
  cfg = pyconfig.load(["configs/base.yml", *(f"{key}={pyconfig.text(value)}" for key, value in keys.items())])
  return pyconfig.resolve(cfg, [topology.Device("cpu", "cpu", 0, 0, 0)])


def recorder(cfg, done=0, device_kind="cpu", process_index=0):
  return metrics.Recorder(
      cfg, 10_000, 2, device_kind, ledger=metrics.Ledger(), done=done, process_index=process_index)


def scalars(step):
  return {"loss": 5.0 - step / 10, "grad_norm": 0.84, "raw_grad_norm": 1.5, "param_norm": 30.0, "learning_rate": 2.1e-4,
          "skipped": 0.0}


def record(cfg, done, last):
  with recorder(cfg, done) as run:
    for step in range(done + 1, last + 1):
      run.step(step, scalars(step), seconds=0.5, compile=step == done + 1)
      if step % 4 == 0:
        run.eval(step, {"loss": 4.0, "accuracy": 0.25})


def lines(path):
  return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def test_the_step_line_has_the_form_of_the_reference(tmp_path, capsys):
  with recorder(config(tmp_path, steps=200), device_kind="NVIDIA H200") as run:
    run._peak_tflops = 1.0
    run.step(119, scalars(1), seconds=3.21, compile=True)
    run.step(120, scalars(2) | {"skipped": 1.0}, seconds=0.5)
  first, second = capsys.readouterr().out.splitlines()[:2]
  assert first == (
      "completed step: 119/200, seconds: 3.210 (compile), TFLOP/s/device: -, MFU: -, Tokens/s/device: -, loss: 4.900, "
      "grad_norm: 0.84, lr: 2.1e-04, eta: -")
  tflops = metrics.train_flops_per_token(run._cfg, 10_000) * 8 * 32 / 2 / 0.5 / 1e12
  assert second == (
      f"completed step: 120/200, seconds: 0.500, TFLOP/s/device: {tflops:.3f}, MFU: {tflops:.1%}, "
      "Tokens/s/device: 256, loss: 4.800, grad_norm: 0.84 (skipped), lr: 2.1e-04, eta: -")


def test_the_eta_is_the_steps_that_are_left_at_the_pace_of_the_last_ones(tmp_path, monkeypatch, capsys):
  run = recorder(config(tmp_path, steps=100))
  clock = iter(range(0, 1000, 2))
  monkeypatch.setattr(metrics.time, "perf_counter", lambda: float(next(clock)))
  for step in range(1, 4):
    run.step(step, scalars(step), seconds=2.0)
  monkeypatch.undo()
  assert capsys.readouterr().out.splitlines()[-1].endswith("eta: 0:03:14")
  run.close()


def test_without_a_known_peak_there_is_no_mfu(tmp_path):
  record(config(tmp_path), 0, 3)
  summary = json.loads((tmp_path / "run/summary.json").read_text())
  assert summary["mfu"] is None
  assert all("perf/mfu" not in line for line in lines(tmp_path / "run/metrics/metrics.jsonl"))


def test_every_step_is_one_line_with_all_scalars(tmp_path):
  cfg = config(tmp_path, metrics_file=str(tmp_path / "copy.jsonl"))
  record(cfg, 0, 10)
  rows = lines(tmp_path / "run/metrics/metrics.jsonl")
  assert [row["step"] for row in rows] == list(range(1, 11))
  assert rows[0]["compile"] and "perf/per_device_tokens_per_sec" not in rows[0]
  assert rows[1]["learning/current_learning_rate"] == 2.1e-4
  assert rows[1]["perf/per_device_tokens_per_sec"] == 8 * 32 / 2 / 0.5
  assert rows[1]["run_name"] == "run"
  assert lines(tmp_path / "copy.jsonl") == rows
  assert [row["step"] for row in lines(tmp_path / "run/metrics/eval.jsonl")] == [4, 8]


def test_a_number_that_json_does_not_know_is_null(tmp_path):
  with recorder(config(tmp_path)) as run:
    run.step(0, scalars(0) | {"loss": float("nan"), "grad_norm": float("inf")}, seconds=1.0)
  (row,) = lines(tmp_path / "run/metrics/metrics.jsonl")
  assert row["learning/loss"] is None
  assert row["learning/grad_norm"] is None


def test_after_kill_and_resume_each_step_is_in_the_file_once(tmp_path):
  killed = child("""
run = recorder(config(sys.argv[1]))
for step in range(1, 9):
  run.step(step, scalars(step), seconds=0.5)
  if step % 4 == 0:
    run.eval(step, {"loss": 4.0})
os.kill(os.getpid(), 9)
""", tmp_path)
  assert killed.returncode == -9
  path = tmp_path / "run/metrics/metrics.jsonl"
  assert [row["step"] for row in lines(path)] == list(range(1, 9))
  with open(path, "a", encoding="utf-8") as file:
    file.write('{"step": 9, "learn')  # torn by the kill
  record(config(tmp_path), 6, 10)
  assert [row["step"] for row in lines(path)] == list(range(1, 11))
  assert [row["step"] for row in lines(tmp_path / "run/metrics/eval.jsonl")] == [4, 8]


def test_a_full_disk_costs_one_warning_and_no_line(tmp_path):
  done = child("""
import resource
with recorder(config(sys.argv[1])) as run:
  for step in range(1, 11):
    if step == 2:
      resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
    if step == 8:
      resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    run.step(step, scalars(step), seconds=0.5)
""", tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("warning") == 1
  assert "Training goes on" in done.stdout
  assert [row["step"] for row in lines(tmp_path / "run/metrics/metrics.jsonl")] == list(range(1, 11))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
  (tmp_path / "run").mkdir()
  (tmp_path / "run/metrics").write_text("a file where the directory should be")
  with pytest.raises(errors.StorageError, match="cannot write"):
    recorder(config(tmp_path))


def test_a_file_that_is_not_ours_is_left_alone(tmp_path):
  for text in ("thesis, last chapter\n", '{"a": 1}\n', "5\n"):
    (tmp_path / "thesis").write_text(text)
    with pytest.raises(errors.StorageError, match="something other than metrics"):
      recorder(config(tmp_path, metrics_file=str(tmp_path / "thesis")))
    assert (tmp_path / "thesis").read_text() == text


def test_only_process_0_writes(tmp_path, capsys):
  with recorder(config(tmp_path), process_index=1) as run:
    run.step(0, scalars(0), seconds=0.5)
    run.eval(0, {"loss": 1.0})
    run.note("hello")
    run.flush()
  assert not list(tmp_path.iterdir())
  assert not capsys.readouterr().out


def test_the_end_leaves_a_summary_and_a_picture(tmp_path, capsys):
  record(config(tmp_path), 0, 10)
  text = capsys.readouterr().out
  assert "loss: 4.900 -> 4.000, evaluation 4.000 (a uniform guess: 5.768)" in text
  assert "10 steps, 2,560 tokens" in text
  summary = json.loads((tmp_path / "run/summary.json").read_text())
  assert summary["status"] == "done"
  assert summary["tokens_per_second"] == 512
  assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_seconds"])
  picture = (tmp_path / "run/training.png").read_bytes()
  assert picture.startswith(b"\x89PNG")
  assert struct.unpack(">II", picture[16:24]) == (1040, 780)


def test_a_run_that_is_stopped_says_by_what_and_draws_nothing(tmp_path):
  with pytest.raises(errors.Stopped), recorder(config(tmp_path)) as run:
    run.step(0, scalars(0), seconds=0.5)
    raise errors.Stopped("SIGTERM")
  assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "Stopped"
  assert not (tmp_path / "run/training.png").exists()


def test_without_matplotlib_there_is_a_note_instead_of_the_picture(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  record(config(tmp_path), 0, 3)
  assert "note: no training.png: import of matplotlib" in capsys.readouterr().out
  assert (tmp_path / "run/summary.json").exists()


def test_a_remote_run_directory_gets_everything_and_is_continued(tmp_path, monkeypatch):
  from etils import epath

  real = epath.Path

  def bucket(path):
    local = real(str(path).replace("gs://bucket", str(tmp_path)))
    local.parent.mkdir(parents=True, exist_ok=True)
    return local

  monkeypatch.setattr(epath, "Path", bucket)
  cfg = config("gs://bucket", gcs_metrics=True, enable_tensorboard=True, log_period=2)
  record(cfg, 0, 6)
  record(cfg, 4, 9)
  assert [row["step"] for row in lines(tmp_path / "run/metrics/metrics.jsonl")] == list(range(1, 10))
  assert len(list((tmp_path / "run/tensorboard").iterdir())) == 2
  assert (tmp_path / "run/training.png").exists()


def test_a_terminal_shows_a_progress_bar_and_a_dumb_one_does_not(tmp_path):
  def shown(term):
    parent, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", f"{CHILD}\nrecord(config(sys.argv[1]), 0, 10)", str(tmp_path)],
                          stdin=terminal, stdout=terminal, stderr=terminal,
                          env=os.environ | {"TERM": term, "COLUMNS": "200"}) as process:
      text, ended = b"", False
      while not ended:
        ended = process.poll() is not None  # asked before the last reading
        while select.select([parent], [], [], 0.2)[0]:
          text += os.read(parent, 65536)
      assert process.returncode == 0
    os.close(terminal)  # only now: with its last holder a pseudo-terminal may lose what nobody has read yet
    os.close(parent)
    return text.decode()

  live, dumb = shown("xterm"), shown("dumb")
  assert "\x1b[" in live
  assert "10/10" in live
  assert "\x1b" not in dumb
  for text in (live, dumb):
    assert re.findall(r"completed step: (\d+)/10", text) == [str(step) for step in range(1, 11)]


# --- TensorBoard ---------------------------------------------------------------------------------------------------


def crc32c(data):
  """Castagnoli's CRC, bit by bit, as an oracle."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
  return crc ^ 0xFFFFFFFF


def masked(data):
  crc = crc32c(data)
  return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def records(data):
  """The payloads of a TFRecord file, checksums verified."""
  while data:
    (length,) = struct.unpack("<Q", data[:8])
    assert data[8:12] == masked(data[:8])
    payload, data = data[12:12 + length], data[12 + length:]
    assert data[:4] == masked(payload)
    data = data[4:]
    yield payload


def message(data):
  """[(field number, value)] of a protobuf message: int, 8 or 4 bytes, or bytes."""

  def varint():
    nonlocal at
    value = shift = 0
    while True:
      byte, at = data[at], at + 1
      value |= (byte & 0x7F) << shift
      shift += 7
      if byte < 0x80:
        return value

  at, out = 0, []
  while at < len(data):
    key = varint()
    size = {1: 8, 5: 4}.get(key & 7)
    if key & 7 == 0:
      out.append((key >> 3, varint()))
      continue
    size = varint() if size is None else size
    out.append((key >> 3, data[at:at + size]))
    at += size
  return out


def test_checksums_are_crc32c():
  assert crc32c(b"123456789") == 0xE3069283  # the check value of the catalogue of CRCs
  for data in (b"", b"123456789", bytes(range(256))):
    assert metrics._masked_crc32c(data) == masked(data)


def test_event_files_hold_the_tags_of_the_reference(tmp_path):
  record(config(tmp_path, enable_tensorboard=True), 0, 9)
  (path,) = (tmp_path / "run/tensorboard").iterdir()
  events = [message(payload) for payload in records(path.read_bytes())]
  assert dict(events[0])[3] == b"brain.Event:2"
  seen = {}
  for event in events:
    for field, value in message(dict(event).get(5, b"")):
      assert field == 1
      value = dict(message(value))
      if 2 in value:
        seen.setdefault(value[1].decode(), []).append((dict(event)[2], struct.unpack("<f", value[2])[0]))
      else:
        assert value[1] in (b"config", b"num_model_parameters")
        assert b"text" in value[9]
  assert {f"learning/{name}" for name in (
      "loss", "grad_norm", "raw_grad_norm", "param_norm", "current_learning_rate")} <= set(seen)
  assert {f"perf/{name}" for name in (
      "step_time_seconds", "per_device_tflops", "per_device_tflops_per_sec", "per_device_tokens_per_sec")} <= set(seen)
  assert seen["learning/loss"] == [(step, pytest.approx(5.0 - step / 10)) for step in range(1, 10)]
  assert seen["eval/loss"] == [(4, 4.0), (8, 4.0)]


@pytest.mark.slow
def test_a_stock_tensorboard_reads_a_resumed_run(tmp_path):
  accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
  cfg = config(tmp_path, enable_tensorboard=True)
  record(cfg, 0, 8)
  record(cfg, 5, 10)
  board = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
  assert [event.step for event in board.Scalars("learning/loss")] == list(range(1, 11))
  assert board.Scalars("learning/loss")[9].value == pytest.approx(4.0)
  assert b"run_name" in board.Tensors("config")[0].tensor_proto.string_val[0]
  assert board.SummaryMetadata("config").plugin_data.plugin_name == "text"
