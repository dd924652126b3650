"""Operations in LLVM's own terms that loops cannot express: products whose sums stay in registers, and prefetching.

A product works on a tile of ``TILE`` voxels by ``ROWS`` rows. A plain loop would read and write its sums at every step,
which takes four times as long. LLVM maps the vectors to those of the processor.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (the arguments are numba's types and LLVM's values)

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

#: Voxels in a tile (float32 numbers in a cache line), and rows of a matrix that are worked on at once.
TILE, ROWS = 16, 4

_FLOAT, _DOUBLE, _LANE, _INDEX = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _LANES = ir.VectorType(_FLOAT, TILE), ir.VectorType(_LANE, TILE)
_FUSED = ("contract",)
_intrinsic: Any = intrinsic  # called with fewer arguments than defined, which type checkers cannot know


class _Matrix:
    """A C-contiguous matrix in compiled code."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        self._builder, self._data = builder, array.data
        self.columns = cgutils.unpack_tuple(builder, array.shape)[1]

    def at(self, row: Any, column: Any) -> Any:
        """The address of a number."""
        index = self._builder.add(self._builder.mul(row, self.columns), column)
        return self._builder.gep(self._data, [index])

    def vector_at(self, row: Any, column: Any) -> Any:
        """The address of the ``TILE`` numbers from here on."""
        return self._builder.bitcast(self.at(row, column), _VECTOR.as_pointer())


def _next_rows(builder: Any, first: Any, count: int = ROWS) -> list[Any]:
    return [builder.add(first, ir.Constant(first.type, n)) for n in range(count)]


def _spread(builder: Any, number: Any, kind: Any = _VECTOR) -> Any:
    """A vector of one number."""
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), number, _LANE(0))
    return builder.shuffle_vector(single, single, ir.Constant(_LANES, [0] * TILE))


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def _sum(builder: Any, vector: Any) -> Any:
    """The sum of a vector's numbers, by halves."""
    width = TILE
    while width > 1:
        width //= 2
        half = ir.VectorType(_LANE, width)
        lower = builder.shuffle_vector(vector, vector, ir.Constant(half, list(range(width))))
        upper = builder.shuffle_vector(vector, vector, ir.Constant(half, list(range(width, 2 * width))))
        vector = builder.fadd(lower, upper)
    return builder.extract_element(vector, _LANE(0))


def _prefetch(writing: int) -> Any:
    """Prefetch the cache line of ``x[row, column]`` for reading or writing. ``x`` is a C-contiguous matrix."""

    def prefetch(typing_context, x, row, column):
        def generate(context, builder, signature, arguments):
            address = _Matrix(context, builder, signature.args[0], arguments[0]).at(*arguments[1:])
            pointer = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [pointer, _LANE, _LANE, _LANE])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            second_cache, data = _LANE(2), _LANE(1)
            builder.call(function, [builder.bitcast(address, pointer), _LANE(writing), second_cache, data])
            return context.get_dummy_value()

        return types.void(x, types.intp, types.intp), generate

    return _intrinsic(prefetch)


fetch, fetch_to_write = _prefetch(0), _prefetch(1)


def _multiply(rows: int) -> Any:
    """``u = weight x`` for ``rows`` rows of u from ``row`` and ``TILE`` columns from ``column``.

    ``weight (K, J)``, ``x (J or more, B)`` and ``u (K, B)`` are float32. Row J - 1 of x holds ones and is not read.
    """

    def product(typing_context, weight, x, u, row, column):
        def generate(context, builder, signature, arguments):
            matrices = zip(signature.args[:3], arguments[:3], strict=True)
            w, source, target = (_Matrix(context, builder, kind, value) for kind, value in matrices)
            rows_here, column = _next_rows(builder, arguments[3], rows), arguments[4]
            last = builder.sub(w.columns, ir.Constant(w.columns.type, 1))
            biases = [_spread(builder, builder.load(w.at(k, last))) for k in rows_here]
            sums = [cgutils.alloca_once_value(builder, bias) for bias in biases]
            with cgutils.for_range(builder, last) as loop:
                values = builder.load(source.vector_at(loop.index, column), align=4)
                for k, total in zip(rows_here, sums, strict=True):
                    scale = _spread(builder, builder.load(w.at(k, loop.index)))
                    builder.store(_multiply_add(builder, scale, values, builder.load(total)), total)
            for k, total in zip(rows_here, sums, strict=True):
                builder.store(builder.load(total), target.vector_at(k, column), align=4)
            return context.get_dummy_value()

        return types.void(weight, x, u, types.intp, types.intp), generate

    return _intrinsic(product)


multiply_tile, multiply_tall_tile = _multiply(ROWS), _multiply(2 * ROWS)


@_intrinsic
def exchange_rows(typing_context, x, row, other_row):
    """Put the larger numbers of two rows into the first, the smaller into the other.

    ``x`` is an int64 matrix whose number of columns is a multiple of ``TILE``.
    """
    vector = ir.VectorType(ir.IntType(64), TILE)

    def generate(context, builder, signature, arguments):
        matrix = _Matrix(context, builder, signature.args[0], arguments[0])
        zero, step = ir.Constant(_INDEX, 0), ir.Constant(_INDEX, TILE)
        with cgutils.for_range_slice(builder, zero, matrix.columns, step, _INDEX) as (column, _):
            places = [builder.bitcast(matrix.at(row, column), vector.as_pointer()) for row in arguments[1:]]
            first, second = (builder.load(place, align=8) for place in places)
            larger = builder.icmp_signed(">", first, second)
            builder.store(builder.select(larger, first, second), places[0], align=8)
            builder.store(builder.select(larger, second, first), places[1], align=8)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp), generate


@_intrinsic
def add_products(typing_context, u, x, total, row, other_row, start, stop):
    """``total += u x'``, summed over columns ``start..stop``, for ``ROWS`` rows of u and of x.

    ``u (K, B)`` and ``x (J, B)`` are float32, with ``TILE`` columns to spare; ``total (K, J)`` is float64.
    """

    def generate(context, builder, signature, arguments):
        matrices = zip(signature.args[:3], arguments[:3], strict=True)
        left, right, target = (_Matrix(context, builder, kind, value) for kind, value in matrices)
        rows, others = _next_rows(builder, arguments[3]), _next_rows(builder, arguments[4])
        start, stop = arguments[5:]
        zeros = ir.Constant(_VECTOR, [0.0] * TILE)
        sums = [[cgutils.alloca_once_value(builder, zeros) for _ in others] for _ in rows]

        def add(column, mask):
            def load(matrix, k):
                values = builder.load(matrix.vector_at(k, column), align=4)
                return values if mask is None else builder.select(mask, values, zeros)

            first, second = [load(left, k) for k in rows], [load(right, j) for j in others]
            for values, row_sums in zip(first, sums, strict=True):
                for other_values, place in zip(second, row_sums, strict=True):
                    builder.store(_multiply_add(builder, values, other_values, builder.load(place)), place)

        step = ir.Constant(start.type, TILE)
        count = builder.sub(stop, start)
        left_over = builder.srem(count, step)
        whole = builder.sub(stop, left_over)
        with cgutils.for_range_slice(builder, start, whole, step, start.type) as (column, _):
            add(column, None)
        with builder.if_then(builder.icmp_signed(">", left_over, ir.Constant(start.type, 0))):
            inside = _spread(builder, builder.trunc(left_over, _LANE), _LANES)
            add(whole, builder.icmp_signed("<", ir.Constant(_LANES, list(range(TILE))), inside))
        for k, row_sums in zip(rows, sums, strict=True):
            for j, place in zip(others, row_sums, strict=True):
                address = target.at(k, j)
                number = builder.fpext(_sum(builder, builder.load(place)), _DOUBLE)
                builder.store(builder.fadd(builder.load(address), number), address)
        return context.get_dummy_value()

    return types.void(u, x, total, *[types.intp] * 4), generate
