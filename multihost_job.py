# SPDX-License-Identifier: Apache-2.0
"""Runs one job on new TPUs: asks for a queued resource whose machines run the command, and frees it when they are done.

  python3 multihost_job.py --COMMAND="bash setup.sh && python3 MaxText/train.py MaxText/configs/base.yml run_name=X" \
    --BUCKET_NAME=my-bucket [--RUN_NAME=X --NUM_SLICES=2 --TPU_TYPE=v4-8 --CQR_EXTRA_ARGS="--reserved" ...]

All flags: --help. --DRY_RUN prints each command and the startup script, and does nothing. For TPUs that exist already
there is multihost_runner.py. It needs Python and gcloud only, and ends as soon as the request is accepted. Then, on
each machine, the startup script (STARTUP below, bash)

  - downloads the code into an empty folder and runs the command there, as root, with SLICE_ID, WORKER_ID, RUN_NAME set
  - runs it again after an interruption: exit code 75 or 76, or death by a signal. A machine that restarts, or replaces
    another one, does so too, and goes on with what the bucket knows; what has ended is not begun again
  - sends its log to Cloud Logging every 10 s, and to the bucket every minute and at the end, then its exit code
  - deletes the queued resource (worker 0 of slice 0) once all have ended, or 10 minutes after one of them failed. What
    the job came to is in job_status in the bucket: the exit code of the worker that failed first, and a line a worker

In the bucket, in BUCKET_DIR/RUN_NAME/<time of the request>: code.tar.gz, main_command_log_slice_*_worker_*, status/,
job_status. The TPUs' service account needs to write there, to write logs and to delete queued resources: the roles
Storage Object Admin, Logs Writer, TPU Admin.

Exit codes: 0 accepted, 2 wrong usage, 4 the upload failed, else that of `gcloud ... create`.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.abspath(__file__))

import argparse
import getpass
import inspect
import re
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
import urllib.parse

NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
# Flag: what its value has to look like, and how to say so.
RULES = {
    "RUN_NAME": (NAME, "1 to 63 lowercase letters, digits and dashes, a letter first and no dash last"),
    "PROJECT": (r"([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]", "a project's ID: gcloud projects list"),
    "ZONE": (NAME, "a zone such as us-central2-b"),
    "TPU_TYPE": (NAME, "an accelerator type such as v4-8 or v5litepod-16"),
    "VERSION": (r"[a-z][-a-z0-9.]{0,126}", "a TPU runtime version such as tpu-ubuntu2204-base"),
    "BUCKET_NAME": (r"[a-z0-9][-a-z0-9._]{1,220}[a-z0-9]", "a bucket's name: gcloud storage buckets list"),
    "BUCKET_DIR": (r"([\w=+-][\w.=+-]*(/[\w=+-][\w.=+-]*)*)?", "a folder such as a/b of letters, digits, . _ - = +"),
}
LEFT_BEHIND = re.compile(r"\.git|\.venv.*|runs|__pycache__|\.\w+_cache|.*\.egg-info")  # where there is no git to ask
METADATA_LIMIT = 256 * 1024  # bytes of one value (Compute Engine, "Metadata size limitations")


def stream(log, offset, metadata, log_name, slice_id, worker_id, run_name):
  """Sends the whole lines of the file `log` behind the position that the file `offset` holds to Cloud Logging.

  It runs on the TPU machines, as a program of its own. Logging agents call this API too; they would first have to be
  installed on each machine, at each start. https://cloud.google.com/logging/docs/reference/v2/rest/v2/entries/write
  """
  import json
  import os
  import urllib.request

  def ask(path):
    request = urllib.request.Request(f"{metadata}/{path}", headers={"Metadata-Flavor": "Google"})
    return urllib.request.urlopen(request, timeout=30).read().decode()

  begin = int(open(offset).read()) if os.path.exists(offset) else 0
  if begin >= os.path.getsize(log):
    return
  token = json.loads(ask("service-accounts/default/token"))["access_token"]
  instance = {"instance_id": ask("id"), "zone": ask("zone").rpartition("/")[2]}
  with open(log, "rb") as file:
    file.seek(begin)
    while True:
      lines = file.readlines(200_000)
      if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
      if not lines:
        return
      texts = [line.decode(errors="replace").rstrip()[:60_000] for line in lines]  # an entry has at most 256 KB
      entries = {
        "logName": log_name,
        "resource": {"type": "gce_instance", "labels": instance},
        "labels": {"slice": slice_id, "worker": worker_id, "run_name": run_name},
        "entries": [{"textPayload": text} for text in texts if text],
      }
      request = urllib.request.Request(
        os.environ.get("LOGGING_URL", "https://logging.googleapis.com") + "/v2/entries:write",
        json.dumps(entries).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
      )
      if entries["entries"]:
        urllib.request.urlopen(request, timeout=30).read()
      begin += sum(map(len, lines))
      with open(offset + ".part", "w") as position:
        position.write(str(begin))
      os.replace(offset + ".part", offset)


# What each machine runs at each start, behind lines NAME=value that startup_script() writes.
STARTUP = r"""
set -u -o pipefail
export HOME="${HOME:-/root}" # a startup script has none, and pip wants one
export RUN_NAME SLICE_ID='' WORKER_ID=''
metadata=http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance
stream_seconds=${STREAM_SECONDS:-10}
pause_seconds=${PAUSE_SECONDS:-10}
patience_seconds=${PATIENCE_SECONDS:-600}
boot=$(cat /proc/sys/kernel/random/boot_id)
log=/dev/null group='' shipping=''

folder=${MULTIHOST_JOB_FOLDER:-/var/lib/multihost_job}/$JOB
mkdir -p "$folder" && cd "$folder" || exit 4
exec 9>lock
flock --nonblock 9 || { echo "multihost_job: $JOB is running on this machine already"; exit 1; }

say() { printf '%s multihost_job: %s\n' "$(date -u +%FT%TZ)" "$*" | tee -a "$log"; }

try() { # times, command: again after a pause, and what it said at last
  local times=$1 said i
  shift
  for ((i = 1; ; i++)); do
    said=$("$@" 2>&1 9>&-) && return
    if ((i == times)); then
      say "failed $times times: $* (${said//$'\n'/ })"
      return 1
    fi
    sleep "$pause_seconds" 9>&-
  done
}

# --- Who this machine is ----------------------------------------------------------------------------------------------

attribute() { curl --silent --fail --max-time 10 --header 'Metadata-Flavor: Google' "$metadata/attributes/$1"; }
fact() { sed -n "s/^$1: *'\{0,1\}\([^']*\)'\{0,1\} *$/\1/p" <<<"$tpu_env"; }

for ((i = 1; ; i++)); do # the attributes may come a while after the machine
  if tpu_env=$(attribute tpu-env) && endpoints=$(attribute worker-network-endpoints); then
    WORKER_ID=$(fact WORKER_ID)
    SLICE_ID=0
    [ "$NUM_SLICES" = 1 ] || SLICE_ID=$(fact MEGASCALE_SLICE_ID)
    [[ $WORKER_ID =~ ^[0-9]+$ && $SLICE_ID =~ ^[0-9]+$ ]] && break
  fi
  if ((i == 60)); then
    say "the metadata server does not tell which worker this is: $metadata/attributes/tpu-env"
    exit 4
  fi
  sleep "$pause_seconds" 9>&-
done
commas=${endpoints//[^,]/}
workers=$((NUM_SLICES * (${#commas} + 1)))
me=slice_${SLICE_ID}_worker_$WORKER_ID
log=main_command_log_$me

# --- Logs and status --------------------------------------------------------------------------------------------------

storage=(gsutil -q)
if command -v gcloud >/dev/null && gcloud storage --help >/dev/null 2>&1 9>&-; then storage=(gcloud storage); fi

stream() {
  local said
  said=$(python3 -c "$STREAM" "$log" streamed "$metadata" "projects/$PROJECT/logs/${RUN_NAME}_log" \
    "$SLICE_ID" "$WORKER_ID" "$RUN_NAME" 2>&1) && return
  [ -e stream_failed ] || say "Cloud Logging takes no lines: ${said##*$'\n'}"
  touch stream_failed
}

ship_forever() { # until the script is gone, however it went; a signal ends it between two rounds
  local rounds=0
  trap exit TERM
  while sleep "$stream_seconds" & wait $! && kill -0 $$; do
    stream
    ((++rounds % 6)) || "${storage[@]}" cp "$log" "$BUCKET_PATH/$log"
  done
}

stop_shipping() {
  [ -z "$shipping" ] || { kill "$shipping" && wait "$shipping"; } 2>/dev/null
  shipping=''
}

ship() {
  stream 9>&-
  try 3 "${storage[@]}" cp "$log" "$BUCKET_PATH/$log"
}

statuses() { # a line of each worker that has ended, the first to end first
  { "${storage[@]}" cat "$BUCKET_PATH/status/*" 2>/dev/null; cat status 2>/dev/null; } 9>&- | sort -u | sort -s -k 10
}

failed() { [[ $(statuses) =~ exit_code\ [1-9] ]]; }

# --- The command ------------------------------------------------------------------------------------------------------

unpack() {
  [ ! -d code ] || return 0
  rm -rf code.part && mkdir code.part &&
    try 60 "${storage[@]}" cp "$BUCKET_PATH/code.tar.gz" code.tar.gz &&
    try 1 tar -xzf code.tar.gz -C code.part && rm code.tar.gz && mv code.part code
}

kill_group() { # what the command has started, also before a script that was killed was started again
  local of_boot='' old=''
  [ -s group ] && read -r of_boot old <group
  if [ "$of_boot" = "$boot" ] && [ -n "$old" ]; then kill -KILL -- "-$old" 2>/dev/null; fi
  rm -f group
}

interrupted() { [ "$1" = 75 ] || [ "$1" = 76 ] || { [ "$1" -gt 128 ] && [ "$1" -le 192 ]; }; }

run() { # the command, again after interruptions; sets code and starts
  local restarts=0 begin
  while :; do
    starts=$(($(cat starts 2>/dev/null) + 1))
    echo "$starts" >starts
    say "start $starts of the command on slice $SLICE_ID worker $WORKER_ID"
    begin=$SECONDS
    (cd code && exec setsid bash -c "$COMMAND" </dev/null) >>"$log" 2>&1 9>&- &
    group=$!
    echo "$boot $group" >group
    wait "$group"
    code=$?
    kill_group
    group=''
    [ -z "$(tail -c 1 "$log")" ] || echo >>"$log"
    say "start $starts ended with exit code $code after $((SECONDS - begin)) s"
    interrupted "$code" || return
    ((SECONDS - begin < 3600)) || restarts=0
    if ((++restarts > MAX_RESTARTS)); then
      say "interrupted $restarts times in a row, each within an hour: no further start"
      return
    fi
    sleep "$pause_seconds" 9>&- # time for the status of a worker that failed
    if failed; then
      say "another worker has failed: no further start"
      return
    fi
  done
}

stop() { # the machine goes down: the command has time to save, and the next start of the machine goes on
  trap '' TERM INT HUP
  say "stopped by a signal"
  local i
  if [ -n "$group" ]; then
    kill -TERM -- "-$group" 2>/dev/null
    for ((i = 0; i < 300; i++)); do
      kill -0 -- "-$group" 2>/dev/null || break
      sleep 0.1 9>&-
    done
    kill_group
  fi
  stop_shipping
  ship
  exit 75
}

# --- The end of the job -----------------------------------------------------------------------------------------------

wait_for_all() { # sets all; one that fails, or a bucket that takes no status, limits the time for the others
  local deadline=''
  [ "$shipped" = 1 ] || deadline=$((SECONDS + patience_seconds))
  while :; do
    all=$(statuses)
    (($(grep -c ^slice <<<"$all") < workers)) || return
    if [[ -z $deadline && $all =~ exit_code\ [1-9] ]]; then
      deadline=$((SECONDS + patience_seconds))
      say "a worker has failed, the others have $patience_seconds s to end: ${all//$'\n'/; }"
    fi
    if [[ -n $deadline ]] && ((SECONDS >= deadline)); then return; fi
    sleep "$pause_seconds" 9>&-
  done
}

report() { # into job_status: the exit code of the first failure that is no interruption, else of the first, and all
  local ended
  ended=$(grep -c ^slice <<<"$all")
  awk -v missing=$((workers - ended)) '
    { line[NR] = $0; cut = $6 == 75 || $6 == 76 || ($6 > 128 && $6 <= 192) }
    $6 != 0 && (!code || (was_cut && !cut)) { code = $6; was_cut = cut }
    END {
      print "exit_code", code ? code : missing ? 76 : 0
      for (i = 1; i <= NR; i++) print line[i]
      if (missing) print missing, "workers have not ended"
    }' <<<"$all" >job_status
  say "the job has ended: $(paste -s -d ';' job_status)"
}

# --- All together -----------------------------------------------------------------------------------------------------

if [ ! -e "$log" ]; then # this machine may replace another one
  "${storage[@]}" cp "$BUCKET_PATH/$log" log.part >/dev/null 2>&1 9>&- || : >log.part
  wc -c <log.part >streamed
  "${storage[@]}" cp "$BUCKET_PATH/status/$me" status.part >/dev/null 2>&1 9>&- && mv status.part status
  mv log.part "$log"
fi
ulimit -n "$(ulimit -Hn)" # systemd gives 1,024 files: too few for checkpoints in many pieces
kill_group
if [ ! -s status ]; then
  trap stop TERM INT HUP
  ship_forever >/dev/null 2>&1 9>&- &
  shipping=$!
  code=4 starts=0
  if unpack; then run; fi
  trap - TERM INT HUP
  printf 'slice %d worker %d exit_code %d starts %d ended %s\n' "$SLICE_ID" "$WORKER_ID" "$code" "$starts" \
    "$(date -u +%FT%T.%3NZ)" >status.part
  mv status.part status
  stop_shipping
fi
read -r _ _ _ _ _ code _ <status
shipped=1
ship || shipped=0
try 5 "${storage[@]}" cp status "$BUCKET_PATH/status/$me" || shipped=0 # behind the log: who reads this may delete all
if [ "$SLICE_ID$WORKER_ID" = 00 ] && [ ! -e deleted ]; then
  wait_for_all
  report
  ship
  try 5 "${storage[@]}" cp job_status "$BUCKET_PATH/job_status"
  if try 5 gcloud alpha compute tpus queued-resources delete "$RUN_NAME" --force --quiet --project="$PROJECT" \
    --zone="$ZONE"; then
    touch deleted
  else
    say "the queued resource $RUN_NAME is not deleted and goes on to cost. Delete it by hand"
    ship
  fi
fi
exit "$code"
"""


def fail(code, message):
  sys.stderr.write(f"multihost_job: {message}\n")
  sys.exit(code)


class Parser(argparse.ArgumentParser):
  def error(self, message):
    fail(2, f"{message}. All flags: python3 multihost_job.py --help")


def truth(text):
  if text.lower() not in ("true", "false", "1", "0"):
    raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false")
  return text.lower() in ("true", "1")


def parse(arguments):
  """The flags, those that name something checked. PROJECT and ZONE may still be None: read_config()."""
  parser = Parser(description=__doc__.partition("\n")[0], allow_abbrev=False)
  flag = {"nargs": "?", "const": True, "default": False, "type": truth, "metavar": "true"}
  add = parser.add_argument
  add("--COMMAND", required=True, help="what each machine runs in its copy of SCRIPT_DIR, by bash; it also installs")
  add("--BUCKET_NAME", required=True, help="bucket for the code, the logs and the status")
  add("--BUCKET_DIR", default="", help="folder in the bucket (none)")
  add("--RUN_NAME", help="name of the queued resource, its nodes and the log (user and time)")
  add("--NUM_SLICES", type=int, default=2, help="number of slices (2)")
  add("--TPU_TYPE", default="v4-8", help="accelerator type of each slice (v4-8)")
  add("--VERSION", default="tpu-ubuntu2204-base", help="TPU runtime version (tpu-ubuntu2204-base)")
  add("--PROJECT", help="project (gcloud config get project)")
  add("--ZONE", help="zone (gcloud config get compute/zone)")
  add("--SCRIPT_DIR", default=".", help="folder that is copied: what git knows or does not ignore there (this one)")
  add("--CQR_EXTRA_ARGS", default="", help="further flags of the request: --reserved, --best-effort, --spot, "
      "--service-account=..., quoted as for a shell")  # fmt: skip
  add("--ENABLE_AUTOCHECKPOINT", **flag, help="let the machines warn of their end (--autocheckpoint-enabled)")
  add("--MAX_RESTARTS", type=int, default=10, help="starts after interruptions in a row within an hour each (10)")
  add("--DRY_RUN", **flag, help="print each command and the startup script, and do nothing")
  args = parser.parse_args(arguments)
  args.BUCKET_NAME = re.sub("^gs://", "", args.BUCKET_NAME).rstrip("/")
  args.BUCKET_DIR = args.BUCKET_DIR.strip("/")
  if args.RUN_NAME is None:
    args.RUN_NAME = time.strftime(f"{user()}-%Y-%m-%d-%H-%M-%S")
  check(args)
  if args.NUM_SLICES < 1:
    parser.error(f"NUM_SLICES={args.NUM_SLICES} is less than 1")
  longest = 63 - len(f"-{args.NUM_SLICES - 1}") * (args.NUM_SLICES > 1)
  if len(args.RUN_NAME) > longest:
    parser.error(f"RUN_NAME={args.RUN_NAME} is longer than {longest}: each of {args.NUM_SLICES} slices adds a number")
  if args.MAX_RESTARTS < 0:
    parser.error(f"MAX_RESTARTS={args.MAX_RESTARTS} is less than 0")
  if not args.COMMAND.strip():
    parser.error("COMMAND is empty")
  if not os.path.isdir(args.SCRIPT_DIR):
    parser.error(f"SCRIPT_DIR={args.SCRIPT_DIR} is no folder")
  try:
    args.CQR_EXTRA_ARGS = shlex.split(args.CQR_EXTRA_ARGS)
  except ValueError as error:
    parser.error(f"CQR_EXTRA_ARGS={args.CQR_EXTRA_ARGS} cannot be split into flags: {error}")
  return args


def user():
  """The user's name as the beginning of a run name; containers may have users without one."""
  try:
    name = getpass.getuser()
  except (KeyError, OSError, ImportError):
    name = ""
  return re.sub(r"^[^a-z]+|[^a-z0-9]+", "", name.lower())[:30] or "job"


def check(args):
  for flag, (pattern, rule) in RULES.items():
    value = getattr(args, flag)
    if value is not None and not re.fullmatch(pattern, value, re.ASCII):
      fail(2, f"{flag}={value!r} is not {rule}")


def read_config(args):
  """Fills PROJECT and ZONE from gcloud's configuration."""
  for flag, key in (("PROJECT", "project"), ("ZONE", "compute/zone")):
    if getattr(args, flag) is None and args.DRY_RUN:
      print(f"+ gcloud config get {key}")
      setattr(args, flag, flag)
    elif getattr(args, flag) is None:
      said = subprocess.run(["gcloud", "config", "get", key], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                            text=True, check=False).stdout.split()  # fmt: skip
      if not said:
        fail(2, f"no {flag} is given, and gcloud has none: gcloud config set {key} ...")
      setattr(args, flag, said[-1])
      check(args)


def files_of(folder):
  """The files to copy, relative to the folder: what git knows or does not ignore; without git all but LEFT_BEHIND."""
  listed = b""
  if shutil.which("git"):
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=folder,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout  # fmt: skip
  names = set()
  for name in filter(None, map(os.fsdecode, listed.split(b"\0"))):
    path = os.path.join(folder, name)
    if os.path.isdir(path) and not os.path.islink(path):  # a submodule, or a repository inside this one
      names.update(os.path.join(name, inner) for inner in walk(path))
    elif os.path.lexists(path):
      names.add(name)
  return sorted(names or walk(folder))


def walk(folder):
  for root, folders, files in os.walk(folder):
    links = {name for name in folders if os.path.islink(os.path.join(root, name))}
    folders[:] = [name for name in folders if name not in links and not LEFT_BEHIND.fullmatch(name)]
    for name in {*files, *links}:
      if not LEFT_BEHIND.fullmatch(name):
        yield os.path.relpath(os.path.join(root, name), folder)


def bundle(folder, archive):
  """Packs files_of(folder), owned by nobody in particular."""

  def disown(info):
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info

  with tarfile.open(archive, "w:gz") as tar:
    for name in files_of(folder):
      tar.add(os.path.join(folder, name), name, recursive=False, filter=disown)


def startup_script(args, bucket_path):
  """What each machine runs at each start: STARTUP behind the values, each quoted."""
  values = {
      "JOB": "-".join(bucket_path.split("/")[-2:]),
      "RUN_NAME": args.RUN_NAME,
      "BUCKET_PATH": bucket_path,
      "PROJECT": args.PROJECT,
      "ZONE": args.ZONE,
      "NUM_SLICES": args.NUM_SLICES,
      "MAX_RESTARTS": args.MAX_RESTARTS,
      "COMMAND": args.COMMAND,
      "STREAM": "import sys\n\n" + inspect.getsource(stream) + "\nstream(*sys.argv[1:])\n",
  }
  lines = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())
  script = f"#!/usr/bin/env bash\n{lines}{STARTUP}"
  if len(script.encode(errors="surrogateescape")) > METADATA_LIMIT:
    fail(2, f"COMMAND has {len(args.COMMAND)} characters: the startup script exceeds the {METADATA_LIMIT} bytes of "
         "an instance's metadata. Put the command into a file in SCRIPT_DIR")  # fmt: skip
  return script


def create_command(args, script_file):
  nodes = [f"--node-id={args.RUN_NAME}"]
  if args.NUM_SLICES > 1:
    nodes = [f"--node-prefix={args.RUN_NAME}", f"--node-count={args.NUM_SLICES}"]
  return ["gcloud", "alpha", "compute", "tpus", "queued-resources", "create", args.RUN_NAME,
          f"--accelerator-type={args.TPU_TYPE}", f"--runtime-version={args.VERSION}", *nodes,
          f"--project={args.PROJECT}", f"--zone={args.ZONE}", "--quiet",
          *(["--autocheckpoint-enabled"] if args.ENABLE_AUTOCHECKPOINT else []), *args.CQR_EXTRA_ARGS,
          f"--metadata-from-file=startup-script={script_file}"]  # fmt: skip


def run(command, dry_run):
  """Runs the command in the user's sight, or only prints it; its exit code."""
  print("+", " ".join(map(shlex.quote, command)), flush=True)
  return 0 if dry_run else subprocess.run(command, check=False).returncode


def print_links(args, bucket_path):
  project = urllib.parse.quote(args.PROJECT)
  query = f'logName="projects/{args.PROJECT}/logs/{args.RUN_NAME}_log"'
  logs = "https://console.cloud.google.com/logs/query;query={}?project=" + project
  first = f'{query}\nlabels.slice="0"\nlabels.worker="0"'
  one_run = f"--project={args.PROJECT} --zone={args.ZONE}"
  print(f"""
Log of all workers:  {logs.format(urllib.parse.quote(query, safe=""))}
Log of one of them:  {logs.format(urllib.parse.quote(first, safe=""))}
Bucket:              https://console.cloud.google.com/storage/browser/{bucket_path[len("gs://"):]}?project={project}
Waiting or running:  gcloud alpha compute tpus queued-resources describe {args.RUN_NAME} {one_run}
What it came to:     gcloud storage cat {bucket_path}/job_status
End it at once:      gcloud alpha compute tpus queued-resources delete {args.RUN_NAME} --force {one_run}""")


def main(arguments):
  args = parse(arguments)
  if not args.DRY_RUN and not shutil.which("gcloud"):
    fail(2, "gcloud is not there. Install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install")
  read_config(args)
  # A folder for each request, for what an earlier one of this name left there must not count.
  bucket_path = "/".join(filter(None, [f"gs://{args.BUCKET_NAME}", args.BUCKET_DIR, args.RUN_NAME]))
  bucket_path += time.strftime("/%Y-%m-%d-%H-%M-%S", time.gmtime())
  script = startup_script(args, bucket_path)
  if args.DRY_RUN:
    print(f"# code.tar.gz: {len(files_of(args.SCRIPT_DIR))} files of {os.path.abspath(args.SCRIPT_DIR)}")
    run(["gcloud", "storage", "cp", "code.tar.gz", f"{bucket_path}/code.tar.gz"], dry_run=True)
    run(create_command(args, "startup.sh"), dry_run=True)
    print(f"# startup.sh:\n{script}", end="")
    return
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through the folder's end
  with tempfile.TemporaryDirectory(prefix="multihost_job-") as folder:
    archive, script_file = os.path.join(folder, "code.tar.gz"), os.path.join(folder, "startup.sh")
    try:
      bundle(args.SCRIPT_DIR, archive)
      with open(script_file, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(script)
    except OSError as error:
      fail(2, f"SCRIPT_DIR={args.SCRIPT_DIR} cannot be packed: {error}")
    if code := run(["gcloud", "storage", "cp", archive, f"{bucket_path}/code.tar.gz"], dry_run=False):
      fail(4, f"the code cannot be uploaded, gcloud ended with exit code {code}. It takes the right to write to "
           f"gs://{args.BUCKET_NAME}, and perhaps gcloud auth login")  # fmt: skip
    if code := run(create_command(args, script_file), dry_run=False):
      fail(code if code > 0 else 128 - code, f"the request failed, gcloud ended with exit code {code}. The code stays "
           f"in {bucket_path}")  # fmt: skip
  print_links(args, bucket_path)


if __name__ == "__main__":
  try:
    main(sys.argv[1:])
  except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
