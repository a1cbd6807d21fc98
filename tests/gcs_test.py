# SPDX-License-Identifier: Apache-2.0
"""Runs, checkpoints and data on gs://: the real clients (gcsfs, TensorStore, TensorFlow, gcloud), a small server."""

import base64
import email
import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest

from tests.sources_test import example, write_parquet, write_rows, write_tfrecord
from tests.tiny import TINY

ROOT = Path(__file__).resolve().parent.parent
C4 = ROOT / "../shared/data/c4/en/3.0.1"
BUCKETS, PAGE = {"bucket", "allennlp-tensorflow-datasets"}, 3
pytestmark = pytest.mark.slow
needs_gcsfs = pytest.mark.skipif(not importlib.util.find_spec("gcsfs"), reason="gcsfs is not installed")
needs_tensorflow = pytest.mark.skipif(not (importlib.util.find_spec("tensorflow") and shutil.which("openssl")),
                                      reason="tensorflow or openssl is not installed")


class Store(http.server.ThreadingHTTPServer):
  """What clients here need of Google Cloud Storage's JSON API, in memory: preconditions, ranges, pages, uploads.

  `url` is its address; for clients that know https://*.googleapis.com alone it is their https_proxy as well.
  """

  daemon_threads = True
  request_queue_size = 128  # TensorStore opens many connections at once

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.server_address[1]}"
    self.objects, self.uploads, self.lock = {}, {}, threading.RLock()  # {"bucket/name": (content, generation)}
    self.generation, self.fault, self.tls, self.billed = 1000, lambda method, name: 0, None, set()

  def answer(self, method, target, headers, body):
    """(status, headers, content) of a request."""
    with self.lock:
      self.billed.add(headers.get("X-Goog-User-Project"))
      url = urllib.parse.urlsplit(target)
      query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
      if url.path.startswith("/batch"):
        return self.batch(headers, body)
      if "upload_id" in query:
        return self.go_on(query["upload_id"], headers, body)
      path, json_api = re.subn(r"^/(upload/|download/)?(resumable/)?storage/v1/b/", "", url.path)
      bucket, *rest = [urllib.parse.unquote(part) for part in path.lstrip("/").split("/")]
      if json_api and rest[:1] == ["o"]:
        rest = rest[1:]
      name, *verb = rest or [""]
      status = self.fault(method, name or query.get("name", "")) or (404 if bucket not in BUCKETS else 0)
      if status:
        return status, {}, json.dumps({"error": {"code": status, "message": f"the test says {status}"}}).encode()
      if not name:
        if method == "POST":
          return self.insert(bucket, query, headers, body)
        return self.list(bucket, query) if url.path.endswith("/o") else found({"name": bucket})
      key = f"{bucket}/{name}"
      content, generation = self.objects.get(key, (None, 0))
      if content is None:
        return 404, {}, json.dumps({"error": {"code": 404, "message": f"No such object: {key}"}}).encode()
      if str(generation) != query.get("ifGenerationMatch", str(generation)):
        return 412, {}, b"{}"
      if str(generation) == query.get("ifGenerationNotMatch"):
        return 304, {}, b""
      if verb:
        if verb[0] == "rewriteTo":  # rewriteTo/b/BUCKET/o/NAME
          self.put(f"{verb[2]}/{verb[4]}", content)
          return found({"done": True, "objectSize": str(len(content)), "totalBytesRewritten": str(len(content)),
                        "resource": self.describe(f"{verb[2]}/{verb[4]}")})
        if verb[0] == "moveTo":  # moveTo/o/NAME
          del self.objects[key]
          return self.put(f"{bucket}/{verb[2]}", content)
        return 501, {}, b"{}"
      if method == "DELETE":
        del self.objects[key]
        return 204, {}, b""
      if json_api and query.get("alt") != "media":
        return found(self.describe(key))
      headers_out = {"x-goog-generation": str(generation), "ETag": f'"{generation}"'}
      asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range") or "")
      if not asked:
        return 200, headers_out, content
      begin, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
      if begin >= len(content):
        return 416, {}, b""
      return 206, headers_out | {"Content-Range": f"bytes {begin}-{end}/{len(content)}"}, content[begin:end + 1]

  def handle_error(self, request, client_address):
    """A client that is killed hangs up in the middle."""
    if not isinstance(sys.exc_info()[1], ConnectionError):
      super().handle_error(request, client_address)

  def list(self, bucket, query):
    """A page of objects, and with a delimiter of what stands for folders."""
    prefix, delimiter, items, folders = query.get("prefix", ""), query.get("delimiter"), [], []
    names = [key.removeprefix(f"{bucket}/") for key in self.objects if key.startswith(f"{bucket}/{prefix}")]
    names = [name for name in names if query.get("startOffset", "") <= name < query.get("endOffset", "\U0010ffff")]
    for name in names:
      head, found_delimiter, _ = name[len(prefix):].partition(delimiter) if delimiter else ("", "", "")
      entry = prefix + head + found_delimiter if found_delimiter else name
      (folders if found_delimiter else items).append(entry)
    entries = sorted({*items, *folders})
    size = min(int(query.get("maxResults", PAGE)), PAGE)  # a page is small, so that every client has to turn it
    entries = [entry for entry in entries if entry > query.get("pageToken", "")]
    page = {"kind": "storage#objects"}
    if len(entries) > size:
      page["nextPageToken"] = entries[size - 1]
    entries = set(entries[:size])
    page["items"] = [self.describe(f"{bucket}/{name}") for name in sorted(items) if name in entries]
    page["prefixes"] = sorted(entries & set(folders))
    return found({key: value for key, value in page.items() if value})

  def insert(self, bucket, query, headers, body):
    """An upload: in one piece, with its metadata, or the beginning of one in pieces."""
    kind, name = query.get("uploadType"), query.get("name")
    if kind == "resumable":
      upload = str(len(self.uploads))
      self.uploads[upload] = [f"{bucket}/{name or json.loads(body)['name']}", query, b""]
      return 200, {"Location": f"{self.url}/upload/storage/v1/b/{bucket}/o?upload_id={upload}"}, b""
    if kind == "multipart":
      boundary = re.search("boundary=['\"]?([^'\";]+)", headers["Content-Type"])[1].encode()
      about, body = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in body.split(b"--" + boundary)[1:3])
      name, body = name or json.loads(about)["name"], re.sub(rb"\r?\n\Z", b"", body)
    return self.put(f"{bucket}/{name}", body, query)

  def go_on(self, upload, headers, body):
    """A piece of a resumable upload."""
    key, query, content = self.uploads[upload]
    span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", headers.get("Content-Range") or "bytes */*")
    status = self.fault("PUT", key.partition("/")[2])
    if status:
      return status, {}, b""
    if span[1] is None or int(span[1]) == len(content):
      content = self.uploads[upload][2] = content + body
    if span[3] != "*" and int(span[3]) == len(content) or "Content-Range" not in headers:
      return self.put(key, content, query)
    return 308, {"Range": f"bytes=0-{len(content) - 1}"} if content else {}, b""

  def put(self, key, content, query=()):
    """Makes an object, unless the precondition fails that keeps two writers apart."""
    wanted = dict(query).get("ifGenerationMatch")
    if wanted is not None and int(wanted) != self.objects.get(key, (b"", 0))[1]:
      return 412, {}, json.dumps({"error": {"code": 412, "message": "conditionNotMet"}}).encode()
    self.generation += 1
    self.objects[key] = content, self.generation
    return found(self.describe(key))

  def batch(self, headers, body):
    message = email.message_from_bytes(b"Content-Type: " + headers["Content-Type"].encode() + b"\r\n\r\n" + body)
    parts = []
    for part in message.get_payload():
      method, target, _ = part.get_payload().strip().splitlines()[0].split(" ")
      status, _, content = self.answer(method, target, {}, b"")
      parts.append(f"--x\r\nContent-Type: application/http\r\nContent-ID: <response-{part['Content-ID']}>\r\n\r\n"
                   f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n\r\n{content.decode()}\r\n")
    return 200, {"Content-Type": "multipart/mixed; boundary=x"}, ("".join(parts) + "--x--").encode()

  def describe(self, key):
    """An object's metadata."""
    content, generation = self.objects[key]
    bucket, _, name = key.partition("/")
    time = "2026-01-01T00:00:00.000Z"
    return {"kind": "storage#object", "id": f"{key}/{generation}", "name": name, "bucket": bucket, "updated": time,
            "generation": str(generation), "metageneration": "1", "size": str(len(content)), "etag": str(generation),
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(), "timeCreated": time,
            "mediaLink": f"{self.url}/download/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, '')}?alt=media",
            "storageClass": "STANDARD", "contentType": "application/octet-stream"}


class Handler(http.server.BaseHTTPRequestHandler):
  """HTTP for a Store."""

  protocol_version = "HTTP/1.1"

  def handle_request(self):
    if self.headers.get("Transfer-Encoding") == "chunked":
      pieces = iter(lambda: self.rfile.read(int(self.rfile.readline(), 16) + 2)[:-2], b"")
      body = b"".join(pieces)
    else:
      body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    status, headers, content = self.server.answer(self.command, self.path, self.headers, body)
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    if status not in (204, 304):
      self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)

  do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = handle_request

  def do_CONNECT(self):
    """Behind a proxy's tunnel the Store is what the client asked for."""
    self.send_response(200)
    self.end_headers()
    self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
    self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
    self.close_connection = False

  def log_message(self, *_):
    pass


def found(value):
  return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@pytest.fixture
def store():
  with Store() as store:
    threading.Thread(target=store.serve_forever, args=(0.02,), daemon=True).start()
    yield store
    store.shutdown()


@pytest.fixture
def run(store, tmp_path):
  """run(script, key=value, ...): the finished process of one of the scripts, with a run on gs://bucket/runs."""
  text = tmp_path / "text"
  text.mkdir()
  for i in range(8):
    (text / f"{i}.txt").write_text(" ".join(map(str, range(100 * i, 100 * i + 300))))
  # gcsfs asks for a bucket's kind over gRPC, which knows no emulator: that is off.
  env = {"STORAGE_EMULATOR_HOST": store.url, "TENSORSTORE_GCS_HTTP_URL": store.url, "HOME": str(tmp_path),
         "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
  keys = TINY | {"base_output_directory": "gs://bucket/runs", "dataset_type": "text", "dataset_path": text,
                 "per_device_batch_size": 1.0, "checkpoint_period": 2, "steps": 4, "log_period": 1}

  def run(script, wait=True, env=env, **overrides):
    given = keys if script == "train" else {}
    arguments = [f"{key}={value}" for key, value in (given | overrides).items()]
    process = subprocess.Popen([sys.executable, ROOT / f"MaxText/{script}.py", ROOT / "configs/base.yml", *arguments],
                               env=os.environ | env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    if not wait:
      return process
    process.out, process.err = process.communicate(timeout=200)
    # What TensorStore says of the token, and jax of its own business, is not ours.
    process.err = "".join(line for line in process.err.splitlines(True) if not re.match(r"[IW]\d{4} |WARNING:", line))
    return process

  run.env, run.keys = env, keys
  return run


def losses(content):
  return [json.loads(line)["learning/loss"] for line in content.splitlines()]


def names(store, prefix):
  return sorted(key.removeprefix(prefix) for key in store.objects if key.startswith(prefix))


@needs_gcsfs
def test_a_run_on_a_bucket_holds_everything_and_in_two_starts_has_the_losses_of_one_on_disk(run, store, tmp_path):
  keys = {"enable_tensorboard": True, "eval_interval": 2, "learning_rate_schedule_steps": 6}
  first = run("train", gcs_metrics=True, profiler="xplane", skip_first_n_steps_for_profiler=1, profiler_steps=1, **keys)
  assert first.returncode == 0 and first.err == "", first.out + first.err
  second = run("train", gcs_metrics=True, steps=6, **keys)
  assert second.returncode == 0 and second.err == "", second.out + second.err
  assert "restored step 4 from gs://bucket/runs/tiny/checkpoints/4" in second.out
  whole = run("train", base_output_directory=tmp_path / "local", steps=6, **keys)
  assert whole.returncode == 0, whole.err
  assert losses(store.objects["bucket/runs/tiny/metrics/metrics.jsonl"][0]) == losses(
      (tmp_path / "local/tiny/metrics/metrics.jsonl").read_bytes())
  found = names(store, "bucket/runs/tiny/")
  assert {"config.yml", "summary.json", "training.png", "data/manifest.json", "data/tokens", "metrics/eval.jsonl",
          *(f"checkpoints/{step}/{name}.json" for step in (2, 4, 6) for name in ("manifest", "position"))} <= set(found)
  assert len([name for name in found if name.startswith("tensorboard/events.out.tfevents.")]) == 2
  assert any(re.fullmatch(r"tensorboard/plugins/profile/.*\.xplane\.pb", name) for name in found)
  assert store.objects["bucket/runs/tiny/training.png"][0].startswith(b"\x89PNG")
  assert "lock" not in found and not [name for name in found if name.endswith(".tmp")]

  prompt = {"prompt": "1 2", "max_predict_length": 8, "data_cache_dir": ""}
  reopened = run("decode", base_output_directory="gs://bucket/runs", run_name="tiny", **prompt)
  assert reopened.returncode == 0 and "loaded the parameters of gs://bucket/runs/tiny/checkpoints/6" in reopened.err
  elsewhere = run("decode", load_parameters_path="gs://bucket/runs/tiny/checkpoints/4", **prompt)
  assert elsewhere.returncode == 0 and "loaded the parameters of gs://bucket/runs/tiny/checkpoints/4" in elsewhere.err


@needs_gcsfs
def test_a_damaged_checkpoint_on_a_bucket_is_set_aside_and_a_killed_save_removed(run, store):
  assert run("train").returncode == 0
  torn = next(key for key in store.objects if re.match("bucket/runs/tiny/checkpoints/4/state/.*/d/", key))
  store.objects[torn] = store.objects[torn][0][:-1], store.objects[torn][1]
  store.objects["bucket/runs/tiny/checkpoints/5/state/_METADATA"] = b"{}", 1
  again = run("train", steps=6)
  assert again.returncode == 0 and "step 4 is damaged" in again.err and "kept as 4.corrupt" in again.err, again.err
  assert "restored step 2" in again.out
  steps = {name.split("/")[0] for name in names(store, "bucket/runs/tiny/checkpoints/")}
  assert steps == {"2", "4", "4.corrupt", "6"}


@needs_gcsfs
def test_a_run_on_a_bucket_keeps_a_second_process_out_and_a_signal_saves_and_frees_it(run, store):
  process = run("train", wait=False, steps=1_000_000, checkpoint_period=1_000_000)
  line = next((line for line in process.stdout if line.startswith("completed step: 2/")), "")
  reader = threading.Thread(target=process.stdout.read)  # or the pipe fills up
  reader.start()
  second = run("train", steps=1_000_000)
  process.send_signal(signal.SIGTERM)
  reader.join()
  assert line and process.wait(100) == 75, process.stderr.read()
  assert second.returncode == 2 and f"gs://bucket/runs/tiny is in use by process {process.pid}" in second.err
  found = names(store, "bucket/runs/tiny/")
  saved = [name for name in found if re.fullmatch(r"checkpoints/\d+/manifest.json", name)]
  assert len(saved) == 1 and "lock" not in found


@needs_gcsfs
def test_a_bucket_that_stops_taking_checkpoints_ends_the_run_with_one_line_and_exit_code_4(run, store):
  store.fault = lambda method, name: 403 if method != "GET" and "/checkpoints/" in name else 0
  process = run("train", steps=6)
  assert process.returncode == 4, process.out + process.err
  assert process.err.splitlines()[-1].startswith("StorageError: ") and "Traceback" not in process.err, process.err


@needs_gcsfs
def test_passing_trouble_of_a_bucket_is_outlived(run, store):
  count = [0]

  def fault(method, name):
    count[0] += 1
    return 503 if count[0] % 10 == 0 else 0

  store.fault = fault
  process = run("train")
  assert process.returncode == 0 and process.err == "", process.out + process.err
  assert {"checkpoints/2/manifest.json", "checkpoints/4/manifest.json"} <= set(names(store, "bucket/runs/tiny/"))


@needs_gcsfs
@pytest.mark.parametrize("overrides, code", [
    ({"base_output_directory": "gs://absent/runs"}, 4), ({"load_parameters_path": "gs://bucket/absent"}, 3),
    ({"dataset_path": "gs://bucket/absent"}, 65), ({"tokenizer_type": "sentencepiece",
                                                    "tokenizer_path": "gs://bucket/absent.model"}, 2),
])  # fmt: skip
def test_what_is_not_in_a_bucket_is_one_line(run, overrides, code):
  process = run("train", **overrides)
  assert process.returncode == code, process.out + process.err
  assert process.err.count("\n") == 1 and "gs://" in process.err and "Traceback" not in process.err, process.err


def test_a_bucket_without_gcsfs_is_one_line(run, tmp_path):
  (tmp_path / "gcsfs.py").write_text("raise ImportError('gcsfs')")
  process = run("train", env=run.env | {"PYTHONPATH": str(tmp_path)})
  assert process.returncode in (2, 4), process.out + process.err
  assert process.err.count("\n") == 1 and "install gcsfs" in process.err, process.err


# --- Data on a bucket ------------------------------------------------------------------------------------------------


def upload(store, folder):
  """Puts the files in a folder on gs://bucket/<its name>."""
  for path in folder.rglob("*"):
    if path.is_file():
      store.put(f"bucket/{path.relative_to(folder.parent)}", path.read_bytes())


def trained(run, tmp_path, name, **keys):
  """The losses of 3 steps of a run of this name."""
  process = run("train", base_output_directory=tmp_path / "runs", run_name=name, steps=3, **keys)
  assert process.returncode == 0 and process.err == "", process.out + process.err
  found = losses((tmp_path / f"runs/{name}/metrics/metrics.jsonl").read_bytes())
  assert len(found) == 3
  return found


@pytest.fixture
def python(run):
  """python(code, *arguments): a process that runs the code, with the Store where Google's would be."""
  def python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=os.environ | run.env, cwd=ROOT,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

  return python


@needs_gcsfs
def test_text_on_a_bucket_gives_the_losses_of_the_same_on_disk_and_is_prepared_anew_when_a_file_changes(
    run, store, tmp_path):
  folder = tmp_path / "notes"
  for name in ("b.txt", "a.md", "sub/c.py", ".git/d.txt", "e.bin"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{name} " * 50)
  write_rows(folder / "z.jsonl", [{"text": f"row {i} " * 20} for i in range(20)])
  upload(store, folder)
  store.put("bucket/notes/sub/", b"")  # what consoles make of an empty folder
  keys = {"eval_interval": 2, "data_cache_dir": tmp_path / "cache"}
  here = trained(run, tmp_path, "here", dataset_path=folder, eval_dataset_path=f"{folder}/*.txt", **keys)
  keys |= {"dataset_path": "gs://bucket/notes", "eval_dataset_path": "gs://bucket/notes/*.txt"}
  assert trained(run, tmp_path, "there", **keys) == here
  fingerprints = [json.loads((tmp_path / f"runs/{name}/data/manifest.json").read_text())["fingerprint"]
                  for name in ("here", "there")]
  assert fingerprints[0] == fingerprints[1]
  evals = [(tmp_path / f"runs/{name}/metrics/eval.jsonl").read_text().count("\n") for name in ("here", "there")]
  assert evals[0] == evals[1] > 0

  asked, answer = [], store.answer
  store.answer = lambda method, target, *rest: (asked.append(target), answer(method, target, *rest))[1]
  assert trained(run, tmp_path, "again", **keys) == here
  assert asked and not [target for target in asked if "alt=media" in target]  # data_cache_dir has it
  store.put("bucket/notes/a.md", b"A.MD " * 50)  # as long, and on this server of the same date
  assert trained(run, tmp_path, "changed", **keys) != here


@needs_gcsfs
@pytest.mark.parametrize("path, complaint", [
    ("gs://absent/a.txt", "no such bucket, file"), ("gs://bucket/absent/*.txt", "no such bucket, file"),
    ("gs://bucket/refused", "cannot be listed (Forbidden"), ("gs://bucket/torn/a.txt", "a.txt: cannot be read (Forb"),
    ("gs://bucket/torn", "a.txt: cannot be read (Forb"), ("gs://bucket/rows.jsonl", "rows.jsonl:2: a row must be")])
def test_text_on_a_bucket_that_cannot_be_read_is_one_line(run, store, tmp_path, path, complaint):
  for name in ("a.txt", "b.txt"):
    store.put(f"bucket/torn/{name}", b"content")
  store.put("bucket/rows.jsonl", b'{"text": "a"}\nno JSON\n')

  asked = []

  def fault(method, name):
    asked.append(name)
    content = name.startswith("torn/") and asked.count(name) > path.endswith("a.txt")  # a file's metadata come first
    return 403 if content or path.endswith("refused") else 0

  store.fault = fault
  process = run("train", base_output_directory=tmp_path, dataset_path=path)
  assert process.returncode == 65 and process.err.count("\n") == 1 and complaint in process.err, process.err


@needs_gcsfs
def test_files_that_others_add_to_a_bucket_are_seen_and_those_that_grow_are_read_whole(python, store):
  code = """
import sys
from MaxText import sources
from etils import epath
for path in sys.stdin:
  folder, rows = epath.Path("gs://bucket/notes"), sources.grain("gs://bucket/rows/a.jsonl")
  print([(folder / name).read_text() for name in ("a.txt", "b.txt") if (folder / name).exists()],
        list(sources.documents(sources.text("gs://bucket/notes/a.txt"), 0)), list(rows.read(0)),
        sorted(path.name for path in folder.iterdir()), list(sources.documents(sources.text("gs://bucket/notes"), 0)),
        len(sources.grain("gs://bucket/rows").shards), flush=True)
"""
  with python(code) as process:
    def look():
      process.stdin.write("\n")
      process.stdin.flush()
      return process.stdout.readline()

    store.put("bucket/notes/a.txt", b"one")
    store.put("bucket/rows/a.jsonl", b'{"text": "1"}\n')
    assert look() == "['one'] ['one'] ['1'] ['a.txt'] ['one'] 1\n"
    store.put("bucket/notes/a.txt", b"longer")
    store.put("bucket/notes/b.txt", b"two")
    store.put("bucket/rows/a.jsonl", b'{"text": "12345"}\n')
    store.put("bucket/rows/b.jsonl", b'{"text": ""}\n')
    assert look() == "['longer', 'two'] ['longer'] ['12345'] ['a.txt', 'b.txt'] ['longer', 'two'] 2\n"


@needs_gcsfs
def test_a_host_waits_on_a_bucket_for_the_data_that_process_0_writes_there(python, run, store):
  code = """
import sys
from MaxText import data, pyconfig
cfg = pyconfig.load(sys.argv[2:])
cfg = pyconfig.resolve(cfg, [type("Device", (), {"platform": "cpu", "device_kind": "cpu", "slice_index": 0})()])
print("ready", flush=True)
held = data.open(cfg, process_index=int(sys.argv[1]), process_count=2)
print(held.identity["corpus"], held.train.rows(0, 4)["inputs"].sum())
"""
  arguments = [ROOT / "configs/base.yml", *(f"{key}={value}" for key, value in run.keys.items())]
  with python(code, 1, *arguments) as second:
    assert second.stdout.readline() == "ready\n"
    looks, answer = threading.Semaphore(0), store.answer
    store.answer = lambda method, target, *rest: (looks.release(), answer(method, target, *rest))[1]
    for _ in range(4):  # it has found nothing, more than once
      assert looks.acquire(timeout=60)
    with python(code, 0, *arguments) as first:
      (out, err), (first_out, first_err) = second.communicate(timeout=60), first.communicate(timeout=60)
      assert first.returncode == second.returncode == 0, err + first_err
      assert out and first_out == "ready\n" + out


@needs_gcsfs
@pytest.mark.parametrize("kind", [".parquet", ".jsonl.gz", ".jsonl.zst"])
def test_shards_on_a_bucket_give_the_losses_of_the_same_on_disk(run, store, tmp_path, kind):
  folder = tmp_path / "shards"
  folder.mkdir()
  for shard in range(3):
    rows = [{"text": f"{shard} {i} " + "ab cd " * (i % 20)} for i in range(100)]
    (write_parquet if kind == ".parquet" else write_rows)(folder / f"{shard}{kind}", rows)
  upload(store, folder)
  here, there = (trained(run, tmp_path, name, dataset_type="grain", dataset_path=path, data_workers=workers,
                         eval_interval=2, eval_dataset_path=f"{path}/0{kind}")
                 for name, path, workers in (("here", folder, 0), ("there", "gs://bucket/shards", 2)))
  assert here == there


@needs_gcsfs
def test_token_files_on_a_bucket_are_refused_in_one_line(run, tmp_path):
  process = run("train", base_output_directory=tmp_path, dataset_type="tokens", dataset_path="gs://bucket/tokens")
  assert process.returncode == 65 and process.err.count("\n") == 1, process.err
  assert "gs://bucket/tokens: token files are read from a local folder. Mount the bucket" in process.err


# --- TensorFlow's client ---------------------------------------------------------------------------------------------
# It knows www.googleapis.com and storage.googleapis.com alone, so that it comes here through a proxy and a certificate.


@pytest.fixture
def tensorflow(store, tmp_path):
  """tensorflow(code): what the code prints in a process whose TensorFlow finds the Store where Google's would be."""
  certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", tmp_path / "key.pem", "-out",
                 tmp_path / "cert.pem", "-days", "2", "-subj", "/CN=here", "-addext",
                 "subjectAltName=DNS:www.googleapis.com,DNS:storage.googleapis.com"]
  subprocess.run(certificate, check=True, capture_output=True)
  store.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
  store.tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
  env = {"https_proxy": store.url, "CURL_CA_BUNDLE": str(tmp_path / "cert.pem"), "no_proxy": "", "HOME": str(tmp_path),
         "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token", "NO_GCE_CHECK": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}

  def run(code):
    return subprocess.run([sys.executable, "-c", code], env=os.environ | env, cwd=ROOT, check=True, timeout=200,
                          stdout=subprocess.PIPE, text=True).stdout.splitlines()

  run.env = env
  return run


@needs_tensorflow
@pytest.mark.skipif(not C4.is_dir(), reason="../shared/data/c4 is absent")
def test_tf_data_reads_the_records_of_c4_from_a_bucket_as_from_disk(store, tensorflow):
  files = sorted(C4.glob("*-train.tfrecord-*"))[:4]
  for file in files:
    store.put(f"bucket/c4/en/3.0.1/{file.name}", file.read_bytes())
  code = """
import hashlib, sys, tensorflow as tf
for pattern in %r:
  files = sorted(tf.io.gfile.glob(pattern))
  records = list(tf.data.TFRecordDataset(files).as_numpy_iterator())
  print(len(files), len(records), hashlib.sha256(b"".join(records)).hexdigest())
""" % ["gs://bucket/c4/en/3.0.1/*-train.tfrecord-*", str(C4 / "*-train.tfrecord-0000[0-3]-*")]
  there, here = tensorflow(code)
  assert there == here and there.startswith("4 ")


@needs_tensorflow
@needs_gcsfs
def test_tfrecords_on_a_bucket_give_the_losses_of_the_same_on_disk(run, store, tensorflow, tmp_path):
  for split, shards in (("train", 3), ("validation", 1)):
    for shard in range(shards):
      texts = [f"{shard} {i} " + "ab cd " * (i % 20) for i in range(100)]
      write_tfrecord(tmp_path / f"tfds/c4/en/3.0.1/c4-{split}.tfrecord-{shard:05d}-of-{shards:05d}",
                     [example({"text": [text.encode()]}) for text in texts])
  upload(store, tmp_path / "tfds")
  here, there = (trained(run, tmp_path, name, dataset_type="tfds", dataset_path=path, eval_interval=2,
                         env=run.env | tensorflow.env)
                 for name, path in (("here", tmp_path / "tfds"), ("there", "gs://bucket/tfds")))
  assert here == there


@needs_tensorflow
def test_paths_through_tensorflow_write_read_list_rename_and_remove_on_a_bucket(store, tensorflow):
  lines = tensorflow("""
import os
os.environ["EPATH_USE_TF"] = "true"
from etils import epath
run = epath.Path("gs://bucket/runs/tf")
run.mkdir(parents=True, exist_ok=True)
for i in range(5):
  (run / f"{i}.txt").write_bytes(b"x" * i)
(run / "3.txt").replace(run / "three")
(run / "4.txt").unlink()
print(sorted(path.name for path in run.iterdir()), (run / "2.txt").read_text(), (run / "three").stat().length)
""")
  assert lines == ["['0.txt', '1.txt', '2.txt', 'three'] xx 3"]
  assert store.objects["bucket/runs/tf/three"][0] == b"xxx"


# --- download_dataset.sh with Google's own tool ----------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
def test_download_dataset_copies_c4_with_the_real_gcloud_and_says_whom_it_bills(store, tmp_path):
  content = {f"c4-train.tfrecord-0000{i}": b"%d" % i * (1000 + i) for i in range(2 * PAGE)}
  for name, body in content.items():
    store.put(f"allennlp-tensorflow-datasets/c4/en/3.0.1/{name}", body)
  (tmp_path / "token").write_text("made up")
  env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path / "cloudsdk"),
         "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{store.url}/storage/v1/",
         "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(tmp_path / "token"), "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
         "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true", "CLOUDSDK_CORE_DISABLE_PROMPTS": "true"}

  def download(to):
    return subprocess.run(["bash", ROOT / "download_dataset.sh", "my-project", to], env=env, check=False, timeout=100,
                          capture_output=True, text=True)

  result = download("bucket")
  assert result.returncode == 0 and "6 files have the sizes" in result.stdout, result.stderr
  assert {name: store.objects[f"bucket/c4/en/3.0.1/{name}"][0] for name in content} == content
  assert store.billed == {"my-project"}
  assert download(tmp_path / "local").returncode == 0
  local = tmp_path / "local/c4/en/3.0.1"
  assert {path.name: path.read_bytes() for path in local.iterdir()} == content
  (local / "c4-train.tfrecord-00003").write_bytes(b"torn")
  assert "of which 1 (1003 bytes)" in download(tmp_path / "local").stdout
  assert {path.name: path.read_bytes() for path in local.iterdir()} == content
  absent = download("absent")
  assert absent.returncode == 2 and absent.stderr.count("\n") == 1 and absent.stderr.endswith("create gs://absent\n")
  store.fault = lambda method, name: 403
  refused = download("bucket")
  assert refused.returncode == 4 and refused.stderr.count("\n") == 1 and "no permission" in refused.stderr
