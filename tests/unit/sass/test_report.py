"""From the compiler's texts to regions, schedules, the report, its picture and its comparison."""

import json
import pickle
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from fa3.sass import record, regions, report, schedule
from fa3.sass.diff import changes, figures, side_by_side
from fa3.sass.draw import draw, in_flight_spans
from fa3.sass.overlap import gemms_in_flight
from tests.unit.sass.programs import COMMIT, EX2, EXIT, HGMMA, kernel, listing, loop, mbarrier_wait, sass, wait

PV = "HGMMA.64x64x16.F32.BF16 R112, R176, gdesc[UR8].tnspB, R112, gsb0"
TRY = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R2"

# A tile loop with a prologue and Algorithm 2's main loop in it. The wait for K retries out of line, behind the EXIT.
KERNEL = [
    "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0",
    ".L_x_0:",
    HGMMA,
    COMMIT,
    wait(0),
    EX2,
    ".L_x_1:",
    TRY,
    "@!P0 BRA `(.L_x_3)",
    ".L_x_2:",
    "BAR.SYNC.DEFER_BLOCKING 0x1, 0x100",
    HGMMA,
    COMMIT,
    PV,
    wait(1),
    *["FMNMX R1, R2, R3, !PT"] * 20,
    EX2,
    "FADD R1, R2, R3",
    EX2,
    wait(0),
    EX2,
    "@P1 BRA `(.L_x_1)",
    "@P2 BRA `(.L_x_0)",
    EXIT,
    ".L_x_3:",
    TRY,
    "@!P0 NANOSLEEP.SYNCS 0x989680",
    "@!P0 BRA `(.L_x_3)",
    "BRA `(.L_x_2)",
]
PTX = kernel(
    *[
        "setmaxnreg.inc.sync.aligned.u32 240;",
        *["wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1;"] * 4,
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, {%r2}, %rd2, p, 1;",
    ]
)
REMARKS = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 168 registers"


@pytest.fixture(name="seen")
def _seen() -> report.Report:
    return report.read("forward", PTX, sass(*KERNEL, source=True), REMARKS, 1000)


def test_regions():
    found = regions.split(listing(*KERNEL))
    assert [(region.title, region.depth, region.main) for region in found] == [
        ("outside loops", 0, False),
        ("tile loop", 1, False),
        ("main loop 1", 2, True),
    ]
    everything = sorted(index for region in found for index in region.indices)
    assert everything == list(range(len(listing(*KERNEL).instructions)))


def test_main_loops_are_told_apart_by_the_mask():
    masked = [f"{line}" for line in (".L_x_0:", HGMMA, COMMIT, wait(0), "@P0 BRA `(.L_x_0)")]
    clear = [".L_x_1:", HGMMA, COMMIT, wait(0), "@P0 BRA `(.L_x_1)", EXIT]
    text = '//## File "/a/mask.py", line 3\n' + sass(*masked) + '\n//## File "/a/forward.py", line 9\n' + sass(*clear)
    titles = [region.title for region in regions.split(report.parse_sass(text)) if region.main]
    assert titles == ["main loop 1 (with the mask)", "main loop 2 (without the mask)"]


def test_a_schedule_leaves_out_the_way_around_a_wait():
    found = listing(*KERNEL)
    loop = regions.split(found)[-1]
    assert schedule.schedule(found, loop.trunk, gemms_in_flight(found)) == [
        "mbarrier wait",
        "BAR.SYNC",
        "HGMMA m64n128k16 SS x2",
        "HGMMA m64n64k16 RS",
        "wait <=1",
        "EX2 x2 (in flight)",
        "wait <=0",
        "EX2",
    ]


def test_a_schedule_sums_arithmetic_and_leaves_out_a_little():
    found = listing(*["FFMA R1, R2, R3, R4"] * 20, *["FADD R1, R2, R3"] * 3, COMMIT, EXIT)
    assert schedule.schedule(found, range(25), gemms_in_flight(found)) == ["FFMA x20", "HGMMA m64n128k16 SS"]


def test_exponentials_partly_under_a_gemm():
    event = schedule.Event("exp", "EX2", 4, 3, 0)
    assert str(event) == "EX2 x4 (3 in flight)"


def test_the_report(seen):
    assert (seen.ex2_in_flight, seen.ex2_total) == (2, 4)
    assert seen.registers == 168 and seen.spill_bytes == 0 and seen.smem_bytes == 1000 and seen.warnings == ()
    assert seen.setmaxnreg == {"dec": (), "inc": (240,)}
    assert [(form.shape, form.operands, form.count) for form in seen.wgmma] == [
        ("m64n128k16", "SS", 4),
        ("m64n64k16", "RS", 1),
    ]
    assert seen.mma == {"m64n128k16 SS": 4, "m64n64k16 RS": 1}
    (loop,) = seen.main_loops
    assert (loop.ex2_in_flight, loop.ex2_total) == (2, 3)
    assert sum(line.total for line in seen.lines) == 4 and {line.ratio for line in seen.lines} == {0.0, 1.0}


def test_json_has_the_promised_figures(seen):
    plain = json.loads(json.dumps(seen.as_dict()))
    promised = "registers spill_bytes setmaxnreg wgmma warnings smem_bytes ex2_in_flight ex2_total"
    assert set(promised.split()) <= set(plain)
    assert plain["ex2_in_flight"] == 2 and plain["wgmma"][0]["count"] == 4


def test_text(seen):
    words = report.text(seen, with_schedule=True)
    assert "2 of 4 are issued while a GEMM is in flight" in words
    assert "main loop 1: 2 of 3" in words and "EX2 x2 (in flight)" in words
    assert "IGNORED" not in words


def test_text_says_when_ptxas_ignored_a_register_change(seen):
    ignored = replace(seen, setmaxnreg={"dec": (), "inc": ()})
    assert "none (IGNORED by ptxas" in report.text(ignored)


def test_a_frozen_wait_is_in_the_report_its_text_and_the_comparison(seen):
    assert seen.frozen_waits == () and json.loads(json.dumps(seen.as_dict()))["frozen_waits"] == []
    ptx = PTX.replace("\tret;", "\n\t".join(loop(mbarrier_wait("%r8", "0"), "add.s32 %r1, %r1, 1;")) + "\n\tret;")
    stuck = report.read("forward", ptx, sass(*KERNEL), REMARKS, 1000)
    (place,) = stuck.frozen_waits
    assert place == "ring.py:7: waits at [%r8] for parity 0 in every iteration"
    assert f"frozen waits    {place}" in report.text(stuck) and "frozen waits    none" in report.text(seen)
    assert ("frozen_waits", "none", place) in changes(seen.as_dict(), stuck.as_dict())


def test_a_report_is_a_plain_value(seen):
    assert pickle.loads(pickle.dumps(seen)) == seen


def test_no_change(seen):
    assert side_by_side(changes(seen.as_dict(), seen.as_dict()), "main") == "no figure differs from main"


def test_changes_come_side_by_side(seen):
    before = json.loads(json.dumps(seen.as_dict()))
    after = json.loads(json.dumps(replace(seen, registers=128, wgmma=seen.wgmma[:1]).as_dict()))
    rows = changes(before, after)
    assert rows == [("registers", "168", "128"), ("wgmma.m64n64k16 RS f32.bf16.bf16", "1", "-")]
    assert [line.split() for line in side_by_side(rows, "main").splitlines()][:2] == [
        ["main", "now"],
        ["registers", "168", "128"],
    ]


def test_figures_name_each_loop(seen):
    assert figures(seen.as_dict())["main loop 1"] == "2 of 3 in flight"
    assert figures(seen.as_dict())["setmaxnreg.inc"] == "240" and figures(seen.as_dict())["warnings"] == "none"


def test_spans():
    assert in_flight_spans([0, 1, 1, 2, 0, 1]) == [(1, 2, 1), (3, 1, 2), (5, 1, 1)]
    assert in_flight_spans([]) == []


def test_a_picture_has_a_row_for_each_main_loop():
    figure = draw(listing(*KERNEL), "forward")
    assert isinstance(figure, Figure) and len(figure.axes) == 1
    assert "2 of 3" in figure.axes[0].get_title(loc="left")


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="no loop"):
        draw(listing(EX2, EXIT))


def test_record(seen, tmp_path):
    path = tmp_path / "overlap.json"
    keys = record.table_keys()[:2]
    record.record(path, keys, look=lambda key: seen)
    assert json.loads(path.read_text()) == {key.name: {"ex2_in_flight": 2, "ex2_total": 4} for key in keys}


def test_one_kernel_is_recorded_beside_the_other(seen, tmp_path):
    path = tmp_path / "overlap.json"
    looked = []

    def look(key):
        looked.append(key.name)
        return seen

    path.write_text(json.dumps({"forward_of_the_table": 1, "backward_of_another_day": 2}))
    assert record.record_kernel(path, "backward", look) == len(record.backward_keys())
    assert looked == [key.name for key in record.backward_keys()]
    assert set(json.loads(path.read_text())) == {"forward_of_the_table", *looked}
    with pytest.raises(ValueError, match="no main loop"):
        record.record_kernel(path, "backward_finish", look)


def test_every_row_is_recorded_in_both_types():
    names = [key.name for key in record.table_keys()]
    assert len(set(names)) == len(names)
    assert sum("_bf16_" in name for name in names) == sum("_fp16_" in name for name in names)
