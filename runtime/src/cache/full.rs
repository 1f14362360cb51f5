//! Policy `full`: the whole cache in memory, for exact attention; in f16 as in the store, or in f32 to verify arithmetic.

use super::Compute;
use super::block_table::BlockTable;
use super::group::GroupLayout;
use crate::error::{Error, Result};
use crate::plan::{FULL_GROUP, ModelShape, full_layout};
use crate::store::Arena;
use forebay_kernels::attention::{AttentionScratch, attend};
use forebay_kernels::prefill_attention::{KvElement, KvRecords, PrefillAttention};
use std::sync::Arc;

/// K and V of all tokens: `[layers][records]`, each record as in `docs/formats.md` with 256 tokens.
pub struct FullCache {
    layout: GroupLayout,
    element: KvElement,
    /// Attention over f32 records; the decode kernel reads f16 ones.
    exact: Option<PrefillAttention>,
    memory: Arc<Arena>,
    records: usize,
    capacity: usize,
    table: BlockTable,
    tokens: usize,
    prefill_tokens: usize,
}

impl FullCache {
    /// Room for `capacity` tokens.
    pub fn new(shape: &ModelShape, capacity: usize, element: KvElement, threads: usize) -> Result<FullCache> {
        let layout = full_layout(shape, element);
        let exact = (element == KvElement::F32)
            .then(|| PrefillAttention::new(threads, shape.heads, shape.kv_heads, shape.head_dim, 1));
        let records = capacity.div_ceil(FULL_GROUP).max(1);
        let memory = Arena::new(shape.layers * records * layout.stride)?;
        let table = BlockTable::new(records);
        Ok(FullCache { layout, element, exact, memory, records, capacity, table, tokens: 0, prefill_tokens: 0 })
    }

    /// Tokens held.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Most pieces of a block table, and most tokens of one.
    pub fn pieces_max(&self) -> (usize, usize) {
        (self.records, FULL_GROUP)
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.tokens = 0;
        self.prefill_tokens = 0;
    }

    fn layer_range(&self, layer: usize) -> std::ops::Range<usize> {
        let bytes = self.records * self.layout.stride;
        layer * bytes..(layer + 1) * bytes
    }

    fn write(&mut self, layer: usize, position: usize, k: &[f32], v: &[f32]) {
        let start = self.layer_range(layer).start + position / FULL_GROUP * self.layout.stride;
        // SAFETY: no I/O ever touches this arena, and `&mut self` makes this the only slice into it.
        let record = unsafe { self.memory.slice_mut(start..start + self.layout.stride) };
        match self.element {
            KvElement::F16 => self.layout.write_token(record, position % FULL_GROUP, k, v),
            KvElement::F32 => self.layout.write_token_f32(record, position % FULL_GROUP, k, v),
        }
    }

    /// Stores the token at hand.
    pub fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        if self.tokens >= self.capacity {
            return Err(Error::ContextFull { requested: self.tokens + 1, context: self.capacity });
        }
        self.write(layer, self.tokens, k, v);
        Ok(())
    }

    /// Exact attention of the token at hand.
    pub fn attend(
        &mut self,
        compute: &Compute<'_>,
        layer: usize,
        q: &[f32],
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) -> Result<()> {
        let count = self.tokens + 1;
        // SAFETY: no I/O ever touches this arena, and nothing writes to it while `&mut self` is held here.
        let bytes = unsafe { self.memory.slice(self.layer_range(layer)) };
        let layout = self.layout;
        if let Some(attention) = &mut self.exact {
            let records = KvRecords { element: self.element, ..layout.records(bytes) };
            attention.begin(1);
            attention.accumulate(compute.pool, compute.isa, q, self.tokens, &records, 0, count, compute.scale);
            attention.finish(out);
            return Ok(());
        }
        let pieces = bytes
            .chunks_exact(layout.stride)
            .enumerate()
            .take(count.div_ceil(FULL_GROUP))
            .map(|(i, record)| layout.piece(record, (count - i * FULL_GROUP).min(FULL_GROUP)));
        self.table.fill(pieces, |pieces| {
            attend(compute.pool, compute.isa, q, pieces, layout.kv_heads, layout.head_dim, compute.scale, scratch, out);
        });
        Ok(())
    }

    /// The token at hand has been through all layers.
    pub fn commit_token(&mut self, _compute: &Compute<'_>) -> Result<()> {
        self.tokens += 1;
        Ok(())
    }

    /// Starts a prefill.
    pub fn prefill_begin(&mut self, count: usize) -> Result<()> {
        if self.tokens + count > self.capacity {
            return Err(Error::ContextFull { requested: self.tokens + count, context: self.capacity });
        }
        self.prefill_tokens = count;
        Ok(())
    }

    /// Starts a layer.
    pub fn prefill_layer_begin(&mut self, _layer: usize) -> Result<()> {
        Ok(())
    }

    /// Stores rows of the prefill.
    pub fn prefill_rows(
        &mut self,
        _compute: &Compute<'_>,
        layer: usize,
        first: usize,
        _q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<()> {
        let dim = self.layout.key_dim();
        for (i, (k, v)) in k.chunks_exact(dim).zip(v.chunks_exact(dim)).enumerate() {
            self.write(layer, self.tokens + first + i, k, v);
        }
        Ok(())
    }

    /// Causal attention of the prefill.
    pub fn prefill_attend(
        &mut self,
        compute: &Compute<'_>,
        attention: &mut PrefillAttention,
        layer: usize,
        first: usize,
        rows: usize,
        q: &mut [f32],
    ) -> Result<()> {
        // SAFETY: no I/O ever touches this arena, and nothing writes to it while `&mut self` is held here.
        let bytes = unsafe { self.memory.slice(self.layer_range(layer)) };
        let records = KvRecords { element: self.element, ..self.layout.records(bytes) };
        let start = self.tokens + first;
        attention.begin(rows);
        attention.accumulate(compute.pool, compute.isa, q, start, &records, 0, start + rows, compute.scale);
        attention.finish(q);
        Ok(())
    }

    /// Ends a layer.
    pub fn prefill_layer_end(&mut self, _compute: &Compute<'_>, _layer: usize) -> Result<()> {
        Ok(())
    }

    /// Ends the prefill.
    pub fn prefill_commit(&mut self) -> Result<()> {
        self.tokens += std::mem::take(&mut self.prefill_tokens);
        Ok(())
    }
}
