"""The DSL and the pure-Python twins agree: on every tile of the tables, and coordinate by coordinate."""

import random

import pytest

from fa3.layouts import fp8_operand, fragments, smem
from fa3.layouts.algebra import (
    Layout,
    coalesce,
    complement,
    composition,
    logical_divide,
    logical_product,
    right_inverse,
    tiled_divide,
    zipped_divide,
)
from fa3.layouts.kmajor_fp8 import k_major_v, row_major_v

pytest.importorskip("cutlass")

HEAD_DIMS = (64, 96, 128, 192, 256)
TILE_NS = tuple(range(48, 257, 16))


def dsl_smem(operand, contiguous, shape, bits, stages):
    """What CUTLASS's Hopper helpers make for a tile of `shape`."""
    import cutlass
    import cutlass.utils.hopper_helpers as sm90

    order = cutlass.tensor_utils.LayoutEnum
    major = order.ROW_MAJOR if contiguous == "columns" else order.COL_MAJOR
    dtype = {16: cutlass.BFloat16, 8: cutlass.Float8E4M3FN}[bits]
    rows, columns = shape
    if operand == "a":
        return sm90.make_smem_layout_a(major, (rows, 128, columns), dtype, stages)
    if operand == "b":
        return sm90.make_smem_layout_b(major, (128, rows, columns), dtype, stages)
    return sm90.make_smem_layout_epi(dtype, major, (rows, columns), stages)


def tiles():
    """(twin, arguments of `dsl_smem`) of every tile that a table row can ask for."""
    for dim in HEAD_DIMS:
        for tile_m in (64, 128, 192):
            for bits in (16, 8):
                yield smem.shared_q(tile_m, dim, bits), ("a", "columns", (tile_m, dim), bits, 1)
            yield smem.shared_o(tile_m, dim), ("epilogue", "columns", (tile_m, dim), 16, 1)
        for tile_n in TILE_NS:
            for stages in (1, 2, 3):
                yield smem.shared_k(tile_n, dim, 16, stages), ("b", "columns", (tile_n, dim), 16, stages)
                yield smem.shared_v(tile_n, dim, 16, stages), ("b", "rows", (dim, tile_n), 16, stages)
            yield smem.shared_k(tile_n, dim, 8, 2), ("b", "columns", (tile_n, dim), 8, 2)
            yield row_major_v(tile_n, dim, 2), ("b", "columns", (tile_n, dim), 8, 2)
            yield k_major_v(tile_n, dim, 2), ("b", "columns", (dim, tile_n), 8, 2)
            yield smem.mn_major(tile_n, dim, 16, 2), ("a", "rows", (tile_n, dim), 16, 2)


def test_shared_layouts_are_those_of_the_hopper_helpers(trace):
    from fa3.layouts.smem_dsl import dsl_shared_layout

    def mismatches():
        found = []
        for twin, arguments in tiles():
            theirs = dsl_smem(*arguments)
            if str(theirs) != str(twin) or dsl_shared_layout(twin) != theirs:
                found.append((arguments, str(theirs), str(twin)))
        return found

    assert trace(mismatches) == []


@pytest.mark.parametrize(
    ("twin", "arguments"),
    [
        (smem.shared_k(176, 128), ("b", "columns", (176, 128), 16, 2)),
        (smem.shared_k(80, 96), ("b", "columns", (80, 96), 16, 2)),
        (smem.shared_v(112, 192), ("b", "rows", (192, 112), 16, 2)),
        (k_major_v(160, 64), ("b", "columns", (64, 160), 8, 1)),
        (row_major_v(128, 128), ("b", "columns", (128, 128), 8, 1)),
    ],
    ids=["K", "K swizzled by 64", "V", "V^T 8 bits", "V 8 bits"],
)
def test_shared_bytes_agree_at_coordinates(trace, twin, arguments):
    """Row, column, stage -> byte, through a swizzle on bytes as the DSL's pointers have it."""
    contiguous, (rows, columns), bits, stages = arguments[1:]
    dice = random.Random(7)
    points = [(dice.randrange(rows), dice.randrange(columns), dice.randrange(stages)) for _ in range(1500)]

    def theirs():
        import cutlass.cute as cute

        layout = dsl_smem(*arguments)
        by_byte = cute.make_composed_layout(layout.inner, 0, cute.recast_layout(8, bits, layout.outer))
        scale = bits // 8
        widen = (1, scale) if contiguous == "columns" else (scale, 1)
        return [by_byte((row * widen[0], column * widen[1], stage)) for row, column, stage in points]

    assert trace(theirs) == [twin.byte(*point) for point in points]


def tiled_mma(n, bits, registers):
    import cutlass
    import cutlass.utils.hopper_helpers as sm90
    from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

    dtype = {16: cutlass.BFloat16, 8: cutlass.Float8E4M3FN}[bits]
    source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    k = OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(dtype, dtype, k, k, cutlass.Float32, (1, 1, 1), (64, n), source)


@pytest.mark.parametrize("n", [16, 48, 176])
def test_accumulator_coordinates(trace, n):
    def theirs():
        layout = tiled_mma(n, 16, registers=False).tv_layout_C_tiled
        return [layout((thread, register)) for register in range(n // 2) for thread in range(128)]

    assert trace(theirs) == fragments.accumulator(n).indices()


@pytest.mark.parametrize(("bits", "block"), [(16, 16), (8, 32)])
def test_a_operand_coordinates(trace, bits, block):
    """The DSL states the operand of one instruction, one k-block; the twin repeats it."""
    ours = fragments.a_operand_16(block) if bits == 16 else fragments.a_operand_8(block)

    def theirs():
        layout = tiled_mma(64, bits, registers=True).tv_layout_A_tiled
        return [layout((thread, register)) for register in range(block // 2) for thread in range(128)]

    assert trace(theirs) == ours.indices()


@pytest.mark.parametrize("n", [32, 80, 128, 176, 256])
def test_accumulator_views(trace_kernel, n):
    from fa3.layouts.fragments_dsl import as_a_operand_16, rows_and_columns

    def views():
        import cutlass
        import cutlass.cute as cute

        mma = tiled_mma(n, 16, registers=True)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, n)), cutlass.Float32)
        p = cute.make_rmem_tensor_like(acc, cutlass.BFloat16)
        a = mma.make_fragment_A(mma.partition_shape_A((64, n)))
        view, operand = rows_and_columns(acc), as_a_operand_16(p)
        assert operand.layout == a.layout
        return (
            str(view.layout),
            [view.layout(i) for i in range(n // 2)],
            str(operand.layout),
            [operand.layout(i) for i in range(n // 2)],
        )

    matrix, operand = fragments.rows_and_columns_view(n), fragments.a_operand_16_view(n)
    assert trace_kernel(views) == (str(matrix), matrix.indices(), str(operand), operand.indices())


@pytest.mark.parametrize("n", [32, 128, 224])
def test_fp8_views(trace_kernel, n):
    from fa3.layouts.fp8_operand_dsl import accumulator_words, operand_words

    def views():
        import cutlass
        import cutlass.cute as cute

        mma = tiled_mma(64, 8, registers=True)
        acc = cute.make_rmem_tensor(((2, 2, n // 8), 1, 1), cutlass.Float32)
        p8 = mma.make_fragment_A(mma.partition_shape_A((64, n)))
        values, words = accumulator_words(acc), operand_words(p8)
        assert cute.size(words) == cute.size(values) // 4
        places = range(n // 2)
        return (
            str(values.layout),
            [values.layout(i) for i in places],
            [p8.layout(i) for i in places],
            str(words.layout),
        )

    values, operand = fp8_operand.accumulator_words_view(n), fragments.a_operand_8_view(n)
    words = str(Layout((2, 2, n // 32), (1, 2, 4)))
    assert trace_kernel(views) == (str(values), values.indices(), operand.indices(), words)


def test_views_refuse_what_is_not_an_accumulator(trace_kernel):
    from fa3.layouts.fp8_operand_dsl import operand_words
    from fa3.layouts.fragments_dsl import as_a_operand_16, rows_and_columns

    def messages():
        import cutlass
        import cutlass.cute as cute

        def message(view, shape, dtype):
            with pytest.raises(ValueError) as caught:
                view(cute.make_rmem_tensor(shape, dtype))
            return str(caught.value)

        f32, bf16 = cutlass.Float32, cutlass.BFloat16
        return [
            message(rows_and_columns, ((2, 2, 8), 2, 1), f32),
            message(rows_and_columns, ((2, 2, 2), 1, 4, 1), f32),
            message(rows_and_columns, (64,), f32),
            message(as_a_operand_16, ((2, 2, 8), 1, 1), f32),
            message(as_a_operand_16, ((2, 2, 5), 1, 1), bf16),
            message(operand_words, ((4, 2, 2), 1, 4), bf16),
        ]

    found = trace_kernel(messages)
    assert ["got shape" in text for text in found] == [True, True, True, False, False, False]
    assert "16-bit elements" in found[3] and "40" in found[4] and "8-bit" in found[5]


def algebra_cases():
    """(name, DSL arguments, our result) for operations where both libraries have an answer."""
    rows, columns = Layout((4, 6), (6, 1)), Layout((8, 6), (1, 8))
    nested = Layout(((2, 2), (3, 2)), ((6, 1), (2, 12)))
    yield "coalesce", (nested,), coalesce(nested)
    yield "composition", (rows, Layout((2, 3), (2, 8))), composition(rows, Layout((2, 3), (2, 8)))
    yield "composition", (columns, Layout((4, 2, 3), (2, 8, 16))), composition(columns, Layout((4, 2, 3), (2, 8, 16)))
    yield "composition", (nested, Layout((6, 4))), composition(nested, Layout((6, 4)))
    yield "complement", (Layout((2, 2), (1, 6)), 24), complement(Layout((2, 2), (1, 6)), 24)
    yield "complement", (Layout(4, 2), 24), complement(Layout(4, 2), 24)
    yield "right_inverse", (rows,), right_inverse(rows)
    yield "right_inverse", (nested,), right_inverse(nested)
    yield "logical_divide", (rows, Layout(8)), logical_divide(rows, Layout(8))
    yield "logical_divide", (columns, Layout(4, 2)), logical_divide(columns, Layout(4, 2))
    yield "zipped_divide", (rows, (2, 3)), zipped_divide(rows, (2, 3))
    yield "tiled_divide", (columns, (4, 2)), tiled_divide(columns, (4, 2))
    yield "logical_product", (Layout((2, 2), (4, 1)), Layout(6)), logical_product(Layout((2, 2), (4, 1)), Layout(6))
    yield "logical_product", (Layout(2, 4), Layout((2, 4))), logical_product(Layout(2, 4), Layout((2, 4)))


def test_the_algebra_agrees_with_the_dsl(trace):
    from fa3.layouts.smem_dsl import dsl_layout

    def differences():
        import cutlass.cute as cute

        found = []
        for name, arguments, ours in algebra_cases():
            given = [dsl_layout(a) if isinstance(a, Layout) else a for a in arguments]
            theirs = getattr(cute, name)(*given)
            values = [theirs(i) for i in range(ours.size)]
            if cute.size(theirs) != ours.size or values != ours.indices():
                found.append((name, [str(a) for a in arguments], str(theirs), str(ours)))
        return found

    assert trace(differences) == []


def test_plans_are_laid_out_like_a_dsl_struct():
    import cutlass
    import cutlass.cute as cute

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[cutlass.Int64, 5]
        tile: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, 1000], 1024]
        flags: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, 3], 128]

    buffers = [smem.Buffer("barriers", 40, 8), smem.Buffer("tile", 2000, 1024), smem.Buffer("flags", 12, 128)]
    plan = smem.SharedMemoryPlan.of(buffers)
    assert plan.total_bytes == Storage.__sizeof__()
    assert {field.name: field.offset for field in plan.fields} == Storage._offsets


def test_rows_and_columns_of_run_time_threads():
    """`row_of` and `column_of` on the DSL's own integers: compiled for the host and run there."""
    import cutlass
    import cutlass.cute as cute
    import numpy as np
    from cutlass.cute.runtime import from_dlpack

    @cute.jit
    def fill(out: cute.Tensor):
        for thread in cutlass.range(128, unroll=1):
            for register in cutlass.range_constexpr(8):
                out[thread, register, 0] = fragments.row_of(thread, register)
                out[thread, register, 1] = fragments.column_of(thread, register)

    found = np.zeros((128, 8, 2), np.int32)
    fill(from_dlpack(found))
    expected = [[(fragments.row_of(t, r), fragments.column_of(t, r)) for r in range(8)] for t in range(128)]
    assert found.tolist() == [[list(pair) for pair in registers] for registers in expected]
