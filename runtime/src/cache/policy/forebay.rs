//! Policy `forebay`: the defaults where no configuration file says otherwise.

use super::Room;
use crate::config::{AdapterKind, Aggregate, CacheConfig, Policy, Replacement, Selection, SketchPrecision};
use crate::error::Result;

/// One rung of the ladder: settings that fall in memory and quality together.
struct Rung {
    /// Sketch rank as a share of `kv_heads * head_dim`: `1 / rank_share`, rounded up to whole vectors of 8, at least 16.
    rank_share: usize,
    sketch_pool: usize,
    window: usize,
    selected_tokens: usize,
    merge_gap: usize,
    /// Smallest reuse buffer with which this rung is taken, as a share of the selected groups in percent.
    reuse_percent: usize,
}

/// From the best to the smallest (measurements: docs/benchmarks.md). Selected groups are cheap in memory, as layers share the
/// staging area, and are given up last but the sketch's rank; the reuse buffer, which every layer has, takes what is left.
const LADDER: [Rung; 8] = [
    Rung { rank_share: 3, sketch_pool: 1, window: 128, selected_tokens: 800, merge_gap: 1, reuse_percent: 100 },
    Rung { rank_share: 4, sketch_pool: 1, window: 128, selected_tokens: 640, merge_gap: 1, reuse_percent: 0 },
    Rung { rank_share: 4, sketch_pool: 1, window: 64, selected_tokens: 640, merge_gap: 1, reuse_percent: 0 },
    Rung { rank_share: 5, sketch_pool: 1, window: 64, selected_tokens: 512, merge_gap: 0, reuse_percent: 0 },
    Rung { rank_share: 4, sketch_pool: 2, window: 64, selected_tokens: 512, merge_gap: 0, reuse_percent: 0 },
    Rung { rank_share: 4, sketch_pool: 4, window: 64, selected_tokens: 480, merge_gap: 0, reuse_percent: 0 },
    Rung { rank_share: 6, sketch_pool: 4, window: 32, selected_tokens: 320, merge_gap: 0, reuse_percent: 0 },
    Rung { rank_share: 16, sketch_pool: 4, window: 16, selected_tokens: 64, merge_gap: 0, reuse_percent: 0 },
];

/// Tokens per group where nothing is known of the device: a record of several KiB, where most flash gives its best per read.
const GROUP: usize = 16;
/// Attention that is not worth a read (measurements: docs/benchmarks.md).
const SCORE_FLOOR: f32 = 0.0005;
/// Reuse slots beyond this many times the selected groups bring little (handbook: reuse buffer).
const MOST_REUSE: usize = 4;

fn rung_config(room: &Room, rung: &Rung, reuse_groups: usize) -> CacheConfig {
    let key_dim = room.shape.kv_heads * room.shape.head_dim;
    CacheConfig {
        group: GROUP,
        selection: Selection::Sketch,
        rank: (key_dim / rung.rank_share).next_multiple_of(8).max(16).min(key_dim),
        sketch: SketchPrecision::I4,
        sketch_pool: rung.sketch_pool,
        adapter: AdapterKind::QueryAware,
        aggregate: Aggregate::Softmax,
        selected_groups: rung.selected_tokens / GROUP,
        reuse_groups,
        replacement: Replacement::Fifo,
        sinks: 4,
        window: rung.window,
        refine_groups: 0,
        lookahead: 1,
        merge_gap: rung.merge_gap,
        score_floor: SCORE_FLOOR,
    }
}

/// The best rung that fits; what is left of the budget goes to the reuse buffer.
pub fn settings(room: &Room) -> Result<CacheConfig> {
    for rung in &LADDER {
        let selected = rung.selected_tokens / GROUP;
        let least = selected * rung.reuse_percent / 100;
        if room.kv_bytes(&rung_config(room, rung, least)) <= room.budget {
            let reuse = room.largest(MOST_REUSE * selected, |slots| rung_config(room, rung, slots));
            return Ok(rung_config(room, rung, reuse));
        }
    }
    let last = rung_config(room, &LADDER[LADDER.len() - 1], 0);
    let smallest = room.kv_bytes(&last);
    room.check(Policy::Forebay, last, smallest)
}
