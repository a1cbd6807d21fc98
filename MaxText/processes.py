# SPDX-License-Identifier: Apache-2.0
"""Several processes: joining jax's distributed runtime, and the end of all of them when one has died.

join() finds out whether this process is one of many: by jax_coordinator_address and its keys, by the environment that
multihost_runner.py sets (JAX_COORDINATOR_ADDRESS, JAX_PROCESS_COUNT, JAX_PROCESS_ID), or by what TPU pods and
multislice, GKE, Slurm and Open MPI tell. On one machine nothing is started.

jax notices a dead process by its heartbeat and then aborts without a word. So process 0 holds a connection to each
other one: the end of a process closes it at once, and a machine that is cut off is silent. Whoever notices says who was
first, tells the others, and ends with exit code 76.
"""

import atexit
import json
import os
import selectors
import socket
import sys
import threading
import time

import jax
import numpy as np

from MaxText import errors

BEAT_SECONDS = 1.0
_JAX_HEARTBEAT_SECONDS = 100  # longer than any of ours: who dies is told by us, with a name and an exit code


def detect():
  """How many processes the environment speaks of, as jax itself would find out; 1 where it speaks of none."""
  from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize() asks, which would start a service for 1

  for kind in ClusterEnv._cluster_types:
    if not kind.opt_in_only_method and kind.is_env_present():
      return kind.get_process_count()
  return 1


def join(cfg):
  """Starts jax's distributed runtime where this process is one of several. Raises ConfigError, PeerDied.

  To be called before jax looks for devices.
  """
  address, count, index = cfg.jax_coordinator_address, cfg.jax_process_count, cfg.jax_process_id
  told = {name: os.environ.get(f"JAX_{name}", "") for name in ("COORDINATOR_ADDRESS", "PROCESS_COUNT", "PROCESS_ID")}
  if not address and all(told.values()):
    if not (told["PROCESS_COUNT"].isdecimal() and told["PROCESS_ID"].isdecimal()):
      raise errors.ConfigError(f"JAX_PROCESS_COUNT={told['PROCESS_COUNT']} JAX_PROCESS_ID={told['PROCESS_ID']}: these"
                               " of the environment must be numbers. Unset them, or give jax_coordinator_address.")
    address, count, index = told["COORDINATOR_ADDRESS"], int(told["PROCESS_COUNT"]), int(told["PROCESS_ID"])
  if (count if address else detect()) == 1:
    return
  given = {"coordinator_address": address, "num_processes": count, "process_id": index} if address else {}
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, for which train.py has its own answer
  # jax itself aborts where one is missing, with a stack of C++.
  seconds = cfg.jax_initialization_timeout_seconds
  alarm = threading.Timer(seconds, _give_up, (address or "(found by jax)", seconds))
  alarm.daemon = True
  alarm.start()
  try:
    jax.distributed.initialize(**given, initialization_timeout=seconds + 60,
                               heartbeat_timeout_seconds=_JAX_HEARTBEAT_SECONDS)
  except (RuntimeError, ValueError) as error:
    reason = str(error).splitlines()[0][:200]
    raise errors.PeerDied(f"the processes have not come together: {reason}. Run the same command again.") from error
  finally:
    alarm.cancel()
  if jax.process_count() > 1:
    Watch(cfg.peer_timeout_seconds).start()


def _give_up(where, seconds):
  print(f"PeerDied: jax_coordinator_address={where}: not all processes have come within"
        f" jax_initialization_timeout_seconds={seconds}. See what the others say, then run the same command again.",
        file=sys.stderr, flush=True)
  os._exit(errors.PEER_DIED)


def part():
  """Waits until all processes have come here, what one of them writes for all done; then each may end as it likes."""
  if _watches:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("part")
    _watches.pop().leave()


_watches = []  # of this process: one or none


class Watch:
  """Connections between process 0 and each other one, with a heartbeat, in a thread of each."""

  def __init__(self, timeout):
    self._timeout = timeout
    self._index, self._count = jax.process_index(), jax.process_count()
    self._name = f"process {self._index} on {socket.gethostname()}"
    self._peers = {}  # connection -> name of the process behind it
    self._heard, self._rest = {}, {}
    self._left = threading.Event()

  def start(self):
    """Connects all processes. Raises PeerDied when one does not come."""
    from jax._src import distributed  # the only one who knows where process 0 is
    from jax.experimental import multihost_utils

    host = distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")
    try:
      if self._index == 0:
        with socket.create_server(("", 0)) as server:
          multihost_utils.broadcast_one_to_all(np.int32(server.getsockname()[1]))
          server.settimeout(self._timeout)
          for _ in range(self._count - 1):
            self._add(server.accept()[0], "a process")
      else:
        port = int(multihost_utils.broadcast_one_to_all(np.int32(0)))
        self._add(socket.create_connection((host, port), self._timeout), "process 0")
    except OSError as error:
      raise errors.PeerDied(f"peer_timeout_seconds={self._timeout:g}: {self._name} has no connection to process 0"
                            f" ({error}). Is a firewall between the hosts?") from error
    self._send({"name": self._name})
    errors.LAST_WORDS.append(self._fail)
    atexit.register(self.leave)
    _watches.append(self)
    threading.Thread(target=self._run, name="watch", daemon=True).start()

  def _add(self, connection, name):
    connection.settimeout(self._timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._peers[connection], self._heard[connection], self._rest[connection] = name, time.monotonic(), b""

  def _run(self):
    selector = selectors.DefaultSelector()
    for connection in self._peers:
      selector.register(connection, selectors.EVENT_READ)
    beat = time.monotonic()
    while not self._left.is_set() and self._peers:
      for key, _ in selector.select(BEAT_SECONDS / 2):
        if not self._read(key.fileobj):
          selector.unregister(key.fileobj)
          del self._peers[key.fileobj]
      now = time.monotonic()
      if now - beat > BEAT_SECONDS:
        beat = now
        self._send({})
      for connection, name in self._peers.items():
        if now - self._heard[connection] > self._timeout:
          self._end(f"{name} has been silent for {self._timeout:g} s: it hangs, or its machine is cut off")

  def _read(self, connection):
    """Hears what a peer says; False when it has left in peace."""
    try:
      said = connection.recv(4096)
    except OSError:
      said = b""
    if not said:
      self._end(f"{self._peers[connection]} is gone: killed, or its machine is")
    self._heard[connection] = time.monotonic()
    *lines, self._rest[connection] = (self._rest[connection] + said).split(b"\n")
    for line in map(json.loads, lines):
      self._peers[connection] = line.get("name", self._peers[connection])
      if "failed" in line:
        self._end(line["failed"])
      if "left" in line:
        return False
    return True

  def _send(self, what):
    for connection in list(self._peers):
      try:
        connection.sendall(json.dumps(what).encode() + b"\n")
      except OSError:  # who is behind it has ended: reading says so
        pass

  def _end(self, what):
    """Tells the others what they do not know, and ends this process."""
    if self._left.is_set():
      return
    self._left.set()
    if self._index == 0:
      self._send({"failed": what})
    print(f"PeerDied: {what}. This process ends too: run the same command again to go on.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(errors.PEER_DIED)

  def _fail(self, code, line):
    """The last words of this process, when it ends by itself with an error."""
    if code == 1:  # an exchange with a process that is gone fails too: hear first whether one is
      time.sleep(2 * BEAT_SECONDS)
    if not self._left.is_set():
      self._left.set()
      self._send({"failed": f"{self._name} ended with exit code {code}: {line}"})

  def leave(self):
    """Ends the watch: what becomes of this process from here on is no failure."""
    self._left.set()
    self._send({"left": True})
