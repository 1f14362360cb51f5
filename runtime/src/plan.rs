//! `MemoryPlan`: every byte of the KV side, computed before anything is allocated.

use crate::cache::adapter::{Adapter, Moments};
use crate::cache::group::GroupLayout;
use crate::cache::reuse::SlotTable;
use crate::config::{CacheConfig, Selection};
use crate::store;
use forebay_kernels::attention::AttentionScratch;
use forebay_kernels::prefill_attention::KvElement;
use forebay_kernels::sketch::SketchQueries;
use half::f16;

/// What the plan needs to know of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Transformer layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Width of the hidden state.
    pub embed: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
}

impl ModelShape {
    /// Bytes of one token's K and V in one layer, f16.
    pub fn token_bytes(&self) -> u64 {
        (2 * self.kv_heads * self.head_dim * size_of::<f16>()) as u64
    }

    /// Bytes of a full f16 cache of `tokens` tokens.
    pub fn full_bytes(&self, tokens: usize) -> u64 {
        self.layers as u64 * tokens as u64 * self.token_bytes()
    }
}

/// One named part of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanItem {
    /// What the bytes are for.
    pub name: &'static str,
    /// How many.
    pub bytes: u64,
}

/// Named byte counts of one session.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct MemoryPlan {
    /// The KV side: held from the session's start to its end.
    pub kv: Vec<PlanItem>,
    /// Prefill only: activations of the prompt, staged layers.
    pub prefill: Vec<PlanItem>,
}

impl MemoryPlan {
    /// All KV-side bytes.
    pub fn kv_bytes(&self) -> u64 {
        self.kv.iter().map(|i| i.bytes).sum()
    }

    /// All bytes that prefill adds while it runs.
    pub fn prefill_bytes(&self) -> u64 {
        self.prefill.iter().map(|i| i.bytes).sum()
    }
}

/// Tokens per record of the in-memory cache of policy `full`.
pub const FULL_GROUP: usize = 256;

/// Tokens that go through a layer together in prefill; bounds the scratch of a layer.
pub const PREFILL_ROWS: usize = 512;

/// What a store holds besides its tables: tickets, the queue of transfers, lists of a plan's groups.
const STORE_BOOKKEEPING_BYTES: u64 = 200 << 10;

/// Bytes of one of the two buffers through which earlier K/V streams back in a chunked prefill.
pub const PAST_BUFFER_BYTES: usize = 1 << 20;

/// Sizes that follow from a configuration and a capacity; one place, so that plan and allocation cannot differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierSizes {
    /// Record geometry.
    pub layout: GroupLayout,
    /// Groups that the capacity is rounded up to.
    pub groups: usize,
    /// Records of sinks per layer.
    pub sink_slots: usize,
    /// Records of the window ring per layer: the window's groups and the one that is being filled.
    pub window_slots: usize,
    /// Records of the reuse buffer per layer.
    pub reuse_slots: usize,
    /// Most groups that one layer's step can select.
    pub selected: usize,
    /// Most groups fetched late.
    pub refine: usize,
    /// Records in each half of the staging area.
    pub staging_slots: usize,
    /// Sketch rows per layer.
    pub sketch_rows: usize,
    /// Sketch rows per group.
    pub group_rows: usize,
    /// Bytes of a layer's sketch.
    pub sketch_bytes: usize,
    /// Queries that score a row.
    pub score_queries: usize,
}

impl TierSizes {
    /// Sizes for `capacity` tokens with records aligned to `alignment` bytes.
    pub fn new(shape: &ModelShape, config: &CacheConfig, capacity: usize, alignment: usize) -> TierSizes {
        use crate::config::Aggregate;
        let layout = GroupLayout::new(shape.kv_heads, shape.head_dim, config.group, alignment);
        let groups = capacity.div_ceil(config.group).max(1);
        let sink_slots = config.sink_groups().min(groups);
        let window_slots = (config.window_groups() + 1).min(groups);
        // Groups that can ever be neither sink nor window.
        let middle = groups.saturating_sub(sink_slots + window_slots - 1);
        let (selected, refine) = match config.selection {
            Selection::Sketch => (config.selected_groups.min(middle), config.refine_groups.min(middle)),
            Selection::All => (middle, 0),
            Selection::None => (0, 0),
        };
        let sketched = config.selection == Selection::Sketch && middle > 0;
        let sketch_rows = if sketched { groups * config.group / config.sketch_pool } else { 0 };
        TierSizes {
            layout,
            groups,
            sink_slots,
            window_slots,
            reuse_slots: if selected == 0 { 0 } else { config.reuse_groups.min(middle) },
            selected,
            refine,
            staging_slots: if selected == 0 {
                0
            } else {
                predicted_slots(selected, config.merge_gap).min(middle) + refine
            },
            sketch_rows,
            group_rows: config.group / config.sketch_pool,
            sketch_bytes: config.sketch.kernel().bytes(config.rank, sketch_rows),
            score_queries: match config.aggregate {
                _ if !sketched => 0,
                Aggregate::Sum => 1,
                Aggregate::SoftmaxKv => shape.kv_heads,
                Aggregate::Softmax => shape.heads,
            },
        }
    }

    /// Records that stay resident per layer.
    pub fn resident_slots(&self) -> usize {
        self.sink_slots + self.window_slots + self.reuse_slots
    }

    /// Most pieces that a block table can hold.
    pub fn pieces(&self) -> usize {
        self.sink_slots + self.window_slots + self.selected + self.refine
    }

    /// Of the staging slots of a half, those of predicted groups; the others are for groups fetched late.
    pub fn predicted_slots(&self) -> usize {
        self.staging_slots - self.refine
    }

    /// Groups whose records pass through the store; none where nothing is ever fetched.
    pub fn stored_groups(&self) -> usize {
        if self.selected > 0 { self.groups } else { 0 }
    }
}

/// Staging slots for `selected` predicted groups: half as many more where gaps may be read, or all that gaps can need.
fn predicted_slots(selected: usize, merge_gap: usize) -> usize {
    store::staging_slots(selected, merge_gap as u32).min(selected + selected / 2)
}

/// The plan of a session with KV tiers.
pub fn plan_tiers(shape: &ModelShape, config: &CacheConfig, sizes: &TierSizes, prefill_tokens: usize) -> MemoryPlan {
    let layers = shape.layers as u64;
    let stride = sizes.layout.stride as u64;
    let per_layer = |slots: usize| layers * slots as u64 * stride;
    let (adapters, scores) = if sizes.sketch_rows > 0 {
        let scratch = forebay_kernels::sketch::ScoreScratch::bytes_for(sizes.score_queries, sizes.sketch_rows)
            + SketchQueries::new(sizes.score_queries, config.rank).bytes()
            + (sizes.groups + sizes.score_queries * config.rank + shape.head_dim) * size_of::<f32>();
        (layers * Adapter::bytes(shape.kv_heads, shape.head_dim, config.rank) as u64, scratch as u64)
    } else {
        (0, 0)
    };
    let (tables, store) = if sizes.selected > 0 {
        let records = (sizes.stored_groups() * shape.layers) as u64;
        // Per record a checksum and a bit that says that it was written.
        let store = records * size_of::<u32>() as u64 + records.div_ceil(8) + STORE_BOOKKEEPING_BYTES;
        (layers * SlotTable::bytes(sizes.reuse_slots, sizes.groups) as u64, store)
    } else {
        (0, 0)
    };
    let pieces = sizes.pieces();
    let attention = AttentionScratch::new(shape.heads, shape.head_dim, pieces * sizes.layout.group, pieces).bytes();
    // Selected, missing, kept and piece lists of the layer at hand and of the next one.
    let lists =
        (sizes.pieces() * (size_of::<forebay_kernels::attention::KvPiece<'_>>() + 16 * size_of::<u32>())) as u64;
    let item = |name, bytes| PlanItem { name, bytes };
    let kv = vec![
        item("sinks", per_layer(sizes.sink_slots)),
        item("window", per_layer(sizes.window_slots)),
        item("reuse", per_layer(sizes.reuse_slots)),
        item("staging", 2 * sizes.staging_slots as u64 * stride),
        item("sketch", layers * sizes.sketch_bytes as u64),
        item("adapters", adapters),
        item("scores", scores),
        item("tables", tables + lists),
        item("store", store),
        item("attention", attention as u64),
    ];
    MemoryPlan { kv, prefill: prefill_items(shape, &sizes.layout, prefill_tokens, true) }
}

/// The plan of a session that keeps everything in memory.
pub fn plan_full(shape: &ModelShape, capacity: usize, prefill_tokens: usize, element: KvElement) -> MemoryPlan {
    let layout = full_layout(shape, element);
    let records = capacity.div_ceil(FULL_GROUP).max(1);
    let attention = AttentionScratch::new(shape.heads, shape.head_dim, records * FULL_GROUP, records).bytes();
    let kv = vec![
        PlanItem { name: "cache", bytes: (shape.layers * records * layout.stride) as u64 },
        PlanItem { name: "attention", bytes: attention as u64 },
    ];
    MemoryPlan { kv, prefill: prefill_items(shape, &layout, prefill_tokens, false) }
}

/// Record geometry of the in-memory cache.
pub fn full_layout(shape: &ModelShape, element: KvElement) -> GroupLayout {
    let mut layout = GroupLayout::new(shape.kv_heads, shape.head_dim, FULL_GROUP, 64);
    layout.stride *= element.bytes() / KvElement::F16.bytes();
    layout
}

/// Bytes of one of the two buffers that hold a layer's K/V of a chunk: a partial first group and the rest.
pub fn layer_buffer_bytes(layout: &GroupLayout, tokens: usize) -> usize {
    (tokens.div_ceil(layout.group) + 1) * layout.stride
}

fn prefill_items(shape: &ModelShape, layout: &GroupLayout, tokens: usize, staged: bool) -> Vec<PlanItem> {
    let item = |name, bytes: usize| PlanItem { name, bytes: bytes as u64 };
    let rows = tokens.min(PREFILL_ROWS);
    let q = shape.heads * shape.head_dim;
    let mut items = vec![
        item("hidden", tokens * shape.embed * size_of::<f32>()),
        item(
            "rows",
            rows * (2 * q + 2 * shape.kv_heads * shape.head_dim + 2 * shape.embed + 2 * shape.ffn) * size_of::<f32>(),
        ),
    ];
    if staged {
        items.push(item("layers", 2 * layer_buffer_bytes(layout, tokens)));
        items.push(item("past", 2 * PAST_BUFFER_BYTES.max(layout.stride)));
        items.push(item("moments", Moments::bytes(shape.kv_heads, shape.head_dim)));
    }
    items
}

/// The largest number of prompt tokens whose prefill fits `budget` bytes; at least one row block.
pub fn prefill_chunk(shape: &ModelShape, layout: &GroupLayout, tokens: usize, budget: u64) -> usize {
    let bytes = |t: usize| prefill_items(shape, layout, t, true).iter().map(|i| i.bytes).sum::<u64>();
    let mut chunk = tokens.max(1);
    while chunk > PREFILL_ROWS && bytes(chunk) > budget {
        chunk = (chunk / 2).max(PREFILL_ROWS);
    }
    chunk
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_halves_until_it_fits_and_stops_at_one_block() {
        let shape = ModelShape { layers: 2, heads: 4, kv_heads: 2, head_dim: 16, embed: 64, ffn: 128 };
        let layout = GroupLayout::new(2, 16, 4, 512);
        assert_eq!(prefill_chunk(&shape, &layout, 10_000, u64::MAX), 10_000);
        assert_eq!(prefill_chunk(&shape, &layout, 10_000, 0), PREFILL_ROWS);
        let some = prefill_chunk(&shape, &layout, 100_000, 32 << 20);
        assert!(some < 100_000 && some > PREFILL_ROWS);
    }
}
