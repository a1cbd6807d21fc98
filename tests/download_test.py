# SPDX-License-Identifier: Apache-2.0
"""download_dataset.sh against a server on this machine: right, damaged, interrupted and absent files."""

import hashlib
import http.server
import os
import re
import shutil
import subprocess
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
    (), ("c4", "x"), ("my-project", "gs://my-bucket"), ("lambada",), ("lambada", ""), ("boolq", "a", "b"),
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
