# SPDX-License-Identifier: Apache-2.0
"""download_dataset.sh against a server on this machine, and against folders that stand for buckets."""

import hashlib
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAMBADA = ROOT / "../shared/data/eval/lambada_test.jsonl"
FILES = {name: b"".join(b'{"row": %d}\n' % row for row in range(size))
         for name, size in (("lambada_test.jsonl", 3000), ("dev.jsonl", 200), ("train.jsonl", 2000))}


class Handler(http.server.BaseHTTPRequestHandler):
  """Serves server.files with byte ranges; sends half of a file whose name is in server.halved, and then hangs up."""

  def do_GET(self):
    name, server = self.path.rpartition("/")[2], self.server
    begin = int((self.headers.get("Range") or "bytes=0-").split("=")[1].rstrip("-")) if server.ranges else 0
    server.seen.append((name, begin))
    if name not in server.files:
      return self.send_error(404)
    content = server.files[name]
    if begin >= len(content):
      return self.send_error(416)
    self.send_response(206 if begin else 200)
    if begin:
      self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
    elif server.ranges:
      self.send_header("Accept-Ranges", "bytes")
    self.send_header("Content-Length", str(len(content) - begin))
    self.end_headers()
    self.wfile.write(content[begin:len(content) // 2 if name in server.halved else None])

  def log_message(self, *_):
    pass


@pytest.fixture
def server():
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    server.files, server.halved, server.seen, server.ranges = dict(FILES), set(), [], True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture(params=["curl", "wget"])
def download(request, server, tmp_path):
  """Runs a copy of the script that knows the small FILES instead, with one of the two tools that it may find."""
  if not shutil.which(request.param):
    pytest.skip(f"{request.param} is not installed")
  text = (ROOT / "download_dataset.sh").read_text()
  for name, content in FILES.items():
    known = f"{name} {hashlib.sha256(content).hexdigest()} {len(content)} "
    text, count = re.subn(rf"\b{re.escape(name)} [0-9a-f]{{64}} \d+ ", known, text)
    assert count == 1
  (tmp_path / "download_dataset.sh").write_text(text)
  bin_folder = tmp_path / "bin"
  bin_folder.mkdir()
  for tool in (request.param, "bash", "cat", "cut", "mkdir", "mv", "rm", "sed", "sha256sum", "shasum", "tail", "wc"):
    if shutil.which(tool):
      (bin_folder / tool).symlink_to(shutil.which(tool))

  def run(*arguments, url=f"http://127.0.0.1:{server.server_address[1]}/data/"):
    return subprocess.run(["bash", "download_dataset.sh", *map(str, arguments)], cwd=tmp_path, check=False, timeout=60,
                          env={"PATH": str(bin_folder), "DATASET_URL": url}, capture_output=True, text=True)

  run.tool, run.to = request.param, tmp_path / "some where"
  return run


def refused(result, code, *words):
  """Whether all the words are on stderr, of a result that must be one line there and that exit code."""
  assert result.returncode == code, result.stdout + result.stderr
  assert result.stderr.count("\n") == 1 and result.stderr.startswith("download: ")
  return all(word in result.stderr for word in words)


def test_files_arrive_whole_and_are_not_fetched_again(download, server):
  result = download("boolq", download.to)
  assert result.returncode == 0, result.stderr
  assert {path.name: path.read_bytes() for path in download.to.iterdir()} == {
      name: FILES[name] for name in ("dev.jsonl", "train.jsonl")}
  server.seen.clear()
  (download.to / "train.jsonl").unlink()
  assert "dev.jsonl is there" in download("boolq", f"{download.to}/").stdout
  assert server.seen == [("train.jsonl", 0)]
  assert sorted(path.name for path in download.to.iterdir()) == ["dev.jsonl", "train.jsonl"]


def test_an_interrupted_download_goes_on_where_it_stopped(download, server):
  part = download.to / "lambada_test.jsonl.part"
  download.to.mkdir()
  part.write_bytes(FILES["lambada_test.jsonl"][:10_000])
  assert download("lambada", download.to).returncode == 0
  assert server.seen == [("lambada_test.jsonl", 10_000)]
  assert (download.to / "lambada_test.jsonl").read_bytes() == FILES["lambada_test.jsonl"]
  assert not part.exists()


def test_a_connection_that_breaks_keeps_what_came_and_the_next_run_has_the_rest(download, server):
  server.halved = {"lambada_test.jsonl"}
  result = download("lambada", download.to)
  assert refused(result, 4, "/data/lambada_test.jsonl cannot be fetched", "Run again")
  assert not (download.to / "lambada_test.jsonl").exists()
  assert (download.to / "lambada_test.jsonl.part").stat().st_size == len(FILES["lambada_test.jsonl"]) // 2
  server.halved = set()
  assert download("lambada", download.to).returncode == 0
  assert server.seen[-1] == ("lambada_test.jsonl", len(FILES["lambada_test.jsonl"]) // 2)
  assert (download.to / "lambada_test.jsonl").read_bytes() == FILES["lambada_test.jsonl"]


def test_a_whole_part_needs_no_server_and_a_server_that_cannot_go_on_begins_anew(download, server):
  download.to.mkdir()
  part = download.to / "lambada_test.jsonl.part"
  part.write_bytes(FILES["lambada_test.jsonl"])
  assert download("lambada", download.to).returncode == 0
  assert server.seen == []
  (download.to / "lambada_test.jsonl").rename(part)
  part.write_bytes(FILES["lambada_test.jsonl"][:100])
  server.ranges = False
  assert download("lambada", download.to).returncode == 0
  assert (download.to / "lambada_test.jsonl").read_bytes() == FILES["lambada_test.jsonl"]


@pytest.mark.parametrize("content", [b"<html>sign in</html>", FILES["dev.jsonl"][:-1] + b" ", FILES["dev.jsonl"] * 2])
def test_another_file_than_the_one_known_is_refused_and_removed(download, server, content):
  server.files["dev.jsonl"] = content
  assert refused(download("boolq", download.to), 65, "/data/dev.jsonl gave another file",
                 hashlib.sha256(content).hexdigest(), hashlib.sha256(FILES["dev.jsonl"]).hexdigest())
  assert list(download.to.iterdir()) == []
  server.files = dict(FILES)
  assert download("boolq", download.to).returncode == 0


def test_a_part_of_something_else_costs_one_more_run_and_never_counts(download):
  download.to.mkdir()
  (download.to / "dev.jsonl.part").write_bytes(b"not the beginning of it")
  assert refused(download("boolq", download.to), 65, "Run again")
  (download.to / "dev.jsonl.part").write_bytes(b"x" * (len(FILES["dev.jsonl"]) + 1))
  assert download("boolq", download.to).returncode == 0


def test_a_file_of_the_user_is_not_overwritten(download, server):
  download.to.mkdir()
  (download.to / "dev.jsonl").write_text("mine")
  assert refused(download("boolq", download.to), 65, "dev.jsonl is not the file known", "Move it away")
  assert (download.to / "dev.jsonl").read_text() == "mine" and server.seen == []


def test_an_absent_file_and_a_dead_server_are_one_line_and_exit_code_4(download, server):
  del server.files["dev.jsonl"]
  assert refused(download("boolq", download.to), 4, "/data/dev.jsonl cannot be fetched", "404", "DATASET_URL=")
  assert list(download.to.iterdir()) == []
  assert refused(download("boolq", download.to, url="http://127.0.0.1:9/x"), 4, "http://127.0.0.1:9/x/dev.jsonl cannot")


def test_a_folder_that_cannot_be_written_to_is_one_line_and_exit_code_4(download, server, tmp_path):
  (tmp_path / "file").write_text("")
  assert refused(download("lambada", tmp_path / "file" / "folder"), 4, "DEST=", "file/folder cannot be written to")
  download.to.mkdir(mode=0o555)
  if os.access(download.to, os.W_OK):  # root may write anywhere but where the kernel says no
    download.to = Path("/proc/self/fdinfo")
  assert refused(download("lambada", download.to), 4, f"DEST={download.to} cannot be written to")
  assert server.seen == []


def test_a_dry_run_prints_the_commands_and_does_nothing(download, server):
  result = download("--dry-run", "boolq", download.to)
  assert result.returncode == 0 and result.stderr == ""
  assert [line.split()[1] for line in result.stdout.splitlines()] == ["mkdir", download.tool, "mv"] * 2
  assert all(line.startswith("+ ") for line in result.stdout.splitlines())
  assert not download.to.exists() and server.seen == []


@pytest.mark.parametrize("arguments", [
    (), ("c4", "x"), ("my-project",), ("my-project", "a", "b"), ("My_Project", "bucket"), ("my-project", "s3://bucket"),
    ("my-project", "-bucket"), ("lambada",), ("lambada", ""), ("boolq", "a", "b"),
    ("lambada", "gs://bucket/data"), ("--fast", "lambada", "x"),
])  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_code_2(download, server, arguments):
  result = download(*arguments)
  assert refused(result, 2)
  assert "bash download_dataset.sh" in result.stderr or "no local folder" in result.stderr
  assert server.seen == []


def test_help_prints_the_usage():
  printed = subprocess.check_output(["bash", str(ROOT / "download_dataset.sh"), "--help"], text=True)
  assert "lambada DEST" in printed and "Exit codes" in printed and "SPDX" not in printed


@pytest.mark.skipif(not LAMBADA.exists(), reason="../shared/data/eval/lambada_test.jsonl is absent")
def test_the_checksum_of_lambada_is_that_of_a_real_copy(server, tmp_path):
  server.files["lambada_test.jsonl"] = LAMBADA.read_bytes()
  url = f"http://127.0.0.1:{server.server_address[1]}"
  subprocess.run(["bash", str(ROOT / "download_dataset.sh"), "lambada", str(tmp_path)], check=True, capture_output=True,
                 env=os.environ | {"DATASET_URL": url})
  assert (tmp_path / "lambada_test.jsonl").read_bytes().count(b"\n") == 5153


# --- C4 --------------------------------------------------------------------------------------------------------------

C4 = {f"c4-train.tfrecord-{i:05d}-of-00003": b"%d" % i * (1000 + i) for i in range(3)} | {"features.json": b"{}"}
SOURCE = "allennlp-tensorflow-datasets/c4/en/3.0.1"
# gcloud and gsutil as far as the script uses them; a bucket is a folder in the working directory. What a file named
# after the command ("ls", "cp") holds is what it fails with: at once, or after that many files and half of the next.
TOOL = """#!{python}
import json, os, pathlib, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
with open("calls", "a") as calls:
  calls.write(json.dumps([name, *arguments]) + chr(10))
flags = {{"gcloud": {{"storage", "--billing-project=my-project", "--long", "--read-paths-from-stdin"}},
         "gsutil": {{"-m", "-u", "my-project", "-l", "-I"}}}}[name]
verb, target = [argument for argument in arguments if argument not in flags]
local = lambda url: pathlib.Path(url.removeprefix("gs://"))
wrong = json.loads(pathlib.Path(verb).read_text()) if os.path.isfile(verb) else {{}}
def stop():
  sys.exit(print(wrong["says"], file=sys.stderr) or 1)
if verb == "ls":
  if wrong and wrong.get("where", "") in target:
    stop()
  found = sorted(local(target).parent.glob("*"))
  for file in found:
    print(f"{{file.stat().st_size:>11}}  2022-01-01T00:00:00Z  gs://{{file}}")
  if not found:
    sys.exit(print("ERROR: One or more URLs matched no objects.", file=sys.stderr) or 1)
  print(f"TOTAL: {{len(found)}} objects, {{sum(file.stat().st_size for file in found)}} bytes (1KiB)")
else:
  local(target).mkdir(parents=True, exist_ok=True)
  for number, url in enumerate(sys.stdin.read().split()):
    content = local(url).read_bytes()
    whole = not wrong or number < wrong.get("after", 0)
    (local(target) / local(url).name).write_bytes(content if whole else content[:len(content) // 2])
    if not whole and wrong["says"]:
      stop()
"""


@pytest.fixture(params=["gcloud", "gsutil"])
def c4(request, tmp_path):
  """Runs the script with one of Google's two tools."""
  bin_folder = tmp_path / "bin"
  bin_folder.mkdir()
  (bin_folder / request.param).write_text(TOOL.format(python=sys.executable))
  (bin_folder / request.param).chmod(0o755)
  for tool in ("bash", "awk", "grep", "df", "mkdir", "sed", "tail", "wc", "sha256sum"):
    (bin_folder / tool).symlink_to(shutil.which(tool))
  source = tmp_path / SOURCE
  source.mkdir(parents=True)
  for name, content in C4.items():
    (source / name).write_bytes(content)

  def run(*arguments):
    return subprocess.run(["bash", str(ROOT / "download_dataset.sh"), *map(str, arguments)], cwd=tmp_path, check=False,
                          timeout=60, env={"PATH": str(bin_folder)}, capture_output=True, text=True)

  def calls():
    """What was copied, after how often it was listed."""
    return [json.loads(line)[1:] for line in (tmp_path / "calls").read_text().splitlines()]

  run.tool, run.calls, run.at, run.bin = request.param, calls, tmp_path, bin_folder
  return run


def copied(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("given", ["my-bucket", "gs://my-bucket", "gs://my-bucket/", "LOCAL"])
def test_c4_arrives_whole_and_is_not_copied_again(c4, given):
  given = c4.at / "my-bucket" if given == "LOCAL" else given  # the fake's buckets are folders: one place for both
  result = c4("my-project", given)
  assert result.returncode == 0, result.stderr
  assert copied(c4.at / "my-bucket/c4/en/3.0.1") == C4
  assert "4 files have the sizes of their sources" in result.stdout and "of which 4 (3005 bytes)" in result.stdout
  billed = ["-u", "my-project"] if c4.tool == "gsutil" else ["--billing-project=my-project"]
  assert all(set(billed) <= set(call) for call in c4.calls())
  before = len(c4.calls())
  (c4.at / "my-bucket/c4/en/3.0.1/features.json").write_text("{ }")  # another size than the source's
  assert "of which 1 (2 bytes)" in c4("my-project", given).stdout
  assert copied(c4.at / "my-bucket/c4/en/3.0.1") == C4
  assert "of which 0 (0 bytes)" in c4("my-project", given).stdout
  assert sum("cp" in call for call in c4.calls()[before:]) == 1


@pytest.mark.parametrize("given", ["my-bucket", "./my-bucket"])
def test_c4_goes_on_where_a_copy_broke(c4, given):
  (c4.at / "cp").write_text(json.dumps({"after": 1, "says": "ERROR: Connection reset by peer"}))
  assert refused(c4("my-project", given), 4, "Connection reset by peer", "Run again: it goes on")
  assert len(copied(c4.at / "my-bucket/c4/en/3.0.1")) == 2
  (c4.at / "cp").unlink()
  assert "of which 3 " in c4("my-project", given).stdout
  assert copied(c4.at / "my-bucket/c4/en/3.0.1") == C4


def test_c4_files_that_come_shorter_than_they_are_do_not_pass(c4):
  (c4.at / "cp").write_text(json.dumps({"after": 3, "says": ""}))
  result = c4("my-project", "my-bucket")
  assert refused(result, 65, "my-bucket/c4/en/3.0.1/", "has not the size")


@pytest.mark.parametrize("verb, where, code, says, words", [
    ("ls", "", 2, "ERROR: HTTPError 400: Unknown project id: my-project", "PROJECT=my-project is no project"),
    ("ls", "", 2, "ERROR: (gcloud.storage.ls) User project specified in the request is invalid.", "PROJECT=my-project"),
    ("ls", "", 4, "AccessDeniedException: 403 me does not have serviceusage.services.use access.", "no permission"),
    ("ls", "", 4, "ERROR: (gcloud) You do not currently have an active account selected.", "gcloud auth login"),
    ("ls", "my-bucket", 2, "ERROR: (gcloud.storage.ls) gs://my-bucket not found: 404.", "storage buckets create"),
    ("ls", "my-bucket", 2, "BucketNotFoundException: 404 gs://my-bucket bucket does not exist.", "buckets create"),
    ("ls", "", 4, "\nTraceback\nERROR: One or more URLs matched no objects.", "matched no objects"),
    ("cp", "", 4, "OSError: [Errno 28] No space left on device", "is full"),
    ("cp", "", 4, "", "gcloud storage|gsutil -m failed"),
])  # fmt: skip
def test_what_google_refuses_is_one_line_with_a_way_out(c4, verb, where, code, says, words):
  (c4.at / verb).write_text(json.dumps({"where": where, "says": says or " "}))
  result = c4("my-project", "my-bucket")
  assert refused(result, code) and re.search(words, result.stderr), result.stderr
  assert says.splitlines()[-1:] == [] or says.splitlines()[-1] in result.stderr


def test_c4_without_googles_tools_without_room_and_in_a_folder_that_is_a_file_is_one_line(c4):
  (c4.bin / "df").unlink()
  (c4.bin / "df").write_text("#!/bin/sh\necho Filesystem\necho / 9 9 2 9%\n")
  (c4.bin / "df").chmod(0o755)
  assert refused(c4("my-project", "./here"), 4, "has room for 2048 bytes, and 3005 are missing")
  (c4.at / "file").write_text("")
  assert refused(c4("my-project", "./file"), 4, "DEST=./file/c4/en/3.0.1 cannot be written to")
  assert not any("cp" in call for call in c4.calls())
  (c4.bin / c4.tool).unlink()
  assert refused(c4("my-project", "my-bucket"), 2, "neither gcloud nor gsutil", "Install")


def test_a_dry_run_of_c4_prints_commands_that_a_shell_takes_and_does_nothing(c4):
  result = c4("--dry-run", "my-project", c4.at / "some where")
  assert result.returncode == 0 and result.stderr == "" and not (c4.at / "calls").exists()
  lines = [shlex.split(line.removeprefix("+ "), comments=True) for line in result.stdout.splitlines()]
  assert lines[0][0] == c4.tool and lines[0][-1] == f"gs://{SOURCE}/*"
  assert lines[1] == ["mkdir", "-p", str(c4.at / "some where/c4/en/3.0.1")]
  assert lines[2][-1] == f"{c4.at}/some where/c4/en/3.0.1/" and not (c4.at / "some where").exists()


def test_shellcheck_has_nothing_to_say():
  if not shutil.which("shellcheck"):
    pytest.skip("shellcheck is not installed")
  subprocess.run(["shellcheck", str(ROOT / "download_dataset.sh")], check=True)
