//! The arithmetic of a decoder layer, between the hidden state and the cache.

use super::Model;
use forebay_kernels::norm::{add_assign, rms_norm, silu_mul};
use forebay_kernels::rope::{RopeTable, rope_apply};
use forebay_kernels::{Activations, GemmScratch, GemvJob, Isa, Pool, Precision, dequantize_rows, gemm, gemv};
use std::sync::Arc;

/// Up to this many rows share one pass over the quantised weights; more go through the blocked product.
const GEMV_ROWS: usize = 8;

/// A model with the threads and instruction set that compute it. Shared by all sessions; calls may come from several threads.
pub struct Transformer {
    model: Arc<Model>,
    pool: Arc<Pool>,
    isa: Isa,
    precision: Precision,
    rope: RopeTable,
}

/// Buffers for up to `rows` tokens going through a layer together.
pub struct Rows {
    rows: usize,
    normed: Vec<f32>,
    /// Queries, then attention's result: `[rows][heads][head_dim]`.
    pub q: Vec<f32>,
    /// Keys: `[rows][kv_heads][head_dim]`.
    pub k: Vec<f32>,
    /// Values: `[rows][kv_heads][head_dim]`.
    pub v: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    projected: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    activations: Activations,
    gemm: GemmScratch,
}

impl Rows {
    /// Buffers for `rows` tokens; the first token's position is set by [`Transformer::set_positions`].
    pub fn new(transformer: &Transformer, rows: usize) -> Rows {
        let c = transformer.model.config();
        let widest = c.embed.max(c.ffn).max(c.heads * c.head_dim);
        let threads = transformer.pool.threads();
        Rows {
            rows,
            normed: vec![0.0; rows * c.embed],
            q: vec![0.0; rows * c.heads * c.head_dim],
            k: vec![0.0; rows * c.kv_heads * c.head_dim],
            v: vec![0.0; rows * c.kv_heads * c.head_dim],
            gate: vec![0.0; rows * c.ffn],
            up: vec![0.0; rows * c.ffn],
            projected: vec![0.0; rows * c.embed],
            cos: vec![0.0; rows * c.head_dim / 2],
            sin: vec![0.0; rows * c.head_dim / 2],
            activations: Activations::new(rows.min(GEMV_ROWS), widest),
            gemm: GemmScratch::new(if rows > GEMV_ROWS { threads } else { 0 }, widest),
        }
    }
}

impl Transformer {
    /// A model computed by `pool` with `isa`.
    pub fn new(model: Arc<Model>, pool: Arc<Pool>, isa: Isa, precision: Precision) -> Transformer {
        let c = model.config();
        let factors = model.rope_freq_factors();
        let rope = RopeTable::new(c.head_dim, c.rope_dims, c.rope_base, factors, c.rope_scale);
        Transformer { model, pool, isa, precision, rope }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The worker threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The worker threads, to keep.
    pub fn shared_pool(&self) -> Arc<Pool> {
        self.pool.clone()
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Hidden states of `tokens` into `hidden`, `[tokens][embed]`.
    pub fn embed(&self, tokens: &[u32], hidden: &mut [f32]) {
        let width = self.model.config().embed;
        for (&token, out) in tokens.iter().zip(hidden.chunks_exact_mut(width)) {
            dequantize_rows(self.isa, &self.model.token_embedding(), token as usize, out);
        }
    }

    /// Rotary angles for `count` tokens from position `first` on.
    pub fn set_positions(&self, rows: &mut Rows, first: usize, count: usize) {
        let half = self.model.config().head_dim / 2;
        for i in 0..count {
            let (cos, sin) = (&mut rows.cos[i * half..(i + 1) * half], &mut rows.sin[i * half..(i + 1) * half]);
            self.rope.angles(first + i, cos, sin);
        }
    }

    /// Products of the same `count` rows of input with several weights.
    fn linear(
        &self,
        activations: &mut Activations,
        scratch: &mut GemmScratch,
        x: &[f32],
        count: usize,
        jobs: &mut [GemvJob<'_>],
    ) {
        let cols = jobs[0].weight.cols();
        if count <= GEMV_ROWS {
            activations.set(self.isa, &x[..count * cols], count, cols, self.precision);
            gemv(&self.pool, self.isa, activations, jobs);
        } else {
            for job in jobs {
                gemm(&self.pool, self.isa, &job.weight, &x[..count * cols], job.out, false, scratch);
            }
        }
    }

    fn rotate(&self, x: &mut [f32], cos: &[f32], sin: &[f32], row_width: usize) {
        let half = self.model.config().head_dim / 2;
        let style = self.model.config().rope_style;
        self.pool.for_each_chunk(x, row_width, |_, i, row| {
            rope_apply(self.isa, style, row, &cos[i * half..(i + 1) * half], &sin[i * half..(i + 1) * half]);
        });
    }

    fn norm_rows(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let width = weight.len();
        let eps = self.model.config().norm_eps;
        let rows_per_task = 16;
        self.pool.for_each_chunk(out, rows_per_task * width, |_, task, out| {
            let from = task * rows_per_task * width;
            rms_norm(self.isa, &x[from..from + out.len()], weight, eps, out);
        });
    }

    /// Queries, keys and values of layer `layer` for `count` rows of hidden states: norm, projections, biases, rotation.
    pub fn qkv(&self, layer: usize, hidden: &[f32], count: usize, rows: &mut Rows) {
        assert!(count <= rows.rows, "{count} rows exceed the buffers for {}", rows.rows);
        let c = self.model.config();
        let w = self.model.layer(layer);
        let (q_width, kv_width) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let normed = &mut rows.normed[..count * c.embed];
        self.norm_rows(&hidden[..count * c.embed], w.attn_norm, normed);
        let (q, k, v) =
            (&mut rows.q[..count * q_width], &mut rows.k[..count * kv_width], &mut rows.v[..count * kv_width]);
        let mut jobs = [
            GemvJob { weight: w.q, out: &mut *q },
            GemvJob { weight: w.k, out: &mut *k },
            GemvJob { weight: w.v, out: &mut *v },
        ];
        self.linear(&mut rows.activations, &mut rows.gemm, normed, count, &mut jobs);
        for (x, bias) in [(&mut *q, w.q_bias), (&mut *k, w.k_bias), (&mut *v, w.v_bias)] {
            self.add_bias(x, bias);
        }
        self.rotate(q, &rows.cos, &rows.sin, q_width);
        self.rotate(k, &rows.cos, &rows.sin, kv_width);
    }

    /// The queries that layer `layer` would make of one row of hidden state, into `rows.q`: norm, projection, bias, rotation.
    /// With the input of the layer before, this is the prediction one layer ahead (Lee et al., InfiniGen; KVSwap).
    pub fn queries(&self, layer: usize, hidden: &[f32], rows: &mut Rows) {
        let c = self.model.config();
        let w = self.model.layer(layer);
        let q_width = c.heads * c.head_dim;
        let normed = &mut rows.normed[..c.embed];
        self.norm_rows(&hidden[..c.embed], w.attn_norm, normed);
        let q = &mut rows.q[..q_width];
        let mut jobs = [GemvJob { weight: w.q, out: &mut *q }];
        self.linear(&mut rows.activations, &mut rows.gemm, normed, 1, &mut jobs);
        self.add_bias(q, w.q_bias);
        self.rotate(q, &rows.cos, &rows.sin, q_width);
    }

    fn add_bias(&self, x: &mut [f32], bias: Option<&[f32]>) {
        if let Some(bias) = bias {
            for row in x.chunks_exact_mut(bias.len()) {
                add_assign(self.isa, row, bias);
            }
        }
    }

    /// The rest of layer `layer` for `count` rows: output projection of the attention in `rows.q`, feed-forward, both added to
    /// `hidden`.
    pub fn finish_layer(&self, layer: usize, hidden: &mut [f32], count: usize, rows: &mut Rows) {
        let c = self.model.config();
        let w = self.model.layer(layer);
        let hidden = &mut hidden[..count * c.embed];
        let attention = &rows.q[..count * c.heads * c.head_dim];
        let projected = &mut rows.projected[..count * c.embed];
        let mut jobs = [GemvJob { weight: w.o, out: &mut *projected }];
        self.linear(&mut rows.activations, &mut rows.gemm, attention, count, &mut jobs);
        add_assign(self.isa, hidden, projected);
        let normed = &mut rows.normed[..count * c.embed];
        self.norm_rows(hidden, w.ffn_norm, normed);
        let (gate, up) = (&mut rows.gate[..count * c.ffn], &mut rows.up[..count * c.ffn]);
        let mut jobs = [GemvJob { weight: w.gate, out: &mut *gate }, GemvJob { weight: w.up, out: &mut *up }];
        self.linear(&mut rows.activations, &mut rows.gemm, normed, count, &mut jobs);
        let chunk = c.ffn * 16;
        self.pool.for_each_chunk(gate, chunk, |_, i, gate| {
            silu_mul(self.isa, gate, &up[i * chunk..i * chunk + gate.len()]);
        });
        let mut jobs = [GemvJob { weight: w.down, out: &mut *projected }];
        self.linear(&mut rows.activations, &mut rows.gemm, gate, count, &mut jobs);
        add_assign(self.isa, hidden, projected);
    }

    /// Logits of one row of hidden state, `[vocab]`.
    pub fn logits(&self, hidden: &[f32], rows: &mut Rows, logits: &mut [f32]) {
        let c = self.model.config();
        let normed = &mut rows.normed[..c.embed];
        self.norm_rows(&hidden[..c.embed], self.model.output_norm(), normed);
        let mut jobs = [GemvJob { weight: self.model.output(), out: logits }];
        self.linear(&mut rows.activations, &mut rows.gemm, normed, 1, &mut jobs);
    }
}
