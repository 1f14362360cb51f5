//! Prefill of the tiers: one layer at a time, its K/V in one of two buffers while the other is written to the store.

use super::Compute;
use super::adapter::{Adapter, Moments};
use super::group::GroupLayout;
use super::tier::{PREFILL_REGION, TieredCache};
use crate::config::AdapterKind;
use crate::error::{Error, Result};
use crate::plan::{PAST_BUFFER_BYTES, layer_buffer_bytes};
use crate::store::{Arena, ArenaOptions, Store, Ticket};
use forebay_kernels::covariance::covariance_add;
use forebay_kernels::dense::project;
use forebay_kernels::prefill_attention::PrefillAttention;
use std::ops::Range;
use std::sync::Arc;

/// A prompt shorter than this makes no projections: they are made from the stored keys once selection needs them.
const MIN_FIT_TOKENS: usize = 256;
/// Alignment of the past buffers inside the arena.
const PAGE: usize = 4096;

/// A prefill under way.
pub(super) struct PrefillState {
    count: usize,
    writes: [Option<Ticket>; 2],
    moments: Moments,
}

/// Memory of prefill: address space is taken with the session, pages come with use and go back after every prefill.
pub(super) struct PrefillBuffers {
    /// Two layer buffers of `half` bytes, whose first record is the group that was being filled; then two past buffers.
    arena: Arc<Arena>,
    half: usize,
    past_half: usize,
}

impl PrefillBuffers {
    /// Buffers for prefills of up to `tokens` tokens.
    pub(super) fn new(layout: &GroupLayout, tokens: usize) -> Result<PrefillBuffers> {
        let half = layer_buffer_bytes(layout, tokens);
        let past_half = PAST_BUFFER_BYTES.max(layout.stride) / layout.stride * layout.stride;
        let transient = ArenaOptions { transient: true, ..ArenaOptions::default() };
        let past_base = (2 * half).next_multiple_of(PAGE);
        Ok(PrefillBuffers { arena: Arena::with_options(past_base + 2 * past_half, transient)?, half, past_half })
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn layer_range(&self, layer: usize) -> Range<usize> {
        let at = layer % 2 * self.half;
        at..at + self.half
    }

    /// Gives the pages back. Nothing may be in flight.
    pub(super) fn release(&self) {
        // SAFETY: called between prefills, when no slice and no I/O of this arena is left.
        unsafe { self.arena.release() };
    }

    fn past_start(&self, block: usize) -> usize {
        (2 * self.half).next_multiple_of(PAGE) + block % 2 * self.past_half
    }
}

impl TieredCache {
    /// Starts a prefill of `count` tokens.
    pub fn prefill_begin(&mut self, count: usize) -> Result<()> {
        self.drain();
        let layout = self.sizes.layout;
        if layer_buffer_bytes(&layout, count) > self.buffers.half {
            return Err(Error::internal(format!("prefill of {count} tokens exceeds its buffers")));
        }
        let moments = Moments::new(layout.kv_heads, layout.head_dim);
        self.prefill = Some(PrefillState { count, writes: [None, None], moments });
        Ok(())
    }

    fn prefill_state(&mut self) -> Result<&mut PrefillState> {
        self.prefill.as_mut().ok_or_else(|| Error::internal("no prefill has begun"))
    }

    /// Starts a layer: its buffer is free once the writes of the layer before the last are done.
    pub fn prefill_layer_begin(&mut self, layer: usize) -> Result<()> {
        let first_group = self.group_now();
        let partial = !self.tokens.is_multiple_of(self.sizes.layout.group);
        let stride = self.sizes.layout.stride;
        let state = self.prefill_state()?;
        state.moments.clear();
        let ticket = state.writes[layer % 2].take();
        if let (Some(ticket), Some(store)) = (ticket, &mut self.store) {
            store.wait(ticket)?;
        }
        if partial {
            let (arena, at) = (self.buffers.arena.clone(), self.buffers.layer_range(layer).start);
            // SAFETY: the writes out of this buffer have been waited for, and `&mut self` excludes other slices of it.
            unsafe { arena.slice_mut(at..at + stride) }.copy_from_slice(self.window_record(layer, first_group));
        }
        Ok(())
    }

    /// Stores K and V of tokens from number `first` of the prefill on, and counts keys and queries for the sketch.
    pub fn prefill_rows(
        &mut self,
        compute: &Compute<'_>,
        layer: usize,
        first: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<()> {
        let layout = self.sizes.layout;
        let (dim, d) = (layout.key_dim(), layout.head_dim);
        let base = self.tokens % layout.group + first;
        let rows = k.len() / dim;
        let heads = self.shape.heads;
        let wants_moments = self.wants_moments();
        let query_aware = self.config.adapter == AdapterKind::QueryAware;
        let arena = self.buffers.arena.clone();
        let range = self.buffers.layer_range(layer);
        // SAFETY: this buffer's earlier writes were waited for in `prefill_layer_begin`, and `&mut self` excludes other slices.
        let buffer = unsafe { arena.slice_mut(range) };
        let state = self.prefill_state()?;
        let first_record = base / layout.group;
        let records = (base + rows).div_ceil(layout.group) - first_record;
        let span = &mut buffer[first_record * layout.stride..(first_record + records) * layout.stride];
        compute.pool.for_each_chunk(span, layout.stride, |_, i, record| {
            let record_first = (first_record + i) * layout.group;
            for token in record_first.max(base)..(record_first + layout.group).min(base + rows) {
                let row = (token - base) * dim;
                layout.write_token(record, token - record_first, &k[row..row + dim], &v[row..row + dim]);
            }
        });
        if wants_moments {
            let m = &mut state.moments;
            covariance_add(compute.pool, compute.isa, k, dim, rows, &mut m.key_sum, &mut m.key_outer);
            m.key_count += rows;
            if query_aware {
                let per_kv = heads / layout.kv_heads;
                let mut unused = vec![0.0; d];
                for head in 0..heads {
                    let outer = &mut m.query_outer[head / per_kv * d * d..][..d * d];
                    covariance_add(compute.pool, compute.isa, &q[head * d..], heads * d, rows, &mut unused, outer);
                }
                m.query_count += rows * per_kv;
            }
        }
        Ok(())
    }

    /// Whether the prefill at hand makes the projections.
    fn wants_moments(&self) -> bool {
        self.sizes.sketch_rows > 0
            && self.tokens == 0
            && self.prefill.as_ref().is_some_and(|p| p.count >= MIN_FIT_TOKENS)
    }

    /// Causal attention of `rows` tokens from number `first` of the prefill on; `q` is replaced by the result.
    pub fn prefill_attend(
        &mut self,
        compute: &Compute<'_>,
        attention: &mut PrefillAttention,
        layer: usize,
        first: usize,
        rows: usize,
        q: &mut [f32],
    ) -> Result<()> {
        let layout = self.sizes.layout;
        let (start, past_groups) = (self.tokens + first, self.group_now());
        attention.begin(rows);
        if self.store.is_some() {
            self.stream_groups(layer, 0..past_groups, |bytes, groups| {
                let (first_key, count) = (groups.start * layout.group, groups.len() * layout.group);
                attention.accumulate(
                    compute.pool,
                    compute.isa,
                    q,
                    start,
                    &layout.records(bytes),
                    first_key,
                    count,
                    compute.scale,
                );
                Ok(())
            })?;
        } else {
            // Without a store the past is what is still resident.
            for group in self.resident_groups(past_groups) {
                let (resident, range) = self.group_record(layer, group, past_groups);
                // SAFETY: only reads here; `&mut self` keeps the writers of the resident arena from running.
                let record = unsafe { resident.slice(range) };
                let first_key = group * layout.group;
                attention.accumulate(
                    compute.pool,
                    compute.isa,
                    q,
                    start,
                    &layout.records(record),
                    first_key,
                    layout.group,
                    compute.scale,
                );
            }
        }
        // SAFETY: only reads here; `&mut self` keeps `prefill_rows` from writing meanwhile.
        let own = unsafe { self.buffers.arena.slice(self.buffers.layer_range(layer)) };
        let own_first = past_groups * layout.group;
        attention.accumulate(
            compute.pool,
            compute.isa,
            q,
            start,
            &layout.records(own),
            own_first,
            start + rows - own_first,
            compute.scale,
        );
        attention.finish(q);
        Ok(())
    }

    /// Streams stored groups back in order through the two past buffers, one read ahead.
    fn stream_groups(
        &mut self,
        layer: usize,
        groups: Range<usize>,
        mut read: impl FnMut(&[u8], Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let stride = self.sizes.layout.stride;
        let (past, per_half) = (self.buffers.arena.clone(), self.buffers.past_half / stride);
        let starts = [self.buffers.past_start(0), self.buffers.past_start(1)];
        let store = self.store.as_mut().ok_or_else(|| Error::internal("no store to stream from"))?;
        let block = |i: usize| {
            let start = groups.start + i * per_half;
            start.min(groups.end)..(start + per_half).min(groups.end)
        };
        let submit = |store: &mut Store, i: usize| -> Result<Option<Ticket>> {
            let range = block(i);
            if range.is_empty() {
                return Ok(None);
            }
            let (first, count) = (range.start as u32, range.len() as u32);
            Ok(Some(store.submit_read_range(layer as u32, first, count, PREFILL_REGION, starts[i % 2] as u64)?))
        };
        let mut pending = submit(store, 0)?;
        let mut i = 0;
        while let Some(ticket) = pending {
            let next = submit(store, i + 1);
            let outcome = store.wait(ticket);
            pending = next?;
            let range = block(i);
            let done = outcome.map_err(Error::from).and_then(|()| {
                let at = starts[i % 2];
                // SAFETY: the read into this half is complete and the next one goes to the other half.
                read(unsafe { past.slice(at..at + range.len() * stride) }, range)
            });
            if let Err(e) = done {
                if let Some(ticket) = pending {
                    let _ = store.wait(ticket);
                }
                return Err(e);
            }
            i += 1;
        }
        Ok(())
    }

    /// Ends a layer of the prefill.
    pub fn prefill_layer_end(&mut self, compute: &Compute<'_>, layer: usize) -> Result<()> {
        let layout = self.sizes.layout;
        let wants_moments = self.wants_moments();
        let first_group = self.group_now();
        let state = self.prefill.as_ref().ok_or_else(|| Error::internal("no prefill has begun"))?;
        let end = self.tokens + state.count;
        let end_group = end / layout.group;
        if wants_moments {
            self.adapters[layer] = Some(Adapter::fit(self.config.adapter, &state.moments, self.config.rank)?);
        }
        let (arena, range) = (self.buffers.arena.clone(), self.buffers.layer_range(layer));
        // SAFETY: this buffer is only read until `prefill_layer_begin` of the layer after the next.
        let buffer = unsafe { arena.slice(range.clone()) };
        let complete = end_group - first_group;
        if let Some(store) = &mut self.store
            && complete > 0
        {
            let ticket = store.submit_write(
                layer as u32,
                first_group as u32,
                complete as u32,
                PREFILL_REGION,
                range.start as u64,
            )?;
            self.prefill_state()?.writes[layer % 2] = Some(ticket);
        }
        self.encode_groups(compute, layer, first_group, &buffer[..complete * layout.stride]);
        let record =
            |group: usize| &buffer[(group - first_group) * layout.stride..(group - first_group + 1) * layout.stride];
        for group in first_group..end_group.min(self.sizes.sink_slots) {
            self.set_sink(layer, group, record(group));
        }
        let partial = usize::from(!end.is_multiple_of(layout.group));
        for group in self.window_start(end_group).max(first_group)..end_group + partial {
            self.window_record(layer, group).copy_from_slice(record(group));
        }
        Ok(())
    }

    /// Ends the prefill: its tokens are held, its buffers are given back.
    pub fn prefill_commit(&mut self) -> Result<()> {
        let mut state = self.prefill.take().ok_or_else(|| Error::internal("no prefill has begun"))?;
        if let Some(store) = &mut self.store {
            for ticket in state.writes.iter_mut().filter_map(Option::take) {
                store.wait(ticket)?;
            }
        }
        self.tokens += state.count;
        self.buffers.release();
        Ok(())
    }

    /// Sketch rows of consecutive groups of a layer, in parallel; nothing where the layer has no projections yet.
    fn encode_groups(&mut self, compute: &Compute<'_>, layer: usize, first_group: usize, records: &[u8]) {
        let Some(adapter) = &self.adapters[layer] else { return };
        let (layout, pool) = (self.sizes.layout, self.config.sketch_pool);
        let first = first_group * self.sizes.group_rows;
        let range = first..first + records.len() / layout.stride * self.sizes.group_rows;
        self.sketch[layer].set_all(compute.pool, range, |rows, out| {
            let mut key = vec![0.0f32; layout.key_dim()];
            for (row, out) in rows.zip(out.chunks_exact_mut(self.config.rank)) {
                let (group, row) = ((row - first) / self.sizes.group_rows, row % self.sizes.group_rows);
                let record = &records[group * layout.stride..(group + 1) * layout.stride];
                pooled_key(&layout, record, row * pool, pool, &adapter.mean, &mut key);
                project(compute.isa, &adapter.key_side, &key, key.len(), out);
            }
        });
    }

    /// Sketch rows of one group that was completed by a step. The two small buffers live in the cache: a step allocates nothing.
    pub(super) fn encode_rows(&mut self, compute: &Compute<'_>, layer: usize, group: usize, record: &[u8]) {
        let Some(adapter) = &self.adapters[layer] else { return };
        let (layout, pool, rows) = (self.sizes.layout, self.config.sketch_pool, self.sizes.group_rows);
        for row in 0..rows {
            pooled_key(&layout, record, row * pool, pool, &adapter.mean, &mut self.key_row);
            project(compute.isa, &adapter.key_side, &self.key_row, layout.key_dim(), &mut self.sketch_row);
            self.sketch[layer].set(group * rows + row, &self.sketch_row);
        }
    }

    /// Makes the projections of a layer from the keys in the store, and the sketch of all its complete groups: for a session
    /// whose prompt was too short to make them. Happens once per layer, when there is first more than can all be selected; the
    /// records pass twice through the layer's half of staging, and only the sums are allocated for the moment.
    pub(super) fn fit_from_store(&mut self, compute: &Compute<'_>, layer: usize) -> Result<()> {
        let layout = self.sizes.layout;
        let (groups, dim) = (self.group_now(), layout.key_dim());
        let mut moments = Moments::new(layout.kv_heads, layout.head_dim);
        let mut keys = vec![0.0f32; layout.group * dim];
        for pass in 0..2 {
            let mut first = 0;
            while first < groups {
                let end = (first + self.sizes.staging_slots).min(groups);
                let (staging, range) = self.read_into_staging(layer, first..end)?;
                // SAFETY: the read has completed, and nothing is submitted into this half before the slice is dropped.
                let bytes = unsafe { staging.slice(range) };
                if pass == 1 {
                    self.encode_groups(compute, layer, first, bytes);
                } else {
                    for record in bytes.chunks_exact(layout.stride) {
                        for (token, key) in keys.chunks_exact_mut(dim).enumerate() {
                            layout.read_key(record, token, false, key);
                        }
                        let (sum, outer) = (&mut moments.key_sum, &mut moments.key_outer);
                        covariance_add(compute.pool, compute.isa, &keys, dim, layout.group, sum, outer);
                        moments.key_count += layout.group;
                    }
                }
                first = end;
            }
            if pass == 0 {
                self.adapters[layer] = Some(Adapter::fit(self.config.adapter, &moments, self.config.rank)?);
            }
        }
        Ok(())
    }
}

/// Mean of `pool` keys from token `first` of a record on, less `mean`.
fn pooled_key(layout: &GroupLayout, record: &[u8], first: usize, pool: usize, mean: &[f32], out: &mut [f32]) {
    for token in 0..pool {
        layout.read_key(record, first + token, token > 0, out);
    }
    let share = 1.0 / pool as f32;
    for (x, m) in out.iter_mut().zip(mean) {
        *x = *x * share - m;
    }
}
