//! Policy `kvswap`: the KVSwap paper's own setting, with the largest rank that the budget holds.

use super::Room;
use crate::config::{AdapterKind, Aggregate, CacheConfig, Policy, Replacement, Selection, SketchPrecision};
use crate::error::Result;

/// Tokens selected per layer and step in the paper.
const SELECTED_TOKENS: usize = 400;
/// Tokens per group in the paper's NVMe setting.
const GROUP: usize = 4;

fn config(rank: usize, selected_groups: usize) -> CacheConfig {
    CacheConfig {
        group: GROUP,
        selection: Selection::Sketch,
        rank: rank.max(1),
        sketch: SketchPrecision::F16,
        sketch_pool: 1,
        adapter: AdapterKind::Pca,
        aggregate: Aggregate::Sum,
        selected_groups,
        reuse_groups: selected_groups,
        replacement: Replacement::Fifo,
        sinks: 0,
        window: GROUP,
        refine_groups: 0,
        lookahead: 1,
        merge_gap: 0,
        score_floor: 0.0,
    }
}

/// `M * G = 400` and `C = M` where they fit with a sketch of rank 1, else as many groups as do.
pub fn settings(room: &Room) -> Result<CacheConfig> {
    let key_dim = room.shape.kv_heads * room.shape.head_dim;
    let selected = room.largest(SELECTED_TOKENS / GROUP, |groups| config(1, groups)).max(1);
    let rank = room.largest(key_dim, |rank| config(rank, selected));
    let smallest = room.kv_bytes(&config(1, 1));
    room.check(Policy::Kvswap, config(rank, selected), smallest)
}
