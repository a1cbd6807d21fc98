# SPDX-License-Identifier: Apache-2.0
"""The rules of the house: who imports whom, names, keys, and what README, recipes and scripts claim to exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from MaxText import pyconfig

ROOT = Path(__file__).resolve().parent.parent
ROOMS = sorted((ROOT / "MaxText").glob("*.py"))
SOURCES = [*(path for path in ROOMS if not path.is_symlink()), *sorted(ROOT.glob("*.py"))]
PYTHON = [*SOURCES, *sorted(ROOT.glob("tests/*.py")), *sorted(ROOT.glob("end_to_end/*.py"))]
SHELL = [*(path for folder in ("", "configs/", "end_to_end/") for path in sorted(ROOT.glob(f"{folder}*.sh"))),
         ROOT / ".ci" / "run"]
RECIPES = sorted(ROOT.glob("configs/*.yml"))
BASE_KEYS = yaml.safe_load((ROOT / "configs/base.yml").read_text()).keys()

# A room imports only from the lines above its own. A new file is a new name here, in the lowest line that holds it.
LAYERS = (
    ("__init__", "errors"),
    ("topology",),
    ("pyconfig",),
    ("interpreter",),
    ("processes",),
    ("sharding", "tokenizer", "diagnostics"),
    ("attention", "quantize", "metrics", "hlo_cost", "executable", "sources"),
    ("corpus", "streams"),
    ("moe", "optim", "data", "checkpoint", "pipeline", "planner"),
    ("model", "prepare", "standalone_dataloader"),
    ("lora", "convert"),
    ("decode",),
    ("train", "evals"),
    ("train_compile",),
)  # fmt: skip
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
ALLOWED = {("train", "evals")}  # only inside main, when the config names eval tasks
STANDARD_LIBRARY_ONLY = ("interpreter", "multihost_runner", "multihost_job")
SLOW_TO_IMPORT = ("tensorflow", "tensorflow_text", "torch", "transformers", "matplotlib")


def relative(path):
  return path.relative_to(ROOT).as_posix()


def each(paths):
  return pytest.mark.parametrize("path", paths, ids=relative)


def tree(path):
  return ast.parse(path.read_text(), filename=str(path))


def imports(nodes):
  """Full names that the import statements among the nodes import: "jax.numpy", "MaxText.errors"."""
  for node in nodes:
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_module_level(node):
  """The nodes that run when the module is imported: everything outside functions and `if __name__` blocks."""
  for child in ast.iter_child_nodes(node):
    yield child
    if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
      yield from at_module_level(child)


# --- Rooms -----------------------------------------------------------------------------------------------------------


@each(SOURCES)
def test_a_room_imports_only_from_lower_layers(path):
  if path.stem in STANDARD_LIBRARY_ONLY[1:]:
    return
  assert path.stem in LAYER, f"{relative(path)} has no layer yet: give it one in {relative(Path(__file__))}"
  for name in imports(ast.walk(tree(path))):
    if name.startswith("MaxText.") and (path.stem, name.split(".")[1]) not in ALLOWED:
      other = name.split(".")[1]
      assert LAYER[other] < LAYER[path.stem], f"{relative(path)} imports {other}, which is not below it"


@each(SOURCES)
def test_what_takes_seconds_to_import_is_imported_where_it_is_used(path):
  for name in imports(at_module_level(tree(path))):
    package = name.split(".")[0]
    assert package not in SLOW_TO_IMPORT, f"{relative(path)} imports {package} for everybody"
    if LAYER.get(path.stem, 9) <= LAYER["interpreter"]:
      assert package not in ("jax", "jaxlib", "flax", "numpy"), f"{relative(path)} has to answer before {package} does"
    if path.stem in STANDARD_LIBRARY_ONLY:
      assert package in (*sys.stdlib_module_names, "MaxText"), f"{relative(path)} is for any Python, without {package}"


def test_reading_a_config_imports_no_jax_and_training_no_tensorflow():
  def imported(modules, packages):
    code = f"import sys, {modules}; print(*[name for name in {packages} if name in sys.modules])"
    return subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()

  assert imported("MaxText.pyconfig, MaxText.topology, MaxText.interpreter", ("jax", "numpy", "flax")) == []
  if (ROOT / "MaxText/train.py").exists():
    assert imported("MaxText.train", SLOW_TO_IMPORT) == []


@each(SOURCES)
def test_files_are_nouns_that_shadow_nothing(path):
  words = set(path.stem.split("_"))
  assert not words & {"util", "utils", "helper", "helpers", "common", "misc", "manager", "factory", "registry", "base",
                      "core", "deprecated", "experimental"}, relative(path)  # fmt: skip
  assert path.stem not in sys.stdlib_module_names, f"{relative(path)} hides the standard library's {path.stem}"


def calls_itself(node):
  return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


@each([*SOURCES, *sorted(ROOT.glob("end_to_end/*.py"))])
def test_an_entry_script_begins_by_finding_its_own_code_and_its_python(path):
  if not any(calls_itself(node) for node in tree(path).body):
    return
  code = [node for node in tree(path).body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
  first = next(node for node in code if not (isinstance(node, ast.Import) and set(imports([node])) <= {"os", "sys"}))
  assert calls_itself(first), f"{relative(path)}: after `import os, sys` comes `if __name__ == '__main__':`"
  assert ast.unparse(first).split("\n")[1].strip().startswith("sys.path[0] = os.path.dirname(")
  if path.stem not in STANDARD_LIBRARY_ONLY:
    assert re.search(r"interpreter\.(ensure|start)\(", ast.unparse(first)), f"{relative(path)}: interpreter.ensure()"


def test_every_room_says_in_its_docstring_what_it_is_for():
  for path in PYTHON:
    if path.name != "__init__.py":
      assert ast.get_docstring(tree(path)), relative(path)


# --- Names -----------------------------------------------------------------------------------------------------------


def name_of(node):
  """What a tensor is called, or "": x_bte, self.w_em, head["w_ve"], x_bte[i:j], x_bte.astype(...)."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute):
    return node.attr
  if isinstance(node, ast.Subscript):
    key = node.slice
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else name_of(node.value)
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "astype":
    return name_of(node.func.value)
  return ""


def einsum_of(node):
  """The einsum call in `einsum(...)`, `shard(einsum(...), ...)` or `einsum(...) * scale`, else None."""
  while isinstance(node, (ast.Call, ast.BinOp)):
    if isinstance(node, ast.BinOp):
      node = node.left
    elif (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) == "einsum":
      return node if node.args and isinstance(node.args[0], ast.Constant) and "->" in node.args[0].value else None
    else:
      node = node.args[0] if node.args else None
  return None


def wrong_names(source):
  """(line, name, letters) of each tensor of an einsum whose suffix is not its letters."""
  wrong = []

  def check(node, letters):
    name = name_of(node)
    if name and "." not in letters and name.rpartition("_")[2] != letters:
      wrong.append((node.lineno, name, letters))

  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Call) and einsum_of(node) is node:
      inputs = node.args[0].value.split("->")[0].split(",")
      for argument, letters in zip(node.args[1:], inputs, strict=False):
        check(argument, letters.strip())
    if isinstance(node, ast.Assign) and (call := einsum_of(node.value)) and isinstance(node.targets[0], ast.Name):
      check(node.targets[0], call.args[0].value.split("->")[1].strip())
  return wrong


def test_the_rule_for_tensor_names_finds_what_breaks_it():
  assert wrong_names('y_bt = einsum("bte,em->btm", x_bte, self.w_em)') == [(1, "y_bt", "btm")]
  assert wrong_names('y_btm = shard(einsum("bte,em->btm", x_btm, w["w_em"]), 0)') == [(1, "x_btm", "bte")]
  assert wrong_names('y_btm = einsum("bte,em->btm", x_bte[:, 1:].astype(f), norm(x)) * s') == []


@each(SOURCES)
def test_the_suffix_of_a_tensor_is_its_einsum_letters(path):
  assert wrong_names(path.read_text()) == []


# --- Keys ------------------------------------------------------------------------------------------------------------


class Device:
  platform, device_kind, slice_index = "cpu", "cpu", 0


def config_names():
  """Every attribute of a resolved Config."""
  cfg = pyconfig.resolve(pyconfig.load([str(ROOT / "configs/base.yml"), "run_name=x"]), [Device()])
  return {*BASE_KEYS, *cfg._values, *(name for name in dir(cfg) if not name.startswith("_"))}


def config_reads(path):
  """(line, name) of every `cfg.name` and `self.cfg.name`."""
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Attribute) and name_of(node.value) == "cfg":
      yield node.lineno, node.attr


def test_every_name_read_from_a_config_exists():
  known = config_names()
  for path in [*SOURCES, *ROOT.glob("end_to_end/*.py")]:
    for line, name in config_reads(path):
      assert name in known or name.startswith("_"), f"{relative(path)}:{line}: cfg.{name} is not in configs/base.yml"


def test_every_key_is_used():
  used = {name for path in SOURCES for _, name in config_reads(path)}
  for path in SOURCES:  # values["key"] in a function; the tables of pyconfig, which name every key, do not count
    for node in ast.walk(tree(path)):
      if isinstance(node, ast.FunctionDef) and not node.name.startswith("validate"):
        used |= {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
  derived = re.compile(r"base_\w+|(ici|dcn)_\w+_parallelism")
  unused = [key for key in BASE_KEYS if key not in used and not derived.fullmatch(key)]
  assert not unused, f"nothing reads {', '.join(unused)}"


def test_every_key_is_explained_in_the_comment_above_it():
  explained = False
  for number, line in enumerate((ROOT / "configs/base.yml").read_text().splitlines(), 1):
    if line.startswith("#"):
      explained = not line.startswith("# ---")
    elif not line.strip():
      explained = False
    elif re.match(r"\w", line):
      assert explained, f"configs/base.yml:{number}: {line} has no comment"


@each(RECIPES)
def test_a_recipe_begins_with_its_command_and_knows_its_keys(path):
  text = path.read_text()
  assert set(yaml.safe_load(text)) - {"base_config"} <= set(BASE_KEYS)
  assert re.match(r"# .*(python3|bash) ", text), f"{relative(path)}: line 1 is the command that runs it"


def commands(text):
  """The shell commands in a text that run a script of this project, without those that are shown to be an error.

  Continuation lines are joined, comment signs and prompts are left as they are.
  """
  lines = [*re.sub(r"\\\n[#\s]*", " ", text).splitlines(), ""]
  return [line for line, answer in zip(lines, lines[1:], strict=False)
          if re.search(r"(python3|bash) +[\w./]+\.(py|sh)\b", line) and not re.match(r"\w*Error: ", answer)]


@each([path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SHELL, *RECIPES] if path.exists()])
def test_commands_name_files_and_keys_that_exist(path):
  for command in commands(path.read_text()):
    for script in re.findall(r"(?:python3|bash) +((?!-)[\w./]+\.(?:py|sh))\b", command):
      assert (ROOT / script).exists(), f"{relative(path)} runs {script}, which does not exist"
    for config in re.findall(r"(?<=\s)((?:MaxText/)?configs/[\w./]+\.yml)", command):
      assert (ROOT / config).exists(), f"{relative(path)} names {config}, which does not exist"
    arguments = re.search(r"(?:train|decode|evals|train_compile)\.py\s(.*)", command)
    for key in re.findall(r"(?:^|\s)([a-z]\w*)=", arguments[1].split("#")[0]) if arguments else ():
      assert key in BASE_KEYS, f"{relative(path)} gives {key}=, which is not in configs/base.yml"


# --- Manners ---------------------------------------------------------------------------------------------------------


@each([path for path in [*PYTHON, *SHELL] if path.name != "__init__.py"])
def test_a_file_states_its_licence_at_its_top(path):
  assert "# SPDX-License-Identifier: Apache-2.0" in path.read_text().splitlines()[:2]


@each([*SHELL, *RECIPES])
def test_lines_fit_where_ruff_does_not_look(path):
  assert [number for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120] == []


def test_the_readme_names_every_file_at_the_top():
  readme = ROOT / "README.md"
  listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
  if not readme.exists() or not listed:
    pytest.skip("no README.md, or not a git checkout")
  top = {name.split("/")[0] for name in listed if not name.startswith(".")}
  text = readme.read_text()
  assert [name for name in sorted(top) if name != "README.md" and name not in text] == []
