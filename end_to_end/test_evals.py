# SPDX-License-Identifier: Apache-2.0
"""Claim: evals.py gives the scores of plain loops, of others' code too, and is faster than they are.

  python3 end_to_end/test_evals.py [--data=../shared/data/eval] [--transformers=PYTHON] [--harness=PYTHON]

On the default model, trained here: all rows of LAMBADA within ten minutes; its perplexity is the evaluation that
training logged; and in turns in one process evals.Scorer, a loop padded to the full length and a loop of one row at a
time in the same few lengths: the same scores, at least 5 and 0.9 times their speed, at the model's own length and at
2,048 tokens. With --transformers, a Python that has torch and transformers: a small model of bytes, trained on the
texts of LAMBADA, scored there row by row (plain_evals.py): every decision and accuracy the same, log-probabilities
within 1e-4. With --harness, a Python that has lm_eval besides what this project needs: its acc, acc_norm, and texts.
--data holds lambada_test.jsonl, boolq.jsonl, arc_easy.jsonl and piqa.jsonl.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import json
import math
import pathlib
import re
import subprocess
import time

import numpy as np

from end_to_end import runs

BYTES = ["dataset_type=text", "tokenizer_type=byte", "vocab_size=384", "eval_interval=-1", "add_eos=false"]
LIMITS = {"padded": 5.0, "one row": 0.9}


def evaluate(place, name, tasks, *more, python=sys.executable, script="evals.py"):
  """What evals.py (or decode.py) prints for a run."""
  command = [python, f"MaxText/{script}", *place.arguments, f"run_name={name}", *more]
  if tasks:
    command.append(f"eval_tasks=[{','.join(tasks)}]")
  done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=False,
                        env={**os.environ, "HF_HUB_OFFLINE": "1"})
  runs.check(done.returncode == 0, f"{script} ended with exit code {done.returncode}: {done.stderr.strip()[-600:]}")
  return done.stdout


def record(place, name):
  """The lines of a run's evals.jsonl."""
  return [json.loads(line) for line in (pathlib.Path(place.directory) / name / "evals.jsonl").read_text().splitlines()]


def open_run(place, name, *more):
  from MaxText import decode, pyconfig

  return decode.open_run(pyconfig.load([*place.arguments, f"run_name={name}", *more], need_run_name=False, reopen=True))


class Keep:
  """A Scorer that keeps what it was asked and what it answered."""

  def __init__(self, scorer=None):
    self.scorer = scorer

  def score(self, params, requests):
    from MaxText import evals

    self.requests = requests
    if self.scorer is None:
      return [evals.Score(-1.0, False)] * len(requests), 0
    self.scores, cut = self.scorer.score(params, requests)
    return self.scores, cut


# --- Speed -----------------------------------------------------------------------------------------------------------


def plain_loop(opened, requests, lengths):
  """(logprob, greedy) of each request, one row at a time padded to the next of `lengths`, logits of every position."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  @jax.jit
  def forward(params, tokens_bt, size):
    transformer = nnx.merge(opened.graph, params)
    positions_bt = jnp.arange(tokens_bt.shape[1])[None]
    hidden_bte, _ = transformer(tokens_bt, positions_bt, (positions_bt < size).astype(jnp.int32))
    return jax.nn.log_softmax(transformer.logits(hidden_bte))[0]

  def run(requests):
    found = []
    for context, target in requests:
      ids = np.concatenate([context, target])[-opened.cfg.max_target_length - 1:]
      inputs, target = ids[:-1], ids[1:][-len(target):]
      padding = next(n for n in lengths if n >= len(inputs)) - len(inputs)
      logprobs = np.asarray(forward(opened.params, np.pad(inputs, (0, padding))[None], np.int32(len(inputs))))
      logprobs = logprobs[len(inputs) - len(target):len(inputs)]
      found.append((logprobs[np.arange(len(target)), target].sum(dtype=np.float64),
                    bool((logprobs.argmax(axis=1) == target).all())))
    return found

  longest = {next(n for n in lengths if n >= min(len(c) + len(t) - 1, lengths[-1])): (c, t) for c, t in requests}
  run(longest.values())  # compiles
  return run


def speeds(place, data, name, rows, *more):
  """{"padded": ratio, "one row": ratio}: how many times as fast as these loops evals.Scorer is, scores compared."""
  from MaxText import evals, sharding

  opened = open_run(place, "demo", *more)
  keep = Keep()
  kind, path = name
  evals.TASKS[kind](opened.cfg.replace(max_eval_task_rows=rows), opened.tokenizer, str(data / path))(keep, None)
  requests = keep.requests
  scorer = evals.Scorer(opened.cfg, opened.mesh, opened.graph)
  with sharding.use(opened.mesh, opened.cfg.logical_axis_rules):
    ways = {"ours": lambda requests: scorer.score(opened.params, requests)[0],
            "one row": plain_loop(opened, requests, scorer.lengths()),
            "padded": plain_loop(opened, requests, [opened.cfg.max_target_length])}
    ways["ours"](requests)  # compiles
    seconds, found = dict.fromkeys(ways, math.inf), {}
    for _ in range(2):  # in turns: whoever else uses the machine slows all of them
      for way, run in ways.items():
        begin = time.perf_counter()
        found[way] = run(requests)
        seconds[way] = min(seconds[way], time.perf_counter() - begin)
  for way in ("one row", "padded"):
    apart = max(abs(a[0] - b[0]) for a, b in zip(found["ours"], found[way], strict=True))
    runs.check(apart < 1e-3, f"{path}: log-probabilities {apart:.1e} from those of the loop ({way})")
    differ = sum(a[1] != b[1] for a, b in zip(found["ours"], found[way], strict=True))
    runs.check(not differ, f"{path}: {differ} other decisions than the loop's ({way})")
  return {way: seconds[way] / seconds["ours"] for way in LIMITS} | {"rows": rows, "rows/s": rows / seconds["ours"]}


# --- Others' code ----------------------------------------------------------------------------------------------------


def raw_boolq(row):
  """A row of {"query", "choices", "gold"} as Pax reads it: passage, question, answer."""
  passage, question = re.fullmatch(r"Passage: (.*)\nQuestion: (.*)\?", row["query"], re.DOTALL).groups()
  return {"passage": passage, "question": question, "answer": row["choices"][row["gold"]] == "yes"}


def own_words(opened, examples):
  """Rows as of LAMBADA whose last word is what decoding the rest greedily gives: all of them right."""
  from MaxText import decode

  texts = [row["text"].rpartition(" ")[0].strip() for row in examples]
  texts = [text for text in texts if text.isascii() and len(text) < 400]
  prompts = [decode.encode(opened, text) for text in texts]
  found = decode.Decoder(opened).generate(prompts, max_predict_length=16)
  said = [decode.continuation_text(opened.tokenizer, prompt, continuation.tokens)
          for prompt, continuation in zip(prompts, found, strict=True)]
  words = [re.match(r" [a-zA-Z]+(?=[^a-zA-Z])", text) for text in said]
  return [{"text": text + word.group()} for text, word in zip(texts, words, strict=True) if word]


def compare_with_transformers(place, data, python, rows):
  """Figures of every decision of transformers against ours on `rows` rows of each task."""
  import jax

  from MaxText import evals

  place.train("bytes", *BYTES, f"dataset_path={data}/lambada_test.jsonl")
  folder = pathlib.Path(place.logs) / "plain"
  folder.mkdir()
  read = {path: [json.loads(line) for line in (data / f"{path}.jsonl").read_text().splitlines()[:rows]]
          for path in ("lambada_test", "boolq", "arc_easy", "piqa")}
  tasks = {"lambada/lambada_test": read["lambada_test"], "boolq/raw": [raw_boolq(row) for row in read["boolq"]],
           "choice/arc_easy": read["arc_easy"], "choice/piqa": read["piqa"], "choice/boolq": read["boolq"]}
  opened = open_run(place, "bytes", "matmul_precision=highest", "max_target_length=512")  # some rows are longer
  tasks["lambada/own_words"] = own_words(opened, read["lambada_test"])
  ours, cut = {}, 0
  for name, examples in tasks.items():
    path = folder / f"{name.replace('/', '_')}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in examples))
    keep = Keep(evals.Scorer(opened.cfg, opened.mesh, opened.graph))
    values = evals.TASKS[name.split("/")[0]](opened.cfg, opened.tokenizer, str(path))(keep, opened.params)
    ours[name], cut = (values, keep.scores), cut + values["cut"]
  own = ours["lambada/own_words"][0]
  runs.check(own["accuracy"] == 1.0 and own["rows"] > 0, f"what decode.py says is not the likeliest: {own}")
  runs.check(cut > 0, "no row was longer than max_target_length: the comparison leaves truncation out")
  np.savez(folder / "params.npz", **{jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(value)
                                     for path, value in jax.tree.leaves_with_path(opened.params)})
  names = ("emb_dim", "num_query_heads", "num_kv_heads", "head_dim", "mlp_dim", "num_decoder_layers", "vocab_size",
           "max_target_length")
  (folder / "config.json").write_text(json.dumps({name: getattr(opened.cfg, name) for name in names}))
  (folder / "tasks.json").write_text(json.dumps(tasks))
  done = subprocess.run([python, "end_to_end/plain_evals.py", str(folder)], cwd=runs.ROOT, capture_output=True,
                        text=True, check=False)
  runs.check(done.returncode == 0, f"plain_evals.py: {done.stderr.strip()[-600:]}")
  apart, greedy, figures = 0.0, 0, []
  for name, found in json.loads((folder / "plain.json").read_text()).items():
    values, scores = ours[name]
    apart = max([apart, *(abs(a.logprob - b[0]) for a, b in zip(scores, found["scores"], strict=True))])
    differ = [i for i, (a, b) in enumerate(zip(scores, found["scores"], strict=True)) if a.greedy != b[1]]
    runs.check(not differ, f"{name}: decided otherwise in answers {differ[:9]}")
    for metric, value in found["values"].items():
      runs.check(values[metric] == value, f"{name}: {metric} {values[metric]}, by transformers {value}")
      figures.append(f"{name} {metric} {value:g}")
    greedy += sum(score.greedy for score in scores)
  runs.check(apart < 1e-4, f"log-probabilities {apart:.1e} from those of transformers")
  count = sum(len(scores) for _, scores in ours.values())
  return (f"transformers, {rows} rows each, {count} answers, {greedy} of them likeliest, {cut} cut: every decision the "
          f"same, log-probabilities within {apart:.1e} ({', '.join(figures)})")


def task_yaml(folder, name, rows, **keys):
  """Path of a task of lm-evaluation-harness over these rows."""
  (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{folder}/{name}.jsonl"}},
          "test_split": "test", "doc_to_text": "{{query}}", **keys}
  path = folder / f"{name}.yaml"
  path.write_text(json.dumps(task))  # JSON is YAML
  return path


def compare_with_harness(place, data, python, rows):
  """Figures of the harness's own evaluation of our model against ours."""
  folder = pathlib.Path(place.logs) / "harness"
  folder.mkdir()
  tasks = []
  for name, delimiter in (("arc_easy", " "), ("piqa", "")):
    examples = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()[:rows]]
    path = task_yaml(folder, f"our_{name}", examples, output_type="multiple_choice", doc_to_choice="{{choices}}",
                     doc_to_target="gold", target_delimiter=delimiter,
                     metric_list=[{"metric": metric, "aggregation": "mean", "higher_is_better": True}
                                  for metric in ("acc", "acc_norm")])
    tasks += [f"choice:{folder}/our_{name}.jsonl", f"lm_eval:{path}"]
  prompts = ["def ", "import os\n\n\nclass Node:\n", "for i in range(", "# Copyright"]
  (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
  evaluate(place, "demo", [], f"prompt_file={folder}/prompts.jsonl", "max_predict_length=12",
           f"decode_output_file={folder}/texts.jsonl", script="decode.py")
  texts = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
  path = task_yaml(folder, "our_texts", [{"query": text["prompt"], "answer": text["text"]} for text in texts],
                   output_type="generate_until", doc_to_target="{{answer}}", target_delimiter="",
                   generation_kwargs={"until": ["never this"], "max_gen_toks": 12, "do_sample": False},
                   metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}])
  evaluate(place, "demo", [*tasks, f"lm_eval:{path}"], python=python)
  arc, arc_theirs, piqa, piqa_theirs, generated = record(place, "demo")[-5:]
  for mine, theirs in ((arc, arc_theirs), (piqa, piqa_theirs)):
    for metric, name in (("accuracy", "acc"), ("accuracy_norm", "acc_norm")):
      runs.check(mine[metric] == theirs[name], f"{mine['path']}: {metric} {mine[metric]}, by lm_eval {theirs[name]}")
  runs.check(generated["exact_match"] == 1.0, f"texts of generate_until are not decode.py's: {generated}")
  return (f"lm_eval, {rows} rows: acc and acc_norm the same on ARC-Easy ({arc['accuracy']:g}, "
          f"{arc['accuracy_norm']:g}) and PIQA ({piqa['accuracy']:g}, {piqa['accuracy_norm']:g}), "
          "generated texts those of decode.py")


# --- The claim -------------------------------------------------------------------------------------------------------


def claim(place, data, transformers, harness, rows):
  data, figures = pathlib.Path(runs.ROOT, data).resolve(), []
  runs.check((data / "lambada_test.jsonl").exists(), f"{data} has no lambada_test.jsonl. Give --data")
  place.train("demo")

  begin = time.monotonic()
  evaluate(place, "demo", [f"lambada:{data}/lambada_test.jsonl"])
  seconds, whole = time.monotonic() - begin, record(place, "demo")[-1]
  runs.check(whole["rows"] == 5153 and seconds < 600, f"{whole['rows']} rows of LAMBADA took {seconds:.0f} s")
  figures.append(f"5,153 rows of LAMBADA in {seconds:.0f} s with start-up and compilation (accuracy "
                 f"{whole['accuracy']:.4f}, perplexity {whole['perplexity']:.1f}, {whole['cut']:.0f} cut)")
  evaluate(place, "demo", ["perplexity"])
  ours, logged = record(place, "demo")[-1], place.rows("demo", "eval.jsonl")[-1]
  runs.check(abs(ours["loss"] / logged["eval/loss"] - 1) < 1e-6, f"loss {ours['loss']}, training {logged['eval/loss']}")
  figures.append(f"evaluation loss {ours['loss']:.6f} is training's")

  for name, count, length in ((("lambada", "lambada_test.jsonl"), 200, 256), (("choice", "arc_easy.jsonl"), 100, 256),
                              (("lambada", "lambada_test.jsonl"), 24, 2048), (("boolq", "boolq.jsonl"), 24, 2048)):
    found = speeds(place, data, name, count, f"max_target_length={length}")
    figures.append(f"{count} rows of {name[1]} at {length}: {found['padded']:.1f}x a padded loop, "
                   f"{found['one row']:.2f}x one row at a time, {found['rows/s']:.0f} rows/s")
    runs.check(found["one row"] >= LIMITS["one row"], figures[-1])
    runs.check(length < 2048 or found["padded"] >= LIMITS["padded"], figures[-1])
  if transformers:
    figures.append(compare_with_transformers(place, data, transformers, rows))
  if harness:
    figures.append(compare_with_harness(place, data, harness, rows))
  return "; ".join(figures)


if __name__ == "__main__":
  runs.judge(__file__, claim, ["configs/base.yml"], data="../shared/data/eval", transformers="", harness="", rows=100)
