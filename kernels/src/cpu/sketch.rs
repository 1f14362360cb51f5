//! Rows of the key sketch, and the scores of groups by them.
//!
//! Token scores of [`TILE_ROWS`] rows are computed together: their values stand transposed in the nearest cache, one row per lane, four bytes
//! of the rank per lane and step, so that an integer dot product needs no sum over lanes, and all queries pass over the tile before the next.
//! With the softmax a tile keeps its weights relative to its own maximum, in f16; once all maxima and sums are known, a second pass
//! adds them up over queries and takes the maximum of each group.

use half::f16;

use super::arch::{Kernel, Simd, dispatch};
use super::parts::Parts;
use super::pool::Pool;
use crate::isa::Isa;

/// Largest rank of a sketch; its tile lives on the stack of a task.
pub const RANK_MAX: usize = 512;
/// Rows per tile: a multiple of twice the lanes of every instruction set.
const TILE_ROWS: usize = 64;
/// Tiles per task.
const TASK_TILES: usize = 16;
/// Queries per pass over a tile.
const QUERY_TILE: usize = 4;
/// What is added to a value of an i4 row so that it fits a nibble.
const NIBBLE_BIAS: i32 = 8;

/// Precision of sketch rows.
///
/// A row is its values, then, for the integer types, one f16 scale (little endian); value times scale is the number.
///
/// - `F16`: `rank` values.
/// - `I8`: `rank` signed bytes, -127 to 127.
/// - `I4`: values -7 to 7, plus 8, two per byte: of each eight, byte `j` holds value `j` in its low half and value `j + 4` in the
///   high one; of a last chunk of `t < 8`, with `b = ceil(t / 2)` bytes, byte `j` holds values `j` and `j + b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SketchType {
    /// 2 bytes per value.
    F16,
    /// 1 byte per value, 2 per row.
    I8,
    /// Half a byte per value, 2 per row.
    I4,
}

impl SketchType {
    /// Bytes of a row.
    pub const fn row_bytes(self, rank: usize) -> usize {
        match self {
            SketchType::F16 => 2 * rank,
            SketchType::I8 => rank + 2,
            SketchType::I4 => rank.div_ceil(2) + 2,
        }
    }
}

/// Bytes of the values of the last, shorter chunk of an i4 row.
const fn tail_bytes(rank: usize) -> usize {
    (rank % 8).div_ceil(2)
}

/// Encodes one row.
///
/// `row`: `[rank]`, `out`: `[ty.row_bytes(rank)]`. Scales round to nearest, and values to the nearest multiple of the rounded scale. NaN becomes 0
/// in integer rows; what exceeds the range of f16 becomes infinity in `F16` and the largest value in the others.
///
/// # Panics
/// If `out` has another length.
pub fn encode_row(ty: SketchType, row: &[f32], out: &mut [u8]) {
    let rank = row.len();
    assert_eq!(out.len(), ty.row_bytes(rank), "bytes of a row of {rank} values");
    let levels = match ty {
        SketchType::F16 => {
            for (out, &x) in out.chunks_exact_mut(2).zip(row) {
                out.copy_from_slice(&f16::from_f32(x).to_le_bytes());
            }
            return;
        }
        SketchType::I8 => 127.0,
        SketchType::I4 => 7.0,
    };
    let largest = row.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let scale = f16::from_f32((largest / levels).min(f16::MAX.to_f32()));
    let inverse = if scale > f16::ZERO { 1.0 / scale.to_f32() } else { 0.0 };
    let quantise = |x: f32| (x * inverse).round_ties_even().clamp(-levels, levels) as i8;
    let (values, scale_bytes) = out.split_at_mut(out.len() - 2);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    if ty == SketchType::I8 {
        for (out, &x) in values.iter_mut().zip(row) {
            *out = quantise(x) as u8;
        }
        return;
    }
    let nibble = |x: Option<&f32>| (quantise(x.copied().unwrap_or(0.0)) + NIBBLE_BIAS as i8) as u8;
    for (chunk, out) in row.chunks(8).zip(values.chunks_mut(4)) {
        let half = out.len();
        for (j, out) in out.iter_mut().enumerate() {
            *out = nibble(chunk.get(j)) | nibble(chunk.get(j + half)) << 4;
        }
    }
}

/// Decodes one row; the inverse of [`encode_row`] but for rounding.
///
/// `bytes`: `[ty.row_bytes(rank)]`, `out`: `[rank]`.
///
/// # Panics
/// If `bytes` has another length.
pub fn decode_row(ty: SketchType, bytes: &[u8], out: &mut [f32]) {
    let rank = out.len();
    assert_eq!(bytes.len(), ty.row_bytes(rank), "bytes of a row of {rank} values");
    if ty == SketchType::F16 {
        for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *out = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        }
        return;
    }
    let (values, scale) = bytes.split_at(bytes.len() - 2);
    let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f32();
    if ty == SketchType::I8 {
        for (out, &value) in out.iter_mut().zip(values) {
            *out = f32::from(value as i8) * scale;
        }
        return;
    }
    for (out, values) in out.chunks_mut(8).zip(values.chunks(4)) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = (nibble_of(values, i) as i32 - NIBBLE_BIAS) as f32 * scale;
        }
    }
}

/// Value `i` of a chunk of an i4 row, with its bias.
#[inline(always)]
fn nibble_of(values: &[u8], i: usize) -> u8 {
    if i < values.len() { values[i] & 15 } else { values[i - values.len()] >> 4 }
}

/// Queries in the sketch's space, prepared for [`group_scores`].
pub struct SketchQueries {
    max_queries: usize,
    max_rank: usize,
    count: usize,
    rank: usize,
    /// `[count][rank]`
    values: Vec<f32>,
    /// Four signed bytes each, 0 behind the rank, `[count][words(rank)]`.
    words: Vec<u32>,
    /// What a byte is worth, `[count]`.
    scales: Vec<f32>,
    /// Sums of the bytes, `[count]`.
    sums: Vec<i32>,
}

/// Words of a query: whole chunks of eight bytes.
const fn words(rank: usize) -> usize {
    rank.div_ceil(8) * 2
}

impl SketchQueries {
    /// Room for `max_queries` queries of rank `max_rank`.
    ///
    /// # Panics
    /// If the rank exceeds [`RANK_MAX`].
    pub fn new(max_queries: usize, max_rank: usize) -> SketchQueries {
        assert!(max_rank <= RANK_MAX, "rank {max_rank} exceeds {RANK_MAX}");
        SketchQueries {
            max_queries,
            max_rank,
            count: 0,
            rank: 0,
            values: vec![0.0; max_queries * max_rank],
            words: vec![0; max_queries * words(max_rank)],
            scales: vec![0.0; max_queries],
            sums: vec![0; max_queries],
        }
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.values[..])
            + size_of_val(&self.words[..])
            + size_of_val(&self.scales[..])
            + size_of_val(&self.sums[..])
    }

    /// Takes `count` queries and quantises each to signed bytes with one scale, for rows of integers; rows of f16 are scored with the
    /// queries as they are.
    ///
    /// `q`: `[count][rank]`. Scores of a query with a NaN or infinity are unspecified.
    ///
    /// # Panics
    /// If the length does not fit or there is no room for the shape.
    pub fn set(&mut self, isa: Isa, q: &[f32], count: usize, rank: usize) {
        assert!(count <= self.max_queries && rank <= self.max_rank, "{count} queries of rank {rank} exceed the room");
        assert_eq!(q.len(), count * rank, "one row per query");
        (self.count, self.rank) = (count, rank);
        self.values[..q.len()].copy_from_slice(q);
        if rank == 0 {
            return;
        }
        let words = words(rank);
        for (i, q) in q.chunks_exact(rank).enumerate() {
            let scale = dispatch(isa, LargestMagnitude { x: q }) / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let mut sum = 0;
            for (word, four) in
                self.words[i * words..][..words].iter_mut().zip(q.chunks(4).chain(std::iter::repeat(&[][..])))
            {
                let mut bytes = [0; 4];
                for (byte, x) in bytes.iter_mut().zip(four) {
                    let value = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
                    sum += i32::from(value);
                    *byte = value as u8;
                }
                *word = u32::from_le_bytes(bytes);
            }
            self.scales[i] = scale;
            self.sums[i] = sum;
        }
    }
}

struct LargestMagnitude<'a> {
    x: &'a [f32],
}

impl Kernel for LargestMagnitude<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let zero = s.splat(0.0);
        let mut largest = zero;
        let mut i = 0;
        while i + S::LANES <= self.x.len() {
            // SAFETY: `i + LANES` is inside the slice.
            let v = unsafe { s.load(self.x.as_ptr().add(i)) };
            largest = s.max(s.max(v, s.sub(zero, v)), largest);
            i += S::LANES;
        }
        self.x[i..].iter().fold(s.reduce_max(largest), |largest, x| largest.max(x.abs()))
    }
}

/// Weights and sums between the two passes of [`group_scores`].
pub struct ScoreScratch {
    max_queries: usize,
    max_rows: usize,
    /// Weights relative to the largest of the tile, `[tiles][queries][TILE_ROWS]`.
    weights: Vec<f16>,
    /// Largest score of the tile in units of log 2, then what its weights are to be multiplied with, `[tiles][padded queries]`.
    factors: Vec<f32>,
    /// Sums of the tile's weights, `[tiles][padded queries]`.
    sums: Vec<f32>,
}

/// Queries in a row of the scratch memory: whole vectors of every instruction set.
const fn padded(queries: usize) -> usize {
    queries.next_multiple_of(super::arch::LANES_MAX)
}

impl ScoreScratch {
    /// For [`group_scores`] with up to `max_queries` queries and `max_rows` rows.
    pub fn new(max_queries: usize, max_rows: usize) -> ScoreScratch {
        let tiles = max_rows.div_ceil(TILE_ROWS);
        ScoreScratch {
            max_queries,
            max_rows,
            weights: vec![f16::ZERO; tiles * max_queries * TILE_ROWS],
            factors: vec![0.0; tiles * padded(max_queries)],
            sums: vec![0.0; tiles * padded(max_queries)],
        }
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        Self::bytes_for(self.max_queries, self.max_rows)
    }

    /// Bytes that one for up to `max_queries` queries and `max_rows` rows holds.
    pub fn bytes_for(max_queries: usize, max_rows: usize) -> usize {
        let tiles = max_rows.div_ceil(TILE_ROWS);
        tiles * (max_queries * TILE_ROWS * size_of::<f16>() + 2 * padded(max_queries) * size_of::<f32>())
    }
}

/// Scores of groups of rows: the largest of its rows' token scores.
///
/// A query's score of a row is their dot product (a factor such as `1/sqrt(d)` is the caller's to put into the queries). A token score is the
/// sum of these over the queries; with `softmax`, the sum of each query's softmax over all `n_rows` rows. `extra`, `[queries][2]`, adds to each
/// query's softmax tokens that have no row: the largest of their scores, and the sum of `e^(score - largest)`.
///
/// `rows`: `n_rows` rows of [`SketchType::row_bytes`], `out`: `[n_rows / rows_per_group]`. The result does not depend on the number of threads. NaN
/// token scores do not count; a group of nothing else scores minus infinity. Nothing is allocated.
///
/// # Panics
/// If the lengths do not fit together, groups are not whole, or the scratch memory is too small.
pub fn group_scores(
    pool: &Pool,
    isa: Isa,
    ty: SketchType,
    rank: usize,
    rows: &[u8],
    n_rows: usize,
    rows_per_group: usize,
    queries: &SketchQueries,
    softmax: bool,
    extra: Option<&[f32]>,
    scratch: &mut ScoreScratch,
    out: &mut [f32],
) {
    assert_eq!(rank, queries.rank, "rows and queries have one rank");
    assert_eq!(rows.len(), n_rows * ty.row_bytes(rank), "{n_rows} rows");
    assert!(rows_per_group > 0 && n_rows == out.len() * rows_per_group, "whole groups, one score each");
    let count = queries.count;
    if let Some(extra) = extra {
        assert_eq!(extra.len(), 2 * count, "two numbers per query");
    }
    let view = Rows { ty, rank, bytes: rows, queries };
    let groups_per_task = (TASK_TILES * TILE_ROWS).div_ceil(rows_per_group);
    let tasks = out.len().div_ceil(groups_per_task);
    let groups = out.len();
    let out = Parts::new(out);
    if !softmax {
        pool.for_each(tasks, |_, task| {
            let range = task * groups_per_task..groups.min((task + 1) * groups_per_task);
            let first_row = range.start * rows_per_group;
            // SAFETY: tasks have different ranges.
            let out = unsafe { out.get(range) };
            dispatch(isa, SumScores { rows: view, first_row, rows_per_group, out });
        });
        return;
    }

    assert!(
        count <= scratch.max_queries && n_rows <= scratch.max_rows,
        "{count} queries, {n_rows} rows exceed the scratch"
    );
    let tiles = n_rows.div_ceil(TILE_ROWS);
    let stride = padded(count);
    {
        let weights = Parts::new(&mut scratch.weights);
        let factors = Parts::new(&mut scratch.factors);
        let sums = Parts::new(&mut scratch.sums);
        pool.for_each(tiles.div_ceil(TASK_TILES), |_, task| {
            let range = task * TASK_TILES..tiles.min((task + 1) * TASK_TILES);
            // SAFETY: tasks have different tiles.
            let (weights, largest, sums) = unsafe {
                (
                    weights.get(range.start * count * TILE_ROWS..range.end * count * TILE_ROWS),
                    factors.get(range.start * stride..range.end * stride),
                    sums.get(range.start * stride..range.end * stride),
                )
            };
            dispatch(
                isa,
                TileWeights { rows: view, first_row: range.start * TILE_ROWS, n_rows, weights, largest, sums },
            );
        });
    }
    let factors = &mut scratch.factors[..tiles * stride];
    dispatch(isa, JoinTiles { factors, sums: &scratch.sums[..tiles * stride], stride, count, extra });
    let (weights, factors) = (&scratch.weights[..], &scratch.factors[..]);
    pool.for_each(tasks, |_, task| {
        let range = task * groups_per_task..groups.min((task + 1) * groups_per_task);
        let first_row = range.start * rows_per_group;
        // SAFETY: tasks have different ranges.
        let out = unsafe { out.get(range) };
        dispatch(isa, SumWeights { weights, factors, stride, count, first_row, rows_per_group, out });
    });
}

/// Sketch rows and the queries that they are scored by.
#[derive(Clone, Copy)]
struct Rows<'a> {
    ty: SketchType,
    rank: usize,
    bytes: &'a [u8],
    queries: &'a SketchQueries,
}

/// Values of one tile of rows, transposed.
struct Tile {
    /// `[words][TILE_ROWS]`: four bytes for i8, eight nibbles (low halves first) for i4, two f16 of the same half-word order for f16
    /// as `[rank][TILE_ROWS]`.
    words: [u32; RANK_MAX * TILE_ROWS / 2],
    scales: [f16; TILE_ROWS],
    scores: [f32; QUERY_TILE * TILE_ROWS],
}

impl Tile {
    #[inline(always)]
    fn new() -> Tile {
        Tile {
            words: [0; RANK_MAX * TILE_ROWS / 2],
            scales: [f16::ZERO; TILE_ROWS],
            scores: [0.0; QUERY_TILE * TILE_ROWS],
        }
    }

    /// Takes `count` rows from `first` on. What the other rows of the tile hold has no meaning.
    #[inline(always)]
    fn fill<S: Simd>(&mut self, _s: S, rows: &Rows, first: usize, count: usize) {
        let row_bytes = rows.ty.row_bytes(rows.rank);
        for (row, bytes) in rows.bytes[first * row_bytes..].chunks_exact(row_bytes.max(1)).take(count).enumerate() {
            if rows.ty == SketchType::F16 {
                let halves: &mut [u16] = bytemuck::cast_slice_mut(&mut self.words);
                for (i, value) in bytes.chunks_exact(2).enumerate() {
                    halves[i * TILE_ROWS + row] = u16::from_le_bytes([value[0], value[1]]);
                }
                continue;
            }
            let (values, scale) = bytes.split_at(row_bytes - 2);
            self.scales[row] = f16::from_le_bytes([scale[0], scale[1]]);
            let flip = if rows.ty == SketchType::I8 { u32::from_ne_bytes([S::ROW_BIAS; 4]) } else { 0 };
            let whole = values.chunks_exact(4);
            let rest = whole.remainder();
            let tail_is_short = rows.ty == SketchType::I4 && tail_bytes(rows.rank) > 0;
            let mut last = 0;
            for (i, word) in whole.enumerate() {
                self.words[i * TILE_ROWS + row] = u32::from_le_bytes([word[0], word[1], word[2], word[3]]) ^ flip;
                last = i + 1;
            }
            if tail_is_short {
                self.take_nibble_tail(rows.rank, values, row);
            } else if !rest.is_empty() {
                let mut word = [0; 4];
                word[..rest.len()].copy_from_slice(rest);
                self.words[last * TILE_ROWS + row] = u32::from_le_bytes(word) ^ flip;
            }
        }
    }

    /// Puts the last, shorter chunk of an i4 row into the order of the others.
    fn take_nibble_tail(&mut self, rank: usize, values: &[u8], row: usize) {
        let chunk = rank / 8;
        let tail = &values[chunk * 4..];
        let mut word = 0;
        for i in 0..rank % 8 {
            word |= u32::from(nibble_of(tail, i)) << (8 * (i % 4) + 4 * (i / 4));
        }
        self.words[chunk * TILE_ROWS + row] = word;
    }

    /// Fills `scores`, `[queries][TILE_ROWS]`, with `factor` times the scores of `count` queries from `first` on.
    #[inline(always)]
    fn score<S: Simd>(&mut self, s: S, rows: &Rows, first: usize, count: usize, factor: f32) {
        match count {
            1 => self.score_queries::<S, 1>(s, rows, first, factor),
            2 => self.score_queries::<S, 2>(s, rows, first, factor),
            3 => self.score_queries::<S, 3>(s, rows, first, factor),
            _ => self.score_queries::<S, QUERY_TILE>(s, rows, first, factor),
        }
    }

    #[inline(always)]
    fn score_queries<S: Simd, const Q: usize>(&mut self, s: S, rows: &Rows, first: usize, factor: f32) {
        for row in (0..TILE_ROWS).step_by(2 * S::LANES) {
            // SAFETY (of all three): TILE_ROWS is a multiple of `2 * LANES`, so the lanes from `row` on are inside the tile, whose arrays hold
            // RANK_MAX values of TILE_ROWS rows, and the queries from `first` to `first + Q` are there.
            match rows.ty {
                // SAFETY: see above.
                SketchType::F16 => unsafe { self.score_f16::<S, Q>(s, rows, first, row, factor) },
                // SAFETY: see above.
                SketchType::I8 => unsafe { self.score_i8::<S, Q>(s, rows, first, row, factor) },
                // SAFETY: see above.
                SketchType::I4 => unsafe { self.score_i4::<S, Q>(s, rows, first, row, factor) },
            }
        }
    }

    /// # Safety
    /// `row + 2 * LANES <= TILE_ROWS`, and `first + Q` queries are there.
    #[inline(always)]
    unsafe fn score_f16<S: Simd, const Q: usize>(&mut self, s: S, rows: &Rows, first: usize, row: usize, factor: f32) {
        let rank = rows.rank;
        let mut acc = [[s.splat(0.0); 2]; Q];
        let tile = self.words.as_ptr().cast::<f16>();
        let q = rows.queries.values[first * rank..][..Q * rank].as_ptr();
        for i in 0..rank {
            // SAFETY: `i < rank <= RANK_MAX`, and the caller's promise.
            unsafe {
                let p = tile.add(i * TILE_ROWS + row);
                let values = [s.load_f16(p), s.load_f16(p.add(S::LANES))];
                for k in 0..Q {
                    let q = s.splat(*q.add(k * rank + i));
                    acc[k][0] = s.fma(values[0], q, acc[k][0]);
                    acc[k][1] = s.fma(values[1], q, acc[k][1]);
                }
            }
        }
        let factor = s.splat(factor);
        for k in 0..Q {
            for j in 0..2 {
                // SAFETY: `k < QUERY_TILE`, and the caller's promise.
                unsafe {
                    let p = self.scores.as_mut_ptr().add(k * TILE_ROWS + row + j * S::LANES);
                    s.store(p, s.mul(acc[k][j], factor));
                }
            }
        }
    }

    /// # Safety
    /// As [`Tile::score_f16`].
    #[inline(always)]
    unsafe fn score_i8<S: Simd, const Q: usize>(&mut self, s: S, rows: &Rows, first: usize, row: usize, factor: f32) {
        let stride = words(rows.rank);
        let mut acc = [[s.splat_i(0); 2]; Q];
        let q = rows.queries.words[first * stride..][..Q * stride].as_ptr();
        for i in 0..rows.rank.div_ceil(4) {
            // SAFETY: `i` is inside the rank, and the caller's promise.
            unsafe {
                let p = self.words.as_ptr().add(i * TILE_ROWS + row);
                let values = [s.load_i(p), s.load_i(p.add(S::LANES))];
                for k in 0..Q {
                    let q = s.splat_i(*q.add(k * stride + i));
                    acc[k][0] = s.dot4(acc[k][0], values[0], q);
                    acc[k][1] = s.dot4(acc[k][1], values[1], q);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.finish::<S, Q>(s, rows, first, row, factor, i32::from(S::ROW_BIAS), acc) };
    }

    /// # Safety
    /// As [`Tile::score_f16`].
    #[inline(always)]
    unsafe fn score_i4<S: Simd, const Q: usize>(&mut self, s: S, rows: &Rows, first: usize, row: usize, factor: f32) {
        let stride = words(rows.rank);
        let mut acc = [[s.splat_i(0); 2]; Q];
        let low = s.splat_i(0x0f0f_0f0f);
        let q = rows.queries.words[first * stride..][..Q * stride].as_ptr();
        for i in 0..rows.rank.div_ceil(8) {
            // SAFETY: `i` is inside the rank, a query has two words per chunk of eight, and the caller's promise.
            unsafe {
                let p = self.words.as_ptr().add(i * TILE_ROWS + row);
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
        unsafe { self.finish::<S, Q>(s, rows, first, row, factor, NIBBLE_BIAS, acc) };
    }

    /// Takes the bias out of integer sums and multiplies with the scales.
    ///
    /// # Safety
    /// As [`Tile::score_f16`].
    #[inline(always)]
    unsafe fn finish<S: Simd, const Q: usize>(
        &mut self,
        s: S,
        rows: &Rows,
        first: usize,
        row: usize,
        factor: f32,
        bias: i32,
        acc: [[S::I; 2]; Q],
    ) {
        for j in 0..2 {
            let row = row + j * S::LANES;
            // SAFETY: the caller's promise.
            let row_scale = unsafe { s.load_f16(self.scales.as_ptr().add(row)) };
            for k in 0..Q {
                let bias = s.splat_i((bias * rows.queries.sums[first + k]) as u32);
                let scale = s.mul(row_scale, s.splat(rows.queries.scales[first + k] * factor));
                let score = s.mul(s.to_f32(s.sub_i(acc[k][j], bias)), scale);
                // SAFETY: `k < QUERY_TILE`, and the caller's promise.
                unsafe { s.store(self.scores.as_mut_ptr().add(k * TILE_ROWS + row), score) };
            }
        }
    }
}

/// The largest token score of each group, token by token, over one task's groups.
struct GroupMaximum<'a> {
    out: &'a mut [f32],
    rows_per_group: usize,
    group: usize,
    left: usize,
}

impl<'a> GroupMaximum<'a> {
    #[inline(always)]
    fn new(out: &'a mut [f32], rows_per_group: usize) -> Self {
        out.fill(f32::NEG_INFINITY);
        GroupMaximum { out, rows_per_group, group: 0, left: rows_per_group }
    }

    /// Takes the next tokens' scores.
    #[inline(always)]
    fn take(&mut self, scores: &[f32]) {
        for &score in scores {
            let best = &mut self.out[self.group];
            if score > *best {
                *best = score;
            }
            self.left -= 1;
            if self.left == 0 {
                self.group += 1;
                self.left = self.rows_per_group;
            }
        }
    }
}

/// Group scores of one task without softmax.
struct SumScores<'a> {
    rows: Rows<'a>,
    first_row: usize,
    rows_per_group: usize,
    out: &'a mut [f32],
}

impl Kernel for SumScores<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n_rows = self.out.len() * self.rows_per_group;
        let mut groups = GroupMaximum::new(self.out, self.rows_per_group);
        let mut tile = Tile::new();
        for first in (0..n_rows).step_by(TILE_ROWS) {
            let count = TILE_ROWS.min(n_rows - first);
            tile.fill(s, &self.rows, self.first_row + first, count);
            let mut tokens = [0.0; TILE_ROWS];
            for query in (0..self.rows.queries.count).step_by(QUERY_TILE) {
                let queries = QUERY_TILE.min(self.rows.queries.count - query);
                tile.score(s, &self.rows, query, queries, 1.0);
                for scores in tile.scores.chunks_exact(TILE_ROWS).take(queries) {
                    for (token, score) in tokens.iter_mut().zip(scores) {
                        *token += score;
                    }
                }
            }
            groups.take(&tokens[..count]);
        }
    }
}

/// First pass with softmax over one task's tiles.
struct TileWeights<'a> {
    rows: Rows<'a>,
    first_row: usize,
    n_rows: usize,
    /// `[tiles][queries][TILE_ROWS]`
    weights: &'a mut [f16],
    /// `[tiles][padded queries]`
    largest: &'a mut [f32],
    /// `[tiles][padded queries]`
    sums: &'a mut [f32],
}

impl Kernel for TileWeights<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let count = self.rows.queries.count;
        let stride = padded(count);
        let mut tile = Tile::new();
        for (index, first) in
            (self.first_row..self.n_rows).step_by(TILE_ROWS).take(self.largest.len() / stride.max(1)).enumerate()
        {
            let rows = TILE_ROWS.min(self.n_rows - first);
            tile.fill(s, &self.rows, first, rows);
            for query in (0..count).step_by(QUERY_TILE) {
                let queries = QUERY_TILE.min(count - query);
                tile.score(s, &self.rows, query, queries, std::f32::consts::LOG2_E);
                for (i, scores) in tile.scores.chunks_exact_mut(TILE_ROWS).take(queries).enumerate() {
                    scores[rows..].fill(f32::NEG_INFINITY);
                    let weights = &mut self.weights[(index * count + query + i) * TILE_ROWS..][..TILE_ROWS];
                    let (largest, sum) = tile_softmax(s, scores, weights);
                    self.largest[index * stride + query + i] = largest;
                    self.sums[index * stride + query + i] = sum;
                }
            }
        }
    }
}

/// Weights of a tile's scores, `[TILE_ROWS]`, relative to the largest, which is returned with the sum of the weights.
#[inline(always)]
fn tile_softmax<S: Simd>(s: S, scores: &[f32], weights: &mut [f16]) -> (f32, f32) {
    debug_assert!(scores.len() == TILE_ROWS && weights.len() == TILE_ROWS);
    let mut max = s.splat(f32::NEG_INFINITY);
    for i in (0..TILE_ROWS).step_by(S::LANES) {
        // SAFETY: TILE_ROWS is a multiple of LANES and the length of both slices.
        max = s.max(unsafe { s.load(scores.as_ptr().add(i)) }, max);
    }
    let largest = s.reduce_max(max);
    let max = s.splat(largest);
    let mut sum = s.splat(0.0);
    for i in (0..TILE_ROWS).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let weight = s.exp2_coarse(s.sub(s.load(scores.as_ptr().add(i)), max));
            s.store_f16(weights.as_mut_ptr().add(i), weight);
            sum = s.add(sum, weight);
        }
    }
    (largest, s.reduce_add(sum))
}

/// Between the passes: turns each tile's largest score into what its weights have to be multiplied with.
struct JoinTiles<'a> {
    /// `[tiles][stride]`
    factors: &'a mut [f32],
    /// `[tiles][stride]`
    sums: &'a [f32],
    stride: usize,
    count: usize,
    /// `[count][2]`
    extra: Option<&'a [f32]>,
}

impl Kernel for JoinTiles<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for first in (0..self.count).step_by(S::LANES) {
            let mut max = [f32::NEG_INFINITY; super::arch::LANES_MAX];
            let mut total = [0.0; super::arch::LANES_MAX];
            if let Some(extra) = self.extra {
                for (lane, extra) in extra.chunks_exact(2).skip(first).take(S::LANES).enumerate() {
                    (max[lane], total[lane]) = (extra[0] * std::f32::consts::LOG2_E, extra[1]);
                }
            }
            // SAFETY: the arrays hold LANES_MAX values; `stride` is a multiple of LANES_MAX beyond `count`, so rows from `first` on have LANES.
            unsafe {
                let extra_max = s.load(max.as_ptr());
                let mut max = extra_max;
                for row in self.factors.chunks_exact(self.stride) {
                    max = s.max(s.load(row.as_ptr().add(first)), max);
                }
                // Minus infinity against itself is NaN, but then there is nothing to multiply.
                let extra_weight = s.exp2(s.sub(extra_max, max));
                let mut total = s.mul(s.load(total.as_ptr()), extra_weight);
                for (row, sums) in self.factors.chunks_exact_mut(self.stride).zip(self.sums.chunks_exact(self.stride)) {
                    let p = row.as_mut_ptr().add(first);
                    let factor = s.exp2(s.sub(s.load(p), max));
                    s.store(p, factor);
                    total = s.fma(s.load(sums.as_ptr().add(first)), factor, total);
                }
                let inverse = s.div(s.splat(1.0), total);
                for row in self.factors.chunks_exact_mut(self.stride) {
                    let p = row.as_mut_ptr().add(first);
                    s.store(p, s.mul(s.load(p), inverse));
                }
            }
        }
    }
}

/// Second pass with softmax over one task's groups.
struct SumWeights<'a> {
    weights: &'a [f16],
    factors: &'a [f32],
    stride: usize,
    count: usize,
    first_row: usize,
    rows_per_group: usize,
    out: &'a mut [f32],
}

impl Kernel for SumWeights<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let end = self.first_row + self.out.len() * self.rows_per_group;
        let mut groups = GroupMaximum::new(self.out, self.rows_per_group);
        let mut row = self.first_row;
        while row < end {
            let tile = row / TILE_ROWS;
            let weights = &self.weights[tile * self.count * TILE_ROWS..][..self.count * TILE_ROWS];
            let factors = &self.factors[tile * self.stride..][..self.count];
            let mut tokens = [0.0; TILE_ROWS];
            for i in (0..TILE_ROWS).step_by(S::LANES) {
                let mut sum = s.splat(0.0);
                for (query, &factor) in factors.iter().enumerate() {
                    // SAFETY: the tile's weights are `[count][TILE_ROWS]`, and `i + LANES <= TILE_ROWS`.
                    let weight = unsafe { s.load_f16(weights.as_ptr().add(query * TILE_ROWS + i)) };
                    sum = s.fma(weight, s.splat(factor), sum);
                }
                // SAFETY: `i + LANES <= TILE_ROWS`.
                unsafe { s.store(tokens.as_mut_ptr().add(i), sum) };
            }
            let last = end.min((tile + 1) * TILE_ROWS);
            groups.take(&tokens[row - tile * TILE_ROWS..last - tile * TILE_ROWS]);
            row = last;
        }
    }
}
