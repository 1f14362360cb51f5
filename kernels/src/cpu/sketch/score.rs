//! Scores of groups by their sketch rows.
//!
//! Token scores of a span of rows are computed together, for all queries. With the softmax a span keeps its weights relative to its own maximum,
//! in f16; once all maxima and sums are known, a second pass adds them up over queries and takes the maximum of each group.

use std::ops::Range;

use half::f16;

use super::SketchQueries;
use super::block::{Block, QUERY_TILE, SPAN_ROWS, Scores};
use super::rows::{BLOCK_ROWS, SketchRows};
use crate::cpu::arch::{Kernel, LANES_MAX, Simd, dispatch};
use crate::cpu::parts::Parts;
use crate::cpu::pool::Pool;
use crate::isa::Isa;

/// Spans per task.
const TASK_SPANS: usize = 4;

/// Weights and sums between the two passes of [`group_scores`].
pub struct ScoreScratch {
    max_queries: usize,
    max_rows: usize,
    /// Weights relative to the largest of the span, `[spans][queries][SPAN_ROWS]`.
    weights: Vec<f16>,
    /// Largest score of the span in units of log 2, then what its weights are to be multiplied with, `[spans][padded queries]`.
    factors: Vec<f32>,
    /// Sums of the span's weights, `[spans][padded queries]`.
    sums: Vec<f32>,
}

/// Queries in a row of the scratch memory: whole vectors of every instruction set.
const fn padded(queries: usize) -> usize {
    queries.next_multiple_of(LANES_MAX)
}

impl ScoreScratch {
    /// For [`group_scores`] with up to `max_queries` queries and `max_rows` rows.
    pub fn new(max_queries: usize, max_rows: usize) -> ScoreScratch {
        let spans = max_rows.div_ceil(SPAN_ROWS);
        ScoreScratch {
            max_queries,
            max_rows,
            weights: vec![f16::ZERO; spans * max_queries * SPAN_ROWS],
            factors: vec![0.0; spans * padded(max_queries)],
            sums: vec![0.0; spans * padded(max_queries)],
        }
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.weights[..]) + size_of_val(&self.factors[..]) + size_of_val(&self.sums[..])
    }

    /// Bytes that one for up to `max_queries` queries and `max_rows` rows holds.
    pub fn bytes_for(max_queries: usize, max_rows: usize) -> usize {
        let spans = max_rows.div_ceil(SPAN_ROWS);
        spans * (max_queries * SPAN_ROWS * size_of::<f16>() + 2 * padded(max_queries) * size_of::<f32>())
    }
}

/// Scores of groups of rows: the largest of its rows' token scores.
///
/// A query's score of a row is their dot product (a factor such as `1/sqrt(d)` is the caller's to put into the queries). A token score is the
/// sum of these over the queries; with `softmax`, the sum of each query's softmax over all `n_rows` rows. `extra`, `[queries][2]`, adds to each
/// query's softmax tokens that have no row: the largest of their scores, and the sum of `e^(score - largest)`.
///
/// The first `n_rows` of `rows` are scored; `out`: `[n_rows / rows_per_group]`. The result does not depend on the number of threads. NaN
/// token scores do not count; a group of nothing else scores minus infinity. Nothing is allocated.
///
/// # Panics
/// If the lengths or ranks do not fit together, groups are not whole, or the scratch memory is too small.
pub fn group_scores(
    pool: &Pool,
    isa: Isa,
    rows: &SketchRows,
    n_rows: usize,
    rows_per_group: usize,
    queries: &SketchQueries,
    softmax: bool,
    extra: Option<&[f32]>,
    scratch: &mut ScoreScratch,
    out: &mut [f32],
) {
    assert_eq!(rows.rank(), queries.rank, "rows and queries have one rank");
    assert!(n_rows <= rows.rows(), "{n_rows} rows of {}", rows.rows());
    assert!(rows_per_group > 0 && n_rows == out.len() * rows_per_group, "whole groups, one score each");
    let count = queries.count;
    if let Some(extra) = extra {
        assert_eq!(extra.len(), 2 * count, "two numbers per query");
    }
    let groups_per_task = (TASK_SPANS * SPAN_ROWS).div_ceil(rows_per_group);
    let tasks = out.len().div_ceil(groups_per_task);
    let groups = out.len();
    let out = Parts::new(out);
    if !softmax {
        pool.for_each(tasks, |_, task| {
            let range = task * groups_per_task..groups.min((task + 1) * groups_per_task);
            let first_row = range.start * rows_per_group;
            // SAFETY: tasks have different ranges.
            let out = unsafe { out.get(range) };
            dispatch(isa, SumScores { rows, queries, first_row, rows_per_group, out });
        });
        return;
    }

    assert!(
        count <= scratch.max_queries && n_rows <= scratch.max_rows,
        "{count} queries, {n_rows} rows exceed the scratch"
    );
    let spans = n_rows.div_ceil(SPAN_ROWS);
    let stride = padded(count);
    {
        let weights = Parts::new(&mut scratch.weights);
        let factors = Parts::new(&mut scratch.factors);
        let sums = Parts::new(&mut scratch.sums);
        pool.for_each(spans.div_ceil(TASK_SPANS), |_, task| {
            let range = task * TASK_SPANS..spans.min((task + 1) * TASK_SPANS);
            // SAFETY: tasks have different spans.
            let (weights, largest, sums) = unsafe {
                (
                    weights.get(range.start * count * SPAN_ROWS..range.end * count * SPAN_ROWS),
                    factors.get(range.start * stride..range.end * stride),
                    sums.get(range.start * stride..range.end * stride),
                )
            };
            dispatch(isa, SpanWeights { rows, queries, spans: range, n_rows, weights, largest, sums });
        });
    }
    let factors = &mut scratch.factors[..spans * stride];
    dispatch(isa, JoinSpans { factors, sums: &scratch.sums[..spans * stride], stride, count, extra });
    let (weights, factors) = (&scratch.weights[..], &scratch.factors[..]);
    pool.for_each(tasks, |_, task| {
        let range = task * groups_per_task..groups.min((task + 1) * groups_per_task);
        let first_row = range.start * rows_per_group;
        // SAFETY: tasks have different ranges.
        let out = unsafe { out.get(range) };
        dispatch(isa, SumWeights { weights, factors, stride, count, first_row, rows_per_group, out });
    });
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
    fn take(&mut self, mut scores: &[f32]) {
        if self.left == self.rows_per_group && scores.len().is_multiple_of(self.rows_per_group) {
            // Groups of the usual sizes without a count to check for each.
            match self.rows_per_group {
                1 => return self.take_groups::<1>(scores),
                2 => return self.take_groups::<2>(scores),
                4 => return self.take_groups::<4>(scores),
                8 => return self.take_groups::<8>(scores),
                16 => return self.take_groups::<16>(scores),
                _ => {}
            }
        }
        while !scores.is_empty() {
            let (now, later) = scores.split_at(self.left.min(scores.len()));
            self.out[self.group] = largest(self.out[self.group], now);
            self.left -= now.len();
            if self.left == 0 {
                self.group += 1;
                self.left = self.rows_per_group;
            }
            scores = later;
        }
    }

    #[inline(always)]
    fn take_groups<const ROWS: usize>(&mut self, scores: &[f32]) {
        let groups = scores.as_chunks::<ROWS>().0;
        for (best, scores) in self.out[self.group..][..groups.len()].iter_mut().zip(groups) {
            *best = largest(f32::NEG_INFINITY, scores);
        }
        self.group += groups.len();
    }
}

/// The largest of `best` and `scores`, NaN left out.
#[inline(always)]
fn largest(best: f32, scores: &[f32]) -> f32 {
    scores.iter().fold(best, |best, &score| if score > best { score } else { best })
}

/// Group scores of one task without softmax.
struct SumScores<'a> {
    rows: &'a SketchRows,
    queries: &'a SketchQueries,
    first_row: usize,
    rows_per_group: usize,
    out: &'a mut [f32],
}

impl Kernel for SumScores<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let end = self.first_row + self.out.len() * self.rows_per_group;
        let count = self.queries.count;
        let mut groups = GroupMaximum::new(self.out, self.rows_per_group);
        let mut scores = [0.0; QUERY_TILE * SPAN_ROWS];
        for span in self.first_row / SPAN_ROWS..end.div_ceil(SPAN_ROWS) {
            let rows = self.first_row.max(span * SPAN_ROWS)..end.min((span + 1) * SPAN_ROWS);
            let mut tokens = [0.0; SPAN_ROWS];
            for query in (0..count).step_by(QUERY_TILE) {
                let queries = QUERY_TILE.min(count - query);
                score_blocks(s, self.rows, self.queries, rows.clone(), query, queries, 1.0, &mut scores);
                for scores in scores.chunks_exact(SPAN_ROWS).take(queries) {
                    for (token, score) in tokens.iter_mut().zip(scores) {
                        *token += score;
                    }
                }
            }
            groups.take(&tokens[rows.start - span * SPAN_ROWS..rows.end - span * SPAN_ROWS]);
        }
    }
}

/// Scores of `count` queries from `first` on, of the blocks that hold `range`, which is within one span.
#[inline(always)]
fn score_blocks<S: Simd>(
    s: S,
    rows: &SketchRows,
    queries: &SketchQueries,
    range: Range<usize>,
    first: usize,
    count: usize,
    factor: f32,
    scores: &mut Scores,
) {
    for block in range.start / BLOCK_ROWS..range.end.div_ceil(BLOCK_ROWS) {
        Block::new(rows, queries, block).score(s, first, count, factor, scores);
    }
}

/// First pass with softmax over one task's spans.
struct SpanWeights<'a> {
    rows: &'a SketchRows,
    queries: &'a SketchQueries,
    spans: Range<usize>,
    n_rows: usize,
    /// `[spans][queries][SPAN_ROWS]`
    weights: &'a mut [f16],
    /// `[spans][padded queries]`
    largest: &'a mut [f32],
    /// `[spans][padded queries]`
    sums: &'a mut [f32],
}

impl Kernel for SpanWeights<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let count = self.queries.count;
        let stride = padded(count);
        let mut scores = [0.0; QUERY_TILE * SPAN_ROWS];
        for (at, span) in self.spans.enumerate() {
            let rows = span * SPAN_ROWS..self.n_rows.min((span + 1) * SPAN_ROWS);
            for query in (0..count).step_by(QUERY_TILE) {
                let queries = QUERY_TILE.min(count - query);
                let factor = std::f32::consts::LOG2_E;
                score_blocks(s, self.rows, self.queries, rows.clone(), query, queries, factor, &mut scores);
                for (i, scores) in scores.chunks_exact_mut(SPAN_ROWS).take(queries).enumerate() {
                    scores[rows.len()..].fill(f32::NEG_INFINITY);
                    let weights = &mut self.weights[(at * count + query + i) * SPAN_ROWS..][..SPAN_ROWS];
                    let (largest, sum) = span_softmax(s, scores, weights);
                    self.largest[at * stride + query + i] = largest;
                    self.sums[at * stride + query + i] = sum;
                }
            }
        }
    }
}

/// Weights of a span's scores, `[SPAN_ROWS]`, relative to the largest, which is returned with the sum of the weights.
#[inline(always)]
fn span_softmax<S: Simd>(s: S, scores: &[f32], weights: &mut [f16]) -> (f32, f32) {
    debug_assert!(scores.len() == SPAN_ROWS && weights.len() == SPAN_ROWS);
    let mut max = s.splat(f32::NEG_INFINITY);
    for i in (0..SPAN_ROWS).step_by(S::LANES) {
        // SAFETY: SPAN_ROWS is a multiple of LANES and the length of both slices.
        max = s.max(unsafe { s.load(scores.as_ptr().add(i)) }, max);
    }
    let largest = s.reduce_max(max);
    let max = s.splat(largest);
    let mut sum = s.splat(0.0);
    for i in (0..SPAN_ROWS).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let weight = s.exp2_coarse(s.sub(s.load(scores.as_ptr().add(i)), max));
            s.store_f16(weights.as_mut_ptr().add(i), weight);
            sum = s.add(sum, weight);
        }
    }
    (largest, s.reduce_add(sum))
}

/// Between the passes: turns each span's largest score into what its weights have to be multiplied with.
struct JoinSpans<'a> {
    /// `[spans][stride]`
    factors: &'a mut [f32],
    /// `[spans][stride]`
    sums: &'a [f32],
    stride: usize,
    count: usize,
    /// `[count][2]`
    extra: Option<&'a [f32]>,
}

impl Kernel for JoinSpans<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for first in (0..self.count).step_by(S::LANES) {
            let mut max = [f32::NEG_INFINITY; LANES_MAX];
            let mut total = [0.0; LANES_MAX];
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
            let span = row / SPAN_ROWS;
            let weights = &self.weights[span * self.count * SPAN_ROWS..][..self.count * SPAN_ROWS];
            let factors = &self.factors[span * self.stride..][..self.count];
            let mut tokens = [0.0; SPAN_ROWS];
            for i in (0..SPAN_ROWS).step_by(S::LANES) {
                let mut sum = s.splat(0.0);
                for (query, &factor) in factors.iter().enumerate() {
                    // SAFETY: the span's weights are `[count][SPAN_ROWS]`, and `i + LANES <= SPAN_ROWS`.
                    let weight = unsafe { s.load_f16(weights.as_ptr().add(query * SPAN_ROWS + i)) };
                    sum = s.fma(weight, s.splat(factor), sum);
                }
                // SAFETY: `i + LANES <= SPAN_ROWS`.
                unsafe { s.store(tokens.as_mut_ptr().add(i), sum) };
            }
            let last = end.min((span + 1) * SPAN_ROWS);
            groups.take(&tokens[row - span * SPAN_ROWS..last - span * SPAN_ROWS]);
            row = last;
        }
    }
}
