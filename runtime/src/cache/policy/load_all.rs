//! Policy `load-all`: every group is read from disk for every layer and step. Exact, and as slow as the disk.

use super::Room;
use crate::config::{AdapterKind, Aggregate, CacheConfig, Policy, Replacement, Selection, SketchPrecision};
use crate::error::Result;

/// Two layers of K/V in staging and one group of window; the budget must hold them.
pub fn settings(room: &Room) -> Result<CacheConfig> {
    let config = CacheConfig {
        group: 16,
        selection: Selection::All,
        rank: 1,
        sketch: SketchPrecision::F16,
        sketch_pool: 1,
        adapter: AdapterKind::Pca,
        aggregate: Aggregate::Sum,
        selected_groups: 0,
        reuse_groups: 0,
        replacement: Replacement::Fifo,
        sinks: 0,
        window: 16,
        refine_groups: 0,
        lookahead: 1,
        merge_gap: 0,
        score_floor: 0.0,
    };
    let smallest = room.kv_bytes(&config);
    room.check(Policy::LoadAll, config, smallest)
}
