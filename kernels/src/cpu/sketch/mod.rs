//! Rows of the key sketch, and the queries that they are scored by.

mod score;
mod tile;

use half::f16;

use super::arch::{Kernel, Simd, dispatch};
use crate::isa::Isa;

pub use score::{ScoreScratch, group_scores};

/// Largest rank of a sketch; a tile of its rows lives on the stack of a task.
pub const RANK_MAX: usize = 512;
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
    let quantise = |x: f32| nearest((x * inverse).clamp(-levels, levels));
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

/// The nearest integer, ties to even, of a number of small magnitude; 0 for NaN. Baseline x86-64 has no instruction for it, but numbers of this
/// size have no bits behind the point.
#[inline(always)]
fn nearest(x: f32) -> i8 {
    const WHOLE: f32 = (3 << 22) as f32;
    ((x + WHOLE) - WHOLE) as i8
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
                    let value = nearest((x * inverse).clamp(-127.0, 127.0));
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
