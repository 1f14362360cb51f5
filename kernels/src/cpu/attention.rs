//! Attention of one decode step over pieces of a KV cache that lie where they lie.
//!
//! The tokens are cut into partitions, whose number and size depend on nothing but the number of tokens. A task is one partition of one
//! KV head: scores of all query heads that share it, their softmax within the partition, the weighted sum of the values. Then the partitions
//! of each head are merged in order by their maxima (the split of flash decoding, with the online softmax of Milakov and Gimelshein).

use half::f16;

use super::arch::{Kernel, Simd, dispatch};
use super::dense::{TILE, dot_vectors};
use super::parts::Parts;
use super::pool::Pool;
use crate::isa::Isa;

/// Some tokens of one layer's cache; the first `tokens` of `capacity` are attended to.
#[derive(Clone, Copy)]
pub struct KvPiece<'a> {
    /// Keys, `[kv_heads][capacity][d]`.
    pub k: &'a [f16],
    /// Values, `[kv_heads][capacity][d]`.
    pub v: &'a [f16],
    /// Tokens that there is room for.
    pub capacity: usize,
    /// Tokens that are there.
    pub tokens: usize,
}

/// Tokens per partition of a short cache: small, so that the tasks are enough for all threads.
const SHORT_PARTITION: usize = 128;
/// Tokens per partition of a long cache; its scores and row addresses live on the stack of a task.
const PARTITION_MAX: usize = 256;
/// Caches up to this length are short.
const SHORT_CACHE: usize = 2048;
/// Query heads whose scores a task holds at a time.
const HEADS_MAX: usize = 8;

/// f16 values in a cache line.
const CACHE_LINE: usize = 32;
/// Key rows ahead of the current one that are asked for, as pieces are too short for the hardware to guess; values are asked for while
/// their partition's scores are computed.
const PREFETCH_ROWS: usize = 16;

/// How many partitions `tokens` are cut into, and how many tokens each has but the last.
fn partitions(tokens: usize) -> (usize, usize) {
    let largest = if tokens <= SHORT_CACHE { SHORT_PARTITION } else { PARTITION_MAX };
    let size = tokens.div_ceil(tokens.div_ceil(largest).max(1)).next_multiple_of(TILE);
    (tokens.div_ceil(size.max(1)), size)
}

/// Where the results of the partitions wait to be merged.
pub struct AttentionScratch {
    heads: usize,
    d: usize,
    max_tokens: usize,
    max_pieces: usize,
    /// First piece of each partition and the token in it.
    starts: Vec<(usize, usize)>,
    /// Weighted value sums, `[partitions][heads][d]`.
    sums: Vec<f32>,
    /// Largest score in units of log 2, and sum of weights relative to it, `[partitions][heads]`.
    weights: Vec<(f32, f32)>,
}

impl AttentionScratch {
    /// For [`attend`] with up to `heads` query heads of `d` elements over `max_tokens` tokens in `max_pieces` pieces.
    pub fn new(heads: usize, d: usize, max_tokens: usize, max_pieces: usize) -> AttentionScratch {
        // Rounding the size of partitions up can only make them fewer.
        let count = max_tokens.min(SHORT_CACHE).div_ceil(SHORT_PARTITION).max(max_tokens.div_ceil(PARTITION_MAX));
        AttentionScratch {
            heads,
            d,
            max_tokens,
            max_pieces,
            starts: Vec::with_capacity(count),
            sums: vec![0.0; count * heads * d],
            weights: vec![(0.0, 0.0); count * heads],
        }
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.sums[..])
            + size_of_val(&self.weights[..])
            + self.starts.capacity() * size_of::<(usize, usize)>()
    }
}

/// `out[h] = softmax over tokens t of (scale * q[h] . k[t]) times v[t]`, over all tokens of all pieces.
///
/// `q`, `out`: `[heads][d]`; query head `h` uses KV head `h / (heads / kv_heads)`. The order of the pieces is without meaning but for
/// rounding. The result does not depend on the number of threads. Without any token it is 0. A NaN or plus infinity among the scores of a head
/// makes its result NaN. Nothing is allocated.
///
/// # Panics
/// If a length does not fit the shape, or the shape exceeds that of the scratch memory.
pub fn attend(
    pool: &Pool,
    isa: Isa,
    q: &[f32],
    pieces: &[KvPiece],
    kv_heads: usize,
    d: usize,
    scale: f32,
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    assert!(d > 0 && kv_heads > 0 && q.len().is_multiple_of(kv_heads * d), "whole query heads for each KV head");
    let heads = q.len() / d;
    assert_eq!(q.len(), out.len(), "one result per query");
    assert!(heads <= scratch.heads && d <= scratch.d, "{heads} heads of {d} exceed the scratch memory");
    assert!(pieces.len() <= scratch.max_pieces, "{} pieces exceed the scratch memory", pieces.len());
    let mut tokens = 0;
    for piece in pieces {
        let len = kv_heads.checked_mul(piece.capacity).and_then(|rows| rows.checked_mul(d));
        let has_shape = Some(piece.k.len()) == len && Some(piece.v.len()) == len;
        assert!(has_shape && piece.tokens <= piece.capacity, "a piece has its shape");
        tokens += piece.tokens;
    }
    assert!(tokens <= scratch.max_tokens, "{tokens} tokens exceed the scratch memory");
    if tokens == 0 {
        out.fill(0.0);
        return;
    }

    let (count, size) = partitions(tokens);
    find_starts(pieces, size, &mut scratch.starts);
    let group = heads / kv_heads;
    let starts = &scratch.starts[..];
    let sums = Parts::new(&mut scratch.sums);
    let weights = Parts::new(&mut scratch.weights);
    // KV head last: neighbouring tasks read different heads of the same pieces.
    pool.for_each(count * kv_heads, |_, task| {
        let (partition, kv_head) = (task / kv_heads, task % kv_heads);
        let first_head = kv_head * group;
        let at = partition * heads + first_head;
        // SAFETY: tasks differ in partition or KV head, so their parts do not overlap.
        let (sums, weights) = unsafe { (sums.get(at * d..(at + group) * d), weights.get(at..at + group)) };
        let tokens = size.min(tokens - partition * size);
        let q = &q[first_head * d..(first_head + group) * d];
        dispatch(isa, Partition { q, pieces, start: starts[partition], tokens, kv_head, d, scale, sums, weights });
    });
    dispatch(isa, Merge { sums: &scratch.sums, weights: &scratch.weights, count, heads, d, out });
}

/// Fills `starts` with the piece and the token in it at which each partition begins.
fn find_starts(pieces: &[KvPiece], size: usize, starts: &mut Vec<(usize, usize)>) {
    starts.clear();
    let mut until_next = 0;
    for (index, piece) in pieces.iter().enumerate() {
        let mut at = until_next;
        while at < piece.tokens {
            starts.push((index, at));
            at += size;
        }
        until_next = at - piece.tokens;
    }
}

/// One task of [`attend`].
struct Partition<'a> {
    /// `[group][d]`
    q: &'a [f32],
    pieces: &'a [KvPiece<'a>],
    start: (usize, usize),
    tokens: usize,
    kv_head: usize,
    d: usize,
    scale: f32,
    /// `[group][d]`
    sums: &'a mut [f32],
    /// `[group]`
    weights: &'a mut [(f32, f32)],
}

impl Kernel for Partition<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let d = self.d;
        let tokens = self.tokens;
        let mut k_rows = [std::ptr::null(); PARTITION_MAX];
        let mut v_rows = [std::ptr::null(); PARTITION_MAX];
        self.find_rows(&mut k_rows, &mut v_rows);
        let padded = tokens.next_multiple_of(TILE);
        for row in tokens..padded {
            k_rows[row] = k_rows[tokens - 1];
        }
        let mut scores = [0.0f32; HEADS_MAX * PARTITION_MAX];
        let group = self.weights.len();
        let mut first = 0;
        while first < group {
            let heads = HEADS_MAX.min(group - first);
            let q = &self.q[first * d..];
            for t in (0..padded).step_by(TILE) {
                if first == 0 {
                    for row in t..tokens.min(t + TILE) {
                        prefetch_row(s, k_rows[tokens.min(row + PREFETCH_ROWS + 1) - 1], d);
                        prefetch_row(s, v_rows[row], d);
                    }
                }
                let rows = [k_rows[t], k_rows[t + 1], k_rows[t + 2], k_rows[t + 3]];
                // SAFETY: each row has `d` keys, `q` has `heads` rows of `d`, and `t + 4` is at most `PARTITION_MAX`.
                unsafe { dot_vectors(s, rows, q.as_ptr(), d, heads, d, scores.as_mut_ptr().add(t), PARTITION_MAX) };
            }
            for (head, scores) in scores.chunks_exact_mut(PARTITION_MAX).take(heads).enumerate() {
                self.weights[first + head] = softmax(s, &mut scores[..], tokens, self.scale);
            }
            // SAFETY: `tokens` rows have `d` values each, `scores` has `heads` rows, and `sums` has `heads` rows of `d` from `first` on.
            unsafe {
                let sums = self.sums[first * d..].as_mut_ptr();
                weighted_sums(s, &v_rows[..tokens], scores.as_ptr(), heads, d, sums);
            }
            first += heads;
        }
    }
}

impl Partition<'_> {
    /// Addresses of the partition's key and value rows of its KV head.
    #[inline(always)]
    fn find_rows(&self, k_rows: &mut [*const f16], v_rows: &mut [*const f16]) {
        let (mut index, mut first) = self.start;
        let mut row = 0;
        while row < self.tokens {
            let piece = &self.pieces[index];
            let offset = (self.kv_head * piece.capacity + first) * self.d;
            let count = piece.tokens.saturating_sub(first).min(self.tokens - row);
            if count > 0 {
                let (k, v) = (piece.k[offset..].as_ptr(), piece.v[offset..].as_ptr());
                for i in 0..count {
                    k_rows[row + i] = k.wrapping_add(i * self.d);
                    v_rows[row + i] = v.wrapping_add(i * self.d);
                }
            }
            row += count;
            index += 1;
            first = 0;
        }
    }
}

/// Asks for all cache lines of a row of `d` values.
#[inline(always)]
fn prefetch_row<S: Simd>(s: S, row: *const f16, d: usize) {
    for i in (0..d).step_by(CACHE_LINE) {
        s.prefetch(row.wrapping_add(i));
    }
}

/// Turns `tokens` scores into weights relative to the largest and returns that, in units of log 2, and the sum of the weights.
///
/// `scores` has room up to the next multiple of the vector length; what lies there becomes 0.
#[inline(always)]
fn softmax<S: Simd>(s: S, scores: &mut [f32], tokens: usize, scale: f32) -> (f32, f32) {
    let padded = tokens.next_multiple_of(S::LANES);
    let any = scores[0];
    scores[tokens..padded].fill(any);
    let to_log2 = s.splat(scale * std::f32::consts::LOG2_E);
    let p = scores.as_mut_ptr();
    let mut max = s.splat(f32::NEG_INFINITY);
    for i in (0..padded).step_by(S::LANES) {
        // SAFETY: `i + LANES` is at most `padded`, which is inside `scores`.
        unsafe {
            let v = s.mul(s.load(p.add(i)), to_log2);
            s.store(p.add(i), v);
            max = s.max(v, max);
        }
    }
    scores[tokens..padded].fill(f32::NEG_INFINITY);
    let p = scores.as_mut_ptr();
    let largest = s.reduce_max(max);
    let max = s.splat(largest);
    let mut sum = s.splat(0.0);
    for i in (0..padded).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let v = s.exp2(s.sub(s.load(p.add(i)), max));
            s.store(p.add(i), v);
            sum = s.add(sum, v);
        }
    }
    (largest, s.reduce_add(sum))
}

/// `sums[h] = sum over t of weights[h][t] * rows[t]` for `heads` heads.
///
/// # Safety
/// Each row has `d` values, `weights` has `heads` rows of `rows.len()` at a stride of `PARTITION_MAX`, `sums` is `[heads][d]`.
#[inline(always)]
unsafe fn weighted_sums<S: Simd>(
    s: S,
    rows: &[*const f16],
    weights: *const f32,
    heads: usize,
    d: usize,
    sums: *mut f32,
) {
    let mut h = 0;
    while h < heads {
        let count = 4.min(heads - h);
        // SAFETY: `h + count <= heads`; the rest is the caller's promise.
        unsafe {
            let (weights, sums) = (weights.add(h * PARTITION_MAX), sums.add(h * d));
            match count {
                1 => sum_heads::<S, 1>(s, rows, weights, d, sums),
                2 => sum_heads::<S, 2>(s, rows, weights, d, sums),
                3 => sum_heads::<S, 3>(s, rows, weights, d, sums),
                _ => sum_heads::<S, 4>(s, rows, weights, d, sums),
            }
        }
        h += count;
    }
}

/// [`weighted_sums`] for `R` heads.
///
/// # Safety
/// As [`weighted_sums`].
#[inline(always)]
unsafe fn sum_heads<S: Simd, const R: usize>(s: S, rows: &[*const f16], weights: *const f32, d: usize, sums: *mut f32) {
    let mut i = 0;
    // SAFETY: each call stays inside `d`; the rest is the caller's promise.
    unsafe {
        while S::SUM_VECTORS == 4 && i + 4 * S::LANES <= d {
            sum_columns::<S, R, 4>(s, rows, i, weights, d, sums);
            i += 4 * S::LANES;
        }
        while i + 2 * S::LANES <= d {
            sum_columns::<S, R, 2>(s, rows, i, weights, d, sums);
            i += 2 * S::LANES;
        }
        if i + S::LANES <= d {
            sum_columns::<S, R, 1>(s, rows, i, weights, d, sums);
            i += S::LANES;
        }
    }
    while i < d {
        for h in 0..R {
            let mut sum = 0.0;
            for (t, row) in rows.iter().enumerate() {
                // SAFETY: `i < d`; rows, weights and sums as the caller promises.
                unsafe { sum += *weights.add(h * PARTITION_MAX + t) * row.add(i).read_unaligned().to_f32() };
            }
            // SAFETY: `i < d`, and `sums` is `[R][d]`.
            unsafe { *sums.add(h * d + i) = sum };
        }
        i += 1;
    }
}

/// The columns `first..first + N * LANES` of [`sum_heads`], in registers.
///
/// # Safety
/// As [`weighted_sums`], and the columns are inside `d`.
#[inline(always)]
unsafe fn sum_columns<S: Simd, const R: usize, const N: usize>(
    s: S,
    rows: &[*const f16],
    first: usize,
    weights: *const f32,
    d: usize,
    sums: *mut f32,
) {
    let mut acc = [[s.splat(0.0); N]; R];
    for t in 0..rows.len() {
        let mut value = [s.splat(0.0); N];
        for j in 0..N {
            // SAFETY: the columns are inside the row.
            value[j] = unsafe { s.load_f16(rows[t].add(first + j * S::LANES)) };
        }
        for h in 0..R {
            // SAFETY: `weights` has `R` rows of at least `rows.len()`.
            let weight = s.splat(unsafe { *weights.add(h * PARTITION_MAX + t) });
            for j in 0..N {
                acc[h][j] = s.fma(value[j], weight, acc[h][j]);
            }
        }
    }
    for h in 0..R {
        for j in 0..N {
            // SAFETY: the columns are inside `d`, and `sums` is `[R][d]`.
            unsafe { s.store(sums.add(h * d + first + j * S::LANES), acc[h][j]) };
        }
    }
}

/// Joins the partitions of each head, in order.
struct Merge<'a> {
    /// `[count][heads][d]`
    sums: &'a [f32],
    /// `[count][heads]`
    weights: &'a [(f32, f32)],
    count: usize,
    heads: usize,
    d: usize,
    out: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let d = self.d;
        for (head, out) in self.out.chunks_exact_mut(d).enumerate() {
            let mut max = f32::NEG_INFINITY;
            for partition in 0..self.count {
                max = max.max(self.weights[partition * self.heads + head].0);
            }
            let mut total = 0.0;
            for partition in 0..self.count {
                let (largest, sum) = self.weights[partition * self.heads + head];
                total += sum * (largest - max).exp2();
            }
            out.fill(0.0);
            for partition in 0..self.count {
                let at = partition * self.heads + head;
                let weight = (self.weights[at].0 - max).exp2() / total;
                let sums = &self.sums[at * d..][..d];
                let mut i = 0;
                while i + S::LANES <= d {
                    // SAFETY: `sums` and `out` have `d` elements.
                    unsafe {
                        let p = out.as_mut_ptr().add(i);
                        s.store(p, s.fma(s.load(sums.as_ptr().add(i)), s.splat(weight), s.load(p)));
                    }
                    i += S::LANES;
                }
                while i < d {
                    out[i] += sums[i] * weight;
                    i += 1;
                }
            }
        }
    }
}
