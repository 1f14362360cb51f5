//! One sequence: prefill, step, statistics, cancellation.

use crate::cache::full::FullCache;
use crate::cache::tier::TieredCache;
use crate::cache::{Compute, KvCache};
use crate::config::{AdapterKind, CacheConfig, Policy};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::model::transformer::Rows;
use crate::plan::{MemoryPlan, PREFILL_ROWS};
use crate::stats::SessionStats;
use forebay_kernels::attention::AttentionScratch;
use forebay_kernels::prefill_attention::PrefillAttention;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How far a prefill is: `done` of `total` units of equal work (a layer's share of a block of tokens).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Units done.
    pub done: u64,
    /// Units in all.
    pub total: u64,
}

/// Is given the index of a token and the logits of what follows it.
pub type LogitsSink<'a> = &'a mut dyn FnMut(usize, &[f32]);

/// Stops a session's current call from any thread; the call returns [`Error::Cancelled`].
#[derive(Clone, Debug, Default)]
pub struct CancelHandle(Arc<AtomicBool>);

impl CancelHandle {
    /// Asks the session to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Lets the session run again.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// One sequence and its cache. Not shared between threads; several sessions of one engine may run on different threads.
pub struct Session {
    engine: Arc<Engine>,
    policy: Policy,
    config: Option<CacheConfig>,
    plan: MemoryPlan,
    capacity: usize,
    prefill_chunk: usize,
    cache: KvCache,
    attention: AttentionScratch,
    rows: Rows,
    /// Queries predicted for the next layer use buffers of their own.
    ahead: Rows,
    hidden: Vec<f32>,
    logits: Vec<f32>,
    tokens: Vec<u32>,
    stats: SessionStats,
    cancel: CancelHandle,
}

/// What [`Session::new`] needs besides the engine.
pub(crate) struct SessionParts {
    pub policy: Policy,
    pub config: Option<CacheConfig>,
    pub plan: MemoryPlan,
    pub capacity: usize,
    pub prefill_chunk: usize,
    pub write_budget: Option<u64>,
}

impl Session {
    pub(crate) fn new(engine: Arc<Engine>, parts: SessionParts) -> Result<Session> {
        let SessionParts { policy, config, plan, capacity, prefill_chunk, write_budget } = parts;
        let shape = engine.shape();
        let cache = match &config {
            None => {
                let threads = engine.transformer().pool().threads();
                KvCache::Full(Box::new(FullCache::new(&shape, capacity, engine.full_element(), threads)?))
            }
            Some(config) => {
                let alignment = engine.alignment()?;
                let open = |layout: &_, groups, plan_groups, arenas: &[_]| {
                    engine.open_store(layout, groups, plan_groups, write_budget, arenas)
                };
                KvCache::Tiered(Box::new(TieredCache::new(
                    shape,
                    config.clone(),
                    capacity,
                    prefill_chunk,
                    alignment,
                    open,
                )?))
            }
        };
        let (pieces, piece_tokens) = cache.pieces_max();
        let attention = AttentionScratch::new(shape.heads, shape.head_dim, pieces * piece_tokens, pieces);
        let transformer = engine.transformer();
        let rows = Rows::new(transformer, 1);
        let ahead = Rows::new(transformer, 1);
        let c = transformer.model().config();
        let stats = SessionStats { kv_memory_bytes: plan.kv_bytes(), ..SessionStats::default() };
        Ok(Session {
            attention,
            hidden: vec![0.0; c.embed],
            logits: vec![0.0; c.vocab],
            tokens: Vec::with_capacity(capacity),
            rows,
            ahead,
            cache,
            policy,
            config,
            plan,
            capacity,
            prefill_chunk,
            stats,
            cancel: CancelHandle::default(),
            engine,
        })
    }

    /// Tokens held.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that the session can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// The settings of the tiers; policy `full` has none.
    pub fn config(&self) -> Option<&CacheConfig> {
        self.config.as_ref()
    }

    /// The memory plan.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// How the sketch's projections were made, once they are.
    pub fn adapter_kind(&self) -> Option<AdapterKind> {
        match &self.cache {
            KvCache::Full(_) => None,
            KvCache::Tiered(tier) => tier.adapter_kind(),
        }
    }

    /// The I/O backend of the store, where there is one.
    pub fn store_backend(&self) -> Option<&'static str> {
        match &self.cache {
            KvCache::Full(_) => None,
            KvCache::Tiered(tier) => tier.store().map(|s| s.capabilities().backend),
        }
    }

    /// A handle that stops a call of this session from another thread or a signal handler.
    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancel.clone()
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.cache.reset();
        self.tokens.clear();
    }

    /// Takes `tokens` into the cache and leaves the logits of what follows in [`Session::logits`].
    ///
    /// `progress` is told how far it is and stops the prefill by returning `false`. When a prefill fails or is stopped, the
    /// session is empty afterwards and can be used again.
    pub fn prefill(&mut self, tokens: &[u32], progress: &mut dyn FnMut(Progress) -> bool) -> Result<()> {
        self.prefill_with(tokens, progress, None)
    }

    /// [`Session::prefill`] that also hands out the logits after every token: `each(index, logits)`.
    pub fn prefill_with(
        &mut self,
        tokens: &[u32],
        progress: &mut dyn FnMut(Progress) -> bool,
        each: Option<LogitsSink<'_>>,
    ) -> Result<()> {
        self.check_tokens(tokens)?;
        if tokens.is_empty() {
            return Err(Error::argument("tokens", "none", "at least one token"));
        }
        if self.tokens.len() + tokens.len() > self.capacity {
            let requested = self.tokens.len() + tokens.len();
            return Err(Error::ContextFull { requested, context: self.capacity });
        }
        self.cache.check_write_budget(tokens.len())?;
        let start = Instant::now();
        let outcome = self.run_prefill(tokens, progress, each);
        if outcome.is_err() {
            self.reset();
        } else {
            self.tokens.extend_from_slice(tokens);
            self.stats.prompt_tokens += tokens.len() as u64;
        }
        self.stats.prefill_seconds += start.elapsed().as_secs_f64();
        outcome
    }

    fn run_prefill(
        &mut self,
        tokens: &[u32],
        progress: &mut dyn FnMut(Progress) -> bool,
        mut each: Option<LogitsSink<'_>>,
    ) -> Result<()> {
        let engine = self.engine.clone();
        let transformer = engine.transformer();
        let (layers, embed) = (engine.shape().layers, engine.shape().embed);
        let chunk = self.prefill_chunk.min(tokens.len());
        let mut rows = Rows::new(transformer, chunk.min(PREFILL_ROWS));
        let mut attention = PrefillAttention::new(
            transformer.pool().threads(),
            engine.shape().heads,
            engine.shape().kv_heads,
            engine.shape().head_dim,
            chunk.min(PREFILL_ROWS),
        );
        let mut hidden = vec![0.0f32; chunk * embed];
        let blocks: u64 = tokens.chunks(chunk).map(|c| c.len().div_ceil(PREFILL_ROWS) as u64).sum();
        let total = blocks * layers as u64;
        let mut done = 0;
        let mut report = |done| if progress(Progress { done, total }) { Ok(()) } else { Err(Error::Cancelled) };
        report(0)?;
        let compute = Compute { pool: transformer.pool(), isa: transformer.isa(), scale: engine.attention_scale() };
        for (index, chunk_tokens) in tokens.chunks(chunk).enumerate() {
            let count = chunk_tokens.len();
            let first_position = self.cache.tokens();
            transformer.embed(chunk_tokens, &mut hidden);
            self.cache.prefill_begin(count)?;
            for layer in 0..layers {
                self.cache.prefill_layer_begin(layer)?;
                for first in (0..count).step_by(PREFILL_ROWS) {
                    self.cancel.check()?;
                    let n = PREFILL_ROWS.min(count - first);
                    let hidden = &mut hidden[first * embed..(first + n) * embed];
                    transformer.set_positions(&mut rows, first_position + first, n);
                    transformer.qkv(layer, hidden, n, &mut rows);
                    let (q_width, kv_width) = engine.widths();
                    let (q, k, v) = (&mut rows.q[..n * q_width], &rows.k[..n * kv_width], &rows.v[..n * kv_width]);
                    self.cache.prefill_rows(&compute, layer, first, q, k, v)?;
                    self.cache.prefill_attend(&compute, &mut attention, layer, first, n, q)?;
                    transformer.finish_layer(layer, hidden, n, &mut rows);
                    done += 1;
                    report(done)?;
                }
                self.cache.prefill_layer_end(&compute, layer)?;
            }
            self.cache.prefill_commit()?;
            if let Some(each) = &mut each {
                for i in 0..count {
                    transformer.logits(&hidden[i * embed..(i + 1) * embed], &mut self.rows, &mut self.logits);
                    each(index * chunk + i, &self.logits);
                }
            }
            self.hidden.copy_from_slice(&hidden[(count - 1) * embed..count * embed]);
        }
        transformer.logits(&self.hidden, &mut self.rows, &mut self.logits);
        let peak = self.plan.prefill_bytes();
        self.stats.prefill_peak_bytes = self.stats.prefill_peak_bytes.max(peak);
        Ok(())
    }

    /// Logits of what follows the last token, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// The same, for a sampler that changes them in place.
    pub fn logits_mut(&mut self) -> &mut [f32] {
        &mut self.logits
    }

    /// Takes one token into the cache and leaves the logits of what follows in [`Session::logits`].
    ///
    /// When a step fails, for example because the disk does, the session is as before it and the step can be tried again.
    pub fn step(&mut self, token: u32) -> Result<()> {
        self.check_tokens(&[token])?;
        if self.tokens.len() >= self.capacity {
            return Err(Error::ContextFull { requested: self.tokens.len() + 1, context: self.capacity });
        }
        self.cache.check_write_budget(1)?;
        let start = Instant::now();
        let outcome = self.run_step(token);
        self.stats.decode_seconds += start.elapsed().as_secs_f64();
        if outcome.is_ok() {
            self.tokens.push(token);
            self.stats.steps += 1;
        }
        outcome
    }

    fn run_step(&mut self, token: u32) -> Result<()> {
        let engine = &self.engine;
        let transformer = engine.transformer();
        let compute = Compute { pool: transformer.pool(), isa: transformer.isa(), scale: engine.attention_scale() };
        let layers = engine.shape().layers;
        let (q_width, kv_width) = engine.widths();
        let predicts = self.cache.wants_prediction();
        transformer.embed(&[token], &mut self.hidden);
        transformer.set_positions(&mut self.rows, self.tokens.len(), 1);
        transformer.set_positions(&mut self.ahead, self.tokens.len(), 1);
        if predicts {
            transformer.queries(0, &self.hidden, &mut self.ahead);
        }
        self.cache.predict(&compute, 0, &self.ahead.q[..q_width])?;
        for layer in 0..layers {
            self.cancel.check()?;
            if layer + 1 < layers {
                if predicts {
                    transformer.queries(layer + 1, &self.hidden, &mut self.ahead);
                }
                self.cache.predict(&compute, layer + 1, &self.ahead.q[..q_width])?;
            }
            transformer.qkv(layer, &self.hidden, 1, &mut self.rows);
            self.cache.append(layer, &self.rows.k[..kv_width], &self.rows.v[..kv_width])?;
            // Queries go in through the buffers of the prediction, which has been submitted: attention's result replaces them.
            self.ahead.q[..q_width].copy_from_slice(&self.rows.q[..q_width]);
            let (q, out) = (&self.ahead.q[..q_width], &mut self.rows.q[..q_width]);
            self.cache.attend(&compute, layer, q, &mut self.attention, out)?;
            transformer.finish_layer(layer, &mut self.hidden, 1, &mut self.rows);
        }
        transformer.logits(&self.hidden, &mut self.rows, &mut self.logits);
        self.cache.commit_token(&compute)
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.logits.len();
        match tokens.iter().find(|&&t| t as usize >= vocab) {
            Some(t) => Err(Error::argument("token", t, format!("less than the vocabulary's {vocab}"))),
            None => Ok(()),
        }
    }

    /// Counters and times up to now.
    pub fn stats(&self) -> SessionStats {
        let mut stats = self.stats.clone();
        stats.kv_full_bytes = self.engine.shape().full_bytes(self.tokens.len());
        if let KvCache::Tiered(tier) = &self.cache {
            let t = tier.stats();
            (stats.groups_selected, stats.groups_reused, stats.groups_refined) = (t.selected, t.reused, t.refined);
            if let Some(store) = tier.store() {
                let s = store.stats();
                stats.disk_bytes_written = s.bytes_written;
                stats.disk_bytes_read = s.bytes_read;
                stats.disk_reads = s.reads;
                stats.io_wait_seconds = s.io_wait_seconds;
                stats.io_busy_seconds = s.io_busy_seconds;
            }
        }
        stats
    }
}
