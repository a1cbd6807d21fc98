# SPDX-License-Identifier: Apache-2.0
"""Static cost of a compiled program: what its optimized HLO says about matrix products, collectives and step time.

Nothing is run. The TPU compiler writes the cycles it expects into each scheduled instruction; Pallas kernels and
collectives have none and are computed from shapes. GPU compilers give no cycles: there the estimate is a roofline.
"""

import collections
import math
import re
from typing import NamedTuple

DTYPE_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4,
               "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
_NO_ESTIMATE = 2**62  # the compiler writes INT64_MAX where it has none

# Matrix products of one call of each of our Pallas kernels, by the start of its name: forward q.k and p.v; for keys and
# values these two's inputs again, and two gradients; for queries one score, one product, one gradient.
PALLAS_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
PALLAS_EFFICIENCY = 0.45  # share of peak that a Pallas attention kernel is taken to reach


class Hardware(NamedTuple):
  """One device of a target, and where each stands. Rates in FLOP/s, Hz and bytes/s.

  places: per partition (slice or host, then coordinates on the torus, empty on GPUs), in the order of the mesh.
  torus: (chips along an axis, whether its ring closes) per axis.
  clock_hz: None where the compiler gives no cycles; the estimate is a roofline then.
  """

  peak_flops: float
  hbm_bandwidth: float
  link_bandwidth: float
  network_bandwidth: float
  clock_hz: float | None
  places: tuple
  torus: tuple = ()


class Instruction(NamedTuple):
  """One line of HLO. `shape` and `attributes` are text, `operands` names."""

  name: str
  shape: str
  opcode: str
  operands: tuple
  attributes: str
  is_root: bool

  def attribute(self, pattern):
    found = re.search(pattern, self.attributes)
    return found and found.group(1)


class Collective(NamedTuple):
  """One kind of exchange of a step: all calls with the same size, group and place.

  nbytes: of the full array on one device (what is gathered, or what is reduced). link: "ici", "nvlink" or "network".
  lanes: directions of the link that it takes, "+" and "-". seconds: of one call on an idle link.
  """

  kind: str
  nbytes: int
  group: int
  link: str
  lanes: tuple
  is_async: bool
  in_loop: bool
  calls: int
  seconds: float


class Cost(NamedTuple):
  """A step's estimate, in seconds of one device, and what it was made of.

  compute: cycles of the schedule (on GPUs the roofline of every kernel). kernels: Pallas attention. collectives: those
  that run alone. exposed: waits for overlapped ones, network: of these and those, what crosses slices or hosts.
  unknown: names of instructions whose time could not be had.
  """

  seconds: float
  compute: float
  kernels: float
  collectives: float
  exposed: float
  network: float
  is_roofline: bool
  matmul_flops: int
  exchanges: tuple
  unknown: tuple


# --- Reading HLO text ------------------------------------------------------------------------------------------------


class Program:
  """Computations of an HLO module by name, each a list of Instruction in the order of the schedule."""

  def __init__(self, text):
    self.computations, self.entry, self._by_name = {}, None, {}
    lines = None
    for line in text.splitlines():
      header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
      if header:
        lines = self.computations[header[2]] = []
        self.entry = header[2] if header[1] else self.entry
      elif line == "}":
        lines = None
      elif lines is not None and re.match(r"  (ROOT )?%?[\w.\-]+ = ", line):
        lines.append(line)
      elif lines:  # the text of an attribute holds raw newlines
        lines[-1] += line
    for name, lines in self.computations.items():
      self.computations[name] = [_instruction(line) for line in lines]
      self._by_name[name] = {i.name: i for i in self.computations[name]}

  def find(self, computation, name):
    """The instruction called `name`."""
    return self._by_name[computation][name]

  def root(self, computation):
    return next(i for i in reversed(self.computations[computation]) if i.is_root)

  def called(self, instruction):
    """Names of the computations that a call, conditional or fusion runs."""
    names = re.findall(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", instruction.attributes)
    branches = instruction.attribute(r"branch_computations=\{([^}]*)\}")
    return names + (re.findall(r"[\w.\-]+", branches) if branches else [])

  def trip_count(self, computation, loop):
    """How often the body of this while instruction runs, or None: known_trip_count, else from start, bound and step.

    Loops that the compiler peels or unrolls start above 0 or step by more than 1.
    """
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
    if known:
      return int(known)
    condition, body = loop.attribute(r"condition=%?([\w.\-]+)"), loop.attribute(r"body=%?([\w.\-]+)")
    test = self.root(condition)
    while test.opcode in ("fusion", "copy", "bitcast") and test.opcode != "compare":
      if test.opcode == "fusion":
        return None
      test = self.find(condition, test.operands[0])
    if test.opcode != "compare" or test.attribute(r"direction=(\w+)") not in ("LT", "GT", "NE", "LE"):
      return None
    sides = [self._source(condition, name) for name in test.operands]
    index = next((s.attribute(r"index=(\d+)") for s in sides if s.opcode == "get-tuple-element"), None)
    bound = next((_constant(s) for s in sides if s.opcode == "constant"), None)
    initial = self._source(computation, loop.operands[0])
    result = self.root(body)
    if index is None or bound is None or initial.opcode != "tuple" or result.opcode != "tuple":
      return None
    start = _constant(self._source(computation, initial.operands[int(index)]))
    update = self._source(body, result.operands[int(index)])
    steps = [_constant(self._source(body, name)) for name in update.operands] if update.opcode == "add" else []
    step = next((s for s in steps if s), None)
    if start is None or step is None:
      return None
    last = bound if test.attribute(r"direction=(\w+)") != "LE" else bound + 1
    return max(0, math.ceil((last - start) / step))

  def _source(self, computation, name):
    """The instruction that `name` is a copy of."""
    found = self.find(computation, name)
    while found.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape"):
      found = self.find(computation, found.operands[0])
    return found


def _constant(instruction):
  """The whole number that a constant holds, else None."""
  value = instruction.opcode == "constant" and re.match(r"\(?\{?(-?\d+)\}?\)?$", instruction.operands[0])
  return int(value[1]) if value else None


def _instruction(line):
  head, _, rest = line.strip().partition(" = ")
  shape, opcode, rest = re.match(r"(.*?) ([a-z][\w\-]*)\((.*)$", rest, re.DOTALL).groups()
  depth, end = 1, -1
  while depth:
    end += 1
    depth += (rest[end] == "(") - (rest[end] == ")")
  inside, attributes = rest[:end], rest[end + 1:]
  operands = (inside,) if opcode == "constant" else tuple(re.findall(r"%([\w.\-]+)", inside))
  return Instruction(head.removeprefix("ROOT ").lstrip("%"), shape, opcode, operands, attributes,
                     head.startswith("ROOT "))


def shapes(text):
  """[(dtype, dimensions)] of the arrays in a shape's text, a tuple's in order."""
  return [(dtype, tuple(int(d) for d in dims.split(",") if d))
          for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", text) if dtype in DTYPE_BYTES]


def array_bytes(text):
  """Bytes of all arrays in a shape's text."""
  return sum(int(DTYPE_BYTES[dtype] * math.prod(dims)) for dtype, dims in shapes(text))


# --- Matrix products -------------------------------------------------------------------------------------------------


def product_flops(program, computation, instruction):
  """FLOPs of one dot, convolution or GPU library product: 2 for each multiplication that is not with padding."""
  (_, out), *_ = shapes(instruction.shape)
  if instruction.opcode == "custom-call":  # GPU: the contracted dimensions stand in the backend's configuration
    left = shapes(program.find(computation, instruction.operands[0]).shape)[0][1]
    summed = instruction.attribute(r'"lhs_contracting_dimensions":\["?([\d",]*)"?\]') or ""
    return 2 * math.prod(out) * math.prod(left[int(d)] for d in re.findall(r"\d+", summed))
  left, right = (shapes(program.find(computation, name).shape)[0][1] for name in instruction.operands)
  if instruction.opcode == "dot":
    summed = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    return 2 * math.prod(out) * math.prod(left[int(d)] for d in summed.split(",") if d)
  # A convolution: the compiler's form of a product on TPU, batch dimensions becoming windows in padding.
  lhs, kernel, result = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute(r"dim_labels=([^,\s]+)")).groups()
  window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attribute(r"window=\{([^}]*)\}") or ""))
  flops = 2 * out[result.index("b")] * out[result.index("f")] * right[kernel.index("i")]
  for axis in range(len(lhs) - 2):
    field = lambda name, default, axis=axis: window[name].split("x")[axis] if name in window else default  # noqa: E731
    low = int(field("pad", "0_0").split("_")[0])
    stride, base, dilation = (int(field(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    size, kernel_size, count = left[lhs.index(str(axis))], right[kernel.index(str(axis))], out[result.index(str(axis))]
    last = (size - 1) * base
    flops *= sum((at := o * stride + k * dilation - low) % base == 0 and 0 <= at <= last
                 for o in range(count) for k in range(kernel_size))
  return flops


def is_product(instruction):
  return instruction.opcode in ("dot", "convolution") or (
      instruction.opcode == "custom-call" and "__cublas$" in instruction.attributes)


# --- Collectives -----------------------------------------------------------------------------------------------------


def first_group(instruction, count):
  """Partitions that exchange with each other: those of the first group, or of the first pair, of `count` in all."""
  pairs = instruction.attribute(r"source_target_pairs=\{\{([\d,]+)\}")
  if pairs:
    return tuple(int(i) for i in pairs.split(","))
  listed = instruction.attribute(r"replica_groups=\{\{([\d,]+)\}")
  if listed:
    return tuple(int(i) for i in listed.split(","))
  iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.attributes)
  if iota:
    dims = [int(d) for d in iota[3].split(",")]
    order = [int(d) for d in iota[4].split(",")] if iota[4] else list(range(len(dims)))
    return _transposed_iota(dims, order, int(iota[2]))
  mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.attributes)
  if mesh:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
    named = re.findall(r"'([^']+)'", mesh[2])
    names = list(sizes)
    order = [i for i, name in enumerate(names) if name not in named] + [names.index(name) for name in named]
    return _transposed_iota(list(sizes.values()), order, math.prod(sizes[name] for name in named))
  return tuple(range(count))  # no groups: all


def _transposed_iota(dims, order, count):
  """The first `count` of the numbers 0, 1, ... laid out as `dims` and transposed to `order`."""
  strides = [math.prod(dims[i + 1:]) for i in range(len(dims))]
  sizes, steps = [dims[i] for i in order], [strides[i] for i in order]
  numbers = []
  for n in range(count):
    total = 0
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
      n, at = divmod(n, size)
      total += at * step
    numbers.append(total)
  return tuple(numbers)


def exchange(kind, instruction, hardware, in_loop, is_async):
  """The Collective of one call of `kind`, calls=1."""
  group = first_group(instruction, len(hardware.places))
  places = [hardware.places[i] for i in group]
  n = len(group)
  nbytes = sum(int(DTYPE_BYTES[dtype] * math.prod(dims)) for dtype, dims in shapes(instruction.shape) if dims)
  if instruction.opcode.endswith("-start") and kind != "all-reduce":  # operands and results
    nbytes = nbytes * n // (n + 1) if kind in ("all-gather", "reduce-scatter") else nbytes // 2
  elif instruction.opcode == "reduce-scatter":
    nbytes *= n
  slices = len({place[0] for place in places})  # on GPUs hosts
  inside = "ici" if hardware.torus else "nvlink"
  link, share, bandwidth = inside, (n - 1) / n, hardware.link_bandwidth
  if slices > 1:  # all members carry a part of what goes between slices
    link, share, bandwidth = "network", (slices - 1) / slices, hardware.network_bandwidth * n / slices
    bandwidth = min(bandwidth, hardware.link_bandwidth * share * n / (n - 1))  # every byte also goes around inside
  elif hardware.torus:
    bandwidth = _ring_bandwidth(places, hardware)
  lanes = ("+", "-")
  if kind == "collective-permute":  # one direction of one axis
    pairs = re.findall(r"\{(\d+),(\d+)\}", instruction.attribute(r"source_target_pairs=\{(.*?\})\}"))
    lanes = ("+" if 2 * sum(int(a) < int(b) for a, b in pairs) > len(pairs) else "-",)
    one_way = {"ici": hardware.link_bandwidth / 2, "nvlink": hardware.link_bandwidth}
    seconds = nbytes / one_way.get(link, hardware.network_bandwidth)
  elif kind in ("all-to-all", "ragged-all-to-all"):  # a quarter of the ring is what a piece travels on average
    if link == "network":  # nobody carries another's part
      bandwidth = hardware.network_bandwidth
    seconds = nbytes * share / bandwidth * (max(n / 4, 1) if link == "ici" else 1)
  else:
    seconds = nbytes * share * (2 if kind == "all-reduce" else 1) / bandwidth
  return Collective(kind, nbytes, n, link, lanes, is_async, in_loop, 1, seconds if n > 1 else 0.0)


def _ring_bandwidth(places, hardware):
  """Bytes/s of a group on the torus: of the axes it spans, half of an axis where its ring cannot close."""
  total = 0.0
  for axis, (size, closes) in enumerate(hardware.torus):
    spanned = len({place[1 + axis] for place in places})
    if spanned > 1:
      total += hardware.link_bandwidth * (1.0 if closes and spanned == size else 0.5)
  return total or hardware.link_bandwidth


# --- Step time -------------------------------------------------------------------------------------------------------


class _Walk:
  """Follows the schedule with a clock per link: an overlapped collective ends when its link has carried it.

  Copies between the memories of one device that run beside the schedule (copy-start, slice-start) are taken as hidden.
  """

  def __init__(self, program, hardware):
    self.program, self.hardware = program, hardware
    self.totals = collections.Counter()
    self.exchanges, self.unknown, self.flops = collections.Counter(), collections.Counter(), 0

  def run(self, computation, times, depth):
    """Seconds of one pass over `computation`, which runs `times` times in all."""
    now, free, pending = 0.0, collections.defaultdict(float), {}

    def spend(seconds, what):
      nonlocal now
      now += seconds
      self.totals[what] += seconds * times

    for i in self.program.computations[computation]:
      kind, phase, inner = self.collective(i)
      if i.opcode == "while":
        trips = self.program.trip_count(computation, i)
        if trips is None:
          self.unknown[f"{i.name} (trip count)"] += 1
          trips = 1
        now += trips * self.run(i.attribute(r"body=%?([\w.\-]+)"), times * trips, depth + 1)
      elif i.opcode in ("call", "conditional"):
        now += max(self.run(name, times, depth) for name in self.program.called(i))
      elif kind and phase != "done":
        call = exchange(kind, inner, self.hardware, depth > 0, phase == "start")
        self.exchanges[call._replace(calls=0)] += times
        lanes = [call.link + lane for lane in call.lanes]
        ready = max(now, *(free[lane] for lane in lanes))
        if phase == "start":
          pending[i.name] = ready + call.seconds
          free.update(dict.fromkeys(lanes, pending[i.name]))
        else:
          spend(ready - now, "exposed")
          spend(call.seconds, "network" if call.link == "network" else "collectives")
      elif phase == "done":
        ends = next((pending[name] for name in self.origins(computation, i) if name in pending), now)
        spend(max(ends - now, 0.0), "exposed")
      elif i.opcode == "send" and "is_host_transfer=true" in i.attributes:
        slices = len({place[0] for place in self.hardware.places})
        nbytes = max(int(DTYPE_BYTES[dtype] * math.prod(dims)) for dtype, dims in shapes(i.shape))
        kind = (i.attribute(r'_xla_megascale_transfer_type="(\w+)"') or "send").lower().replace("_", "-")
        rounds = 2 * (slices - 1) / slices if kind == "all-reduce" else 1.0
        call = Collective(kind, nbytes, slices, "network", ("+", "-"), True, depth > 0, 1,
                          rounds * nbytes / self.hardware.network_bandwidth)
        self.exchanges[call._replace(calls=0)] += times
        ends = max(now, free["network+"]) + call.seconds
        free.update({"network+": ends, "network-": ends})
        pending[i.attribute(r'_xla_host_transfer_rendezvous="([^"]+)"')] = ends
      elif i.opcode == "recv-done" and "is_host_transfer=true" in i.attributes:
        ends = pending.get(i.attribute(r'_xla_host_transfer_rendezvous="([^"]+)"'), now)
        spend(max(ends - now, 0.0), "network")
      else:
        self.count_products(computation, i, times)
        self.spend_on(computation, i, spend)
    return now

  def collective(self, i):
    """(kind, phase, the collective instruction) of an instruction that exchanges: phase "start", "done" or "alone"."""
    base, _, phase = i.opcode.rpartition("-")
    if i.opcode in COLLECTIVES:
      return i.opcode, "alone", i
    if phase in ("start", "done") and base in COLLECTIVES:
      return base, phase, i
    if i.opcode == "fusion" and i.name.startswith("async-collective-"):
      phase = "start" if i.name.startswith("async-collective-start") else "done"
      inner = next(x for x in self.program.computations[self.program.called(i)[0]] if x.opcode in COLLECTIVES)
      return inner.opcode, phase, inner
    if i.opcode in ("async-start", "async-done", "fusion"):
      for name in self.program.called(i):
        inner = next((x for x in self.program.computations[name] if x.opcode in COLLECTIVES), None)
        if inner and (i.opcode != "fusion" or "kind=kCustom" in i.attributes and "async" not in name):
          kind = "reduce-scatter" if "all-reduce-scatter" in i.name else inner.opcode
          return kind, {"async-start": "start", "async-done": "done"}.get(i.opcode, "alone"), inner
    return None, None, None

  def origins(self, computation, done):
    """Names of what a "done" may end: its operands, through tuples and the fusions that carry a collective along."""
    seen, todo = set(), list(done.operands)
    while todo:
      name = todo.pop()
      if name in seen:
        continue
      seen.add(name)
      i = self.program.find(computation, name)
      if i.opcode in ("get-tuple-element", "async-update", "bitcast", "copy") or "async_collective" in i.attributes:
        todo += i.operands
    return seen

  def count_products(self, computation, i, times):
    """Adds the matrix products of an instruction and of all it calls."""
    if is_product(i):
      self.flops += times * product_flops(self.program, computation, i)
    for name in self.program.called(i) if i.opcode == "fusion" else ():
      for inner in self.program.computations[name]:
        self.count_products(name, inner, times)

  def spend_on(self, computation, i, spend):
    """Charges the time of an instruction that is no exchange."""
    if i.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in i.attributes:
      products = next((count for name, count in PALLAS_PRODUCTS.items() if i.name.startswith(name)), None)
      if products is None:
        self.unknown[i.name] += 1
        return
      operands = [shapes(self.program.find(computation, name).shape)[0] for name in i.operands]
      # Masks and segments are whole numbers; one row has no batch axis.
      (*batch, t, h), (*_, s, _) = [dims for dtype, dims in operands if "f" in dtype][:2]
      causal = 1 - t / (2 * s)
      spend(2 * products * causal * math.prod(batch) * t * s * h / (PALLAS_EFFICIENCY * self.hardware.peak_flops),
            "kernels")
    elif self.hardware.clock_hz:
      cycles = i.attribute(r'"estimated_cycles":"?(\d+)')
      if cycles and int(cycles) >= _NO_ESTIMATE:
        self.unknown[i.name] += 1
      elif cycles:
        spend(int(cycles) / self.hardware.clock_hz, "compute")
    elif i.opcode not in _FREE:
      before = self.flops
      self.count_products(computation, i, 1)
      flops, self.flops = self.flops - before, before
      moved = array_bytes(i.shape) + sum(array_bytes(self.program.find(computation, name).shape) for name in i.operands)
      if "__cudnn$fmha" in i.attributes:
        flops = _cudnn_flops(self.program, computation, i)
      spend(max(flops / self.hardware.peak_flops, moved / self.hardware.hbm_bandwidth), "compute")


def _cudnn_flops(program, computation, i):
  """FLOPs of cuDNN attention, causal: two products forward, five backward, from queries [b, t, n, h]."""
  b, t, n, h = next(dims for name in i.operands for _, dims in shapes(program.find(computation, name).shape)[:1]
                    if len(dims) == 4)
  return (5 if "Backward" in i.attributes else 2) * b * n * t * t * h


def estimate(text, hardware):
  """Cost of one run of the program whose optimized, scheduled HLO is `text`, on one device of `hardware`."""
  program = Program(text)
  walk = _Walk(program, hardware)
  seconds = walk.run(program.entry, 1, 0)
  exchanges = sorted((call._replace(calls=count) for call, count in walk.exchanges.items()),
                     key=lambda call: -call.calls * call.seconds)
  parts = {name: walk.totals[name] for name in ("compute", "kernels", "collectives", "exposed", "network")}
  return Cost(seconds, **parts, is_roofline=not hardware.clock_hz, matmul_flops=walk.flops, exchanges=tuple(exchanges),
              unknown=tuple(walk.unknown))
