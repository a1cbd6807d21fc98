# SPDX-License-Identifier: Apache-2.0
"""What optimized HLO says about products, exchanges and time, on programs small enough to count by hand."""

import pytest

from MaxText import hlo_cost

TORUS = ((4, True), (4, True))
PLACES = tuple((s, x, y) for s in range(2) for x in range(4) for y in range(4))
V5E = hlo_cost.Hardware(197e12, 819e9, 90e9, 3e9, 1.5e9, PLACES, TORUS)
ONE_SLICE = V5E._replace(places=PLACES[:16])
GPU = hlo_cost.Hardware(1e15, 3e12, 450e9, 50e9, None, tuple((host,) for host in (0, 0, 1, 1)))


def module(entry, *computations):
  return "\n".join(["HloModule test", *computations, "ENTRY %main (p: f32[8]) -> f32[8] {", *entry, "}", ""])


def body(name, *lines):
  return "\n".join([f"%{name} (p: (s32[], f32[8])) -> (s32[], f32[8]) {{", *lines, "}"])


def loop(start, bound, step, work, direction="LT"):
  """A module that runs the lines `work` in a loop that counts from start to bound by step."""
  return module(
      [f"  %start = s32[] constant({start})", "  %kept = s32[]{:T(128)} copy(%start)", "  %x = f32[8]{0} parameter(0)",
       "  %init = (s32[], f32[8]{0:T(8,128)}) tuple(%kept, %x)",
       "  ROOT %w = (s32[], f32[8]{0}) while(%init), condition=%cond, body=%body"],
      body("cond", "  %p = (s32[], f32[8]{0}) parameter(0)", "  %i = s32[] get-tuple-element(%p), index=0",
           f"  %n = s32[] constant({bound})", f"  ROOT %lt = pred[] compare(%i, %n), direction={direction}"),
      body("body", "  %p = (s32[], f32[8]{0}) parameter(0)", "  %i = s32[] get-tuple-element(%p), index=0",
           "  %v = f32[8]{0} get-tuple-element(%p), index=1", f"  %by = s32[] constant({step})",
           "  %next = s32[] add(%i, %by)", *work, "  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %v)"))


def cycles(name, count, operand="%v"):
  return f'  %{name} = f32[8]{{0}} negate({operand}), backend_config={{"estimated_cycles":"{count}"}}'


@pytest.mark.parametrize(("start", "bound", "step", "direction", "trips"), [
    (0, 8, 1, "LT", 8), (0, 8, 2, "LT", 4), (1, 36, 1, "LT", 35), (0, 7, 2, "LT", 4), (0, 3, 1, "LE", 4),
    (36, 1, -1, "GT", 35), (5, 5, 1, "LT", 0),
])  # fmt: skip
def test_a_loop_runs_from_its_start_to_its_bound_by_its_step(start, bound, step, direction, trips):
  cost = hlo_cost.estimate(loop(start, bound, step, [cycles("work", 1500)], direction), ONE_SLICE)
  assert cost.compute == pytest.approx(trips * 1e-6)
  assert cost.seconds == pytest.approx(trips * 1e-6)
  assert cost.unknown == ()


def test_a_known_trip_count_is_believed_and_an_unknown_one_is_named():
  text = loop(0, 8, 1, [cycles("work", 1500)])
  known = text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
  assert hlo_cost.estimate(known, ONE_SLICE).compute == pytest.approx(3e-6)
  unknown = text.replace("add(%i, %by)", "multiply(%i, %by)")
  assert hlo_cost.estimate(unknown, ONE_SLICE).unknown == ("w (trip count)",)


def test_cycles_that_the_compiler_does_not_know_are_named_and_not_added():
  text = module(["  %v = f32[8]{0} parameter(0)", cycles("a", 1500), cycles("b", 2**63 - 1)])
  cost = hlo_cost.estimate(text, ONE_SLICE)
  assert (cost.compute, cost.unknown) == (pytest.approx(1e-6), ("b",))


def test_an_attribute_with_raw_newlines_is_one_instruction():
  text = module(["  %v = f32[8]{0} parameter(0)", '  %c = f32[8]{0} custom-call(%v), custom_call_target="x", '
                 "frontend_attributes={kernel_metadata={", '"a": 1', '}}, backend_config={"estimated_cycles":"3000"}',
                 cycles("d", 1500)])
  assert [i.name for i in hlo_cost.Program(text).computations["main"]] == ["v", "c", "d"]
  assert hlo_cost.estimate(text, ONE_SLICE).compute == pytest.approx(3e-6)


@pytest.mark.parametrize(("line", "flops"), [
    ("f32[3,5]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 3 * 4 * 5),
    # A product [3, 4] x [4, 5] as a convolution without spatial dimensions.
    ("f32[3,5]{1,0} convolution(%a, %b), dim_labels=bf_io->bf", 2 * 3 * 4 * 5),
    # bte,enh->btnh: the 6 heads are a window over 1 element in padding, of which each place sees one.
    ("f32[2,3,6,7]{3,2,1,0} convolution(%x, %w), window={size=1x6 pad=0_0x5_5 rhs_reversal=0x1}, "
     "dim_labels=0bf1_i1o0->0b1f", 2 * 2 * 3 * 4 * 6 * 7),
    # btv,bte->ev summed over both rows, the 2 rows being the window.
    ("f32[4,5,1]{1,0,2} convolution(%y, %z), window={size=2}, dim_labels=0fb_0io->bf0", 2 * 2 * 3 * 4 * 5),
])  # fmt: skip
def test_a_product_is_counted_by_its_multiplications(line, flops):
  text = module([
      "  %a = f32[3,4]{1,0} parameter(0)", "  %b = f32[4,5]{1,0} parameter(1)",
      "  %x = f32[2,3,4,1]{3,2,1,0} parameter(2)", "  %w = f32[4,6,7,1]{3,2,1,0} parameter(3)",
      "  %y = f32[2,3,4]{2,1,0} parameter(4)", "  %z = f32[2,3,5]{2,1,0} parameter(5)", f"  ROOT %out = {line}"])
  assert hlo_cost.estimate(text, ONE_SLICE).matmul_flops == flops


def test_a_product_in_a_fusion_in_a_loop_counts_for_every_trip():
  fused = "\n".join(["%fused (p: f32[8]) -> f32[8] {", "  %a = f32[3,4]{1,0} parameter(0)",
                     "  %b = f32[4,5]{1,0} parameter(1)",
                     "  ROOT %d = f32[3,5]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "}"])
  work = ['  %f = f32[3,5]{1,0} fusion(%v, %v), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"15"}']
  text = loop(0, 7, 1, work).replace("HloModule test", "HloModule test\n" + fused)
  cost = hlo_cost.estimate(text, ONE_SLICE)
  assert cost.matmul_flops == 7 * 120
  assert cost.compute == pytest.approx(7 * 1e-8)


@pytest.mark.parametrize(("groups", "expected"), [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3)),
    ("replica_groups=[8,4]<=[32]", (0, 1, 2, 3)),
    ("replica_groups=[4,8]<=[8,4]T(1,0)", (0, 4, 8, 12, 16, 20, 24, 28)),
    ("replica_groups=mesh['a'=2,'b'=16] {'b'}", tuple(range(16))),
    ("replica_groups=mesh['a'=2,'b'=16] {'a'}", (0, 16)),
    ("replica_groups=mesh['a'=4,'b'=4,'c'=2] {'a','c'}", (0, 1, 8, 9, 16, 17, 24, 25)),
    ("replica_groups={}", tuple(range(32))),
    ("source_target_pairs={{3,0},{0,1}}", (3, 0)),
])
def test_every_way_of_writing_groups_gives_the_devices_that_exchange(groups, expected):
  i = hlo_cost.Instruction("g", "f32[8]{0}", "all-gather", ("v",), groups + ", dimensions={0}", False)
  assert hlo_cost.first_group(i, 32) == expected


def exchange(line, hardware=ONE_SLICE):
  text = module(["  %v = f32[8]{0} parameter(0)", f"  ROOT %g = {line}"])
  cost = hlo_cost.estimate(text, hardware)
  (call,) = cost.exchanges
  return call, cost


MIB = 2**20


@pytest.mark.parametrize(("line", "seconds"), [
    # Both axes of the torus, closed rings: 15 of 16 parts arrive over 2 x 90 GB/s.
    ("f32[4,65536]{1,0} all-gather(%v), replica_groups=[1,16]<=[16], dimensions={0}", MIB * 15 / 16 / 180e9),
    # One axis of it.
    ("f32[4,65536]{1,0} all-gather(%v), replica_groups=[4,4]<=[16], dimensions={0}", MIB * 3 / 4 / 90e9),
    # Two neighbours of four: no ring.
    ("f32[4,65536]{1,0} all-gather(%v), replica_groups=[8,2]<=[16], dimensions={0}", MIB / 2 / 45e9),
    ("f32[4,65536]{1,0} all-reduce(%v), replica_groups=[4,4]<=[16], to_apply=%add", 2 * MIB * 3 / 4 / 90e9),
    ("f32[1,65536]{1,0} reduce-scatter(%v), replica_groups=[4,4]<=[16], dimensions={0}", MIB * 3 / 4 / 90e9),
    ("f32[4,65536]{1,0} collective-permute(%v), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", MIB / 45e9),
    ("f32[4,65536]{1,0} all-to-all(%v), replica_groups=[4,4]<=[16], dimensions={0}", MIB * 3 / 4 / 90e9),
])
def test_an_exchange_takes_its_bytes_over_the_links_that_its_group_spans(line, seconds):
  call, cost = exchange(line)
  assert (call.seconds, cost.collectives) == (pytest.approx(seconds), pytest.approx(seconds))
  assert (call.link, call.is_async, call.in_loop, call.calls, call.nbytes) == ("ici", False, False, 1, MIB)


def test_gpus_exchange_over_nvlink_in_a_host_and_over_the_network_between_hosts():
  call, _ = exchange("f32[4,65536]{1,0} all-gather(%v), replica_groups=[2,2]<=[4], dimensions={0}", GPU)
  assert (call.link, call.seconds) == ("nvlink", pytest.approx(MIB / 2 / 450e9))
  call, cost = exchange("f32[4,65536]{1,0} all-gather(%v), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", GPU)
  assert (call.link, call.seconds) == ("network", pytest.approx(MIB / 2 / 50e9))
  assert cost.network == pytest.approx(call.seconds)
  # All cards of a host carry a part of what leaves it; with a network faster than NVLink, that limits.
  everyone = "f32[4,65536]{1,0} all-gather(%v), replica_groups=[1,4]<=[4], dimensions={0}"
  assert exchange(everyone, GPU)[0].seconds == pytest.approx(MIB / 2 / (2 * 50e9))
  assert exchange(everyone, GPU._replace(network_bandwidth=1e12))[0].seconds == pytest.approx(MIB * 3 / 4 / 450e9)
  own = everyone.replace("all-gather", "all-to-all")  # each sends its own
  assert exchange(own, GPU)[0].seconds == pytest.approx(MIB / 2 / 50e9)


@pytest.mark.parametrize(("line", "seconds"), [
    ("(f32[1,65536]{1,0}, f32[4,65536]{1,0}) all-gather-start(%v), replica_groups=[4,4]<=[16]", MIB * 3 / 4 / 90e9),
    ("((f32[1,65536]{1,0}, bf16[1,8]{1,0}), (f32[4,65536]{1,0}, bf16[4,8]{1,0})) all-gather-start(%v, %v), "
     "replica_groups=[4,4]<=[16]", (MIB + 64) * 3 / 4 / 90e9),
    ("(f32[4,65536]{1,0}, f32[1,65536]{1,0}) reduce-scatter-start(%v), replica_groups=[4,4]<=[16]",
     MIB * 3 / 4 / 90e9),
    ("f32[4,65536]{1,0} all-reduce-start(%v), replica_groups=[4,4]<=[16]", 2 * MIB * 3 / 4 / 90e9),
    ("(f32[4,65536]{1,0}, f32[4,65536]{1,0}, u32[], u32[]) collective-permute-start(%v), "
     "source_target_pairs={{0,1},{1,0}}", MIB / 45e9),
])  # fmt: skip
def test_an_overlapped_exchange_counts_its_result_and_not_its_operand(line, seconds):
  call, cost = exchange(line)
  assert (call.seconds, call.is_async, cost.seconds) == (pytest.approx(seconds), True, 0.0)


def overlapped(between):
  start = "f32[4,65536]{1,0} all-gather-start(%v), replica_groups=[4,4]<=[16], dimensions={0}"
  return module(["  %v = f32[8]{0} parameter(0)",
                 f"  %s = (f32[1,65536]{{1,0}}, f32[4,65536]{{1,0}}) {start.split(' ', 1)[1]}", *between,
                 "  %d = f32[4,65536]{1,0} all-gather-done(%s)"])


def test_of_an_overlapped_exchange_only_the_wait_counts():
  whole = MIB * 3 / 4 / 90e9
  hidden = hlo_cost.estimate(overlapped([cycles("work", 1_500_000)]), ONE_SLICE)
  assert (hidden.exposed, hidden.seconds) == (0.0, pytest.approx(1e-3))
  half = hlo_cost.estimate(overlapped([cycles("work", round(whole / 2 * 1.5e9))]), ONE_SLICE)
  assert half.exposed == pytest.approx(whole / 2, rel=1e-3)
  assert half.seconds == pytest.approx(whole, rel=1e-3)


def test_exchanges_on_one_link_wait_for_each_other_and_opposite_directions_do_not():
  def permutes(*pairs):
    starts = [f"  %s{n} = (f32[262144]{{0}}, f32[262144]{{0}}) collective-permute-start(%v), source_target_pairs={pair}"
              for n, pair in enumerate(pairs)]
    dones = [f"  %d{n} = f32[262144]{{0}} collective-permute-done(%s{n})" for n in range(len(pairs))]
    return hlo_cost.estimate(module(["  %v = f32[262144]{0} parameter(0)", *starts, *dones]), ONE_SLICE).seconds

  up, down = "{{0,1},{1,2},{2,3},{3,0}}", "{{0,3},{1,0},{2,1},{3,2}}"
  assert permutes(up, up) == pytest.approx(2 * permutes(up))
  assert permutes(up, down) == pytest.approx(permutes(up))


def test_attention_kernels_are_counted_by_their_products_below_the_diagonal():
  def kernel(name, queries=2048, rows="2,16,"):
    return hlo_cost.estimate(module([
        "  %m = s8[1,4,4]{2,1,0} parameter(0)", f"  %q = bf16[{rows}{queries},128]{{3,2,1,0}} parameter(1)",
        f"  %k = bf16[{rows}2048,128]{{3,2,1,0}} parameter(2)",
        f"  %{name} = bf16[{rows}{queries},128]{{3,2,1,0}} custom-call(%m, %q, %k), "
        'custom_call_target="tpu_custom_call"']),
        ONE_SLICE)

  forward = kernel("splash_mha_fwd.1").kernels
  assert forward == pytest.approx(2 * 2 * 2 * 16 * 2048 * 2048 * 128 / 2 / (0.45 * 197e12))
  assert kernel("splash_mha_dkv.1").kernels == pytest.approx(2 * forward)
  assert kernel("splash_mha_dq.1").kernels == pytest.approx(1.5 * forward)
  # Of four parts of a row the last sees nearly all keys, and the others wait for it.
  assert kernel("splash_mha_fwd.1", 512).kernels == pytest.approx(forward / 4 * 2 * (1 - 1 / 8))
  assert kernel("splash_mha_fwd.1", rows="16,").kernels == pytest.approx(forward / 2)  # a single row has no batch axis
  assert kernel("somebody_elses.1").unknown == ("somebody_elses.1",)


def test_what_crosses_slices_takes_the_network():
  names = ('frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.1_0",'
           '_xla_megascale_transfer_type="ALL_REDUCE"}')
  text = module([
      "  %v = f32[262144]{0} parameter(0)", "  %t = token[] after-all()",
      f"  %s = (f32[262144]{{0}}, u32[], token[]) send(%v, %t), channel_id=1, is_host_transfer=true, {names}",
      f"  %r = (f32[262144]{{0}}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, {names}",
      cycles("work", 150_000),
      f"  %d = (f32[262144]{{0}}, token[]) recv-done(%r), channel_id=2, is_host_transfer=true, {names}"])
  cost = hlo_cost.estimate(text, V5E)
  assert cost.exchanges[0].link == "network"
  assert cost.seconds == pytest.approx(MIB / 3e9)
  assert cost.network == pytest.approx(MIB / 3e9 - 1e-4)


def test_without_cycles_the_estimate_is_a_roofline():
  text = module([
      "  %a = bf16[4096,4096]{1,0} parameter(0)",
      "  %d = bf16[4096,4096]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
      "  %n = bf16[4096,4096]{1,0} negate(%d)"])
  cost = hlo_cost.estimate(text, GPU)
  assert cost.is_roofline
  assert cost.compute == pytest.approx(2 * 4096**3 / 1e15 + 2 * 2 * 4096**2 / 3e12)
