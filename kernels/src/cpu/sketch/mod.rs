//! Rows of the key sketch, and the queries that they are scored by.

mod block;
mod rows;
mod score;

use super::arch::{Kernel, Simd, dispatch};
use crate::isa::Isa;

pub use rows::{BLOCK_ROWS, SketchRows, SketchType};
pub use score::{ScoreScratch, group_scores};

/// Largest rank of a sketch.
pub const RANK_MAX: usize = 512;

/// The nearest integer, ties to even, of a number of small magnitude; 0 for NaN. Baseline x86-64 has no instruction for it, but numbers of this
/// size have no bits behind the point.
#[inline(always)]
fn nearest(x: f32) -> i8 {
    const WHOLE: f32 = (3 << 22) as f32;
    ((x + WHOLE) - WHOLE) as i8
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
