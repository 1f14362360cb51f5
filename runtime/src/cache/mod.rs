//! The KV tiers of one sequence: sinks, rolling window, key sketch and reuse buffer in memory, groups in the store.

pub mod adapter;
pub mod block_table;
pub mod full;
pub mod group;
pub mod policy;
pub mod predictor;
mod prefill;
pub mod reuse;
mod step;
pub mod tier;

use crate::error::Result;
use forebay_kernels::Pool;
use forebay_kernels::{Isa, attention::AttentionScratch, prefill_attention::PrefillAttention};

/// What the cache borrows from its session for one call.
pub struct Compute<'a> {
    /// Worker threads.
    pub pool: &'a Pool,
    /// Instruction set.
    pub isa: Isa,
    /// `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// The cache of one sequence.
pub enum KvCache {
    /// Everything in memory.
    Full(Box<full::FullCache>),
    /// Tiers and a store.
    Tiered(Box<tier::TieredCache>),
}

macro_rules! each {
    ($cache:expr, $inner:ident => $call:expr) => {
        match $cache {
            KvCache::Full($inner) => $call,
            KvCache::Tiered($inner) => $call,
        }
    };
}

impl KvCache {
    /// Tokens held.
    pub fn tokens(&self) -> usize {
        each!(self, c => c.tokens())
    }

    /// Most pieces that a step's block table holds, and most tokens of one.
    pub fn pieces_max(&self) -> (usize, usize) {
        each!(self, c => c.pieces_max())
    }

    /// Errors where `count` more tokens would write more than the store's budget.
    pub fn check_write_budget(&self, count: usize) -> Result<()> {
        match self {
            KvCache::Full(_) => Ok(()),
            KvCache::Tiered(tier) => tier.check_write_budget(count),
        }
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        each!(self, c => c.reset())
    }

    /// Whether decode wants the queries of layer `layer` predicted.
    pub fn wants_prediction(&self) -> bool {
        match self {
            KvCache::Full(_) => false,
            KvCache::Tiered(tier) => tier.wants_prediction(),
        }
    }

    /// Selects layer `layer`'s groups by the predicted queries `q`, `[heads][head_dim]`, and submits the reads.
    pub fn predict(&mut self, compute: &Compute<'_>, layer: usize, q: &[f32]) -> Result<()> {
        match self {
            KvCache::Full(_) => Ok(()),
            KvCache::Tiered(tier) => tier.predict(compute, layer, q),
        }
    }

    /// Stores the key and value of the token at hand, `[kv_heads][head_dim]` each.
    pub fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        each!(self, c => c.append(layer, k, v))
    }

    /// Attention of the token at hand: `q` and `out` are `[heads][head_dim]`.
    pub fn attend(
        &mut self,
        compute: &Compute<'_>,
        layer: usize,
        q: &[f32],
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) -> Result<()> {
        each!(self, c => c.attend(compute, layer, q, scratch, out))
    }

    /// The token at hand has been through all layers.
    pub fn commit_token(&mut self, compute: &Compute<'_>) -> Result<()> {
        each!(self, c => c.commit_token(compute))
    }

    /// Starts a prefill of `count` tokens after those held.
    pub fn prefill_begin(&mut self, count: usize) -> Result<()> {
        each!(self, c => c.prefill_begin(count))
    }

    /// Starts layer `layer` of a prefill.
    pub fn prefill_layer_begin(&mut self, layer: usize) -> Result<()> {
        each!(self, c => c.prefill_layer_begin(layer))
    }

    /// Stores K and V, `[rows][kv_heads][head_dim]`, of the prefill's tokens from number `first` on, and counts the queries
    /// `q`, `[rows][heads][head_dim]`, for the sketch.
    pub fn prefill_rows(
        &mut self,
        compute: &Compute<'_>,
        layer: usize,
        first: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<()> {
        each!(self, c => c.prefill_rows(compute, layer, first, q, k, v))
    }

    /// Causal attention of the prefill's tokens from number `first` on over everything up to themselves; `q` is
    /// `[rows][heads][head_dim]` and is replaced by the result.
    pub fn prefill_attend(
        &mut self,
        compute: &Compute<'_>,
        attention: &mut PrefillAttention,
        layer: usize,
        first: usize,
        rows: usize,
        q: &mut [f32],
    ) -> Result<()> {
        each!(self, c => c.prefill_attend(compute, attention, layer, first, rows, q))
    }

    /// Ends layer `layer`: sketch, window and sinks are filled, complete groups go to the store.
    pub fn prefill_layer_end(&mut self, compute: &Compute<'_>, layer: usize) -> Result<()> {
        each!(self, c => c.prefill_layer_end(compute, layer))
    }

    /// Ends the prefill: its tokens are held now.
    pub fn prefill_commit(&mut self) -> Result<()> {
        each!(self, c => c.prefill_commit())
    }
}
