//! From queries to group scores: the query side of the key sketch.

use super::Compute;
use super::adapter::Adapter;
use crate::config::{Aggregate, CacheConfig};
use crate::plan::{ModelShape, TierSizes};
use forebay_kernels::dense::project;
use forebay_kernels::sketch::{ScoreScratch, SketchQueries, SketchRows, group_scores};

/// Buffers that score one layer at a time.
pub struct Predictor {
    aggregate: Aggregate,
    config: CacheConfig,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Sum or mean of query heads, `[head_dim]`.
    mean_query: Vec<f32>,
    /// Projected queries, `[queries][rank]`.
    projected: Vec<f32>,
    queries: SketchQueries,
    scratch: ScoreScratch,
    scores: Vec<f32>,
}

impl Predictor {
    /// Buffers for the given sizes.
    pub fn new(shape: &ModelShape, config: &CacheConfig, sizes: &TierSizes) -> Predictor {
        Predictor {
            aggregate: config.aggregate,
            config: config.clone(),
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            mean_query: vec![0.0; shape.head_dim],
            projected: vec![0.0; sizes.score_queries * config.rank],
            queries: SketchQueries::new(sizes.score_queries, config.rank),
            scratch: ScoreScratch::new(sizes.score_queries, sizes.sketch_rows),
            scores: vec![0.0; sizes.groups],
        }
    }

    /// Scores of the first `groups` groups for queries `q`, `[heads][head_dim]`; `rows` are their sketch rows.
    pub fn score(
        &mut self,
        compute: &Compute<'_>,
        adapter: &Adapter,
        rows: &SketchRows,
        groups: usize,
        q: &[f32],
    ) -> &mut [f32] {
        let (rank, d) = (self.config.rank, self.head_dim);
        let per_kv = self.heads / self.kv_heads;
        let count = match self.aggregate {
            Aggregate::Sum => 1,
            Aggregate::SoftmaxKv => self.kv_heads,
            Aggregate::Softmax => self.heads,
        };
        let projected = &mut self.projected[..count * rank];
        projected.fill(0.0);
        for kv_head in 0..self.kv_heads {
            let side = &adapter.query_side[kv_head * rank * d..(kv_head + 1) * rank * d];
            let heads = &q[kv_head * per_kv * d..(kv_head + 1) * per_kv * d];
            match self.aggregate {
                Aggregate::Softmax => {
                    let out = &mut projected[kv_head * per_kv * rank..(kv_head + 1) * per_kv * rank];
                    project(compute.isa, side, heads, d, out);
                }
                Aggregate::SoftmaxKv | Aggregate::Sum => {
                    self.mean_query.fill(0.0);
                    for head in heads.chunks_exact(d) {
                        self.mean_query.iter_mut().zip(head).for_each(|(m, x)| *m += x);
                    }
                    if self.aggregate == Aggregate::SoftmaxKv {
                        self.mean_query.iter_mut().for_each(|m| *m /= per_kv as f32);
                        let out = &mut projected[kv_head * rank..(kv_head + 1) * rank];
                        project(compute.isa, side, &self.mean_query, d, out);
                    } else {
                        // One summed query: the projections of the KV heads add up.
                        let mut part = [0.0f32; 64];
                        for (j0, out) in projected.chunks_mut(part.len()).enumerate() {
                            let first = j0 * 64 * d;
                            let side = &side[first..first + out.len() * d];
                            project(compute.isa, side, &self.mean_query, d, &mut part[..out.len()]);
                            out.iter_mut().zip(&part).for_each(|(o, p)| *o += p);
                        }
                    }
                }
            }
        }
        projected.iter_mut().for_each(|x| *x *= compute.scale);
        self.queries.set(compute.isa, projected, count, rank);
        let rows_per_group = self.config.group / self.config.sketch_pool;
        let scores = &mut self.scores[..groups];
        group_scores(
            compute.pool,
            compute.isa,
            rows,
            groups * rows_per_group,
            rows_per_group,
            &self.queries,
            self.aggregate != Aggregate::Sum,
            None,
            &mut self.scratch,
            scores,
        );
        scores
    }
}
