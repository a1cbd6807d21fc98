# SPDX-License-Identifier: Apache-2.0
"""What can go wrong for a user, and the exit code each kind ends with (the table in README.md)."""

import contextlib
import os
import signal
import sys
import traceback

DONE, CONFIG, CHECKPOINT, STORAGE, NUMERICS, DOES_NOT_FIT = 0, 2, 3, 4, 5, 6
DATA, HANG, STOPPED, PEER_DIED = 65, 70, 75, 76


LAST_WORDS = []  # functions of (exit code, line) that are called before a process ends with an error


class RunError(Exception):
  """A failure explained in one line; the process ends with `exit_code`."""

  exit_code = 1


class ConfigError(RunError, ValueError):
  """A wrong key, value or usage. The message carries key, value, rule and a way out."""

  exit_code = CONFIG


class CheckpointError(RunError):
  """There should be a usable checkpoint and there is none."""

  exit_code = CHECKPOINT


class StorageError(RunError):
  """Writing keeps failing."""

  exit_code = STORAGE


class NumericsError(RunError):
  """Too many skipped steps in a row."""

  exit_code = NUMERICS


class DoesNotFit(RunError):
  """The run needs more device memory than there is."""

  exit_code = DOES_NOT_FIT


class DataError(RunError):
  """The data cannot be read or does not fit the run."""

  exit_code = DATA


class Stopped(RunError):
  """Ended by a signal after saving; running the same command again continues."""

  exit_code = STOPPED


class PeerDied(RunError):
  """Another process of the run has ended; running the same command again continues."""

  exit_code = PEER_DIED


@contextlib.contextmanager
def as_exit_codes():
  """Ends the process, where the block raises a RunError, with one line on stderr and that error's exit code.

  Anything else that is raised is our bug and keeps its traceback (exit code 1); Ctrl-C gives the shell's usual 130.
  """
  try:
    yield
    return
  except RunError as error:
    line, code, said = f"{type(error).__name__}: {error}", error.exit_code, ""
  except KeyboardInterrupt:
    line, code, said = "interrupted", 128 + signal.SIGINT, None
  except BrokenPipeError:  # `... | head` has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    line, code, said = "nobody reads its output", 128 + signal.SIGPIPE, None
  except Exception as error:
    line, code, said = f"{type(error).__name__}: {error}".splitlines()[0], 1, traceback.format_exc()
  for say in LAST_WORDS:  # one of them may know better why, and end the process
    say(code, line)
  if said is not None:
    print(said.rstrip() or line, file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # threads of a failed run (compilation, savers, collectives) must not hold the process
