//! Integer and f16 dot products of the rows of a block with all queries.

use half::f16;

use super::rows::{BLOCK_ROWS, NIBBLE_BIAS, SketchRows, SketchType};
use super::{SketchQueries, words};
use crate::cpu::arch::Simd;

/// Queries per pass over a block.
pub(super) const QUERY_TILE: usize = 8;
/// Rows whose scores stand together.
pub(super) const SPAN_ROWS: usize = 4 * BLOCK_ROWS;
/// Scores of a span, `[QUERY_TILE][SPAN_ROWS]`.
pub(super) type Scores = [f32; QUERY_TILE * SPAN_ROWS];

/// One block of sketch rows, and the queries that they are scored by, of the same rank.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    ty: SketchType,
    rank: usize,
    bytes: &'a [u8],
    queries: &'a SketchQueries,
    /// Where its rows begin in their span.
    at: usize,
}

impl<'a> Block<'a> {
    #[inline(always)]
    pub fn new(rows: &'a SketchRows, queries: &'a SketchQueries, index: usize) -> Block<'a> {
        let size = rows.block_bytes();
        assert_eq!(rows.rank(), queries.rank, "rows and queries have one rank");
        let bytes = &rows.as_bytes()[index * size..][..size];
        Block { ty: rows.ty(), rank: rows.rank(), bytes, queries, at: index * BLOCK_ROWS % SPAN_ROWS }
    }

    /// Sets the block's part of its span's `scores` to `factor` times the scores of `count` queries from `first` on.
    #[inline(always)]
    pub fn score<S: Simd>(&self, s: S, first: usize, count: usize, factor: f32, scores: &mut Scores) {
        assert!(count <= QUERY_TILE && first + count <= self.queries.count, "queries {first} to {count} more");
        match count {
            0 => {}
            1 => self.score_queries::<S, 1>(s, first, factor, scores),
            2 => self.score_queries::<S, 2>(s, first, factor, scores),
            3 => self.score_queries::<S, 3>(s, first, factor, scores),
            4 => self.score_queries::<S, 4>(s, first, factor, scores),
            5 => self.score_queries::<S, 5>(s, first, factor, scores),
            6 => self.score_queries::<S, 6>(s, first, factor, scores),
            7 => self.score_queries::<S, 7>(s, first, factor, scores),
            _ => self.score_queries::<S, QUERY_TILE>(s, first, factor, scores),
        }
    }

    #[inline(always)]
    fn score_queries<S: Simd, const Q: usize>(&self, s: S, first: usize, factor: f32, scores: &mut Scores) {
        for row in (0..BLOCK_ROWS).step_by(2 * S::LANES) {
            match self.ty {
                // SAFETY: BLOCK_ROWS is a multiple of `2 * LANES`, so the lanes from `row` on are inside; the queries are there.
                SketchType::F16 => unsafe { self.score_f16::<S, Q>(s, first, row, factor, scores) },
                // SAFETY: as above.
                SketchType::I8 => unsafe { self.score_i8::<S, Q>(s, first, row, factor, scores) },
                // SAFETY: as above.
                SketchType::I4 => unsafe { self.score_i4::<S, Q>(s, first, row, factor, scores) },
            }
        }
    }

    /// # Safety
    /// `row + 2 * LANES <= BLOCK_ROWS`, and `first + Q` queries are there, `Q <= QUERY_TILE`.
    #[inline(always)]
    unsafe fn score_f16<S: Simd, const Q: usize>(
        &self,
        s: S,
        first: usize,
        row: usize,
        factor: f32,
        scores: &mut Scores,
    ) {
        let rank = self.rank;
        let mut acc = [[s.splat(0.0); 2]; Q];
        let values = self.bytes.as_ptr().cast::<f16>();
        let q = self.queries.values[first * rank..][..Q * rank].as_ptr();
        for i in 0..rank {
            // SAFETY: the block is `[rank][BLOCK_ROWS]` f16, and the caller's promise; loads need no alignment.
            unsafe {
                let p = values.add(i * BLOCK_ROWS + row);
                let values = [s.load_f16(p), s.load_f16(p.add(S::LANES))];
                for k in 0..Q {
                    let q = s.splat(*q.add(k * rank + i));
                    acc[k][0] = s.fma(values[0], q, acc[k][0]);
                    acc[k][1] = s.fma(values[1], q, acc[k][1]);
                }
            }
        }
        let factor = s.splat(factor);
        for (k, acc) in acc.iter().enumerate() {
            for (j, &acc) in acc.iter().enumerate() {
                // SAFETY: `k < Q`, the block is inside its span, and the caller's promise.
                unsafe {
                    s.store(scores.as_mut_ptr().add(k * SPAN_ROWS + self.at + row + j * S::LANES), s.mul(acc, factor))
                };
            }
        }
    }

    /// # Safety
    /// As [`Block::score_f16`].
    #[inline(always)]
    unsafe fn score_i8<S: Simd, const Q: usize>(
        &self,
        s: S,
        first: usize,
        row: usize,
        factor: f32,
        scores: &mut Scores,
    ) {
        let stride = words(self.rank);
        let mut acc = [[s.splat_i(0); 2]; Q];
        let q = self.queries.words[first * stride..][..Q * stride].as_ptr();
        for i in 0..self.rank.div_ceil(4) {
            // SAFETY: the block begins with `[ceil(rank / 4)][BLOCK_ROWS]` words, a query has as many or more, and the caller's promise.
            unsafe {
                let p = self.bytes.as_ptr().cast::<u32>().add(i * BLOCK_ROWS + row);
                let values = [s.load_i(p), s.load_i(p.add(S::LANES))];
                for k in 0..Q {
                    let q = s.splat_i(*q.add(k * stride + i));
                    acc[k][0] = s.dot4(acc[k][0], values[0], q);
                    acc[k][1] = s.dot4(acc[k][1], values[1], q);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.finish::<S, Q>(s, first, row, factor, S::ROW_BIAS, acc, scores) };
    }

    /// # Safety
    /// As [`Block::score_f16`].
    #[inline(always)]
    unsafe fn score_i4<S: Simd, const Q: usize>(
        &self,
        s: S,
        first: usize,
        row: usize,
        factor: f32,
        scores: &mut Scores,
    ) {
        let stride = words(self.rank);
        let mut acc = [[s.splat_i(0); 2]; Q];
        let low = s.splat_i(0x0f0f_0f0f);
        let q = self.queries.words[first * stride..][..Q * stride].as_ptr();
        for i in 0..self.rank.div_ceil(8) {
            // SAFETY: the block begins with `[ceil(rank / 8)][BLOCK_ROWS]` words, a query has two for each, and the caller's promise.
            unsafe {
                let p = self.bytes.as_ptr().cast::<u32>().add(i * BLOCK_ROWS + row);
                let packed = [s.load_i(p), s.load_i(p.add(S::LANES))];
                let first_half = [s.and_i(packed[0], low), s.and_i(packed[1], low)];
                let second_half = [s.and_i(s.shift_right_4(packed[0]), low), s.and_i(s.shift_right_4(packed[1]), low)];
                for k in 0..Q {
                    let a = s.splat_i(*q.add(k * stride + 2 * i));
                    let b = s.splat_i(*q.add(k * stride + 2 * i + 1));
                    for j in 0..2 {
                        acc[k][j] = s.dot4_nibbles(acc[k][j], first_half[j], a);
                        acc[k][j] = s.dot4_nibbles(acc[k][j], second_half[j], b);
                    }
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.finish::<S, Q>(s, first, row, factor, NIBBLE_BIAS, acc, scores) };
    }

    /// Takes the bias out of integer sums and multiplies with the scales.
    ///
    /// # Safety
    /// As [`Block::score_f16`].
    #[inline(always)]
    unsafe fn finish<S: Simd, const Q: usize>(
        &self,
        s: S,
        first: usize,
        row: usize,
        factor: f32,
        bias: i32,
        acc: [[S::I; 2]; Q],
        scores: &mut Scores,
    ) {
        let scales = self.bytes[self.bytes.len() - 2 * BLOCK_ROWS..].as_ptr().cast::<f16>();
        for j in 0..2 {
            let row = row + j * S::LANES;
            // SAFETY: there are BLOCK_ROWS scales, and the caller's promise; the load needs no alignment.
            let row_scale = unsafe { s.load_f16(scales.add(row)) };
            for (k, acc) in acc.iter().enumerate() {
                let bias = s.splat_i((bias * self.queries.sums[first + k]) as u32);
                let scale = s.mul(row_scale, s.splat(self.queries.scales[first + k] * factor));
                let score = s.mul(s.to_f32(s.sub_i(acc[j], bias)), scale);
                // SAFETY: `k < Q`, the block is inside its span, and the caller's promise.
                unsafe { s.store(scores.as_mut_ptr().add(k * SPAN_ROWS + self.at + row), score) };
            }
        }
    }
}
