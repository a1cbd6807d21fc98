# SPDX-License-Identifier: Apache-2.0
"""multihost_job.py against a gcloud of folders, and its startup script, run for real on machines that are folders."""

import http.server
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

import multihost_job

ROOT = Path(__file__).resolve().parent.parent
# gcloud and gsutil as far as they are used. A bucket is a folder; what the file `broken` has in a line "words|message"
# fails, with exit code 7, for a call that has these words; the file `old` makes gcloud one without `storage`.
TOOL = r"""#!/bin/bash
name=${0##*/}
printf -v call '%s\x1f' "$name" "$@"
printf '%s\x1e' "$call" >>"$FAKE/calls"
while IFS='|' read -r words message; do
  if [[ "$name $*" == *"$words"* ]]; then printf '%s\n' "$message" >&2; exit 7; fi
done <"$FAKE/broken"
case "$name $*" in
  'gcloud config get '*) cat "$FAKE/config/$3" 2>/dev/null; exit ;;
  *' queued-resources create '*) last=${!#}; exec cp "${last##*startup-script=}" "$FAKE/startup.sh" ;;
  *' queued-resources delete '*) exit ;;
  'gcloud storage '*) [ ! -e "$FAKE/old" ] || exit 2; shift ;;
  'gsutil -q '*) shift ;;
  *) echo "no such command: $name $*" >&2; exit 2 ;;
esac
verb=$1
shift
paths=("${@/#gs:\/\//$FAKE/buckets/}")
case $verb in
  --help) ;;
  cp)
    mkdir -p "$(dirname "${paths[1]}")" && cp "${paths[0]}" "${paths[1]}.part.$$" &&
      mv "${paths[1]}.part.$$" "${paths[1]}" ;;
  cat) cat ${paths[0]} ;;
esac
"""


class Handler(http.server.BaseHTTPRequestHandler):
  """The metadata server of machine /<slice>/<worker>, and Cloud Logging."""

  def do_GET(self):
    _, slice_id, worker, path = self.path.split("/", 3)
    job = self.server.job
    texts = {
        "attributes/tpu-env": f"ACCELERATOR_TYPE: 'v4-16'\nNODE_ID: 'n-{slice_id}'\nWORKER_ID: '{worker}'\n"
                              f"MEGASCALE_SLICE_ID: '{slice_id}'\nMEGASCALE_NUM_SLICES: '{job.slices}'\n",
        "attributes/worker-network-endpoints": ",".join(f"a:b:10.0.0.{i}" for i in range(job.workers)),
        "service-accounts/default/token": '{"access_token": "secret", "expires_in": 3599}',
        "id": f"4711{slice_id}{worker}", "zone": "projects/1/zones/us-central2-b",
    }  # fmt: skip
    text = texts.get(path.replace("computeMetadata/v1/instance/", ""))
    known = text and self.headers["Metadata-Flavor"] == "Google" and time.monotonic() > self.server.silent_until
    self.answer(200 if known else 404, text or "")

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    allowed = self.path == "/v2/entries:write" and self.headers["Authorization"] == "Bearer secret"
    if allowed and not self.server.forbidden:
      self.server.writes.append(body)
    self.answer(403 if self.server.forbidden or not allowed else 200, "{}")

  def answer(self, code, text):
    self.send_response(code)
    self.end_headers()
    self.wfile.write(text.encode())

  def log_message(self, *_):
    pass


class Job:
  """A place with fake tools, buckets and machines, and a job that was asked for there."""

  def __init__(self, place, server):
    self.place, self.server, self.slices, self.workers = place, server, 1, 1
    self.bin, self.code, self.temporary = place / "bin", place / "code", place / "tmp"
    for folder in (self.bin, self.code, self.temporary, place / "config/compute"):
      folder.mkdir(parents=True)
    (place / "broken").touch()
    (place / "config/project").write_text("my-project\n")
    (place / "config/compute/zone").write_text("us-central2-b\n")
    for name in ("gcloud", "gsutil"):
      (self.bin / name).write_text(TOOL)
      (self.bin / name).chmod(0o755)
    (self.code / "hello.txt").write_text("hello from the code\n")
    self.environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "FAKE": str(place), "TMPDIR": str(self.temporary),
                        "HOME": str(place)}  # fmt: skip
    self.scripts = []

  def flags(self, command, **flags):
    flags = {"BUCKET_NAME": "my-bucket", "RUN_NAME": "x", "NUM_SLICES": self.slices, "SCRIPT_DIR": self.code} | flags
    return [sys.executable, str(ROOT / "multihost_job.py"), f"--COMMAND={command}",
            *(f"--{name}={value}" for name, value in flags.items())]  # fmt: skip

  def ask(self, command, slices=1, workers=1, **flags):
    """Runs multihost_job.py."""
    self.slices, self.workers = slices, workers
    return subprocess.run(self.flags(command, **flags), env=self.environment, capture_output=True, text=True,
                          check=False, timeout=60)  # fmt: skip

  def accepted(self, command, slices=1, workers=1, **flags):
    result = self.ask(command, slices, workers, **flags)
    assert result.returncode == 0, result.stderr
    (self.place / "calls").unlink()
    return result.stdout

  def start(self, slice_id=0, worker=0, **variables):
    """Starts a machine: the startup script."""
    address = f"127.0.0.1:{self.server.server_address[1]}"
    environment = self.environment | {
        "GCE_METADATA_HOST": f"{address}/{slice_id}/{worker}", "LOGGING_URL": f"http://{address}",
        "MULTIHOST_JOB_FOLDER": str(self.machine(slice_id, worker)), "STREAM_SECONDS": "0.2", "PAUSE_SECONDS": "0.1",
        "PATIENCE_SECONDS": "2"} | variables  # fmt: skip
    script = subprocess.Popen(["bash", str(self.place / "startup.sh")], env=environment, cwd=self.place,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    self.scripts.append(script)
    return script

  def run(self, slice_id=0, worker=0, **variables):
    script = self.start(slice_id, worker, **variables)
    self.output = script.communicate(timeout=60)[0]
    return script.returncode

  def machine(self, slice_id=0, worker=0):
    return self.place / f"machine_{slice_id}_{worker}"

  def calls(self, *words):
    """The calls of the tools that have these words, as lists."""
    calls = [call.split("\x1f")[:-1] for call in (self.place / "calls").read_text().split("\x1e")[:-1]]
    return [call for call in calls if set(words) <= set(call)]

  def object(self, name):
    """Text of what the bucket has in the folder of the one job."""
    (path,) = (self.place / "buckets/my-bucket").glob(f"**/x/*/{name}")
    return path.read_text()

  def log(self, slice_id=0, worker=0):
    return self.object(f"main_command_log_slice_{slice_id}_worker_{worker}")

  def log_has(self, words):
    logs = (self.place / "buckets").glob("**/main_command_log_slice_0_worker_0")
    return any(words in log.read_text() for log in logs)

  def lines(self):
    """What Cloud Logging has."""
    return [entry["textPayload"] for write in self.server.writes for entry in write["entries"]]

  def kill(self, script):
    """The script alone, by kill -9."""
    script.kill()
    script.communicate(timeout=10)

  def close(self):
    for script in self.scripts:
      if script.poll() is None:
        script.kill()
      script.wait()
      script.stdout.close()
    for group in self.place.glob("machine_*/*/group"):
      try:
        os.killpg(int(group.read_text().split()[1]), signal.SIGKILL)
      except (OSError, IndexError):
        pass


@pytest.fixture
def job(tmp_path):
  for tool in ("curl", "flock", "setsid"):
    if not shutil.which(tool):
      pytest.skip(f"{tool} is not installed")
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    server.writes, server.forbidden, server.silent_until = [], False, 0.0
    job = server.job = Job(tmp_path, server)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield job
    job.close()
    server.shutdown()


def until(condition, seconds=20):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it does not come"
    time.sleep(0.02)


def refused(result, code, *words):
  """Whether all the words are on stderr, of a result that must be one line there and that exit code."""
  assert result.returncode == code, result.stdout + result.stderr
  assert result.stderr.count("\n") == 1 and result.stderr.startswith("multihost_job: ")
  return all(word in result.stderr for word in words)


# --- The request -----------------------------------------------------------------------------------------------------


def test_the_request_is_what_the_flags_say_and_the_links_are_printed(job):
  printed = job.ask("true", slices=3, TPU_TYPE="v5litepod-16", VERSION="v2-alpha-tpuv5-lite", ENABLE_AUTOCHECKPOINT="1",
                    BUCKET_DIR="/a/b/", CQR_EXTRA_ARGS="--reserved --labels='of=the team'")  # fmt: skip
  assert printed.returncode == 0, printed.stderr
  (create,) = job.calls("create")
  assert create[:-1] == [
      "gcloud", "alpha", "compute", "tpus", "queued-resources", "create", "x", "--accelerator-type=v5litepod-16",
      "--runtime-version=v2-alpha-tpuv5-lite", "--node-prefix=x", "--node-count=3", "--project=my-project",
      "--zone=us-central2-b", "--quiet", "--autocheckpoint-enabled", "--reserved", "--labels=of=the team"]  # fmt: skip
  assert create[-1].startswith(f"--metadata-from-file=startup-script={job.temporary}/")
  assert list(job.temporary.iterdir()) == []
  (folder,) = (job.place / "buckets/my-bucket/a/b/x").iterdir()
  assert [path.name for path in folder.iterdir()] == ["code.tar.gz"]
  assert f"https://console.cloud.google.com/storage/browser/my-bucket/a/b/x/{folder.name}?project=my-project" in (
      printed.stdout)
  assert "https://console.cloud.google.com/logs/query;query=logName%3D%22projects%2Fmy-project%2Flogs%2Fx_log%22?" in (
      printed.stdout)


def test_one_slice_is_a_node_and_not_a_group_of_nodes(job):
  job.ask("true", PROJECT="other-project", ZONE="us-east5-a")
  (create,) = job.calls("create")
  assert "--node-id=x" in create and not any(word.startswith("--node-count") for word in create)
  assert "--project=other-project" in create and "--zone=us-east5-a" in create and not job.calls("config")


def test_a_run_name_is_made_of_the_user_and_the_time_also_for_users_without_a_name(job):
  for user in ("Ada.L 1", "ж", ""):
    job.environment["LOGNAME"] = user
    flags = [flag for flag in job.flags("true") if "RUN_NAME" not in flag]
    subprocess.run(flags, env=job.environment, capture_output=True, check=True, timeout=60)
  names = [call[6] for call in job.calls("create")]
  assert len(names) == 3 and all(re.fullmatch(multihost_job.NAME, name) for name in names)
  assert re.fullmatch(r"adal1-\d{4}(-\d\d){5}", names[0])


@pytest.mark.parametrize("flags", [
    {"RUN_NAME": "x;reboot"}, {"RUN_NAME": "$(reboot)"}, {"RUN_NAME": "a b"}, {"RUN_NAME": "X"}, {"RUN_NAME": "x\n"},
    {"RUN_NAME": "-x"}, {"RUN_NAME": "x" * 62}, {"BUCKET_NAME": "b`c`"}, {"BUCKET_NAME": "my bucket"},
    {"BUCKET_NAME": "b/*"}, {"BUCKET_DIR": "a/../b"}, {"BUCKET_DIR": "a'b"}, {"BUCKET_DIR": "*"},
    {"BUCKET_DIR": "a//b"}, {"PROJECT": "p&&q"}, {"PROJECT": ""}, {"ZONE": "us|sh"}, {"TPU_TYPE": "v4-8 --x"},
    {"VERSION": "a>b"}, {"NUM_SLICES": "two"}, {"NUM_SLICES": "0"}, {"MAX_RESTARTS": "-1"},
    {"CQR_EXTRA_ARGS": "--labels='a"},
    {"SCRIPT_DIR": "/nowhere"}, {"DRY_RUN": "perhaps"}, {"COMAND": "x"}, {"COMMAND": " "}, {"COMMAND": "x" * 300_000},
])  # fmt: skip
def test_wrong_values_are_one_line_and_exit_code_2(flags):
  arguments = {"COMMAND": "true", "BUCKET_NAME": "my-bucket", "RUN_NAME": "x", "PROJECT": "my-project", "ZONE": "z",
               "DRY_RUN": "true"} | flags  # fmt: skip
  command = (f"--{name}={value}" for name, value in arguments.items())
  if "COMMAND" in flags and len(flags["COMMAND"]) > 100_000:  # longer than what one argument may have
    with pytest.raises(SystemExit) as error:
      multihost_job.main(list(command))
    assert error.value.code == 2
    return
  result = subprocess.run([sys.executable, str(ROOT / "multihost_job.py"), *command], capture_output=True, text=True,
                          check=False, timeout=60)  # fmt: skip
  assert refused(result, 2, *flags)


def test_without_gcloud_a_project_or_a_zone_it_is_one_line(job):
  (job.place / "config/project").unlink()
  assert refused(job.ask("true"), 2, "no PROJECT is given", "gcloud config set project")
  (job.bin / "gcloud").unlink()
  job.environment["PATH"] = str(job.bin)
  assert refused(job.ask("true"), 2, "gcloud is not there", "https://cloud.google.com/sdk/docs/install")
  assert refused(subprocess.run([sys.executable, str(ROOT / "multihost_job.py")], capture_output=True, text=True,
                                check=False), 2, "--COMMAND", "--BUCKET_NAME")  # fmt: skip


def test_a_dry_run_prints_the_commands_and_the_script_and_runs_nothing(job):
  command, place = "echo it's\nthe script", {"PROJECT": "my-project", "ZONE": "us-central2-b"}
  dry = job.ask(command, DRY_RUN="true", **place)
  without = job.ask(command, DRY_RUN="true").stdout.splitlines()
  assert without[:2] == ["+ gcloud config get project", "+ gcloud config get compute/zone"]
  assert dry.returncode == 0 and dry.stderr == ""
  assert not (job.place / "calls").exists() and list(job.temporary.iterdir()) == []
  job.ask(command, **place)
  printed, _, script = dry.stdout.partition("# startup.sh:\n")
  time_in = re.compile(r"\d{4}(-\d\d){5}")
  assert time_in.sub("", script) == time_in.sub("", (job.place / "startup.sh").read_text())
  copy, create = (shlex.split(line)[1:] for line in printed.splitlines() if line.startswith("+ "))
  assert copy[:3] == job.calls("cp")[0][:3] and time_in.sub("", copy[-1]) == time_in.sub("", job.calls("cp")[0][-1])
  assert create[:-1] == job.calls("create")[0][:-1]
  assert "# code.tar.gz: 1 files" in printed


def test_a_request_that_fails_shows_the_words_and_the_code_of_gcloud_and_leaves_nothing(job):
  for words, code in (("create", 7), ("storage cp", 4)):
    (job.place / "broken").write_text(f"{words}|ERROR: (gcloud) PERMISSION_DENIED: ask {words}\n")
    result = job.ask("true")
    assert result.returncode == code and f"PERMISSION_DENIED: ask {words}\n" in result.stderr
    assert "multihost_job: the " in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr
    assert list(job.temporary.iterdir()) == []
  assert len(job.calls("create")) == 1


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_request_that_is_stopped_leaves_nothing(job, number, code):
  (job.bin / "gcloud").write_text("#!/bin/bash\ntouch \"$FAKE/waiting\"\nexec sleep 60\n")
  process = subprocess.Popen(job.flags("true", PROJECT="my-project", ZONE="z"), env=job.environment, text=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
  until((job.place / "waiting").exists)
  assert len(list(job.temporary.iterdir())) == 1
  process.send_signal(number)
  assert process.communicate(timeout=20)[1] == "" and process.returncode == code
  assert list(job.temporary.iterdir()) == []


def test_the_code_is_what_git_knows_or_does_not_ignore_and_without_git_all_but_what_is_made(job, tmp_path):
  for name in ("a.py", "sub/b c.py", "ignored.log", ".venv/lib", "runs/x", "sub/__pycache__/b.pyc", "gone.py"):
    (job.code / name).parent.mkdir(exist_ok=True)
    (job.code / name).write_text(name)
  (job.code / "a.py").chmod(0o755)
  (job.code / "link").symlink_to("sub")
  (job.code / "broken").symlink_to("nowhere")
  plain = {"hello.txt", "a.py", "sub/b c.py", "link", "broken"}
  assert set(multihost_job.files_of(job.code)) == plain | {"ignored.log", "gone.py"}
  (job.code / ".gitignore").write_text("*.log\n.venv\nruns\n__pycache__\n")
  for command in (["init", "-q"], ["add", "gone.py", "a.py"]):
    subprocess.run(["git", *command], cwd=job.code, check=True)
  (job.code / "gone.py").unlink()
  multihost_job.bundle(job.code, tmp_path / "code.tar.gz")
  with tarfile.open(tmp_path / "code.tar.gz") as tar:
    members = {member.name: member for member in tar}
  assert set(members) == plain | {".gitignore"}
  assert members["a.py"].mode & 0o111 and members["link"].linkname == "sub" and members["a.py"].uid == 0
  assert set(multihost_job.files_of(job.code / "sub")) == {"b c.py"}
  subprocess.run(["git", "init", "-q", "inner"], cwd=job.code, check=True)
  (job.code / "inner/d.py").touch()
  assert set(multihost_job.files_of(job.code)) == plain | {".gitignore", "inner/d.py"}


def test_the_oldest_python_that_it_is_for_runs_it(tmp_path):
  found = [*(Path.home() / ".pyenv/versions").glob("3.9.*/bin/python3"), shutil.which("python3.9")]
  python = next((str(path) for path in found if path and not subprocess.call([path, "-c", ""], stderr=-3)), None)
  if python is None:
    pytest.skip("python3.9 is not installed")
  result = subprocess.run([python, str(ROOT / "multihost_job.py"), "--COMMAND=x", "--BUCKET_NAME=my-bucket",
                           "--DRY_RUN"], cwd=tmp_path, capture_output=True, text=True, check=False)  # fmt: skip
  assert result.returncode == 0 and result.stderr == "" and "COMMAND=x\n" in result.stdout


# --- The startup script ----------------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing_in_the_script(job):
  if not shutil.which("shellcheck"):
    pytest.skip("shellcheck is not installed")
  job.accepted("echo 'a b' $c")
  # SC2016: values are quoted on purpose. SC2317: it does not see the calls by trap.
  subprocess.run(["shellcheck", "--exclude=SC2016,SC2317", str(job.place / "startup.sh")], check=True)


@pytest.mark.parametrize("code", [0, 1, 65])
@pytest.mark.parametrize("tool", ["gcloud", "gsutil"])
def test_a_machine_runs_the_command_in_the_code_and_tells_its_exit_code(job, tool, code):
  (job.code / "run.sh").write_text('cat hello.txt; echo "$RUN_NAME $SLICE_ID $WORKER_ID" >&2; printf end; exit "$1"\n')
  job.accepted(f"bash run.sh {code}")
  if tool == "gsutil":
    (job.place / "old").touch()
  assert job.run() == code
  assert "\nhello from the code\nx 0 0\nend\n" in job.log()
  assert f"start 1 ended with exit code {code}" in job.log()
  status = f"slice 0 worker 0 exit_code {code} starts 1 ended "
  assert job.object("status/slice_0_worker_0").startswith(status)
  assert job.object("job_status").startswith(f"exit_code {code}\n{status}")
  assert job.calls("delete") == [["gcloud", "alpha", "compute", "tpus", "queued-resources", "delete", "x", "--force",
                                  "--quiet", "--project=my-project", "--zone=us-central2-b"]]  # fmt: skip
  assert {call[0] for call in job.calls("cp")} == {tool}
  assert job.calls()[-1][5:6] == ["delete"]  # all that is to be kept is in the bucket by then


def test_cloud_logging_gets_each_line_once_while_the_command_runs(job):
  job.accepted('for i in $(seq 300); do echo "line $i \\"é\\""; done; printf half; '
               'until [ -e "$FAKE/go" ]; do sleep 0.05; done; echo " and half"')  # fmt: skip
  script = job.start()
  until(lambda: 'line 300 "é"' in job.lines())
  time.sleep(0.5)
  assert script.poll() is None
  (job.place / "go").touch()
  script.communicate(timeout=30)
  assert [line for line in job.lines() if line.startswith("line")] == [f'line {i} "é"' for i in range(1, 301)]
  assert "half and half" in job.lines() and "the job has ended: exit_code 0" in job.lines()[-1]
  assert job.server.writes[0]["logName"] == "projects/my-project/logs/x_log"
  assert job.server.writes[0]["labels"] == {"slice": "0", "worker": "0", "run_name": "x"}
  assert job.server.writes[0]["resource"] == {
      "type": "gce_instance", "labels": {"instance_id": "471100", "zone": "us-central2-b"}}  # fmt: skip


def test_cloud_logging_that_refuses_costs_one_line(job):
  job.server.forbidden = True
  job.accepted("sleep 1")
  assert job.run() == 0
  assert job.log().count("Cloud Logging takes no lines: urllib.error.HTTPError: HTTP Error 403") == 1


def test_the_log_comes_to_the_bucket_while_the_command_runs(job):
  job.accepted("echo early; sleep 60")
  script = job.start(STREAM_SECONDS="0.02")
  until(lambda: job.log_has("early\n"))
  assert script.poll() is None


@pytest.mark.parametrize("command", [
    """printf '<%s>\\n' "it's" '$HOME' "a\\"b" `echo tick` \\\\ '!' \\; '*' 'né'""",
    "cat <<'END'\n$(reboot) `x` ${y} \\n \"quoted\" 'single'\n\n  indented\tEOF\nEND",
    "x=3\nfor i in 1 2; do\n  echo \"$((x * i))\" | tr 6 '6'\ndone # and a comment",
])  # fmt: skip
def test_a_command_arrives_as_it_is(job, command):
  expected = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
  job.accepted(command)
  assert job.run() == 0
  assert expected and f"on slice 0 worker 0\n{expected}" in job.log()


def counts(job, name="starts"):
  path = job.place / name
  return len(path.read_text().splitlines()) if path.exists() else 0


# What a command begins with to count its starts.
COUNT = 'echo >>"$FAKE/starts"; n=$(wc -l <"$FAKE/starts"); '


@pytest.mark.parametrize("ends, code", [
    ("75 0", 0), ("76 75 0", 0), ("75 1 0", 1), ("-9 0", 0), ("255 0", 255), ("70 0", 70), ("75 76 75 76 0", 76),
])  # fmt: skip
def test_an_interrupted_command_runs_again_a_bounded_number_of_times(job, ends, code):
  job.accepted(COUNT + f'set -- {ends}; shift $((n - 1)); if [ "$1" = -9 ]; then kill -9 $$; fi; exit "$1"',
               MAX_RESTARTS=3)  # fmt: skip
  assert job.run() == code
  expected = 4 if code == 76 else ends.split().index(str(code)) + 1
  assert counts(job) == expected
  assert job.object("job_status").startswith(f"exit_code {code}\nslice 0 worker 0 exit_code {code} starts {expected} ")
  assert len(job.calls("delete")) == 1


def test_what_a_command_leaves_running_is_gone_before_the_next_start(job):
  job.accepted(COUNT + 'if [ $n = 1 ]; then sleep 61 & echo $! >"$FAKE/left"; exit 75; fi; '
               'grep -s "^State:.[^XZ]" "/proc/$(cat "$FAKE/left")/status" && exit 1; exit 0')  # fmt: skip
  assert job.run() == 0 and counts(job) == 2


def test_a_script_killed_while_the_command_runs_goes_on_and_begins_nothing_twice_that_is_finished(job):
  job.accepted(COUNT + 'echo "start $n"; [ $n -gt 1 ] || { touch made; sleep 62 & echo $! >"$FAKE/left"; wait; }; '
               '[ -e made ] || exit 9')  # fmt: skip
  script = job.start()
  until((job.place / "left").exists)
  job.kill(script)
  left = Path("/proc", (job.place / "left").read_text().strip(), "status")

  def left_runs():
    return left.exists() and not re.search(r"^State:\s+[XZ]", left.read_text(), re.MULTILINE)

  assert left_runs()
  assert job.run() == 0, job.output
  assert not left_runs()
  assert counts(job) == 2 and "start 1\n" in job.log() and "start 2\n" in job.log()
  assert len([call for call in job.calls("cp") if call[3].endswith("code.tar.gz")]) == 1
  assert job.object("job_status").startswith("exit_code 0\nslice 0 worker 0 exit_code 0 starts 2 ")
  before = len(job.calls())
  assert job.run() == 0 and counts(job) == 2 and len(job.calls("delete")) == 1
  assert len(job.calls()) - before < 6


def test_a_script_killed_at_any_moment_ends_the_job_all_the_same(job):
  """The command takes three steps and remembers each, as training does; each may be done once only."""
  job.accepted('for i in 1 2 3; do [ -e "$FAKE/step$i" ] || { sleep 0.15; touch "$FAKE/step$i"; '
               'echo $i >>"$FAKE/steps"; }; done; echo >>"$FAKE/ends"; exit 3')  # fmt: skip
  moments = random.Random(1)
  for _ in range(6):
    script = job.start()
    time.sleep(moments.uniform(0.05, 1.2))
    if script.poll() is not None:
      break
    job.kill(script)
  assert job.run() == 3, job.output
  assert (job.place / "steps").read_text() == "1\n2\n3\n" and counts(job, "ends") >= 1
  assert job.object("job_status").startswith("exit_code 3\n") and job.calls("delete")


def test_a_machine_that_replaces_another_goes_on_with_what_the_bucket_knows(job):
  job.accepted(COUNT + 'echo "start $n"; [ $n -gt 1 ] || sleep 63; exit 5')
  script = job.start(STREAM_SECONDS="0.02")
  until(lambda: job.log_has("start 1\n"))
  job.kill(script)
  (group,) = job.machine().glob("*/group")
  os.killpg(int(group.read_text().split()[1]), signal.SIGKILL)
  shutil.rmtree(job.machine())
  assert job.run() == 5
  assert "start 1\n" in job.log() and "start 2\n" in job.log() and counts(job) == 2
  shutil.rmtree(job.machine())
  assert job.lines().count("start 1") == 1 and job.lines().count("start 2") == 1
  assert job.run() == 5 and counts(job) == 2  # it has ended: another machine only tells so again
  assert "start 2\n" in job.log()


def test_a_machine_that_goes_down_lets_the_command_save_and_goes_on_at_its_next_start(job):
  job.accepted(COUNT + "[ $n = 1 ] || exit 0; trap 'sleep 0.5; echo saved; exit 75' TERM; touch \"$FAKE/up\"; "
               'while :; do sleep 0.05; done')  # fmt: skip
  script = job.start()
  until((job.place / "up").exists)
  script.terminate()
  script.communicate(timeout=20)
  assert script.returncode == 75 and "saved\n" in job.log() and "stopped by a signal" in job.log()
  assert not list((job.place / "buckets").glob("**/status/*")) and not job.calls("delete")
  assert job.run() == 0 and counts(job) == 2 and len(job.calls("delete")) == 1


def test_a_second_script_on_one_machine_does_nothing(job):
  job.accepted(COUNT + "sleep 64")
  job.start()
  until((job.place / "starts").exists)
  assert job.run() == 1 and "is running on this machine already" in job.output
  assert counts(job) == 1


def test_a_metadata_server_that_comes_late_is_waited_for(job):
  job.accepted("true")
  job.server.silent_until = time.monotonic() + 1
  assert job.run() == 0 and "exit code 0" in job.log()


@pytest.mark.slow
def test_training_goes_on_from_its_checkpoint_after_the_machine_was_killed(job):
  """The trainer itself, from a copy of this folder."""
  from tiny import TINY

  job.environment |= {"MAXTEXT_VENV": sys.prefix, "JAX_PLATFORMS": "cpu"}
  keys = TINY | {"run_name": "r", "base_output_directory": job.place / "runs", "steps": 3000, "checkpoint_period": 300}
  train = ["python3", "MaxText/train.py", "configs/base.yml", *(f"{key}={value}" for key, value in keys.items())]
  job.accepted(shlex.join(train), SCRIPT_DIR=ROOT)
  script = job.start()
  until(lambda: any("saved step 300 " in log.read_text() for log in job.machine().glob("*/main_command_log*")), 200)
  job.kill(script)
  assert job.run() == 0, job.log()
  first, second = job.log().split("start 2 of the command")
  done = max(map(int, re.findall(r"saved step (\d+) ", first)))
  assert 300 <= done < 3000 and f"restored step {done} " in second and "saved step 3000 " in second


# --- Many machines ---------------------------------------------------------------------------------------------------

FOUR = [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_worker_0_of_slice_0_waits_for_all_and_deletes_once(job):
  job.accepted('[ "$SLICE_ID$WORKER_ID" != 11 ] || until [ -e "$FAKE/go" ]; do sleep 0.05; done', slices=2, workers=2)
  scripts = {who: job.start(*who) for who in FOUR}
  until(lambda: len(list((job.place / "buckets").glob("**/status/*_?"))) == 3)
  time.sleep(2.5)  # longer than the patience that there is after a failure
  assert scripts[0, 0].poll() is None and not job.calls("delete")
  assert scripts[0, 1].wait(10) == 0 and scripts[1, 0].wait(10) == 0
  (job.place / "go").touch()
  assert scripts[0, 0].wait(20) == 0 and len(job.calls("delete")) == 1
  status = job.object("job_status").splitlines()
  assert status[0] == "exit_code 0" and len(status) == 5 and status[-1].startswith("slice 1 worker 1 exit_code 0 ")
  assert all("start 1 ended" in job.log(*who) for who in FOUR)


def test_the_job_has_the_code_of_the_worker_that_failed_first_and_its_peers_are_not_started_again(job):
  job.accepted('echo >>"$FAKE/starts$SLICE_ID$WORKER_ID"; case $SLICE_ID$WORKER_ID in 00) exit 76;; '
               '10) exit 65;; esac; until compgen -G "$FAKE/buckets/my-bucket/x/*/status/slice_1_worker_0"; do '
               'sleep 0.05; done; [ $SLICE_ID = 0 ] && exit 1; kill -9 $$',
               slices=2, workers=2)  # fmt: skip
  scripts = {who: job.start(*who, PAUSE_SECONDS="1.5", PATIENCE_SECONDS="20") for who in FOUR}
  codes = {who: script.wait(30) for who, script in scripts.items()}
  assert codes == {(0, 0): 76, (0, 1): 1, (1, 0): 65, (1, 1): 137}
  status = job.object("job_status").splitlines()
  assert status[0] == "exit_code 65" and len(status) == 5 and len(job.calls("delete")) == 1
  assert [counts(job, f"starts{slice_id}{worker}") for slice_id, worker in FOUR] == [1, 1, 1, 1]
  assert "another worker has failed: no further start" in job.log(0, 0)


def test_a_failure_says_more_than_the_interruption_of_others_that_ended_before(job):
  job.accepted('[ "$WORKER_ID" = 1 ] || exit 76; until [ -e "$FAKE/go" ]; do sleep 0.05; done; exit 1',
               workers=2, MAX_RESTARTS=0)  # fmt: skip
  scripts = [job.start(0, worker, PATIENCE_SECONDS="20") for worker in (0, 1)]
  until(lambda: list((job.place / "buckets").glob("**/status/slice_0_worker_0")))
  (job.place / "go").touch()
  assert [script.wait(20) for script in scripts] == [76, 1]
  status = job.object("job_status").splitlines()
  assert status[0] == "exit_code 1" and status[1].startswith("slice 0 worker 0 exit_code 76 ")


def test_a_worker_that_does_not_end_is_not_waited_for_once_another_has_failed(job):
  job.accepted('[ "$WORKER_ID" = 0 ] || exit 3', workers=3)
  begin = time.monotonic()
  scripts = [job.start(0, worker) for worker in (0, 1)]
  assert [script.wait(20) for script in scripts] == [0, 3] and time.monotonic() - begin < 10
  status = job.object("job_status").splitlines()
  assert status[0] == "exit_code 3" and status[-1] == "1 workers have not ended" and len(job.calls("delete")) == 1


def test_a_job_whose_code_cannot_be_had_or_whose_status_cannot_be_written_is_deleted_too(job):
  job.accepted(COUNT, workers=2)
  (job.place / "broken").write_text("code.tar.gz|ERROR: 403\n")
  assert job.run(PAUSE_SECONDS="0.01") == 4 and counts(job) == 0
  assert "failed 60 times" in job.log() and "(ERROR: 403)" in job.log() and len(job.calls("delete")) == 1
  shutil.rmtree(job.machine())
  shutil.rmtree(next((job.place / "buckets").glob("**/status")))
  (job.place / "broken").write_text("/status/|ERROR: 403\n")
  assert job.run() == 0 and counts(job) == 1
  assert job.object("job_status").splitlines()[0] == "exit_code 76" and len(job.calls("delete")) == 2


def test_a_queued_resource_that_cannot_be_deleted_is_said_and_deleted_at_the_next_start(job):
  job.accepted(COUNT)
  (job.place / "broken").write_text("delete|ERROR: PERMISSION_DENIED tpu.queuedResources.delete\n")
  assert job.run(PAUSE_SECONDS="0.02") == 0
  assert "goes on to cost. Delete it by hand" in job.log() and "PERMISSION_DENIED" in job.log()
  (job.place / "broken").write_text("")
  assert job.run() == 0 and counts(job) == 1 and "delete" in job.calls()[-1]
