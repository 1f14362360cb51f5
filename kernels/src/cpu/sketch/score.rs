//! Scores of groups by their sketch rows.
//!
//! Token scores of [`TILE_ROWS`] rows are computed together, for all queries. With the softmax a tile keeps its weights relative to its own maximum,
//! in f16; once all maxima and sums are known, a second pass adds them up over queries and takes the maximum of each group.

use half::f16;

use super::tile::{QUERY_TILE, Rows, TILE_ROWS, Tile};
use super::{SketchQueries, SketchType};
use crate::cpu::arch::{Kernel, LANES_MAX, Simd, dispatch};
use crate::cpu::parts::Parts;
use crate::cpu::pool::Pool;
use crate::isa::Isa;

/// Tiles per task.
const TASK_TILES: usize = 16;

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
    queries.next_multiple_of(LANES_MAX)
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
        size_of_val(&self.weights[..]) + size_of_val(&self.factors[..]) + size_of_val(&self.sums[..])
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
        tile.clear(&self.rows);
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
        tile.clear(&self.rows);
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
