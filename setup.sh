#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prepares this machine: a virtual environment with everything the trainer needs, for CPU, NVIDIA GPU or TPU.
#
#   bash setup.sh [OPTION=value ...]        options may also come from the environment
#
#   DEVICE=cpu|gpu|tpu     default: what the machine has. CUDA=12|13 overrides the choice by driver.
#   MODE=stable            the pinned versions (default)
#        nightly           the same, then the newest jax, jaxlib and libtpu
#        libtpu-only       only another libtpu: LIBTPU_GCS_PATH=file.whl or .so, local or gs://, default the nightly one
#   JAX_VERSION=0.10.1     this jax instead of the pinned one
#   VENV=path              default: the active environment, else .venv beside this file
#   PYTHON=path            the Python (3.11, 3.12 or 3.13) to make the environment from
#   MINIMAL=1              without TensorFlow, ArrayRecord, Parquet, libtpu: what training on this machine needs
#   DEV=1                  also what tests and lint need
#   DRY_RUN=1              print the commands instead of running them
#
# Nothing is ever deleted. Packages come from where pip's configuration says. Run again, it is done at once when nothing
# changed.
# Exit codes: 0 ready, 1 the installation failed, 2 wrong option or a machine that cannot do it.

set -u -o pipefail

nightly_index=https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/ # docs.jax.dev, installation, nightly
libtpu_links=https://storage.googleapis.com/jax-releases/libtpu_releases.html
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

say() { printf 'setup: %s\n' "$*"; }
fail() { # code, message
  printf 'setup: %s\n' "$2" >&2
  exit "$1"
}
run() { # prints the command in a dry run, else runs it
  if [ -n "$DRY_RUN" ]; then printf '+'; printf ' %q' "$@"; printf '\n'; else "$@"; fi
}

for option in "$@"; do
  case $option in
    DEVICE=* | CUDA=* | MODE=* | JAX_VERSION=* | LIBTPU_GCS_PATH=* | VENV=* | PYTHON=* | MINIMAL=* | DEV=* | DRY_RUN=*)
      printf -v "${option%%=*}" '%s' "${option#*=}" ;;
    -h | --help) sed -n '4,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail 2 "unknown option $option. Options: bash setup.sh --help" ;;
  esac
done
MODE=${MODE:-stable} DEVICE=${DEVICE:-} CUDA=${CUDA:-} JAX_VERSION=${JAX_VERSION:-} LIBTPU_GCS_PATH=${LIBTPU_GCS_PATH:-}
VENV=${VENV:-${VIRTUAL_ENV:-$here/.venv}} PYTHON=${PYTHON:-} MINIMAL=${MINIMAL:-} DEV=${DEV:-} DRY_RUN=${DRY_RUN:-}
case $MODE in stable | nightly | libtpu-only) ;; *) fail 2 "MODE=$MODE is none of stable, nightly, libtpu-only" ;; esac
case $DEVICE in '' | cpu | gpu | tpu) ;; *) fail 2 "DEVICE=$DEVICE is none of cpu, gpu, tpu" ;; esac
case $CUDA in '' | 12 | 13) ;; *) fail 2 "CUDA=$CUDA is neither 12 nor 13" ;; esac
for flag in MINIMAL DEV DRY_RUN; do
  if [ "${!flag}" = 0 ]; then printf -v "$flag" ''; fi
done
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
python=$VENV/bin/python
log=$VENV/setup.log
export PIP_USER=0 # a user's configuration may say otherwise, which fails inside an environment

# --- The accelerator --------------------------------------------------------------------------------------------------

has_tpu() { # as jax finds one: a Google PCI device (0x1ae0) that is a TPU and not a network card
  local device
  for device in /sys/bus/pci/devices/*; do
    [ "$(cat "$device/vendor" 2>/dev/null)" = 0x1ae0 ] || continue
    case $(cat "$device/device" 2>/dev/null) in
      0x0027 | 0x0056 | 0x005e | 0x0062 | 0x0063 | 0x006f | 0x0076) return 0 ;;
    esac
  done
  return 1
}

nvidia() { # "driver version, compute capability" of the first GPU
  local smi
  smi=$(command -v nvidia-smi || echo /usr/lib/wsl/lib/nvidia-smi)
  "$smi" --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | sed -n '/^[0-9]/{p;q;}'
}

gpu=
if [ -z "$DEVICE" ]; then
  DEVICE=cpu
  gpu=$(nvidia)
  [ -n "$gpu" ] && DEVICE=gpu
  has_tpu && DEVICE=tpu
elif [ "$DEVICE" = gpu ]; then
  gpu=$(nvidia)
fi
extra=
case $DEVICE in
  tpu) extra=tpu ;;
  gpu)
    if [ -z "$CUDA" ] && [ -z "$gpu" ]; then
      CUDA=12 # runs on every driver that CUDA 13 runs on
      say "no NVIDIA driver answers here; taking CUDA 12 (CUDA=13 for the other)"
    elif [ -z "$CUDA" ]; then
      driver=${gpu%%.*} capability=${gpu##*, }
      if [ "$driver" -lt 525 ]; then
        fail 2 "NVIDIA driver ${gpu%%,*} is too old: jax needs 525 (CUDA 12) or 580 (CUDA 13). \
Way out: update it, or: DEVICE=cpu bash setup.sh"
      fi
      CUDA=12
      case $capability in
        [1-6].* | 7.[0-4]) ;; # CUDA 13 begins at Turing
        *) [ "$driver" -ge 580 ] && CUDA=13 ;;
      esac
    fi
    extra=cuda$CUDA ;;
esac

# --- Nothing to do? ---------------------------------------------------------------------------------------------------

record() { # the environment that scripts of this user start in when none is active and none is beside them
  local file=${XDG_DATA_HOME:-$HOME/.local/share}/maxtext/venv
  if [ "$(cat "$file" 2>/dev/null)" != "$VENV" ]; then
    mkdir -p "${file%/*}" && printf '%s\n' "$VENV" >"$file"
  fi
}

stamp=$VENV/setup.stamp
base="$(cat "$here/requirements.txt" "$here/constraints.txt" | cksum) $extra $MODE $JAX_VERSION minimal=$MINIMAL"
dev="dev $(cksum <"$here/requirements-dev.txt")"
has_stamp() { [ -x "$python" ] && [ -z "$DRY_RUN" ] && grep -qxF "$1" "$stamp" 2>/dev/null; }
if [ "$MODE" = stable ] && has_stamp "$base" && { [ -z "$DEV" ] || has_stamp "$dev"; }; then
  record
  say "nothing to do: $VENV is ready for $DEVICE"
  exit 0
fi

# --- The environment --------------------------------------------------------------------------------------------------

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
suitable() { case $(version "$1") in 3.11 | 3.12 | 3.13) ;; *) return 1 ;; esac; }

find_python() { # prints a suitable Python, one with ensurepip if there is any; a pyenv shim may exist and yet not run
  local path without=''
  while IFS= read -r path; do
    if ! suitable "$path"; then continue; fi
    if "$path" -c 'import ensurepip' 2>/dev/null; then
      echo "$path"
      return
    fi
    without=${without:-$path}
  done < <(type -aP python3 python3.12 python3.13 python3.11 python
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[123].*/bin/python \
      "$HOME"/.local/share/uv/python/cpython-3.1[123].*/bin/python3 2>/dev/null)
  [ -n "$without" ] && echo "$without"
}

install_pip() { # into the environment, from wherever there is one: Debian ships ensurepip in a package of its own
  local base
  "$python" -m ensurepip --default-pip >>"$log" 2>&1 && return
  base=$("$1" -c 'import os, pip; print(os.path.dirname(os.path.dirname(pip.__file__)))' 2>/dev/null)
  if [ -n "$base" ] && PYTHONPATH=$base "$python" -m pip install --ignore-installed pip >>"$log" 2>&1; then return; fi
  if command -v virtualenv >/dev/null && virtualenv --python "$1" "$VENV" >>"$log" 2>&1; then return; fi
  if command -v uv >/dev/null && uv pip install --python "$python" pip >>"$log" 2>&1; then return; fi
  return 1
}

if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV" 2>&1)" ]; then
  fail 2 "$VENV exists and is not a virtual environment. Way out: VENV=other/path bash setup.sh"
fi
maker=
if [ -e "$VENV/pyvenv.cfg" ] && suitable "$python"; then
  maker=$python
elif [ -e "$VENV/pyvenv.cfg" ] && [ -n "$(version "$python")" ]; then
  fail 2 "$VENV is Python $(version "$python"); 3.11, 3.12 or 3.13 is needed. Way out: VENV=other/path bash setup.sh"
elif [ -e "$VENV/pyvenv.cfg" ] && [ "$VENV" != "$here/.venv" ]; then
  fail 2 "the Python of $VENV does not run. Way out: VENV=other/path bash setup.sh"
elif [ -e "$VENV/pyvenv.cfg" ]; then
  aside=$VENV.broken-$(date +%Y%m%d-%H%M%S)
  say "the Python of $VENV does not run; moving it to $aside"
  run mv "$VENV" "$aside" || fail 1 "cannot move $VENV aside"
fi
if [ -z "$maker" ]; then
  if [ -z "$PYTHON" ]; then
    maker=$(find_python) ||
      fail 2 "Python 3.11, 3.12 or 3.13 is needed, this machine has $(version python3 || echo none). Way out: \
sudo apt-get install python3.11 python3.11-venv, or: PYTHON=/path/to/python3.12 bash setup.sh"
  elif ! maker=$(command -v "$PYTHON") || ! suitable "$maker"; then
    fail 2 "PYTHON=$PYTHON is $(version "$PYTHON" || echo "no Python that runs"); 3.11, 3.12 or 3.13 is needed"
  fi
  say "making $VENV from $maker ($(version "$maker"))"
  run "$maker" -m venv --without-pip "$VENV" || fail 1 "$maker -m venv $VENV failed"
fi
if [ -n "$DRY_RUN" ]; then
  log=/dev/null
elif ! "$python" -m pip --version >/dev/null 2>&1; then
  install_pip "$maker" || fail 2 "no pip for $maker, nor virtualenv or uv. \
Way out: sudo apt-get install python$(version "$maker")-venv, then again. Log: $log"
fi

# --- The packages -----------------------------------------------------------------------------------------------------

progress() { # pip's wall of text as one line that changes, on a terminal only
  local line
  while IFS= read -r line; do
    if [ -t 1 ]; then
      case $line in Collecting* | '  Downloading'* | Installing*) printf '\r\033[K%s' "${line:0:100}" ;; esac
    fi
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

pip_install() { # tried three times: downloads of this size do break
  local attempt
  if [ -n "$DRY_RUN" ]; then
    run "$python" -m pip install "$@"
    return
  fi
  for attempt in 1 2 3; do
    if [ "$attempt" != 1 ]; then
      say "pip failed, trying again ($attempt of 3)"
      sleep $((attempt * 2))
    fi
    printf '\n--- pip install %s\n' "$*" >>"$log"
    "$python" -m pip install --no-compile --progress-bar off --no-input "$@" 2>&1 | tee -a "$log" | progress && return
    tail -n 20 "$log" | grep -q 'No space left' && break
  done
  fail 1 "pip failed: $(grep '^ERROR' "$log" | tail -n 1 | cut -c 1-200) Log: $log"
}

if [ -z "$DRY_RUN" ] && ! has_stamp "$base"; then : >"$stamp"; fi # until this ends well, nothing is known to be there
if [ "$MODE" = libtpu-only ]; then
  wheel=$LIBTPU_GCS_PATH
  case $wheel in gs://*)
    wheel=${TMPDIR:-/tmp}/${LIBTPU_GCS_PATH##*/}
    run gsutil cp "$LIBTPU_GCS_PATH" "$wheel" || fail 1 "cannot copy $LIBTPU_GCS_PATH" ;;
  esac
  case $wheel in
    '') pip_install --upgrade --pre --no-deps libtpu --find-links "$libtpu_links" ;;
    *.so) run cp "$wheel" "$VENV"/lib/python3*/site-packages/libtpu/libtpu.so || fail 1 "cannot copy $wheel" ;;
    *) pip_install --force-reinstall --no-deps "$wheel" ;;
  esac
  say "libtpu replaced in $VENV"
  exit 0
fi

requirements=$here/requirements.txt
if [ -n "$MINIMAL" ]; then
  requirements=$VENV/requirements-minimal.txt
  if [ -z "$DRY_RUN" ]; then sed '/^-c /d; /^# MINIMAL/,$d' "$here/requirements.txt" >"$requirements"; fi
fi
started=$SECONDS
if [ "$MODE" = stable ] && has_stamp "$base"; then
  say "adding what tests need"
  pip_install -r "$here/requirements-dev.txt"
else
  say "installing for $DEVICE${extra:+ (jax[$extra])} into $VENV; minutes the first time. Log: $log"
  pip_install -c "$here/constraints.txt" -r "$requirements" ${extra:+"jax[$extra]"} \
    ${DEV:+-r "$here/requirements-dev.txt"}
fi
linux_x86= # where libtpu exists; jax's extra "tpu" names the one that belongs to it
[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] && [ -z "$MINIMAL" ] && linux_x86=1
extras=$extra
[ -n "$linux_x86" ] && [ "$extra" != tpu ] && extras=tpu${extra:+,$extra}
if [ -n "$JAX_VERSION" ]; then
  pip_install "jax${extras:+[$extras]}==$JAX_VERSION" "jaxlib==$JAX_VERSION"
elif [ "$MODE" = nightly ]; then
  plugin=()
  [ "$DEVICE" = gpu ] && plugin=("jax-$extra-plugin[with-cuda]" "jax-$extra-pjrt")
  pip_install --upgrade --pre --index-url "$nightly_index" --find-links "$libtpu_links" jax jaxlib \
    ${linux_x86:+libtpu} ${plugin[@]+"${plugin[@]}"}
fi
[ -n "$DRY_RUN" ] && exit 0

# The check that it works also writes the byte code of what training imports, which pip (--no-compile) left to be done.
check='import jax, flax.nnx, matplotlib.figure, optax, orbax.checkpoint, rich.progress, sentencepiece, yaml
jax.jit(lambda x: x @ x)(jax.numpy.ones((2, 2))); print(jax.__version__)'
jax=$(PYTHONDONTWRITEBYTECODE='' JAX_PLATFORMS=cpu "$python" -c "$check" 2>>"$log") ||
  fail 1 "installed, yet jax does not start: $(tail -n 1 "$log" | cut -c 1-200) Log: $log"
{ printf '%s\n' "$base"; if [ -n "$DEV" ]; then printf '%s\n' "$dev"; fi; } >"$stamp"
record
say "ready in $((SECONDS - started)) s: jax $jax for $DEVICE, Python $(version "$python"), $VENV"
if [ "$VENV" != "${VIRTUAL_ENV:-}" ]; then say "activate it (not a must): source ${VENV#"$PWD"/}/bin/activate"; fi
exit 0
