# SPDX-License-Identifier: Apache-2.0
r"""Copies this code to many hosts, runs a command on all of them at once and watches it: for experiments.

  python3 multihost_runner.py --TPU_PREFIX=NAME --COMMAND="bash setup.sh && python3 MaxText/train.py ..."
  python3 multihost_runner.py --HOSTS=ann@10.0.0.1,10.0.0.2:2222 --COMMAND="..."     or --HOSTS=@file, a host per line

Hosts are the workers of the TPU slice NAME, or of slices NAME-0, NAME-1, ..., or any Linux that ssh reaches. Standard
output is that of worker 0; every worker has a log. When one fails, all are stopped and its exit code is this one's.
Ctrl-C, SIGTERM and the end of this process, however it comes, stop them too.

How: one ssh per worker, held open. A script at its other end waits until all workers are there, runs the command in a
session of its own, and ends all that this started: when it exits, when told to, and when this side falls silent.

Exit codes: the first failing worker's; 1 cannot reach a host, 2 usage, 4 cannot copy (its disk is full), 76 a host was
lost, 130 Ctrl-C, 143 SIGTERM. Standard library only, Python 3.9 or later.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.abspath(__file__))

import argparse
import concurrent.futures
import contextlib
import json
import queue
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time

LEFT_BEHIND = re.compile(r"\.git|\.venv.*|runs|__pycache__|\.\w+_cache|.*\.egg-info")  # where there is no git to ask
ATTEMPTS = 3  # of copying to a host
READY_SECONDS = 60  # for all hosts to answer, once copied
SILENCE_SECONDS = 20  # of this side, after which a host ends what it runs
LAST_LINES = 20
UNREACHABLE, USAGE, STORAGE, PEER_DIED = 1, 2, 4, 76
COORDINATOR_PORT = 8476
# ssh takes the first value it sees: these come after the user's.
SSH_OPTIONS = [
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3",
    "-o", "StrictHostKeyChecking=accept-new", "-o", "ControlPath=none", "-o", "ClearAllForwardings=yes",
    "-o", "LogLevel=ERROR",
]  # fmt: skip

TPU_VM = ["gcloud", "compute", "tpus", "tpu-vm"]
UNPACK = 'mkdir -p -- "$1" && tar -xzof - -C "$1"'

# What runs on a host. It speaks on standard error, each line begun with its id; the command has standard output.
# All that the command starts carries the id in its environment: that finds even what left the session.
WATCH = r"""
id=$1 grace=$2 silence=$3 folder=$4 command=$5
shift 5
say() { printf '%s %s\n' "$id" "$*" >&2; }
cd -- "$folder" || exit
exec 3<&0
trap '' HUP PIPE
say ready "${SSH_CONNECTION:-}"
while read -r -n 1 -t "$silence" word <&3 && [ "$word" = . ]; do :; done
[ "${word:-}" = g ] && read -r -t "$silence" coordinator <&3 || exit 1
[ -n "$coordinator" ] && set -- "$@" "JAX_COORDINATOR_ADDRESS=$coordinator"
(
  trap - HUP PIPE INT QUIT
  exec env "MULTIHOST_RUNNER=$id" "$@" setsid bash -c "$command"
) </dev/null 2>&1 3<&- &
child=$! code='' deadline='' heard=$SECONDS
started() { grep -lzxsF "MULTIHOST_RUNNER=$id" /proc/[0-9]*/environ | cut -d/ -f3; }
signal() { kill -s "$1" -- "-$child" $(started) 2>/dev/null; }
stop() {
  if [ -z "$deadline" ]; then
    deadline=$((SECONDS + grace))
    signal TERM
  fi
}
while kill -0 "$child" 2>/dev/null && [ -z "$(started)" ]; do sleep 0.05; done # before that no signal would find it
while :; do
  if [ -z "$code" ] && ! kill -0 "$child" 2>/dev/null; then
    wait "$child"
    code=$?
    say exit "$code"
    stop
  fi
  if [ -n "$code" ] && [ -z "$(started)" ]; then break; fi
  if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
    signal KILL
    [ "$SECONDS" -ge $((deadline + 10)) ] && break
  fi
  read -r -n 1 -t 0.2 word <&3
  status=$?
  if [ -n "$word" ]; then heard=$SECONDS; fi
  case $word in t) stop ;; k) stop; deadline=$SECONDS ;; esac
  if [ "$status" != 0 ] && [ "$status" -le 128 ]; then # no timeout: the other end is gone
    stop
    sleep 0.2
  fi
  [ $((SECONDS - heard)) -ge "$silence" ] && stop
done
"""


class Failure(Exception):
  """The end of the run, in one line, with the exit code."""

  def __init__(self, code, message):
    super().__init__(message)
    self.code = code


class Worker:
  """A host: `ssh` is the command line that reaches it, up to what is to be run there."""

  def __init__(self, slice_number, number, ssh):
    self.slice_number, self.number, self.ssh = slice_number, number, ssh
    self.name = f"slice {slice_number} worker {number} ({ssh[-1]})"
    self.log = f"output_slice_{slice_number:04d}_worker_{number:04d}.txt"
    self.process = self.code = self.address = None
    self.remarks = []  # what ssh, or a shell before the script, said

  def launch(self, script, arguments, **streams):
    # A session of its own: Ctrl-C must not reach ssh before the host has been told to stop.
    command = self.command(script, arguments)
    self.process = subprocess.Popen(command, bufsize=0, start_new_session=True, stderr=subprocess.PIPE, **streams)

  def command(self, script, arguments):
    return [*self.ssh, shlex.join(["exec", "bash", "-c", script, "bash", *map(str, arguments)])]

  def send(self, message):
    with contextlib.suppress(OSError):  # it is gone, of which its thread tells
      self.process.stdin.write(message)

  def reason(self):
    return f" ({self.remarks[-1]})" if self.remarks else ""


def say(message):
  print(f"runner: {message}", file=sys.stderr, flush=True)


# --- Command line ----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
  def error(self, message):
    raise Failure(USAGE, f"{message}. All flags: python3 multihost_runner.py --help")


def parse(argv):
  """The flags; raises Failure with one line."""
  parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
  switch = {"type": boolean, "nargs": "?", "const": True, "default": False, "metavar": "true|false"}
  tpu_name = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
  parser.add_argument("--TPU_PREFIX", type=named(tpu_name), help="name of a TPU slice, or what its slices are called "
                      "before -0, -1, ...")
  parser.add_argument("--HOSTS", help="a,b,c (each [user@]host[:port]), or @file with one on each line")
  parser.add_argument("--COMMAND", required=True, help="what bash runs on every host, in the copied folder")
  parser.add_argument("--PROJECT", type=named(r"[a-z][-a-z0-9.:]*"), help="default: as gcloud is configured")
  parser.add_argument("--ZONE", type=named(tpu_name), help="default: as gcloud is configured")
  parser.add_argument("--SCRIPT_DIR", default=os.getcwd(), help="the folder to copy (default: this one)")
  parser.add_argument("--RUN_NAME", type=named(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,127}"), help="what the folder is called "
                      "that is made in each host's home (default: the time)")
  parser.add_argument("--USE_EXISTING_FOLDER", **switch, help="do not copy: the hosts have the folder RUN_NAME")
  parser.add_argument("--INTERNAL_IP", **switch, help="reach TPUs by their internal addresses")
  parser.add_argument("--SSH_OPTIONS", type=shlex.split, default=[], help="more for ssh, such as '-i key -o Port=2222'")
  parser.add_argument("--LOG_DIR", help="where logs go (default: runs/RUN_NAME)")
  parser.add_argument("--GRACE_SECONDS", type=int, default=15, help="between SIGTERM and SIGKILL (default: 15)")
  parser.add_argument("--DRY_RUN", **switch, help="print every command and run none")
  args = parser.parse_args(argv)
  if bool(args.HOSTS) == bool(args.TPU_PREFIX):
    parser.error("give one of --HOSTS and --TPU_PREFIX")
  if not args.COMMAND.strip() or "\0" in args.COMMAND:
    parser.error("--COMMAND is empty")
  if args.USE_EXISTING_FOLDER and not args.RUN_NAME:
    parser.error("--USE_EXISTING_FOLDER needs the --RUN_NAME that made the folder")
  if not os.path.isdir(args.SCRIPT_DIR):
    parser.error(f"--SCRIPT_DIR={args.SCRIPT_DIR} is not a folder")
  if args.GRACE_SECONDS < 0:
    parser.error(f"--GRACE_SECONDS={args.GRACE_SECONDS} is negative")
  if not args.DRY_RUN and not shutil.which("ssh"):
    parser.error("ssh is not installed")
  args.RUN_NAME = args.RUN_NAME or time.strftime("%Y-%m-%d-%H-%M-%S")
  args.LOG_DIR = args.LOG_DIR or os.path.join("runs", args.RUN_NAME)
  return args


def named(rule):
  def check(text):
    if not re.fullmatch(rule, text):
      raise argparse.ArgumentTypeError(f"{text!r} does not match {rule}")
    return text

  return check


def boolean(text):
  if text.lower() not in ("true", "false"):
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
  return text.lower() == "true"


# --- Hosts -----------------------------------------------------------------------------------------------------------


def plain_hosts(args):
  """Workers of slice 0, in the order given."""
  if args.HOSTS.startswith("@"):
    try:
      with open(args.HOSTS[1:], encoding="utf-8") as file:
        hosts = [line.split("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
      raise Failure(USAGE, f"--HOSTS={args.HOSTS} cannot be read: {error}") from None
    hosts = [host for host in hosts if host]
  else:
    hosts = args.HOSTS.split(",")
  if not hosts:
    raise Failure(USAGE, f"--HOSTS={args.HOSTS} names no host")
  workers = []
  for number, host in enumerate(hosts):
    match = re.fullmatch(r"((?:[A-Za-z_][\w.-]*@)?(?:\w[\w.-]*|\[[0-9a-fA-F:.]+\]))(?::(\d{1,5}))?", host, re.ASCII)
    if not match:
      raise Failure(USAGE, f"--HOSTS: {host!r} is not [user@]host[:port]")
    if host in hosts[:number]:
      raise Failure(USAGE, f"--HOSTS names {host} twice")
    target = match[1].replace("[", "").replace("]", "")
    port = ["-p", match[2]] if match[2] else []
    workers.append(Worker(0, number, ["ssh", *port, *args.SSH_OPTIONS, *SSH_OPTIONS, target]))
    workers[-1].name = f"slice 0 worker {number} ({host})"
  return workers


def place(args):
  """What tells gcloud where, in every command."""
  flags = [("--project", args.PROJECT), ("--zone", args.ZONE)]
  return [f"{flag}={value}" for flag, value in flags if value] + ["--quiet"]


def list_command(args):
  return [*TPU_VM, "list", f"--filter=name~{args.TPU_PREFIX}", "--format=json", *place(args)]


def ssh_command(args, name, *more):
  """Of gcloud. It brings the user's key to the slice, and knows users (OS Login), keys and addresses. It does not run
  the command itself: on a lost connection it would start it again."""
  internal = ["--internal-ip"] if args.INTERNAL_IP else []
  return [*TPU_VM, "ssh", name, "--command=true", "--strict-host-key-checking=no", *more, *internal, *place(args)]


def gcloud(command):
  """Standard output of a command; raises Failure with the line that says why there is none."""
  try:
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
  except FileNotFoundError:
    raise Failure(USAGE, "--TPU_PREFIX needs gcloud, which is not installed: https://cloud.google.com/sdk/docs/install"
                  ) from None  # fmt: skip
  if result.returncode:
    lines = result.stderr.strip().splitlines() or ["no message"]
    line = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    raise Failure(UNREACHABLE, f"{shlex.join(command[:6])} failed: {line}")
  return result.stdout


def tpu_hosts(args):
  """Workers of the slice PREFIX, else of PREFIX-0, PREFIX-1, ..."""
  nodes = {node["name"].rpartition("/")[2]: node for node in json.loads(gcloud(list_command(args)) or "[]")}
  names = [args.TPU_PREFIX] if args.TPU_PREFIX in nodes else sorted(
      (name for name in nodes if re.fullmatch(re.escape(args.TPU_PREFIX) + "-[0-9]+", name)),
      key=lambda name: int(name.rpartition("-")[2]))  # fmt: skip
  if not names:
    raise Failure(USAGE, f"no TPU is called {args.TPU_PREFIX}, or {args.TPU_PREFIX}-0, -1, ...; there: "
                  f"{', '.join(sorted(nodes)) or 'none of that prefix'}. Is it another --ZONE or --PROJECT?")
  for number, name in enumerate(names):
    if name != args.TPU_PREFIX and name != f"{args.TPU_PREFIX}-{number}":
      raise Failure(USAGE, f"slice {args.TPU_PREFIX}-{number} is missing: there are {', '.join(names)}")
    if nodes[name].get("state") != "READY":
      raise Failure(UNREACHABLE, f"slice {name} is {nodes[name].get('state')}, not READY")

  def reach(name):
    gcloud(ssh_command(args, name, "--worker=0"))
    return gcloud(ssh_command(args, name, "--worker=all", "--dry-run")).splitlines()

  with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
    reached = list(pool.map(reach, names))
  workers = []
  for slice_number, name in enumerate(names):
    lines = [words for words in map(shlex.split, reached[slice_number]) if words[-2:] == ["--", "true"]]
    expected = len(nodes[name]["networkEndpoints"])
    if len(lines) != expected:
      raise Failure(UNREACHABLE, f"gcloud says how to reach {len(lines)} of the {expected} workers of {name}")
    for number, (*ssh, target, _, _) in enumerate(lines):
      workers.append(Worker(slice_number, number, [*ssh, *args.SSH_OPTIONS, *SSH_OPTIONS, target]))
  return workers


# --- Copying ---------------------------------------------------------------------------------------------------------


def walk(folder, top=""):
  """Names of the files below, without what stays behind."""
  with os.scandir(os.path.join(folder, top)) as entries:
    for entry in sorted(entries, key=lambda entry: entry.name):
      name = os.path.join(top, entry.name)
      if LEFT_BEHIND.fullmatch(entry.name):
        continue
      if entry.is_dir(follow_symlinks=False):
        yield from walk(folder, name)
      else:
        yield name


def list_files(folder):
  """What to copy: all that git tracks or does not ignore, or without git what walk() finds."""
  try:
    command = ["git", "-C", folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout
  except (OSError, subprocess.CalledProcessError):
    return list(walk(folder))
  files = []
  for name in dict.fromkeys(os.fsdecode(name) for name in listed.split(b"\0") if name):
    path = os.path.join(folder, name)
    if os.path.isdir(path) and not os.path.islink(path):  # a submodule, or a repository inside this one
      files += walk(folder, name.rstrip("/"))
    elif os.path.lexists(path):
      files.append(name)
  return files


def pack(folder, files, bundle):
  with tarfile.open(fileobj=bundle, mode="w:gz", compresslevel=1) as tar:
    for name in files:
      tar.add(os.path.join(folder, name), name, recursive=False)
  bundle.flush()


def copy(workers, bundle, folder, events):
  """Unpacks the file `bundle` into the folder on all hosts at once; raises Failure when one does not get it."""

  def start(worker):
    with open(bundle, "rb") as file:
      worker.launch(UNPACK, [folder], stdin=file, stdout=subprocess.DEVNULL)
    threading.Thread(target=wait, args=(worker,), daemon=True).start()

  def wait(worker):
    lines = worker.process.communicate()[1].decode(errors="replace").strip().splitlines() or ["no message"]
    line = next((line for line in lines if "No space left" in line), lines[-1])
    events.put(("copied", worker, line if worker.process.returncode else ""))

  attempts = dict.fromkeys(workers, 1)
  for worker in workers:
    start(worker)
  missing = set(workers)
  while missing:
    kind, worker, value = events.get()
    if kind == "signal":
      raise Failure(128 + value, f"stopped by {signal.Signals(value).name} while copying; nothing was started")
    if kind == "again":
      start(worker)
    elif not value:
      missing.remove(worker)
    elif "No space left" in value or attempts[worker] == ATTEMPTS:
      code = UNREACHABLE if worker.process.returncode == 255 else STORAGE
      raise Failure(code, f"cannot copy to {worker.name}: {value}. Nothing was started")
    else:
      seconds = 2 ** (attempts[worker] - 1)
      attempts[worker] += 1
      say(f"copying to {worker.name} failed ({value}); trying again in {seconds} s")
      timer = threading.Timer(seconds, events.put, [("again", worker, None)])
      timer.daemon = True
      timer.start()


# --- Running ---------------------------------------------------------------------------------------------------------


def run_arguments(args, workers, run_id, number):
  """What WATCH gets on host `number`. TPU workers find each other; plain hosts are told who they are."""
  jax = [] if args.TPU_PREFIX else [f"JAX_PROCESS_COUNT={len(workers)}", f"JAX_PROCESS_ID={number}"]
  return [run_id, args.GRACE_SECONDS, SILENCE_SECONDS, args.RUN_NAME, args.COMMAND, *jax]


def keep_output(worker, log, console, events):
  """Carries what the worker writes to its log, and to the console."""
  outputs = [log, console] if console else [log]
  with log:
    for chunk in iter(lambda: worker.process.stdout.read(65536), b""):
      try:
        for output in outputs:
          output.write(chunk)
          output.flush()
      except OSError as error:
        outputs = []  # go on reading, or the worker could not end
        events.put(("unwritable", worker, error))


def follow(worker, run_id, output, events):
  """Tells what the script on the host says, and when its connection ends."""
  for line in worker.process.stderr:
    text = line.decode(errors="replace").rstrip()
    begin, _, rest = text.partition(" ")
    if begin == run_id:
      word, _, value = rest.partition(" ")
      events.put((word, worker, value))
    elif text:
      worker.remarks.append(text)
  worker.process.wait()
  output.join()
  events.put(("gone", worker, ""))


def start(args, workers, events):
  """Connects all workers to their scripts, which then wait."""
  for number, worker in enumerate(workers):
    log = open(os.path.join(args.LOG_DIR, worker.log), "wb")
    run_id = secrets.token_hex(16)  # one for each worker: two names may turn out to be one machine
    worker.launch(WATCH, run_arguments(args, workers, run_id, number), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    console = sys.stdout.buffer if number == 0 else None
    output = threading.Thread(target=keep_output, args=(worker, log, console, events), daemon=True)
    output.start()
    threading.Thread(target=follow, args=(worker, run_id, output, events), daemon=True).start()


def watch(args, workers, events):
  """Starts the command once all are ready and stays until all have ended; returns the first failure, or None."""
  begun, going, stopping, failure = time.monotonic(), False, None, None
  alive = set(workers)
  suspect = None  # a worker that ended because another did, and until when that other may still tell
  beat, order = begun, b"."
  while alive:
    now = time.monotonic()
    if now >= beat:  # an order is repeated: bash's read may lose a character that comes as its time runs out
      beat = now + 1
      for worker in alive:
        worker.send(order)
    if suspect and not failure and now >= suspect[0]:
      failure = suspect[1]
    if not going and not failure and now >= begun + READY_SECONDS:
      silent = next(worker for worker in workers if worker.address is None)
      failure = Failure(UNREACHABLE, f"{silent.name} did not answer in {READY_SECONDS} s; nothing was started")
    if failure and not stopping:
      others = len(alive) - sum(worker.code is not None for worker in alive)
      say(f"{failure}" + (f"; stopping {others} workers" if going and others else ""))
      stopping, beat, order = now, now, b"t"
      continue
    if stopping and now >= stopping + args.GRACE_SECONDS + 15:
      break  # the hosts will see to it themselves
    try:
      kind, worker, value = events.get(timeout=0.2)
    except queue.Empty:
      continue
    if kind == "ready":
      worker.address = (value.split() + ["", "", "", ""])[2]
      if all(worker.address is not None for worker in workers) and not failure:
        going = True
        address = workers[0].address
        host = f"[{address}]" if ":" in address else address
        coordinator = "" if args.TPU_PREFIX else f"{host}:{COORDINATOR_PORT}"
        for worker in workers:
          worker.send(f"g{coordinator}\n".encode())
        say(f"started on {len(workers)} workers {time.monotonic() - begun:.1f} s after copying; logs: {args.LOG_DIR}")
    elif kind == "exit":
      worker.code = int(value)
      if worker.code and not failure:
        ended = Failure(worker.code, f"{worker.name} failed with exit code {worker.code}")
        ended.worker = worker
        if worker.code == PEER_DIED:
          suspect = suspect or (time.monotonic() + 1, ended)
        else:
          failure = ended
    elif kind == "gone":
      alive.remove(worker)
      if worker.code is None and going:
        lost = Failure(PEER_DIED, f"{worker.name}: the connection was lost{worker.reason()}. What runs there ends by "
                       f"itself within {SILENCE_SECONDS + args.GRACE_SECONDS} s")
        if failure:
          say(str(lost))
        failure = failure or lost
        failure.worker = getattr(failure, "worker", worker)
      elif worker.code is None and not failure:
        failure = Failure(UNREACHABLE, f"cannot start on {worker.name}{worker.reason()}; nothing was started")
    elif kind == "unwritable" and not failure:
      piped = isinstance(value, BrokenPipeError)
      failure = Failure(128 + signal.SIGPIPE if piped else STORAGE, f"cannot write what {worker.name} says: {value}")
    elif kind == "signal" and failure:
      beat, order = now, b"k"
    elif kind == "signal":
      failure = Failure(128 + value, f"stopped by {signal.Signals(value).name} (again: at once)")
  failure = failure or (suspect[1] if suspect else None)
  if failure and not stopping:  # it came with the end of the last worker
    say(str(failure))
  return failure


def print_last_lines(worker, path):
  with open(path, "rb") as log:
    log.seek(max(os.path.getsize(path) - 65536, 0))
    lines = log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
  say(f"the last lines of {worker.name}, all in {path}:")
  print(*(f"  {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)


def dry_run(args, workers, files):
  """Prints what would be run. Without gcloud there are no workers yet."""
  if args.TPU_PREFIX:
    print(f"+ {shlex.join(list_command(args))}")
    print("for each slice:")
    print(f"+ {shlex.join(ssh_command(args, args.TPU_PREFIX, '--worker=0'))}")
    print(f"+ {shlex.join(ssh_command(args, args.TPU_PREFIX, '--worker=all', '--dry-run'))}")
    print("for each worker, with the options, user and address that this prints:")
    workers = [Worker(0, 0, ["ssh", *args.SSH_OPTIONS, *SSH_OPTIONS, "ADDRESS"])]
  if not args.USE_EXISTING_FOLDER:
    print(f"+ git -C {shlex.quote(args.SCRIPT_DIR)} ls-files: {len(files)} files")
    for worker in workers:
      print(f"+ {shlex.join(worker.command(UNPACK, [args.RUN_NAME]))} < files.tar.gz")
  for number, worker in enumerate(workers):
    print(f"+ {shlex.join(worker.command('$WATCH', run_arguments(args, workers, 'ID', number)))}"
          f" > {os.path.join(args.LOG_DIR, worker.log)}")  # fmt: skip
  print(f"where $WATCH is:{WATCH}", end="")


def run(args):
  """Everything; raises Failure unless all workers ended well."""
  workers = plain_hosts(args) if args.HOSTS else []
  files = [] if args.USE_EXISTING_FOLDER else list_files(args.SCRIPT_DIR)
  if args.DRY_RUN:
    return dry_run(args, workers, files)
  workers = workers or tpu_hosts(args)
  os.makedirs(args.LOG_DIR, exist_ok=True)
  events = queue.SimpleQueue()
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: events.put(("signal", None, number)))
  try:
    if not args.USE_EXISTING_FOLDER:
      begun = time.monotonic()
      with tempfile.NamedTemporaryFile(suffix=".tar.gz") as bundle:
        pack(args.SCRIPT_DIR, files, bundle)
        say(f"copying {len(files)} files, {os.path.getsize(bundle.name) / 1e6:.1f} MB, to {len(workers)} workers")
        copy(workers, bundle.name, args.RUN_NAME, events)
      say(f"copied in {time.monotonic() - begun:.1f} s")
    start(args, workers, events)
    failure = watch(args, workers, events)
  finally:
    for worker in workers:
      if worker.process and worker.process.poll() is None:
        worker.process.kill()
  failed = getattr(failure, "worker", None)
  if failed and failed is not workers[0]:  # whose lines are on the console
    print_last_lines(failed, os.path.join(args.LOG_DIR, failed.log))
  return failure


def main():
  try:
    args = parse(sys.argv[1:])
    failure = run(args)
    if failure is None and not args.DRY_RUN:
      say("all workers ended well")
    return failure.code if failure else 0
  except Failure as failure:
    say(str(failure))
    return failure.code
  except OSError as error:
    say(f"{error.strerror or error}: {error.filename or 'this machine'}")
    return STORAGE
  except KeyboardInterrupt:
    return 128 + signal.SIGINT


if __name__ == "__main__":
  code = main()
  with contextlib.suppress(BrokenPipeError):
    sys.stdout.flush()
  os._exit(code)  # threads that still read from a lost host must not hold the process
