# SPDX-License-Identifier: Apache-2.0
"""Looking into a run: a profiler window, stack traces, errors of memory in plain words."""

import contextlib
import faulthandler
import os
import shutil
import signal
import tempfile

import jax

from MaxText import errors


@contextlib.contextmanager
def stack_traces(cfg):
  """Writes Python stacks every stack_trace_interval_seconds, and on a crash, while in the block.

  Through cloud-tpu-diagnostics: of all threads to stderr, or with stack_trace_to_cloud of the main thread to
  /tmp/debugging/stack_trace_TIME.txt, which the logging agent of a Cloud TPU VM carries to Cloud Logging. Takes the
  signal SIGUSR1. Raises ConfigError when the package is not installed.
  """
  if not cfg.collect_stack_trace:
    yield
    return
  try:
    from cloud_tpu_diagnostics import diagnostic
    from cloud_tpu_diagnostics.configuration import (
        debug_configuration,
        diagnostic_configuration,
        stack_trace_configuration,
    )
    from cloud_tpu_diagnostics.src import stack_trace
  except ImportError as error:
    raise errors.ConfigError("collect_stack_trace=true needs a package: pip install cloud-tpu-diagnostics") from error
  traces = stack_trace_configuration.StackTraceConfig(
      collect_stack_trace=True, stack_trace_to_cloud=cfg.stack_trace_to_cloud,
      stack_trace_interval_seconds=cfg.stack_trace_interval_seconds)
  collecting = diagnostic.diagnose(diagnostic_configuration.DiagnosticConfig(
      debug_config=debug_configuration.DebugConfig(stack_trace_config=traces)))
  collecting.__enter__()
  # The package answers the signal in Python, so never while the main thread hangs in native code. faulthandler answers
  # at once; it has to be unregistered first to take effect again.
  file = stack_trace._stack_trace_file_obj
  faulthandler.unregister(signal.SIGUSR1)
  faulthandler.register(signal.SIGUSR1, file=file, all_threads=not cfg.stack_trace_to_cloud)
  print(f"stack traces every {cfg.stack_trace_interval_seconds} s to {file.name}; they do not mean a crash", flush=True)
  try:
    yield
  finally:
    # Leaving `collecting` would wait for its thread, which may sleep for one more interval, ten minutes by default. The
    # thread is a daemon and knows only how to send SIGUSR1: being deaf to that is enough.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@contextlib.contextmanager
def memory_errors_explained(hint):
  """Turns XLA's out-of-memory error, of compiling or of running, into DoesNotFit with `hint` before XLA's own words."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise errors.DoesNotFit(f"{hint} XLA: {str(error).splitlines()[0]}") from error


class Profiler:
  """Records a profile of profiler_steps steps, after the first skip_first_n_steps_for_profiler of this start.

  It lands in DIRECTORY/plugins/profile/TIME/HOST.xplane.pb, where TensorBoard's profile plugin and xprof look. Use as a
  context manager: a window that the run's end cuts short is closed and kept. Process 0 records, the others do nothing.

  Args:
    cfg: profiler, skip_first_n_steps_for_profiler, profiler_steps.
    directory: tensorboard_directory, local or gs://.
    first_step: the step this start begins with.
  """

  def __init__(self, cfg, directory, first_step):
    self._directory, self._recording = directory, None
    self._start = self._stop = None
    if cfg.profiler and jax.process_index() == 0:
      self._start = first_step + cfg.skip_first_n_steps_for_profiler
      self._stop = self._start + cfg.profiler_steps

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.stop()

  @contextlib.contextmanager
  def step(self, step, pending=None):
    """To be around every step. `pending` (arrays) is waited for where the window begins and ends."""
    if step == self._stop:
      self.stop(pending)
    if step == self._start:
      self._begin(pending)
    if self._recording is None:
      yield
      return
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      yield

  def stop(self, pending=None):
    """Ends the window if it is open, and says where the profile is."""
    if self._recording is None:
      return
    jax.block_until_ready(pending)
    local, self._recording = self._recording, None
    jax.profiler.stop_trace()
    if local != self._directory:
      _move_tree(local, self._directory)
    print(f"profile: tensorboard --logdir {self._directory}, or xprof --logdir {self._directory}", flush=True)

  def _begin(self, pending):
    jax.block_until_ready(pending)
    local = tempfile.mkdtemp(prefix="maxtext-profile-") if "://" in self._directory else self._directory
    jax.profiler.start_trace(local)
    self._recording = local


def _move_tree(source, destination):
  """Moves the files under a local directory to a remote one."""
  from etils import epath

  for folder, _, names in os.walk(source):
    for name in names:
      path = os.path.join(folder, name)
      target = epath.Path(destination).joinpath(os.path.relpath(path, source))
      target.parent.mkdir(parents=True, exist_ok=True)
      with open(path, "rb") as file:
        target.write_bytes(file.read())
  shutil.rmtree(source)
