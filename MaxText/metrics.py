# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself: FLOP count, step line, JSONL, TensorBoard events, where the time went, summary, plot."""

import collections
import concurrent.futures
import contextlib
import datetime
import functools
import json
import math
import os
import resource
import shutil
import socket
import struct
import sys
import tempfile
import time

from MaxText import errors, interpreter, pyconfig, topology

# --- FLOP count ----------------------------------------------------------------------------------------------------


def train_flops_per_token(cfg, num_parameters):
  """FLOPs of training on one token as the step line counts them: 6 per parameter, and attention not causal.

  PaLM, appendix B (https://arxiv.org/abs/2204.02311), with every parameter counted, embeddings included.
  """
  return 6 * num_parameters + attention_flops(cfg)


def model_flops_per_token(cfg, causal):
  """FLOPs of training on one token, from shapes: 6 per weight of a matrix product, the embedding look-up being free.

  causal counts half of the attention scores, those a causal kernel has to compute.
  """
  projections = 2 * cfg.emb_dim * cfg.head_dim * (cfg.num_query_heads + cfg.num_kv_heads)
  mlp = (1 + len(cfg.mlp_activations)) * cfg.emb_dim * cfg.mlp_dim
  weights = cfg.num_decoder_layers * (projections + mlp) + cfg.vocab_size * cfg.emb_dim
  return 6 * weights + attention_flops(cfg) / (2 if causal else 1)


def matmul_flops(cfg):
  """FLOPs of the matrix products that one device has to compute in one step, recomputed ones (remat_policy) included.

  Without those inside fused attention kernels (flash, cudnn). A compiled step has exactly these, or repeats some.
  """
  E, V, M, H = cfg.emb_dim, cfg.vocab_size, cfg.mlp_dim, cfg.head_dim
  N, K, S = cfg.num_query_heads, cfg.num_kv_heads, cfg.max_target_length
  sequential = cfg.block_layout == "sequential"
  saved = {
      "none": {"query", "key", "value", "context", "out_proj", "mlp_up", "mlp_gate"},
      "minimal": {"query", "key", "value", "out_proj", "mlp_up", "mlp_gate"},
      "save_qkv_proj": {"query", "key", "value"},
      "save_out_proj": {"query", "key", "value", "out_proj"},
      "save_dot_except_mlp": {"query", "key", "value", "context", "out_proj"},
      "full": set(), "names": set(cfg.remat_names)}[cfg.remat_policy]
  if cfg.remat_policy not in ("none", "minimal") and (cfg.use_qk_norm or cfg.query_scaling == "per_dim"):
    saved = saved - ({"query", "key"} if cfg.use_qk_norm else {"query"})  # their norm's gradient needs its input
  sizes = {"query": E * N * H, "key": E * K * H, "value": E * K * H, "mlp_up": E * M,
           "mlp_gate": E * M * (len(cfg.mlp_activations) - 1), "out_proj": N * H * E}
  layer = 3 * (sum(sizes.values()) + M * E)  # once forward, twice backward
  layer += sum(size for name, size in sizes.items() if name not in saved and (name != "out_proj" or sequential))
  if cfg.attention == "dot":
    layer += N * H * S * (6 if cfg.remat_policy == "none" else 7 if "context" in saved else 8)
  outside = 3 * V * E + (2 * V * E if cfg.use_iota_embed else 0)
  tokens = cfg.global_batch_size * S
  return 2 * tokens * (cfg.num_decoder_layers * layer + outside) // cfg.num_devices


def attention_flops(cfg):
  """FLOPs of training on one token that attention scores and the products with values are counted as, not causal."""
  return 12 * cfg.num_decoder_layers * cfg.num_query_heads * cfg.head_dim * cfg.max_target_length


# --- Where the time went -------------------------------------------------------------------------------------------


class Ledger:
  """Seconds of wall time since the process started, by what the main thread was doing; they sum to the wall time.

  What no measure() covers is "init" before the first step and "other" after it.
  """

  def __init__(self):
    self._seconds = dict.fromkeys(("init", "compile", "data_wait", "step", "eval", "save", "other"), 0.0)
    self._kind, self._rest = None, "init"
    self._since = time.perf_counter() - interpreter.seconds_since_start()

  @contextlib.contextmanager
  def measure(self, kind):
    """Charges the time within to `kind`; a measure inside another takes its time out of the outer one."""
    outer = self._kind
    self._charge(kind)
    try:
      yield
    finally:
      self._charge(outer)

  def end_init(self):
    """From here on, time that no measure() covers is "other"."""
    if self._rest == "init":
      self._charge(self._kind)
      self._rest = "other"

  def seconds(self):
    """{kind: seconds} up to now."""
    self._charge(self._kind)
    return dict(self._seconds)

  def _charge(self, next_kind):
    now = time.perf_counter()
    self._seconds[self._kind or self._rest] += now - self._since
    self._since, self._kind = now, next_kind


# --- TensorBoard event files ---------------------------------------------------------------------------------------
# Written by hand: the smallest package that does it takes 0.5 s to import (protobuf) and starts a process; a run needs
# two kinds of records. Layout: tensorflow/core/util/event.proto, framework/summary.proto, lib/io/record_writer.h.


def _crc_table():
  table = []
  for byte in range(256):
    for _ in range(8):
      byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    table.append(byte)
  return table


_CRC = _crc_table()


def _masked_crc32c(data):
  crc, table = 0xFFFFFFFF, _CRC
  for byte in data:
    crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
  crc ^= 0xFFFFFFFF
  return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value):
  out = bytearray()
  while value > 0x7F:
    out.append(value & 0x7F | 0x80)
    value >>= 7
  out.append(value)
  return bytes(out)


def _field(number, data):
  """A protobuf field that holds bytes: a string or a message."""
  return _varint(number << 3 | 2) + _varint(len(data)) + data


def _event(step, content):
  """A framed record of one Event at `step` with the field `content`."""
  event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + content
  length = struct.pack("<Q", len(event))
  return length + _masked_crc32c(length) + event + _masked_crc32c(event)


def start_events(step):
  """Records that open the event file of a start whose first step is `step`: TensorBoard drops those from there on that
  earlier files have."""
  return _event(0, _field(3, b"brain.Event:2")) + _event(step, _field(7, b"\x08\x01"))


def scalar_event(step, scalars):
  """A record of {tag: float} at `step`."""
  return _event(step, _field(5, b"".join(_scalar_head(tag) + struct.pack("<f", x) for tag, x in scalars.items())))


@functools.cache
def _scalar_head(tag):
  """What precedes the four bytes of a scalar's value."""
  head = _field(1, tag.encode()) + b"\x15"
  return b"\x0a" + _varint(len(head) + 4) + head


def text_event(step, tag, text):
  """A record of a Markdown text."""
  metadata = _field(9, _field(1, _field(1, b"text")) + b"\x20\x02")  # plugin "text", data class tensor
  tensor = _field(8, b"\x08\x07" + _field(2, _field(2, b"\x08\x01")) + _field(8, text.encode()))  # one string
  return _event(step, _field(5, _field(1, _field(1, tag.encode()) + metadata + tensor)))


# --- Files ---------------------------------------------------------------------------------------------------------


class _File:
  """A local file that only grows, and its copy at a remote place if there is one.

  What a full disk refuses is kept in memory and written with a later append; one line says so.
  """

  def __init__(self, path, remote=None):
    self.path, self.remote = path, remote
    self._pending, self._warned = b"", False
    self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

  def append(self, data):
    self._pending += data
    try:
      while self._pending:
        self._pending = self._pending[os.write(self._descriptor, self._pending):]
    except OSError as error:
      if not self._warned:
        print(f"warning: {self.path}: {error.strerror}. Training goes on; metrics are kept in memory until they can be"
              " written.", flush=True)
      self._warned = True

  def copy(self):
    """Copies the file to its remote place; a failure is one line, for the next copy brings everything again."""
    from etils import epath

    try:
      with open(self.path, "rb") as file:
        epath.Path(self.remote).write_bytes(file.read())
    except Exception as error:  # of whatever library serves this kind of place
      print(f"warning: {self.remote}: {error}. Trying again later.", flush=True)

  def close(self):
    self.append(b"")
    os.close(self._descriptor)


def _cut(path, done):
  """Ends a JSONL file before its first line of a step > done, or its last one if that is torn.

  Lines are in order of steps, so this drops what a resumed run will write again; it needs no room on a full disk.
  Raises StorageError when the file holds anything else: it is somebody's.
  """
  end = 0
  with open(path, "rb") as file:
    for line in file:
      try:
        if not line.endswith(b"\n") or json.loads(line)["step"] > done:
          break
      except (ValueError, KeyError, TypeError) as error:
        raise errors.StorageError(f"{path} holds something other than metrics. Choose another place.") from error
      end += len(line)
  os.truncate(path, end)


def _is_remote(path):
  return "://" in path


# --- The recorder --------------------------------------------------------------------------------------------------


class Recorder:
  """Writes what happens in a run: to the terminal, metrics.jsonl, eval.jsonl, TensorBoard, summary.json, training.png.

  Only process 0 writes; elsewhere every method returns at once. As a context manager it closes itself, and says in
  the summary what ended the run.

  Args:
    cfg: resolved config.
    num_parameters: of the whole model.
    num_devices: jax devices that train.
    device_kind: jax's name for one, for its peak FLOP/s.
    ledger: the Ledger of this process.
    done: how many steps earlier starts have done; what they logged of later ones is dropped.
    process_index: jax.process_index().
  """

  def __init__(self, cfg, num_parameters, num_devices, device_kind, *, ledger, done=0, process_index=0):
    self._cfg, self._ledger, self._done = cfg, ledger, done
    self._active = process_index == 0
    if not self._active:
      return
    self._tokens_per_step = cfg.global_batch_size * cfg.max_target_length
    self._num_devices = num_devices
    self._device_tflops = train_flops_per_token(cfg, num_parameters) * self._tokens_per_step / num_devices / 1e12
    peak = topology.peak_flops(device_kind, cfg.dtype)
    self._peak_tflops = peak and peak / 1e12
    self._facts = {"num_parameters": num_parameters, "num_devices": num_devices, "device_kind": device_kind}
    self._steps = self._skipped = 0
    self._step_seconds = []
    self._last_step = None
    self._eval = {}
    self._ends = collections.deque(maxlen=100)  # when the last steps ended, for the ETA
    self._sender, self._unsent = concurrent.futures.ThreadPoolExecutor(1), set()
    self._scratch = None
    self._open_files(num_parameters)
    self._bar = _bar(cfg.steps, done) if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else None

  def __enter__(self):
    return self

  def __exit__(self, kind, error, trace):
    self.close("done" if kind is None else kind.__name__)

  def step(self, step, scalars, seconds, compile=False):
    """Records a completed step.

    Args:
      step: how many steps the run has done with it: 1 for the first.
      scalars: {name: float}: loss, grad_norm, raw_grad_norm, param_norm, learning_rate, ...; "skipped" is 1.0 when
        the step changed nothing. A name without "/" is tagged learning/NAME.
      seconds: true wall time from the end of the step before.
      compile: the time includes a compilation, so that it says nothing about speed.
    """
    if not self._active:
      return
    self._ledger.end_init()
    cfg = self._cfg
    scalars = {_tag(name): float(value) for name, value in scalars.items()}
    scalars["perf/step_time_seconds"] = seconds
    scalars["perf/per_device_tflops"] = self._device_tflops
    tflops = tokens = mfu = None
    if not compile:
      tflops = self._device_tflops / seconds
      tokens = self._tokens_per_step / self._num_devices / seconds
      scalars["perf/per_device_tflops_per_sec"] = tflops
      scalars["perf/per_device_tokens_per_sec"] = tokens
      if self._peak_tflops:
        scalars["perf/mfu"] = mfu = tflops / self._peak_tflops
      self._step_seconds.append(seconds)
      self._ends.append(time.perf_counter())
    skipped = scalars.get("learning/skipped", 0.0) > 0
    self._steps += 1
    self._skipped += skipped
    self._last_step = step
    line = {"step": step, "run_name": cfg.run_name, "time": time.time(), **({"compile": True} if compile else {})}
    self._metrics.append(_json_line(line | scalars))
    if self._copy:
      self._copy.append(_json_line(line | scalars))
    if self._events:
      self._event_bytes += scalar_event(step, scalars)
    if step % cfg.log_period == 0:
      self._write_events()
      self._send(all_files=cfg.gcs_metrics)
    eta = self._eta(step)
    self.note(
        f"completed step: {step}/{cfg.steps}, seconds: {seconds:.3f}{' (compile)' if compile else ''}, "
        f"TFLOP/s/device: {_number(tflops, '.3f')}, MFU: {_number(mfu, '.1%')}, "
        f"Tokens/s/device: {_number(tokens, '.0f')}, loss: {_number(scalars.get('learning/loss'), '.3f')}, "
        f"grad_norm: {_number(scalars.get('learning/grad_norm'), '.3g')}{' (skipped)' if skipped else ''}, "
        f"lr: {_number(scalars.get('learning/current_learning_rate'), '.1e')}, eta: {eta}")
    if self._bar:
      self._bar.update(
          0, completed=step, loss=_number(scalars.get("learning/loss"), ".3f"),
          speed=_number(tokens and tokens * self._num_devices, ",.0f"), eta=eta)

  def eval(self, step, scalars):
    """Records an evaluation after `step`: {name: float}, tagged eval/NAME, one line in eval.jsonl."""
    if not self._active:
      return
    scalars = {name if "/" in name else f"eval/{name}": float(value) for name, value in scalars.items()}
    self._eval = scalars
    self._evals.append(_json_line({"step": step, "run_name": self._cfg.run_name, "time": time.time()} | scalars))
    if self._events:
      self._event_bytes += scalar_event(step, scalars)
    self._write_events()
    values = ", ".join(f"{name.removeprefix('eval/')}: {value:.4g}" for name, value in scalars.items())
    self.note(f"eval after step {step}: {values}")

  def note(self, line):
    """Prints a line, above the progress bar if there is one."""
    if not self._active:
      return
    if self._bar:
      self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
      print(line, flush=True)

  def flush(self):
    """Brings everything recorded so far to its place, remote copies included: before a checkpoint is written."""
    if self._active:
      self._write_events()
      self._send(all_files=True)

  def close(self, status="done"):
    """Ends the display, writes the summary and, when the run is done, the plot. Does nothing the second time."""
    if not self._active:
      return
    if self._bar:
      self._bar.stop()
      self._bar = None
    try:
      summary = self._summary(status)
      for line in _summary_lines(summary):
        self.note(line)
      self._write("summary.json", (json.dumps(summary, indent=2) + "\n").encode())
      if status == "done" and self._steps:
        self._plot()
    except OSError as error:
      self.note(f"warning: {self._cfg.run_directory}: {error.strerror or error}: the summary is not complete.")
    self._write_events()
    for file in self._files:
      file.close()
    self._send(all_files=True)
    self._sender.shutdown()
    if self._scratch:
      shutil.rmtree(self._scratch, ignore_errors=True)
    self._active = False

  def _open_files(self, num_parameters):
    cfg = self._cfg
    self._metrics = self._open_lines(cfg.metrics_directory, "metrics.jsonl")
    self._evals = self._open_lines(cfg.metrics_directory, "eval.jsonl")
    self._files = [self._metrics, self._evals]
    self._copy = self._events = None
    self._event_bytes = b""
    if cfg.metrics_file:
      folder, name = os.path.split(os.path.abspath(os.path.expanduser(cfg.metrics_file)))
      self._copy = self._open_lines(folder, name)
      self._files.append(self._copy)
    if cfg.enable_tensorboard:
      name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
      self._events = self._open(cfg.tensorboard_directory, name)
      self._files.append(self._events)
      text = pyconfig.as_yaml(cfg).replace("\n", "\n    ")  # indented: code in Markdown
      self._event_bytes = (
          start_events(self._done + 1) + text_event(self._done, "config", f"    {text}")
          + text_event(self._done, "num_model_parameters", f"{num_parameters:,}"))
      self._write_events()

  def _open_lines(self, directory, name):
    """A JSONL file without the lines that this start writes again."""
    file = self._open(directory, name)
    if file.remote:
      from etils import epath

      try:
        source = epath.Path(file.remote)
        if source.exists():
          file.append(source.read_bytes())
      except Exception as error:  # of whatever library serves this kind of place
        raise errors.StorageError(f"cannot read {file.remote}: {error}") from error
    _cut(file.path, self._done)
    return file

  def _open(self, directory, name):
    """A file in a directory; for gs:// a local one that is copied there."""
    try:
      if _is_remote(directory):
        self._scratch = self._scratch or tempfile.mkdtemp(prefix="maxtext-metrics-")
        return _File(os.path.join(self._scratch, name), f"{directory.rstrip('/')}/{name}")
      os.makedirs(directory, exist_ok=True)
      return _File(os.path.join(directory, name))
    except OSError as error:
      raise errors.StorageError(f"cannot write {directory}/{name}: {error.strerror}. Choose another place or mend its"
                                " rights.") from error

  def _write_events(self):
    if self._events and self._event_bytes:
      self._events.append(self._event_bytes)
      self._event_bytes = b""

  def _send(self, all_files):
    """Has files copied to their remote places in the background."""
    self._unsent.update(f for f in self._files if f.remote and (all_files or f is self._events))
    if self._unsent:
      self._sender.submit(self._copy_unsent)

  def _copy_unsent(self):
    while self._unsent:  # what was added several times meanwhile is copied once
      self._unsent.pop().copy()

  def _write(self, name, data):
    """Writes a small file into the run directory."""
    from etils import epath

    epath.Path(self._cfg.run_directory).joinpath(name).write_bytes(data)

  def _eta(self, step):
    if len(self._ends) < 2:
      return "-"
    each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
    return datetime.timedelta(seconds=round(each * max(0, self._cfg.steps - step)))

  def _summary(self, status):
    cfg = self._cfg
    losses = [row["learning/loss"] for row in _rows(self._metrics.path) if row.get("learning/loss") is not None]
    seconds = self._ledger.seconds()
    median = sorted(self._step_seconds)[len(self._step_seconds) // 2] if self._step_seconds else None
    tflops = self._device_tflops / median if median else None
    return {
        "run_name": cfg.run_name,
        "status": status,
        "first_step": self._done + 1,
        "last_step": self._last_step,
        "steps": self._steps,
        "skipped_steps": self._skipped,
        "loss_start": losses[0] if losses else None,
        "loss_end": losses[-1] if losses else None,
        "loss_uniform": math.log(cfg.vocab_size),
        **self._eval,
        "tokens": self._steps * self._tokens_per_step,
        "median_step_seconds": median,
        "tokens_per_second": self._tokens_per_step / median if median else None,
        "per_device_tflops_per_sec": tflops,
        "mfu": tflops / self._peak_tflops if tflops and self._peak_tflops else None,
        "wall_seconds": sum(seconds.values()),
        "seconds": seconds,
        "peak_host_bytes": peak_host_bytes(),
        "peak_device_bytes": peak_device_bytes(),
        **self._facts,
    }

  def _plot(self):
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, "training.png")
      try:
        plot(path, _rows(self._metrics.path), _rows(self._evals.path), self._cfg.run_name,
             math.log(self._cfg.vocab_size))
      except Exception as error:  # the run is done and well, whatever ails its picture
        self.note(f"note: no training.png: {error}")
        return
      with open(path, "rb") as file:
        self._write("training.png", file.read())


def _tag(name):
  """TensorBoard tag of a step's scalar."""
  name = "current_learning_rate" if name == "learning_rate" else name
  return name if "/" in name else f"learning/{name}"


def _json_line(row):
  """One JSON object; NaN and infinity, which JSON does not know, become null."""
  return (json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()})
          + "\n").encode()


def _number(value, form):
  return "-" if value is None else format(value, form)


def _rows(path):
  """The objects of a JSONL file, a torn last line left out."""
  with open(path, encoding="utf-8") as file:
    for line in file:
      with contextlib.suppress(ValueError):
        yield json.loads(line)


def _bar(steps, done):
  """A started progress bar that stays under the lines printed meanwhile, and goes when it is stopped."""
  from rich import console, progress

  bar = progress.Progress(
      progress.BarColumn(None), progress.TextColumn("{task.completed:.0f}/{task.total:.0f}"),
      progress.TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s  eta {task.fields[eta]}"),
      console=console.Console(), transient=True, expand=True, refresh_per_second=4)
  bar.add_task("", total=steps, completed=done, loss="-", speed="-", eta="-")
  bar.start()
  bar.console.show_cursor(True)  # a process that is killed cannot bring a hidden cursor back
  return bar


def peak_host_bytes():
  """Most memory that this process ever had in use."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes():
  """Most memory that a local device ever had in use; None where the platform does not say (CPU)."""
  if "jax" not in sys.modules:
    return None
  import jax

  peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
  return max((peak for peak in peaks if peak is not None), default=None)


def _duration(seconds):
  return f"{seconds:.1f} s" if seconds < 600 else str(datetime.timedelta(seconds=round(seconds)))


def _summary_lines(summary):
  """The summary as a few lines for people."""
  seconds, wall = summary["seconds"], summary["wall_seconds"]
  lines = [f"summary: {summary['steps']} steps, {summary['tokens']:,} tokens in {_duration(wall)}"]
  if summary["tokens_per_second"]:
    mfu = f", MFU {summary['mfu']:.1%}" if summary["mfu"] else ""
    lines[0] += f"; {summary['tokens_per_second']:,.0f} tokens/s at the median step{mfu}"
  if summary["loss_start"] is not None:
    evaluation = f", evaluation {summary['eval/loss']:.3f}" if "eval/loss" in summary else ""
    lines.append(f"  loss: {summary['loss_start']:.3f} -> {summary['loss_end']:.3f}{evaluation} "
                 f"(a uniform guess: {summary['loss_uniform']:.3f})")
  if summary["skipped_steps"]:
    lines.append(f"  skipped steps: {summary['skipped_steps']} (gradient not finite or too large)")
  shares = (f"{kind.replace('_', ' ')} {_duration(spent)} ({spent / wall:.0%})"
            for kind, spent in seconds.items() if spent >= 0.05)
  lines.append(f"  time: {', '.join(shares)}")
  memory = f"host {summary['peak_host_bytes'] / 2**30:.2f} GiB"
  if summary["peak_device_bytes"]:
    memory += f", device {summary['peak_device_bytes'] / 2**30:.2f} GiB"
  return [*lines, f"  peak memory: {memory}"]


# --- The plot ------------------------------------------------------------------------------------------------------


def plot(path, rows, evals, title, loss_uniform):
  """Draws loss (with evaluations, and the loss of a uniform guess where it is in range) and throughput over steps.

  rows and evals are the objects of metrics.jsonl and eval.jsonl. Needs matplotlib.
  """
  from matplotlib import figure

  rows = [row for row in rows if row.get("learning/loss") is not None]
  evals = [row for row in evals if row.get("eval/loss") is not None]
  steps, losses = [row["step"] for row in rows], [row["learning/loss"] for row in rows]
  timed = [row for row in rows if "perf/per_device_tokens_per_sec" in row]
  blue, orange, grey = "#1f5fa8", "#d9660f", "#8a8a8a"
  picture = figure.Figure(figsize=(8, 6), dpi=130, layout="constrained")
  top, bottom = picture.subplots(2, 1, sharex=True, height_ratios=(3, 1))
  picture.suptitle(title, fontweight="bold")

  window = max(1, len(losses) // 150)
  top.plot(steps, losses, color=blue, alpha=0.3 if window > 1 else 1.0, linewidth=1.2,
           label="training" if window == 1 else None)
  if window > 1:
    top.plot(steps, _smooth(losses, window), color=blue, linewidth=1.6, label=f"training, mean of {window} steps")
  if evals:
    top.plot([row["step"] for row in evals], [row["eval/loss"] for row in evals], "o-", color=orange, markersize=4,
             linewidth=1.0, label="evaluation")
    top.annotate(f"{evals[-1]['eval/loss']:.3f}", (evals[-1]["step"], evals[-1]["eval/loss"]), color=orange,
                 textcoords="offset points", xytext=(0, 7), ha="right")
  if losses and loss_uniform <= max(losses) * 1.1:
    top.axhline(loss_uniform, color=grey, linestyle="--", linewidth=1.0, label=f"uniform guess ({loss_uniform:.2f})")
  top.set_ylabel("loss (nats per token)")
  top.legend(frameon=False)

  speeds = [row["perf/per_device_tokens_per_sec"] for row in timed]
  bottom.plot([row["step"] for row in timed], speeds, color=blue, linewidth=1.0)
  bottom.set_ylim(0, 1.15 * max(speeds, default=1.0))
  bottom.set_ylabel("tokens/s per device")
  bottom.set_xlabel("step")
  bottom.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
  for axes in (top, bottom):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.01)
  picture.savefig(path)


def _smooth(values, window):
  """Mean of each value and up to window - 1 before it."""
  out, total = [], 0.0
  for i, value in enumerate(values):
    total += value - (values[i - window] if i >= window else 0.0)
    out.append(total / min(i + 1, window))
  return out
