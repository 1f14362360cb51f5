//! Policy `window`: sinks and a rolling window as large as the budget; what leaves the window is forgotten.

use super::Room;
use crate::config::{AdapterKind, Aggregate, CacheConfig, Policy, Replacement, Selection, SketchPrecision};
use crate::error::Result;

const GROUP: usize = 4;

fn config(window_groups: usize) -> CacheConfig {
    CacheConfig {
        group: GROUP,
        selection: Selection::None,
        rank: 1,
        sketch: SketchPrecision::F16,
        sketch_pool: 1,
        adapter: AdapterKind::Pca,
        aggregate: Aggregate::Sum,
        selected_groups: 0,
        reuse_groups: 0,
        replacement: Replacement::Fifo,
        sinks: 4,
        window: window_groups * GROUP,
        refine_groups: 0,
        lookahead: 1,
        merge_gap: 0,
        score_floor: 0.0,
    }
}

/// The largest window that fits.
pub fn settings(room: &Room) -> Result<CacheConfig> {
    let groups = room.largest(room.capacity.div_ceil(GROUP), config).max(1);
    let smallest = room.kv_bytes(&config(1));
    room.check(Policy::Window, config(groups), smallest)
}
