# SPDX-License-Identifier: Apache-2.0
"""setup.sh on machines that are not at hand (stand-ins on PATH, dry runs), and interpreter.py in a copied folder."""

import ast
import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE_PYTHON = os.path.realpath(sys.executable)
STAND_INS = {  # of the packages that setup.sh tries out at its end
    "jax.py": "class numpy: ones = lambda shape: None\n__version__ = '0.0'\ndef jit(f): return lambda x: x\n",
    "flax/nnx.py": "", "matplotlib/figure.py": "", "optax.py": "", "orbax/checkpoint.py": "", "rich/progress.py": "",
    "sentencepiece.py": "", "yaml.py": "",
}  # fmt: skip


def executable(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("#!/bin/bash\n" + text)
  path.chmod(0o755)
  return path


def nvidia_smi(folder, driver, capability):
  return executable(folder / "nvidia-smi", f"echo '{driver}, {capability}'\n")


def prepare_machine(folder):
  """A copy of setup.sh, a home, and a `bin` that goes before PATH; returns a function that runs that setup.sh."""
  copy, home = folder / "copy", folder / "home"
  copy.mkdir()
  home.mkdir()
  for name in ("setup.sh", "requirements.txt", "requirements-dev.txt", "constraints.txt"):
    shutil.copy(ROOT / name, copy)
  executable(folder / "bin" / "nvidia-smi", "exit 9\n")  # as on a machine whose driver is not loaded

  def set_up(*arguments, path=None, **environment):
    keep = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k in ("LANG", "TMPDIR")}
    path = path or f"{folder / 'bin'}:{os.path.dirname(BASE_PYTHON)}:/usr/local/bin:/usr/bin:/bin"
    return subprocess.run(
        ["bash", str(copy / "setup.sh"), *arguments], env=keep | {"HOME": str(home), "PATH": path} | environment,
        cwd=copy, capture_output=True, text=True, timeout=200, check=False)  # fmt: skip

  set_up.copy, set_up.home, set_up.bin = copy, home, folder / "bin"
  return set_up


@pytest.fixture
def machine(tmp_path):
  return prepare_machine(tmp_path)


@pytest.mark.parametrize(
    "driver,capability,extra",
    [("580.65.06", "9.0", "cuda13"), ("595.10", "12.0", "cuda13"), ("550.54.15", "9.0", "cuda12"),
     ("525.60.13", "8.0", "cuda12"), ("580.65.06", "7.0", "cuda12"), ("580.65.06", "7.5", "cuda13")])  # fmt: skip
def test_the_driver_chooses_cuda_12_or_13_and_cards_older_than_turing_stay_on_12(machine, driver, capability, extra):
  nvidia_smi(machine.bin, driver, capability)
  result = machine(DRY_RUN="1")
  assert result.returncode == 0, result.stderr
  assert f"jax\\[{extra}\\]" in result.stdout and "gpu" in result.stdout


def test_a_driver_too_old_for_jax_is_one_line_and_exit_code_2(machine):
  nvidia_smi(machine.bin, "470.256.02", "8.0")
  result = machine(DRY_RUN="1")
  assert result.returncode == 2
  assert result.stderr.count("\n") == 1 and "470.256.02" in result.stderr and "DEVICE=cpu" in result.stderr
  assert machine("DEVICE=cpu", "DRY_RUN=1").returncode == 0


def test_each_device_and_mode_installs_what_it_needs(machine):
  cpu = machine(DRY_RUN="1", DEVICE="cpu")
  assert "requirements.txt" in cpu.stdout and "jax" not in cpu.stdout.split("-m pip")[1]
  assert "jax\\[tpu\\]" in machine(DRY_RUN="1", DEVICE="tpu").stdout
  assert "jax\\[cuda12\\]" in machine(DRY_RUN="1", DEVICE="gpu").stdout  # no driver: what runs on every one
  assert "--pre" in machine(DRY_RUN="1", DEVICE="tpu", MODE="nightly").stdout
  assert "jaxlib==0.10.1" in machine("DRY_RUN=1", "JAX_VERSION=0.10.1", "DEVICE=cpu").stdout
  libtpu = machine("MODE=libtpu-only", "LIBTPU_GCS_PATH=gs://bucket/libtpu-1-py3-none-any.whl", DRY_RUN="1").stdout
  assert "gsutil cp gs://bucket/libtpu-1-py3-none-any.whl" in libtpu and "requirements" not in libtpu
  assert "requirements-minimal.txt" in machine(DRY_RUN="1", MINIMAL="1").stdout
  assert "requirements-dev.txt" in machine(DRY_RUN="1", DEV="1").stdout
  assert sorted(path.name for path in machine.copy.iterdir()) == [
      "constraints.txt", "requirements-dev.txt", "requirements.txt", "setup.sh"], "a dry run changes nothing"


@pytest.mark.parametrize("wrong", ["MODE=fast", "DEVICE=xpu", "CUDA=11", "WHAT=1", "PYTHON=/bin/true"])
def test_a_wrong_option_is_one_line_and_exit_code_2(machine, wrong):
  result = machine(wrong, "DRY_RUN=1")
  assert result.returncode == 2 and result.stderr.count("\n") == 1 and wrong in result.stderr


def tools_without_python(folder):
  """A PATH of one folder with what setup.sh calls, and no Python."""
  for tool in ("bash", "cat", "cksum", "cut", "date", "dirname", "grep", "ls", "mkdir", "mv", "sed", "sleep", "tail",
               "tee", "uname"):  # fmt: skip
    (folder / tool).symlink_to(shutil.which(tool))
  return str(folder)


def test_a_machine_with_only_python_3_10_is_told_the_way_out_in_one_line(machine):
  path = tools_without_python(machine.bin)
  executable(machine.bin / "python3", "echo 3.10\n")
  result = machine(path=path)
  assert result.returncode == 2
  assert result.stderr.count("\n") == 1 and "3.10" in result.stderr and "PYTHON=" in result.stderr


def test_a_shim_that_exists_and_does_not_run_is_passed_over(machine):
  path = tools_without_python(machine.bin)
  for name in ("python3", "python3.12"):
    executable(machine.bin / name, "echo 'pyenv: command not found' >&2; exit 127\n")
  real = machine.home / ".pyenv" / "versions" / f"{sys.version_info[0]}.{sys.version_info[1]}.0" / "bin" / "python"
  real.parent.mkdir(parents=True)
  real.symlink_to(BASE_PYTHON)
  result = machine(path=path, DRY_RUN="1")
  assert result.returncode == 0 and f"making {machine.copy}/.venv from {real}" in result.stdout


def test_a_folder_that_is_no_environment_stays_as_it_is(machine):
  mine = machine.copy / ".venv"
  mine.mkdir()
  (mine / "thesis.txt").write_text("mine")
  result = machine()
  assert result.returncode == 2 and "not a virtual environment" in result.stderr
  assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


def stubbed(machine):
  """The environment variables under which setup.sh finds stand-ins for all packages, no index and no ensurepip."""
  for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt"):
    (machine.copy / name).write_text("")
  stubs = machine.home / "stubs"
  for name, text in STAND_INS.items():
    (stubs / name).parent.mkdir(parents=True, exist_ok=True)
    (stubs / name).write_text(text)
  (stubs / "ensurepip.py").write_text("raise ImportError('as on Debian without python3-venv')\n")
  bundled = glob.glob(os.path.join(os.path.dirname(os.__file__), "ensurepip", "_bundled"))
  if not bundled or subprocess.run([BASE_PYTHON, "-m", "pip", "-V"], capture_output=True, check=False).returncode:
    pytest.skip("this Python brings no pip of its own to install from")
  return {"PYTHONPATH": str(stubs), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": bundled[0], "PYTHON": BASE_PYTHON,
          "PIP_CONFIG_FILE": os.devnull, "DEVICE": "cpu", "PIP_USER": "1"}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """A machine where setup.sh has run once; its variables; and what that run printed."""
  machine = prepare_machine(tmp_path_factory.mktemp("prepared"))
  environment = stubbed(machine)
  return machine, environment, machine(**environment)


def test_without_ensurepip_it_borrows_a_pip_and_a_second_run_has_nothing_to_do(prepared):
  machine, environment, first = prepared
  assert first.returncode == 0, first.stdout + first.stderr
  assert first.stdout.count("\n") <= 4, "a few lines, not pip's"
  venv = machine.copy / ".venv"
  assert (machine.home / ".local/share/maxtext/venv").read_text() == f"{venv}\n"
  assert "nothing to do" in machine(**environment).stdout


def test_a_package_that_cannot_be_had_is_one_line_with_the_log_and_not_forgotten(prepared):
  machine, environment, _ = prepared
  (machine.copy / "requirements.txt").write_text("no-such-package-of-ours==1.0\n")
  executable(machine.bin / "sleep", "exit 0\n")
  result = machine(**environment)
  assert result.returncode == 1 and result.stderr.count("\n") == 1
  assert "no-such-package-of-ours==1.0" in result.stderr and "setup.log" in result.stderr
  assert result.stdout.count("trying again") == 2
  (machine.copy / "requirements.txt").write_text("")
  assert "ready in" in machine(**environment).stdout, "after a failure the environment counts as unfinished"


def test_a_broken_environment_is_moved_aside_and_an_old_python_refused(machine):
  environment = stubbed(machine)
  venv = machine.copy / ".venv"
  executable(venv / "bin" / "python", "exit 127\n")
  (venv / "pyvenv.cfg").write_text("home = /gone\n")
  (venv / "notes.txt").write_text("mine")
  result = machine(**environment)
  assert result.returncode == 0, result.stdout + result.stderr
  (aside,) = machine.copy.glob(".venv.broken-*")
  assert (aside / "notes.txt").read_text() == "mine"

  old = machine.home / "old"
  executable(old / "bin" / "python", "echo 3.10\n")
  (old / "pyvenv.cfg").write_text("home = /usr/bin\n")
  refused = machine(**environment, VIRTUAL_ENV=str(old))
  assert refused.returncode == 2 and "Python 3.10" in refused.stderr and (old / "bin" / "python").exists()


# --- interpreter.py --------------------------------------------------------------------------------------------------


def environment_with(path, *packages):
  subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", str(path)], check=True)
  (site,) = glob.glob(f"{path}/lib/python3*/site-packages")
  for package in packages:
    os.makedirs(os.path.join(site, package))
    Path(site, package, "__init__.py").touch()
  return path


@pytest.fixture
def copied(tmp_path):
  """A copied folder with an entry script, started by a Python without jax."""
  folder = tmp_path / "copied folder"
  (folder / "MaxText").mkdir(parents=True)
  for name in ("__init__.py", "interpreter.py"):
    shutil.copy(ROOT / "MaxText" / name, folder / "MaxText")
  (folder / "MaxText" / "entry.py").write_text(
      "import os\nimport sys\n\nif __name__ == '__main__':\n"
      "  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))\n"
      "  from MaxText import interpreter\n\n  interpreter.ensure()\n\n"
      "import jax\n\nprint(sys.prefix, os.getpid(), *sys.argv[1:], sep='|')\n")
  bare = environment_with(tmp_path / "bare")

  def start(*arguments, **environment):
    with subprocess.Popen(
        [bare / "bin" / "python", "MaxText/entry.py", *arguments], cwd=folder, text=True,
        env={"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
      out, error = process.communicate(timeout=60)
    return process.returncode, out.strip().split("|"), error, process.pid

  start.folder, start.tmp = folder, tmp_path
  return start


def test_without_any_environment_one_line_names_setup(copied):
  code, _, error, _ = copied()
  assert code == 2 and error.count("\n") == 1
  assert "jax is not installed" in error and str(copied.folder / "setup.sh") in error


def test_a_copied_folder_runs_in_the_recorded_environment_with_its_arguments_and_process_id(copied):
  recorded = environment_with(copied.tmp / "recorded", "jax")
  file = copied.tmp / "home/.local/share/maxtext/venv"
  file.parent.mkdir(parents=True)
  file.write_text(f"{recorded}\n")
  code, out, error, pid = copied("a b", "x='1'")
  assert (code, out) == (0, [str(recorded), str(pid), "a b", "x='1'"]), error

  beside = environment_with(copied.folder / ".venv", "jax")
  assert copied()[1][0] == str(beside), "the folder's own goes first"
  chosen = environment_with(copied.tmp / "chosen", "jax")
  assert copied(MAXTEXT_VENV=str(chosen))[1][0] == str(chosen)


def test_environments_that_cannot_help_are_passed_over_without_a_loop(copied):
  environment_with(copied.folder / ".venv")  # set-up was interrupted: no jax
  assert copied()[0] == 2
  lying = environment_with(copied.tmp / "lying", "jax")
  (lying / "bin" / "python").unlink()
  (lying / "bin" / "python").symlink_to(copied.tmp / "bare" / "bin" / "python")
  (site,) = glob.glob(f"{lying}/lib/python3*/site-packages")
  os.remove(os.path.join(site, "jax", "__init__.py"))  # a namespace is no jax
  code, _, error, _ = copied(MAXTEXT_VENV=str(lying))
  assert code == 2 and error.count("\n") == 1 and "lying" in error


def test_an_old_python_gets_as_far_as_the_line_that_says_so():
  ast.parse((ROOT / "MaxText" / "interpreter.py").read_text(), feature_version=(3, 8))
  for path in [*ROOT.glob("MaxText/*.py"), *ROOT.glob("*.py"), *ROOT.glob("end_to_end/*.py")]:
    if "interpreter." in path.read_text():  # an entry script: all of it is parsed before its first line runs
      ast.parse(path.read_text(), filename=str(path), feature_version=(3, 10))


def test_shell_scripts_pass_shellcheck():
  if not shutil.which("shellcheck"):
    pytest.skip("shellcheck is not installed")
  scripts = [*map(str, ROOT.glob("*.sh")), *map(str, ROOT.glob("end_to_end/*.sh")), str(ROOT / ".ci" / "run")]
  result = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stdout
