# SPDX-License-Identifier: Apache-2.0
"""Compiled train steps in files: written with all that shaped them, loaded only where every bit of that is the same.

  recorded = pyconfig.Recorded(cfg)              # cfg resolved, within sharding.use(mesh, cfg.logical_axis_rules)
  compiled = executable.compile(train.lower_train_step(recorded, mesh))
  _, arguments = train.step_arguments(cfg, mesh)
  executable.save(path, compiled, executable.header(recorded, mesh, arguments))

  header, payload = executable.read(path, cfg, mesh, arguments)  # in another process: checks, runs nothing
  step = executable.load(path, header, payload, mesh, arguments)

A file is one line with the magic words and the SHA-256 of all that follows, one line of JSON (the header), and the
payload of jax.experimental.serialize_executable: a pickle around machine code.

The file is code. Its pickle is read by an unpickler that knows only the classes below, and a file that others may
write is refused; but the machine code in it is trusted, and runs with all rights of the process: there is no sandbox.
Load only what you or somebody you trust has compiled. Who may write a file on gs:// is for the bucket to say: it is not
checked here.
"""

import ast
import hashlib
import importlib.metadata
import io
import json
import os
import pickle
import platform
import stat

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from MaxText import errors, pyconfig

MAGIC = b"maxtext compiled step 1 "  # the number is that of the format

# Read while a step is lowered or not, these shape it: through the mesh in use and jax's own configuration.
ALWAYS = ("mesh_shape", "ici_mesh_shape", "dcn_mesh_shape", "logical_axis_rules", "matmul_precision")
SETTINGS = ("jax_default_matmul_precision", "jax_default_prng_impl", "jax_enable_x64", "jax_threefry_partitionable")
# Flags that change no program: the number of fake devices is compared as that of devices, and the last is what jax adds
# on TPU machines.
NO_MATTER = ("--xla_dump_", "--xla_force_host_platform_device_count", "--xla_tpu_use_enhanced_launch_barrier")
# What train.py imports for the run around the step, and what gives it values: these are compared themselves.
AROUND = {"checkpoint", "data", "diagnostics", "errors", "evals", "executable", "interpreter", "metrics", "processes",
          "pyconfig", "topology"}
# All that the pickle of a compiled step is made of, with jax 0.10 and 0.11, for CPU, GPU and TPU.
CLASSES = {
    ("jax", "P"), ("jax._src.core", "ManualAxisType"), ("jax._src.core", "MemorySpace"),
    ("jax._src.core", "ShapedArray"), ("jax._src.interpreters.pxla", "AllArgsInfo"),
    ("jax._src.interpreters.pxla", "UnloadedMeshExecutable"), ("jax._src.layout", "AutoLayoutSingleton"),
    ("jax._src.layout", "Layout"), ("jax._src.linear_util", "DebugInfo"), ("jax._src.mesh", "AbstractDevice"),
    ("jax._src.mesh", "AbstractMesh"), ("jax._src.mesh", "AxisType"), ("jax._src.mesh", "Mesh"),
    ("jax._src.named_sharding", "_unpickle_named_sharding"), ("jax._src.stages", "ArgInfo"),
    ("jaxlib._jax", "DeviceList"), ("numpy", "dtype"), ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
}  # fmt: skip


def compile(lowered, options=None):
  """`lowered` compiled, with compiler options, and not taken from jax's persistent cache.

  What XLA has loaded from there for a CPU cannot be saved again: its loader leaves parts of it behind, and a step saved
  from it fails when it is run (jaxlib 0.10, 0.11: "Function wrapped_broadcast not found").
  """
  enabled = jax.config.jax_enable_compilation_cache
  try:
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # or what jax has decided before stays
    return lowered.compile(options)
  finally:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


def header(recorded, mesh, arguments):
  """What shaped a step lowered for `mesh` and these abstract `arguments`, as JSON can hold it.

  Args:
    recorded: the pyconfig.Recorded with which the step was lowered.
    mesh: its mesh, of devices that are here or of a topology.
    arguments: (state, batch, hyper) of train.step_arguments().
  """
  return circumstances(recorded, mesh, arguments, {*recorded.reads, *ALWAYS})


def save(path, compiled, header):
  """Writes a compiled step and its header to `path`, whole or not at all, for its owner alone to write."""
  payload, _, out_tree = serialize_executable.serialize(compiled)
  _, metrics = jax.tree.unflatten(out_tree, [0] * out_tree.num_leaves)
  content = json.dumps(header | {"metrics": metrics}).encode() + b"\n" + payload
  content = MAGIC + checksum(content) + b"\n" + content
  if "://" in path:
    from etils import epath  # slow, and only for gs://

    epath.Path(path).write_bytes(content)
    return
  temporary = f"{path}.{os.getpid()}.tmp"
  try:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
      file.write(content)
    os.replace(temporary, path)
  except OSError as error:
    raise errors.ConfigError(
        f"compiled_trainstep_file={pyconfig.show(path)} cannot be written: {error.strerror}. Name another path."
    ) from error


def read(path, cfg, mesh, arguments):
  """(header, payload) of the file at `path`. Nothing in it is run.

  Raises ConfigError when it is no whole file of save(), is not ours alone to write, or was compiled for anything else
  than `cfg` (resolved) on `mesh` with these abstract `arguments`; of several differences the first is named.
  """
  content = content_of(path)
  lines = content.split(b"\n", 2)
  if not content.startswith(MAGIC) or len(lines) < 3:
    words = MAGIC.rsplit(b" ", 2)[0]
    refuse(path, "is of another format than this version's" if content.startswith(words) else "is no compiled step")
  if lines[0] != MAGIC + checksum(content[len(lines[0]) + 1:]):
    refuse(path, "is damaged: cut short or changed, its checksum is not that of its content")
  header = json.loads(lines[1])
  now = json.loads(json.dumps(circumstances(cfg, mesh, arguments, header["config"])))
  for section, values in now.items():
    for name in header[section] | values:
      then, here = header[section].get(name), values.get(name)
      if then != here and section == "source":
        refuse(path, f"was compiled from another version of {name}")
      if then != here:
        label = f"base_{name}" if f"base_{name}" in cfg.given else name
        refuse(path, f"was compiled with {label}={shown(then, here)}, and this run has {label}={shown(here, then)}")
  return header, lines[2]


def load(path, header, payload, mesh, arguments):
  """The step that read() has checked, as a jax.stages.Compiled for the devices of `mesh`."""
  devices = list(mesh.devices.flat)
  in_tree = jax.tree.structure((arguments, {}))
  out_tree = jax.tree.structure((arguments[0], header["metrics"]))
  try:
    unloaded, argument_infos, no_kwargs = Unpickler(io.BytesIO(payload), devices[0].client, devices).load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(argument_infos), out_tree, no_kwargs=no_kwargs)
  except Exception as error:  # unpickling and the compiler may raise anything
    refuse(path, f"cannot be loaded: {(str(error).splitlines() or [type(error).__name__])[0][:200]}")


class Unpickler(serialize_executable._JaxPjrtUnpickler):
  """jax's own, without any class or function that a compiled step has no need of."""

  def find_class(self, module, name):
    if (module, name) not in CLASSES:
      raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no compiled step needs")
    return super().find_class(module, name)


def content_of(path):
  """The bytes at `path`. Raises ConfigError where there are none, or where another user may have written them."""
  try:
    if "://" in path:
      from etils import epath

      return epath.Path(path).read_bytes()
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
      status = os.fstat(file.fileno())
      if not stat.S_ISREG(status.st_mode):
        refuse(path, "is no file")
      if status.st_uid not in (0, os.geteuid()):
        refuse(path, f"belongs to user {status.st_uid}, neither to you ({os.geteuid()}) nor to root: it is code")
      if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        refuse(path, f"has mode {stat.S_IMODE(status.st_mode):o}, which lets others write it: it is code")
      return file.read()
  except FileNotFoundError:
    refuse(path, f"does not exist (seen from {pyconfig.show(os.getcwd())})")
  except OSError as error:
    refuse(path, f"cannot be read: {error.strerror}")


def checksum(content):
  return hashlib.sha256(content).hexdigest().encode()


def shown(value, other):
  """`value` for a message: of a list too long for it only what the other has not."""
  if isinstance(value, list) and isinstance(other, list) and max(len(pyconfig.text(x)) for x in (value, other)) > 80:
    value = [item for item in value if item not in other]
  return pyconfig.show(value)


def refuse(path, reason):
  raise errors.ConfigError(f"compiled_trainstep_file={pyconfig.show(path)} {reason}. Compile it again: "
                           "python3 train_compile.py with the arguments of this run.")


# --- What shapes a step --------------------------------------------------------------------------------------------


def circumstances(cfg, mesh, arguments, keys):
  """{section: {name: value}} of all that must be the same where a step is compiled and where it is loaded."""
  return {
      "surroundings": surroundings(cfg, mesh),
      "config": {key: getattr(cfg, key, None) for key in sorted(keys)},
      "arguments": described(arguments),
      "source": fingerprints(),
  }


def surroundings(cfg, mesh):
  """{name: value} of devices, versions, flags and settings."""
  devices = list(mesh.devices.flat)
  found = {
      "platform": cfg.platform,
      "device_kind": devices[0].device_kind,
      "devices": mesh.size,
      "processes": len({device.process_index for device in devices}),
      "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
      "device_ids": [device.id for device in devices],
  }
  packages = ["jax", "jaxlib", "flax", "optax"]
  if cfg.platform == "gpu":  # whose devices of a topology do not say which compiler is behind them
    packages += ["jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"]
  else:  # of the lines the last: on TPU the build of libtpu
    found["platform_version"] = devices[0].client.platform_version.splitlines()[-1]
  found |= {package: version(package) for package in packages}
  if cfg.platform == "cpu":
    found["cpu_features"] = cpu_features()
  found["XLA_FLAGS"] = flags("XLA_FLAGS")
  if cfg.platform == "tpu":
    found["LIBTPU_INIT_ARGS"] = flags("LIBTPU_INIT_ARGS")
  return found | {name: getattr(jax.config, name) for name in SETTINGS}


def version(package):
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "none"


def cpu_features():
  """This processor's kind and what it can do: a step compiled for another may meet an instruction it has not."""
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      line = next(line for line in file if line.startswith(("flags", "Features")))
  except (OSError, StopIteration):
    line = ""
  return [platform.machine(), *sorted(line.partition(":")[2].split())]


def flags(variable):
  """The flags in an environment variable by name; those of one name keep their order, in which the last one wins."""
  given = [flag for flag in os.environ.get(variable, "").split() if not flag.startswith(NO_MATTER)]
  return sorted(given, key=lambda flag: flag.partition("=")[0])


def described(arguments):
  """{path: type, shape and sharding} of abstract arguments (state, batch, hyper)."""
  return {
      jax.tree_util.keystr(path, simple=True, separator="/"):
          f"{leaf.dtype}{list(leaf.shape)} {leaf.sharding.spec if leaf.sharding else ''}"
      for path, leaf in jax.tree.leaves_with_path(dict(zip(("state", "batch", "hyper"), arguments, strict=True)))
  }


def fingerprints():
  """{file: hash} of train.py and the rooms that make its step: their code without comments and docstrings."""
  rooms, hashes = ["train"], {}
  for room in rooms:  # grows
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{room}.py"), "rb") as file:
      tree = ast.parse(file.read())
    hashes[f"MaxText/{room}.py"] = hashlib.sha256(repr(essence(tree)).encode()).hexdigest()[:16]
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}".split(".") for alias in node.names]
        rooms += [name[1] for name in names if name[0] == "MaxText" and name[1] not in {*AROUND, *rooms}]
  return hashes


def essence(node):
  """A syntax tree as nested tuples, alike for every version of Python: without what is empty, docstrings and places."""
  if isinstance(node, ast.AST):
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    return type(node).__name__, *((name, essence(value)) for name, value in fields)
  if isinstance(node, list):
    return tuple(essence(item) for item in node
                 if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)))
  return repr(node)
