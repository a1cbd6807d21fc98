# SPDX-License-Identifier: Apache-2.0
"""How every entry script begins: in the Python that setup.sh prepared, activated or not, with its config read.

Standard library only, and no syntax newer than Python 3.8: the system's Python has to get through it.
"""

import contextlib
import glob
import importlib.util
import os
import signal
import sys
import time

OLDEST = (3, 11)
_GUARD = "MAXTEXT_STARTED_BY"
_STARTED = "MAXTEXT_STARTED_AT"  # process id and time


def ensure():
  """Goes on in this process if its Python has jax, else starts the same command, under the same process id, in one
  that has.

  In order: the environment MAXTEXT_VENV, `.venv` in this folder, the one that setup.sh recorded last for this user.
  Exits with code 2 and one line when there is none. Must run before anything else is imported.
  """
  if seconds_since_start() == 0.0:
    os.environ[_STARTED] = f"{os.getpid()} {time.time()}"
  started_by = os.environ.pop(_GUARD, None)
  jax = importlib.util.find_spec("jax")
  if sys.version_info >= OLDEST and jax is not None and jax.origin is not None:
    return
  if started_by is None:
    for environment in _environments():
      python = os.path.join(environment, "bin", "python")
      if os.access(python, os.X_OK) and glob.glob(os.path.join(environment, "lib", "python3*", "site-packages", "jax")):
        os.environ[_GUARD] = sys.executable
        sys.stdout.flush()
        os.execv(python, [python, *getattr(sys, "orig_argv", ["", *sys.argv])[1:]])
  if sys.version_info < OLDEST:
    problem = f"Python 3.11 or later is needed, {sys.executable} is {sys.version.split()[0]}"
  else:
    problem = f"jax is not installed for {sys.executable}"
  if os.environ.get("MAXTEXT_VENV"):
    problem += f", nor in MAXTEXT_VENV={os.environ['MAXTEXT_VENV']}"
  print(f"{problem}. Run: bash {_repository('setup.sh')}", file=sys.stderr)
  sys.exit(2)


def start(**options):
  """What every entry script does before it imports jax: ensure(), and the config of the command line: pyconfig.load()
  with these options.

  A wrong command line ends the process here, with one line and exit code 2.
  """
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load is no traceback
  ensure()
  from MaxText import errors, pyconfig, topology

  topology.select_platform()
  # Pages of 2 MiB: a step's arrays are mapped anew each time, and 4 KiB pages cost a tenth of the CPU time (measured).
  # glibc reads this at the start of a process only.
  if os.environ.get("JAX_PLATFORMS") == "cpu" and sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
  with errors.as_exit_codes(), contextlib.redirect_stdout(sys.stderr if options.get("reopen") else sys.stdout):
    cfg = pyconfig.load(sys.argv[1:], **options)
    topology.set_environment(cfg)
  return cfg  # where a run is reopened, standard output is for what is asked of it alone


def seconds_since_start():
  """Wall seconds since the command of this process began, also when it has gone on in another Python; 0.0 if unknown.

  The system's own record is no use: `bash -c "setup && train"` is one process.
  """
  process, _, start = os.environ.get(_STARTED, "").partition(" ")
  return max(time.time() - float(start), 0.0) if process == str(os.getpid()) else 0.0


def recorded():
  """The file in which setup.sh writes down the path of the environment it prepared last."""
  data = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
  return os.path.join(data, "maxtext", "venv")


def _environments():
  if os.environ.get("MAXTEXT_VENV"):
    yield os.environ["MAXTEXT_VENV"]
    return
  yield _repository(".venv")
  try:
    with open(recorded(), encoding="utf-8") as file:
      yield file.read().strip()
  except OSError:
    pass


def _repository(name):
  return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), name)
