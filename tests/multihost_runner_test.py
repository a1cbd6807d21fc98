# SPDX-License-Identifier: Apache-2.0
"""multihost_runner.py against sshd servers, each in a network namespace: hosts with addresses, homes and disks of their
own on this machine. For TPUs a gcloud stands in that answers as the real one does, and records what it was asked."""

import json
import os
import pwd
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / "multihost_runner.py"
HOME = pwd.getpwuid(os.getuid()).pw_dir
USER = pwd.getpwuid(os.getuid()).pw_name
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
COUNT = 8


def command(*words, **options):
  return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True, **options)


class Lab:
  """A switch in a namespace of its own, in which the runner runs, and hosts 1 to COUNT around it."""

  def __init__(self, folder):
    self.folder, self.switch, self.servers = folder, f"mt{os.getpid()}", {}
    self.hosts = [f"10.77.0.{number}" for number in range(1, COUNT + 1)]
    for name in ("user", "host"):
      command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    command("ip", "netns", "add", self.switch)
    self.ip("link", "add", "bridge", "type", "bridge")
    self.ip("address", "add", "10.77.0.254/24", "dev", "bridge")
    self.ip("link", "set", "bridge", "up")
    for host in self.hosts:
      name, port = self.namespace(host), f"port{host.rpartition('.')[2]}"
      command("ip", "netns", "add", name)
      self.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
      self.ip("link", "set", port, "master", "bridge", "up")
      command("ip", "-n", name, "address", "add", f"{host}/24", "dev", "eth0")
      command("ip", "-n", name, "link", "set", "eth0", "up")
      command("ip", "-n", name, "link", "set", "lo", "up")
      self.home(host).mkdir()
      self.serve(host)

  def ip(self, *words):
    command("ip", "-n", self.switch, *words)

  def namespace(self, host):
    return f"{self.switch}h{host.rpartition('.')[2]}"

  def home(self, host):
    return self.folder / host

  def plug(self, host, state):
    self.ip("link", "set", f"port{host.rpartition('.')[2]}", state)

  def serve(self, host, disk=None):
    """Starts a host: its sshd, in whose mount namespace the home is the host's own, on a disk of so many bytes."""
    options = [f"HostKey={self.folder}/host", f"AuthorizedKeysFile={self.folder}/user.pub", "StrictModes=no",
               "UsePAM=no", "PidFile=none", "PermitRootLogin=yes", f"ListenAddress={host}"]  # fmt: skip
    mounts = [f"mount --bind {shlex.quote(str(self.home(host)))} {HOME}"]
    if disk:
      mounts.append(f"mount -t tmpfs -o size={disk} none {HOME}")
    sshd = shlex.join([SSHD, "-D", "-e", "-f", "/dev/null", *(word for option in options for word in ("-o", option))])
    script = " && ".join(["mkdir -p /run/sshd", *mounts, f"exec {sshd}"])
    with open(self.folder / f"{host}.log", "ab") as log:
      enter = ["ip", "netns", "exec", self.namespace(host)]
      self.servers[host] = subprocess.Popen([*enter, "sh", "-c", script], stderr=log)
    for _ in range(100):
      listening = command(*enter, "cat", "/proc/net/tcp").stdout
      if ":0016 00000000:0000 0A" in listening:
        return
      time.sleep(0.05)
    raise AssertionError((self.folder / f"{host}.log").read_text())

  def shut(self, host):
    self.servers[host].kill()
    self.servers[host].wait()

  def close(self):
    for server in self.servers.values():
      server.kill()
      server.wait()
    for name in [*map(self.namespace, self.hosts), self.switch]:
      for process in command("ip", "netns", "pids", name).stdout.split():  # sessions of a server that is gone
        subprocess.run(["kill", "-KILL", process], check=False)
      subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
  missing = [name for name in ("ip", "ssh", "ssh-keygen", "tar", "setsid") if not shutil.which(name)]
  if missing or not SSHD:
    pytest.skip(f"not installed: {', '.join(missing + ['sshd'] * (not SSHD))}")
  if subprocess.run(["unshare", "--net", "--mount", "true"], check=False, capture_output=True).returncode:
    pytest.skip("no network namespaces for this user")
  lab = Lab(tmp_path_factory.mktemp("lab"))
  yield lab
  lab.close()


@pytest.fixture
def project(tmp_path):
  folder = tmp_path / "project"
  folder.mkdir()
  (folder / "code.txt").write_text("code")
  return folder


class Run:
  """The runner on hosts of the lab. A token that COMMAND sees as $TOKEN marks all that runs for it."""

  def __init__(self, lab, project, tmp_path):
    self.lab, self.project, self.logs, self.token = lab, project, tmp_path / "logs", uuid.uuid4().hex
    self.environment = dict(os.environ)

  def arguments(self, hosts, text, *flags):
    target = [f"--HOSTS={','.join(hosts)}"] if hosts else []
    ssh = f"-F /dev/null -i {self.lab.folder}/user -o UserKnownHostsFile={self.lab.folder}/known_hosts"
    return ["ip", "netns", "exec", self.lab.switch, sys.executable, RUNNER, *target, f"--SCRIPT_DIR={self.project}",
            f"--LOG_DIR={self.logs}", f"--SSH_OPTIONS={ssh}", f"--COMMAND={text}", *flags]  # fmt: skip

  def start(self, hosts, text, *flags):
    text = f"export TOKEN={self.token}; {text}"
    return subprocess.Popen(self.arguments(hosts, text, *flags), env=self.environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

  def __call__(self, hosts, text, *flags):
    process = self.start(hosts, text, *flags)
    output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

  def running(self):
    """Process ids of all that carries the token in its environment or command line, on whatever host."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
      try:
        text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
      except OSError:
        continue
      if self.token.encode() in text:
        found.append(int(process.name))
    return found

  def nothing_runs(self, seconds=0.0):
    end = time.monotonic() + seconds
    while self.running() and time.monotonic() < end:
      time.sleep(0.1)
    return self.running() == []

  def log(self, number, slice_number=0):
    return (self.logs / f"output_slice_{slice_number:04d}_worker_{number:04d}.txt").read_text()


@pytest.fixture
def run(lab, project, tmp_path):
  run = Run(lab, project, tmp_path)
  yield run
  for process in run.running():
    os.kill(process, signal.SIGKILL)


@pytest.fixture
def bystanders(lab):
  """A process on each host that has nothing to do with any run."""
  processes = [subprocess.Popen(["ip", "netns", "exec", lab.namespace(host), "sleep", "600"]) for host in lab.hosts]
  yield processes
  for process in processes:
    process.kill()
    process.wait()


def on(number, then, otherwise="sleep 1000"):
  """A command that does something else on one worker."""
  return f'if [ "$JAX_PROCESS_ID" = {number} ]; then {then}; else {otherwise}; fi'


def read_until(stream, words):
  """Lines up to the one that has the words, and when it came."""
  lines = []
  for line in stream:
    lines.append(line)
    if words in line:
      return lines, time.time()
  raise AssertionError("".join(lines))


# --- Running ---------------------------------------------------------------------------------------------------------


def test_the_command_runs_on_every_host_in_the_copied_folder_and_every_worker_has_a_log(run, lab):
  result = run(lab.hosts[:3], "cat code.txt; echo \" $JAX_PROCESS_ID/$JAX_PROCESS_COUNT $JAX_COORDINATOR_ADDRESS\"")
  assert result.returncode == 0, result.stderr
  assert result.stdout == run.log(0) == "code 0/3 10.77.0.1:8476\n"
  assert [run.log(number) for number in (1, 2)] == ["code 1/3 10.77.0.1:8476\n", "code 2/3 10.77.0.1:8476\n"]
  assert run.nothing_runs()


def test_output_of_worker_0_streams_while_it_comes(run, lab):
  process = run.start(lab.hosts[:2], "echo one from $JAX_PROCESS_ID; sleep 2; echo two")
  assert process.stdout.readline() == "one from 0\n"
  first = time.monotonic()
  assert process.stdout.readline() == "two\n"
  assert time.monotonic() - first > 1.5
  assert process.communicate(timeout=30)[0] == "" and process.returncode == 0


def test_eight_hosts_start_together_within_5_s_of_the_end_of_copying(run, lab):
  process = run.start(lab.hosts, "date +%s.%N")
  _, copied = read_until(process.stderr, "copied in")
  process.communicate(timeout=60)
  assert process.returncode == 0
  starts = [float(run.log(number)) for number in range(COUNT)]
  assert max(starts) - copied < 5 and max(starts) - min(starts) < 1


def test_a_command_reaches_the_shell_unchanged(run, lab):
  text = """printf %s "$BASH_EXECUTION_STRING" # ' "two" $dollar ${x} `tick` \\ \\\\ ! * ~ & ; | < > % é \t\n\n# 'x"""
  result = run(lab.hosts[:1], text)
  assert result.returncode == 0, result.stderr
  assert result.stdout == f"export TOKEN={run.token}; {text}"


def test_what_a_command_leaves_in_the_background_ends_with_it(run, lab):
  result = run(lab.hosts[:2], "setsid sleep 1000 & (trap '' TERM; sleep 1000) & exit 0", "--GRACE_SECONDS=1")
  assert result.returncode == 0, result.stderr
  assert run.nothing_runs()


# --- Failures --------------------------------------------------------------------------------------------------------


def test_a_failure_is_noticed_in_2_s_named_shown_and_ends_all(run, lab):
  process = run.start(lab.hosts[:3], on(2, "seq 100; date +%s.%N; exit 37"))
  _, noticed = read_until(process.stderr, "slice 0 worker 2 (10.77.0.3) failed with exit code 37; stopping 2 workers")
  _, errors = process.communicate(timeout=30)
  assert process.returncode == 37
  lines = run.log(2).splitlines()
  assert noticed - float(lines[-1]) < 2
  assert "the last lines of slice 0 worker 2" in errors
  assert [line.strip() for line in errors.splitlines()[-20:]] == lines[-20:]
  assert run.nothing_runs()


@pytest.mark.slow
def test_20_of_20_failures_end_with_the_right_code_and_leave_nothing(run, lab, bystanders):
  generator = random.Random(20)
  for attempt in range(20):
    number, code = generator.randrange(COUNT), generator.choice([1, 2, 3, 65, 75, 137, 139, 143, 254, 255])
    fail = {137: "kill -KILL $$", 139: "kill -SEGV $$", 143: "kill -TERM $$"}.get(code, f"exit {code}")
    seconds = generator.random() * 2
    others = generator.choice(["sleep 1000", "setsid sleep 1000 & wait", "trap '' TERM; while :; do sleep 1; done"])
    fail = f"sleep {seconds:.2f}; date +%s.%N; {fail}"
    process = run.start(lab.hosts, on(number, fail, others), "--GRACE_SECONDS=1")
    name = f"slice 0 worker {number} ({lab.hosts[number]}) failed with exit code {code}"
    _, noticed = read_until(process.stderr, name)
    process.communicate(timeout=60)
    assert process.returncode == code, (attempt, name)
    assert noticed - float(run.log(number)) < 2, (attempt, name)
    assert run.nothing_runs(), (attempt, name)
  assert [process.poll() for process in bystanders] == [None] * COUNT


def test_the_worker_that_failed_is_named_and_not_those_that_lost_it(run, lab):
  text = on(1, "exit 76", on(2, "sleep 0.4; exit 9"))
  result = run(lab.hosts[:3], text)
  assert result.returncode == 9, result.stderr
  assert "worker 2 (10.77.0.3) failed with exit code 9" in result.stderr
  assert run(lab.hosts[:2], on(1, "exit 76")).returncode == 76
  alone = run(lab.hosts[:1], "exit 76")
  assert alone.returncode == 76 and "worker 0 (10.77.0.1) failed with exit code 76" in alone.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_hosts_and_only_what_was_started_there(run, lab, bystanders, number):
  process = run.start(lab.hosts[:3], "trap 'echo told; exit 75' TERM; echo up; while :; do sleep 0.1; done")
  assert process.stdout.readline() == "up\n"
  while not all(run.log(worker) for worker in range(3)):
    time.sleep(0.05)  # each has its trap once it has said so
  process.send_signal(number)
  _, errors = process.communicate(timeout=30)
  assert process.returncode == 128 + number, errors
  assert all(run.log(number).endswith("told\n") for number in range(3))
  assert run.nothing_runs()
  assert [process.poll() for process in bystanders] == [None] * COUNT


def test_what_ignores_sigterm_is_killed_after_the_grace_or_at_once_when_asked_twice(run, lab):
  for flags, signals in (("--GRACE_SECONDS=1", 1), ("--GRACE_SECONDS=600", 2)):
    process = run.start(lab.hosts[:2], "trap '' TERM; echo up; while :; do sleep 0.1; done", flags)
    assert process.stdout.readline() == "up\n"
    for _ in range(signals):
      process.send_signal(signal.SIGINT)
      time.sleep(0.5)
    process.communicate(timeout=10)
    assert process.returncode == 130 and run.nothing_runs()


def test_a_runner_that_is_killed_leaves_nothing_on_the_hosts(run, lab):
  process = run.start(lab.hosts[:2], "echo up; sleep 1000")
  assert process.stdout.readline() == "up\n"
  process.kill()
  process.wait()
  assert run.nothing_runs(seconds=5)


def test_a_reader_that_has_seen_enough_ends_the_run(run, lab):
  process = run.start(lab.hosts[:2], "while :; do echo line; sleep 0.1; done")
  process.stdout.readline()
  process.stdout.close()
  _, errors = process.communicate(timeout=30)
  assert process.returncode == 141, errors
  assert run.nothing_runs()


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_in_seconds_and_ends_what_it_runs_by_itself(run, lab):
  host = lab.hosts[1]
  process = run.start(lab.hosts[:3], "echo up; sleep 1000", "--GRACE_SECONDS=1")
  assert process.stdout.readline() == "up\n"
  time.sleep(1)
  try:
    lab.plug(host, "down")
    cut = time.time()
    _, noticed = read_until(process.stderr, "slice 0 worker 1 (10.77.0.2): the connection was lost")
    assert noticed - cut < 15
    process.communicate(timeout=30)
    assert process.returncode == 76
    assert run.running()  # on the host that cannot know yet
    assert run.nothing_runs(seconds=30)
  finally:
    lab.plug(host, "up")


def test_a_connection_that_breaks_while_running_is_one_line_with_the_name(run, lab):
  process = run.start(lab.hosts[:3], "echo up; sleep 1000")
  assert process.stdout.readline() == "up\n"
  host = lab.namespace(lab.hosts[2])
  sessions = command("ip", "netns", "pids", host).stdout.split()
  for session in sessions:
    cmdline = Path(f"/proc/{session}/cmdline").read_bytes()
    if cmdline.startswith(b"sshd: ") and b"listener" not in cmdline:
      os.kill(int(session), signal.SIGKILL)
  _, errors = process.communicate(timeout=30)
  assert process.returncode == 76
  assert "slice 0 worker 2 (10.77.0.3): the connection was lost" in errors
  assert run.nothing_runs(seconds=5)


# --- Before anything runs --------------------------------------------------------------------------------------------


def last_line(result):
  """The line that says why; before it come only retries."""
  *before, last = result.stderr.splitlines()
  assert all(re.match(r"runner: copying .*(workers|trying again in \d s)$", line) for line in before), result.stderr
  return last


def test_a_dead_host_is_one_line_and_nothing_starts_anywhere(run, lab):
  lab.shut(lab.hosts[2])
  try:
    result = run(lab.hosts[:3], "echo started")
  finally:
    lab.serve(lab.hosts[2])
  assert result.returncode == 1 and result.stdout == ""
  line = last_line(result)
  assert line.startswith("runner: cannot copy to slice 0 worker 2 (10.77.0.3): ") and "Connection refused" in line
  assert run(lab.hosts[:2], "true", "--RUN_NAME=there").returncode == 0
  existing = run([*lab.hosts[:2], "10.77.0.99"], "echo started", "--USE_EXISTING_FOLDER", "--RUN_NAME=there")
  assert existing.returncode == 1 and existing.stdout == ""
  assert "cannot start on slice 0 worker 2 (10.77.0.99) (ssh: connect to host" in existing.stderr


def test_copying_is_tried_again(run, lab):
  lab.shut(lab.hosts[1])
  try:
    process = run.start(lab.hosts[:2], "cat code.txt")
    read_until(process.stderr, "copying to slice 0 worker 1 (10.77.0.2) failed")
  finally:
    lab.serve(lab.hosts[1])
  output, errors = process.communicate(timeout=60)
  assert process.returncode == 0, errors
  assert output == run.log(1) == "code"


def test_a_full_disk_is_one_line_and_nothing_starts_anywhere(run, lab, project):
  for number in range(20):
    (project / f"large{number}").write_bytes(os.urandom(40_000))
  lab.shut(lab.hosts[1])
  lab.serve(lab.hosts[1], disk="64k")
  try:
    result = run(lab.hosts[:2], "echo started")
  finally:
    lab.shut(lab.hosts[1])
    lab.serve(lab.hosts[1])
  assert result.returncode == 4 and result.stdout == ""
  line = last_line(result)
  assert line.startswith("runner: cannot copy to slice 0 worker 1 (10.77.0.2): ") and "No space left on device" in line


def copied(run, lab, name):
  result = run(lab.hosts[:1], "find . -not -type d | sort", f"--RUN_NAME={name}")
  assert result.returncode == 0, result.stderr
  return [line[2:] for line in result.stdout.splitlines()]


def test_what_git_ignores_and_git_itself_stay_behind(run, lab, project):
  for name in ("a b/c", ".venv/x", "runs/y", "deleted", "untracked", "a b/__pycache__/z"):
    (project / name).parent.mkdir(exist_ok=True, parents=True)
    (project / name).write_text(name)
  (project / "link").symlink_to("a b/c")
  (project / ".gitignore").write_text(".venv*/\nruns/\n__pycache__/\n")
  without_git = copied(run, lab, "without_git")
  assert without_git == sorted([".gitignore", "a b/c", "code.txt", "deleted", "link", "untracked"])
  command("git", "init", "-q", cwd=project)
  command("git", "add", "deleted", "a b", cwd=project)
  (project / "deleted").unlink()
  assert copied(run, lab, "with_git") == [name for name in without_git if name != "deleted"]
  assert os.readlink(lab.home(lab.hosts[0]) / "with_git" / "link") == "a b/c"


def test_an_existing_folder_is_used_as_it_is(run, lab, project):
  assert run(lab.hosts[:2], "echo kept > made_there", "--RUN_NAME=again").returncode == 0
  (project / "code.txt").write_text("changed")
  result = run(lab.hosts[:2], "cat made_there code.txt", "--RUN_NAME=again", "--USE_EXISTING_FOLDER=true")
  assert result.returncode == 0 and result.stdout == run.log(1) == "kept\ncode"
  result = run(lab.hosts[:2], "echo started", "--RUN_NAME=never", "--USE_EXISTING_FOLDER=true")
  assert result.returncode == 1 and "never: No such file or directory" in result.stderr and result.stdout == ""


@pytest.mark.parametrize("flags", [
    ["--HOSTS=a;b"], ["--HOSTS=-oProxyCommand=x"], ["--HOSTS=a,,b"], ["--HOSTS=a,b,a"], ["--HOSTS=$(x)"],
    ["--HOSTS=@missing"], ["--HOSTS=a b"], ["--TPU_PREFIX=x;y"], ["--TPU_PREFIX=-x"], ["--TPU_PREFIX=a$b"],
    ["--HOSTS=a", "--RUN_NAME=../x"], ["--HOSTS=a", "--RUN_NAME=x y"], ["--HOSTS=a", "--RUN_NAME=-x"],
    ["--TPU_PREFIX=a", "--ZONE=`x`"], ["--TPU_PREFIX=a", "--PROJECT=a'b"], ["--HOSTS=a", "--TPU_PREFIX=b"], [],
    ["--HOSTS=a", "--USE_EXISTING_FOLDER"], ["--HOSTS=a", "--INTERNAL_IP=perhaps"], ["--HOSTS=a", "--COMMAND= "],
    ["--HOSTS=a", "--SCRIPT_DIR=/missing"], ["--HOSTS=a", "--RUN=x"]])  # fmt: skip
def test_names_with_shell_characters_and_other_mistakes_are_one_line(flags, tmp_path):
  result = subprocess.run([sys.executable, RUNNER, "--COMMAND=x", *flags], cwd=tmp_path, check=False, text=True,
                          capture_output=True, env={"PATH": str(tmp_path)})
  assert result.returncode == 2 and result.stdout == ""
  assert result.stderr.startswith("runner: ") and result.stderr.count("\n") == 1
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--HOSTS=a,me@b:2222"], ["--TPU_PREFIX=pod", "--ZONE=us-x1-a", "--INTERNAL_IP"]])
def test_a_dry_run_prints_everything_and_runs_nothing(flags, tmp_path, project):
  for name in ("ssh", "gcloud"):
    (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / name).chmod(0o755)
  result = subprocess.run(
      [sys.executable, RUNNER, "--COMMAND=echo 'it is' \"$HOME\"", "--RUN_NAME=x", "--DRY_RUN", *flags, "--SCRIPT_DIR",
       project], cwd=tmp_path, check=False, text=True, capture_output=True,
      env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})  # fmt: skip
  assert result.returncode == 0, result.stderr
  lines = [shlex.split(line[2:]) for line in result.stdout.splitlines() if line.startswith("+ ")]
  remote = [shlex.split(line[line.index("<" if "<" in line else ">") - 1]) for line in lines if line[0] == "ssh"]
  assert [words[3] for words in remote if "tar" in words[3]] == ["mkdir -p -- \"$1\" && tar -xzof - -C \"$1\""] * (
      2 if "a,me@b" in flags[0] else 1)  # fmt: skip
  assert any("echo 'it is' \"$HOME\"" in words for words in remote)
  assert "setsid bash -c" in result.stdout
  if "--INTERNAL_IP" in flags:
    assert [line[4] for line in lines if line[0] == "gcloud"] == ["list", "ssh", "ssh"]
    assert all("--zone=us-x1-a" in line for line in lines if line[0] == "gcloud")
  else:
    assert any("me@b" in line and line[1:3] == ["-p", "2222"] for line in lines)
  assert not (tmp_path / "ran").exists() and not (tmp_path / "runs").exists()


def test_hosts_come_from_a_file_and_are_named_as_written(tmp_path, project):
  (tmp_path / "hosts").write_text("# two of them\na\n\nme@b:2222 # the second\n[::1]:22\n")
  flags = ["--COMMAND=x", "--HOSTS=@hosts", "--DRY_RUN", f"--SCRIPT_DIR={project}"]
  result = subprocess.run([sys.executable, RUNNER, *flags], cwd=tmp_path, check=True, text=True, capture_output=True)
  targets = [line[:line.index("<")][-2] for line in map(shlex.split, result.stdout.splitlines()) if "<" in line]
  assert targets == ["a", "me@b", "::1"]


# --- TPUs ------------------------------------------------------------------------------------------------------------

GCLOUD = """#!{python}
import json, sys
folder = {folder!r}
with open(folder + "/asked", "a") as file:
  file.write(json.dumps(sys.argv[1:]) + "\\n")
nodes = json.load(open(folder + "/nodes.json"))
if "broken" in nodes:
  sys.exit("WARNING: something\\nERROR: (gcloud.compute.tpus.tpu-vm.list) Error parsing [zone].\\nmore")
if sys.argv[4] == "list":
  print(json.dumps(list(nodes.values())))
elif "--dry-run" in sys.argv:
  print("Using ssh batch size of 1. Attempting to SSH into 1 nodes", file=sys.stderr)
  for end in nodes[sys.argv[5]]["networkEndpoints"]:
    address = end["ipAddress"] if "--internal-ip" in sys.argv else end["accessConfig"]["externalIp"]
    print("/usr/bin/ssh -T -i {key} -o CheckHostIP=no -o HashKnownHosts=no -o HostKeyAlias=tpu.1-0"
          " -o IdentitiesOnly=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile={key}.known {user}@" + address +
          " -- true")
"""


@pytest.fixture
def gcloud(run, lab, tmp_path):
  """Slices pod-0 and pod-1 of two workers each, and others that only begin so. The value changes what they are."""
  def node(name, hosts):
    return {"name": f"projects/p/locations/z/nodes/{name}", "state": "READY", "acceleratorType": "v4-16",
            "networkEndpoints": [{"ipAddress": host, "port": 8470, "accessConfig": {"externalIp": "192.0.2.1"}}
                                 for host in hosts]}  # fmt: skip

  slices = {"pod-1": lab.hosts[2:4], "pod-0": lab.hosts[:2], "pod-two": lab.hosts[4:5], "my-pod-0": lab.hosts[4:5]}
  nodes = {name: node(name, hosts) for name, hosts in slices.items()}
  (tmp_path / "gcloud").write_text(GCLOUD.format(python=sys.executable, folder=str(tmp_path), key=lab.folder / "user",
                                                 user=USER))  # fmt: skip
  (tmp_path / "gcloud").chmod(0o755)
  run.environment["PATH"] = f"{tmp_path}:{run.environment['PATH']}"

  def write():
    (tmp_path / "nodes.json").write_text(json.dumps(nodes))

  write()
  run.nodes, run.write = nodes, write
  run.asked = lambda: [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
  return run


def test_slices_of_a_prefix_are_found_numbered_and_run_on(gcloud):
  flags = ["--TPU_PREFIX=pod", "--PROJECT=p", "--ZONE=us-central2-b", "--INTERNAL_IP=true"]
  result = gcloud([], 'echo "$SSH_CONNECTION" | cut -d " " -f 3; env | grep -c ^JAX_; true', *flags)
  assert result.returncode == 0, result.stderr
  logs = [gcloud.log(number, slice_number) for slice_number in (0, 1) for number in (0, 1)]
  assert logs == [f"10.77.0.{number}\n0\n" for number in (1, 2, 3, 4)]
  assert result.stdout == logs[0]
  for words in gcloud.asked():
    assert words[:3] == ["compute", "tpus", "tpu-vm"]
    assert {"--project=p", "--zone=us-central2-b", "--quiet"} <= set(words)
  assert gcloud.asked()[0][3:6] == ["list", "--filter=name~pod", "--format=json"]
  assert sorted((words[4], words[7]) for words in gcloud.asked()[1:]) == [
      (name, worker) for name in ("pod-0", "pod-1") for worker in ("--worker=0", "--worker=all")]
  assert all("--internal-ip" in words for words in gcloud.asked()[1:])


def test_a_failing_worker_of_a_slice_is_named_and_its_code_kept(gcloud):
  text = 'case $SSH_CONNECTION in *" 10.77.0.4 "*) exit 5 ;; *) sleep 1000 ;; esac'
  result = gcloud([], text, "--TPU_PREFIX=pod", "--INTERNAL_IP")
  assert result.returncode == 5, result.stderr
  assert f"slice 1 worker 1 ({USER}@10.77.0.4) failed with exit code 5; stopping 3 workers" in result.stderr
  assert gcloud.nothing_runs()


def test_a_slice_of_exactly_that_name_is_the_only_one(gcloud):
  result = gcloud([], "true", "--TPU_PREFIX=pod-1", "--INTERNAL_IP=true")
  assert result.returncode == 0, result.stderr
  assert sorted(path.name for path in gcloud.logs.iterdir()) == [
      f"output_slice_0000_worker_{number:04d}.txt" for number in (0, 1)]


def test_slices_that_are_missing_or_not_ready_are_one_line(gcloud):
  def refused(*words):
    gcloud.write()
    result = gcloud([], "true", "--TPU_PREFIX=pod")
    return result.returncode in (1, 2) and result.stderr.count("\n") == 1 and all(w in result.stderr for w in words)

  gcloud.nodes["pod-1"]["state"] = "PREEMPTED"
  assert refused("slice pod-1 is PREEMPTED")
  del gcloud.nodes["pod-0"]
  assert refused("slice pod-0 is missing", "pod-1")
  del gcloud.nodes["pod-1"]
  assert refused("no TPU is called pod", "pod-two")
  gcloud.nodes["broken"] = {}
  assert refused("ERROR: (gcloud.compute.tpus.tpu-vm.list) Error parsing [zone].")
