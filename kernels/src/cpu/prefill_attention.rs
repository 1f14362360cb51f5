//! Causal attention of many queries over stored records, block of keys by block of keys.
//!
//! A task is a tile of queries of one KV head. Its rows (a query of one head each) stand in panels of `PANEL` columns, one row per
//! column: scores of a panel are `K Q^T`, `[keys][PANEL]`, their softmax runs down the columns without any exchange between lanes, and `V^T P`
//! adds to the results, `[d][PANEL]`. Only one panel's scores for `KEY_TILE` keys exist at a time, in the nearest cache (the tiling of
//! FlashAttention, Dao et al.). Keys and values are widened to f32 once per tile, for all rows of the task.

use half::f16;

use super::arch::{Kernel, Simd, dispatch};
use super::parts::Parts;
use super::pool::Pool;
use super::tile::{PANEL, Strided, TILE_ROWS_MAX, panel_product};
use crate::isa::Isa;

/// Keys per tile: their f32 form and the values' stay in the second-level cache, the scores of a panel in the first.
const KEY_TILE: usize = 128;
/// Rows of the buffers of keys and scores: the microkernel takes whole tiles of rows.
const KEY_ROWS: usize = KEY_TILE + TILE_ROWS_MAX;
/// Rows per task: many, because each task widens all keys and values for itself.
const TASK_ROWS: usize = 384;
/// Tasks per KV head below which the tiles of queries are made smaller.
const TASKS_MIN: usize = 4;
/// Where the running maximum of a row starts: below any score, and finite, so that its difference from minus infinity is not NaN.
const LOWEST: f32 = -1e30;

/// Number format of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvElement {
    /// Half precision: what the group store holds.
    F16,
    /// Single precision, for caches that verify arithmetic.
    F32,
}

impl KvElement {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            KvElement::F16 => 2,
            KvElement::F32 => 4,
        }
    }
}

/// K and V of consecutive tokens as the group store lays them out.
///
/// Token `t` lies in record `t / group`. A record is `[K][V]`, each `[kv_heads][group][d]` values; records begin `stride` bytes apart.
#[derive(Clone, Copy)]
pub struct KvRecords<'a> {
    /// All records.
    pub bytes: &'a [u8],
    /// Bytes from one record to the next.
    pub stride: usize,
    /// Tokens per record.
    pub group: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub d: usize,
    /// Their number format.
    pub element: KvElement,
}

impl KvRecords<'_> {
    /// Bytes of one record without what pads it.
    pub fn record_bytes(&self) -> usize {
        2 * self.kv_heads * self.group * self.d * self.element.bytes()
    }

    /// Whether `tokens` tokens are inside.
    fn holds(&self, tokens: usize) -> bool {
        if tokens == 0 {
            return true;
        }
        let values = [2, self.kv_heads, self.group, self.d, size_of::<f16>()];
        let record = values.into_iter().try_fold(1usize, |product, factor| product.checked_mul(factor));
        let last = ((tokens - 1) / self.group).checked_mul(self.stride);
        let end = last.zip(record).and_then(|(last, record)| last.checked_add(record));
        end.is_some_and(|end| end <= self.bytes.len())
    }

    /// Addresses of the key and value row of `token`; may be unaligned.
    #[inline(always)]
    fn rows(&self, kv_head: usize, token: usize) -> (*const u8, *const u8) {
        let in_record = (kv_head * self.group + token % self.group) * self.d * self.element.bytes();
        let values = self.kv_heads * self.group * self.d * self.element.bytes();
        let k = self.bytes.as_ptr().wrapping_add(token / self.group * self.stride + in_record);
        (k, k.wrapping_add(values))
    }
}

/// How the queries of one [`PrefillAttention::begin`] are cut into tasks.
#[derive(Clone, Copy)]
struct Tiling {
    queries: usize,
    /// Query heads per KV head.
    group: usize,
    /// Queries per task.
    tile: usize,
    /// Panels per task.
    panels: usize,
}

impl Tiling {
    fn new(queries: usize, group: usize) -> Tiling {
        let smallest = PANEL.div_ceil(group);
        let largest = (TASK_ROWS / group).max(1);
        let tile = queries.div_ceil(TASKS_MIN).max(smallest).min(largest).min(queries.max(1));
        Tiling { queries, group, tile, panels: (tile * group).div_ceil(PANEL) }
    }

    /// Tasks of one KV head.
    fn tiles(&self) -> usize {
        self.queries.div_ceil(self.tile)
    }
}

/// Running softmax state of a chunk of queries, and the buffers of each thread.
pub struct PrefillAttention {
    heads: usize,
    kv_heads: usize,
    d: usize,
    max_queries: usize,
    tiling: Tiling,
    /// Value sums, `[kv_heads][tiles][panels][d][PANEL]`.
    sums: Vec<f32>,
    /// Largest score so far in units of log 2, then sum of weights relative to it, `[kv_heads][tiles][panels][2][PANEL]`.
    weights: Vec<f32>,
    /// Per thread: queries `[panels][d][PANEL]`, keys `[KEY_ROWS][d]`, values `[KEY_TILE][d]`, scores `[KEY_ROWS][PANEL]`.
    buffers: Vec<f32>,
    buffer_len: usize,
    threads: usize,
}

impl PrefillAttention {
    /// For chunks of up to `max_queries` queries of `heads` heads of `d` elements that share `kv_heads` KV heads.
    ///
    /// # Panics
    /// If `heads` is not a multiple of `kv_heads`, or one of them is 0.
    pub fn new(threads: usize, heads: usize, kv_heads: usize, d: usize, max_queries: usize) -> PrefillAttention {
        assert!(heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads), "whole query heads for each KV head");
        let group = heads / kv_heads;
        let (mut panels, mut task_panels) = (0, 0);
        // Fewer queries may need more panels, as more tasks have a last panel that is not full.
        for queries in 1..=max_queries {
            let tiling = Tiling::new(queries, group);
            panels = panels.max(kv_heads * tiling.tiles() * tiling.panels);
            task_panels = task_panels.max(tiling.panels);
        }
        let buffer_len = task_panels * d * PANEL + (KEY_ROWS + KEY_TILE) * d + KEY_ROWS * PANEL;
        PrefillAttention {
            heads,
            kv_heads,
            d,
            max_queries,
            tiling: Tiling::new(0, group),
            sums: vec![0.0; panels * d * PANEL],
            weights: vec![0.0; panels * 2 * PANEL],
            buffers: vec![0.0; threads.max(1) * buffer_len],
            buffer_len,
            threads: threads.max(1),
        }
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.sums[..]) + size_of_val(&self.weights[..]) + size_of_val(&self.buffers[..])
    }

    /// Forgets all keys and takes `queries` queries from now on.
    ///
    /// # Panics
    /// If that is more than there is room for.
    pub fn begin(&mut self, queries: usize) {
        assert!(queries <= self.max_queries, "{queries} queries exceed the room for {}", self.max_queries);
        self.tiling = Tiling::new(queries, self.heads / self.kv_heads);
        let panels = self.kv_heads * self.tiling.tiles() * self.tiling.panels;
        self.sums[..panels * self.d * PANEL].fill(0.0);
        for weights in self.weights[..panels * 2 * PANEL].chunks_exact_mut(2 * PANEL) {
            weights[..PANEL].fill(LOWEST);
            weights[PANEL..].fill(0.0);
        }
    }

    /// Lets each query attend to those of `key_count` keys that are not after it: query `i` stands at `first_query_position + i`, key `j` at
    /// `first_key_position + j`.
    ///
    /// `q`: `[queries][heads][d]`; `scale` multiplies the scores. To be called for each block of keys, each time with the same queries. The result does not
    /// depend on the number of threads. A NaN or plus infinity among the scores of a query head makes its result NaN; infinities
    /// among the values of keys that come shortly after a query may do so too. Nothing is allocated.
    ///
    /// # Panics
    /// If a shape is not that of [`PrefillAttention::new`] and [`PrefillAttention::begin`], `kv` does not hold `key_count` keys, or the pool has more threads than
    /// there are buffers for.
    pub fn accumulate(
        &mut self,
        pool: &Pool,
        isa: Isa,
        q: &[f32],
        first_query_position: usize,
        kv: &KvRecords,
        first_key_position: usize,
        key_count: usize,
        scale: f32,
    ) {
        let tiling = self.tiling;
        assert_eq!(q.len(), tiling.queries * self.heads * self.d, "the queries that were announced");
        assert!(kv.group > 0 && kv.kv_heads == self.kv_heads && kv.d == self.d, "records have the model's shape");
        assert!(kv.holds(key_count), "{key_count} keys exceed the records");
        assert!(pool.threads() <= self.threads, "{} threads exceed the {} buffers", pool.threads(), self.threads);
        let (d, tiles) = (self.d, tiling.tiles());
        let (sums_len, weights_len) = (tiling.panels * d * PANEL, tiling.panels * 2 * PANEL);
        let sums = Parts::new(&mut self.sums);
        let weights = Parts::new(&mut self.weights);
        let buffers = Parts::new(&mut self.buffers);
        let (heads, kv_heads, buffer_len) = (self.heads, self.kv_heads, self.buffer_len);
        pool.for_each(tiles * kv_heads, |worker, task| {
            // The last tiles see the most keys: first, so that no thread is left with one at the end.
            let (tile, kv_head) = (tiles - 1 - task / kv_heads, task % kv_heads);
            let at = kv_head * tiles + tile;
            // SAFETY: tasks differ in tile or KV head, and one worker runs one task at a time, so no parts overlap.
            let (sums, weights, buffer) = unsafe {
                (
                    sums.get(at * sums_len..(at + 1) * sums_len),
                    weights.get(at * weights_len..(at + 1) * weights_len),
                    buffers.get(worker * buffer_len..(worker + 1) * buffer_len),
                )
            };
            let first = tile * tiling.tile;
            let queries = tiling.tile.min(tiling.queries - first);
            let task = QueryTile {
                q: &q[first * heads * d..(first + queries) * heads * d],
                heads,
                first_head: kv_head * tiling.group,
                group: tiling.group,
                queries,
                first_position: first_query_position + first,
                kv,
                kv_head,
                first_key_position,
                key_count,
                to_log2: scale * std::f32::consts::LOG2_E,
                sums,
                weights,
                buffer,
            };
            dispatch(isa, task);
        });
    }

    /// Writes the attention of all keys so far; 0 for a query that saw none.
    ///
    /// `out`: `[queries][heads][d]`.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn finish(&mut self, out: &mut [f32]) {
        let (d, tiling) = (self.d, self.tiling);
        assert_eq!(out.len(), tiling.queries * self.heads * d, "one result per query");
        for kv_head in 0..self.kv_heads {
            for tile in 0..tiling.tiles() {
                let first = tile * tiling.tile;
                let queries = tiling.tile.min(tiling.queries - first);
                for row in 0..queries * tiling.group {
                    let panel = (kv_head * tiling.tiles() + tile) * tiling.panels + row / PANEL;
                    let column = row % PANEL;
                    let sums = &self.sums[panel * d * PANEL..][..d * PANEL];
                    let total = self.weights[panel * 2 * PANEL + PANEL + column];
                    let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
                    let head = (first + row / tiling.group) * self.heads + kv_head * tiling.group + row % tiling.group;
                    for (i, out) in out[head * d..][..d].iter_mut().enumerate() {
                        *out = sums[i * PANEL + column] * factor;
                    }
                }
            }
        }
    }
}

/// One task of [`PrefillAttention::accumulate`].
struct QueryTile<'a> {
    /// `[queries][heads][d]`
    q: &'a [f32],
    heads: usize,
    first_head: usize,
    group: usize,
    queries: usize,
    first_position: usize,
    kv: &'a KvRecords<'a>,
    kv_head: usize,
    first_key_position: usize,
    key_count: usize,
    to_log2: f32,
    /// `[panels][d][PANEL]`
    sums: &'a mut [f32],
    /// `[panels][2][PANEL]`
    weights: &'a mut [f32],
    buffer: &'a mut [f32],
}

impl QueryTile<'_> {
    /// How many of the keys the query of `row` sees; rows behind the last one are as the last.
    #[inline(always)]
    fn visible(&self, row: usize) -> usize {
        let query = (row / self.group).min(self.queries - 1);
        (self.first_position + query + 1).saturating_sub(self.first_key_position).min(self.key_count)
    }
}

impl Kernel for QueryTile<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let d = self.kv.d;
        let panels = (self.queries * self.group).div_ceil(PANEL);
        let keys_seen = self.visible(panels * PANEL);
        if keys_seen == 0 {
            return;
        }
        let buffer = std::mem::take(&mut self.buffer);
        let (keys, buffer) = buffer.split_at_mut(KEY_ROWS * d);
        let (values, buffer) = buffer.split_at_mut(KEY_TILE * d);
        let (scores, queries) = buffer.split_at_mut(KEY_ROWS * PANEL);
        self.transpose_queries(&mut queries[..panels * d * PANEL]);
        for first in (0..keys_seen).step_by(KEY_TILE) {
            let count = KEY_TILE.min(keys_seen - first);
            for key in 0..count {
                let (k, v) = self.kv.rows(self.kv_head, first + key);
                // SAFETY: `key_count` keys are inside the records, so both rows of `d` are; `key < KEY_TILE`.
                unsafe {
                    widen(s, k, self.kv.element, keys[key * d..].as_mut_ptr(), d);
                    widen(s, v, self.kv.element, values[key * d..].as_mut_ptr(), d);
                }
            }
            // The microkernel takes whole tiles of rows; the scores of these rows are not looked at.
            let rows = count.next_multiple_of(S::TILE_ROWS);
            keys[count * d..rows * d].fill(0.0);
            for panel in 0..panels {
                let seen_by_last = self.visible(panel * PANEL + PANEL - 1).saturating_sub(first).min(count);
                if seen_by_last == 0 {
                    continue;
                }
                let queries = &queries[panel * d * PANEL..][..d * PANEL];
                let k = Strided { start: keys.as_ptr(), row_stride: d, k_stride: 1 };
                let rows = seen_by_last.next_multiple_of(S::TILE_ROWS);
                // SAFETY: `keys` has `rows <= KEY_ROWS` rows of `d`, `queries` is `[d][PANEL]`, `scores` has `rows` rows of PANEL.
                unsafe { panel_product(s, k, rows, d, queries.as_ptr(), scores.as_mut_ptr(), false) };
                self.mask(scores, panel, first, seen_by_last);
                let sums = &mut self.sums[panel * d * PANEL..][..d * PANEL];
                let weights = &mut self.weights[panel * 2 * PANEL..][..2 * PANEL];
                softmax_columns(s, &mut scores[..seen_by_last * PANEL], weights, sums);
                let v = Strided { start: values.as_ptr(), row_stride: 1, k_stride: d };
                // SAFETY: `values` has `seen_by_last` rows of `d`, `scores` as many of PANEL, `sums` is `[d][PANEL]`.
                unsafe { panel_product(s, v, d, seen_by_last, scores.as_ptr(), sums.as_mut_ptr(), true) };
            }
        }
    }
}

impl QueryTile<'_> {
    /// Fills `to`, `[panels][d][PANEL]`, with the scaled queries, one row per column, 0 in the columns behind the last.
    #[inline(always)]
    fn transpose_queries(&self, to: &mut [f32]) {
        let d = self.kv.d;
        let rows = self.queries * self.group;
        for (panel, to) in to.chunks_exact_mut(d * PANEL).enumerate() {
            for column in 0..PANEL {
                let row = panel * PANEL + column;
                if row < rows {
                    let head = row / self.group * self.heads + self.first_head + row % self.group;
                    for (i, x) in self.q[head * d..][..d].iter().enumerate() {
                        to[i * PANEL + column] = x * self.to_log2;
                    }
                } else {
                    for i in 0..d {
                        to[i * PANEL + column] = 0.0;
                    }
                }
            }
        }
    }

    /// Sets the scores of keys that come after a row's query to minus infinity; `count` keys of the tile at `first` are looked at.
    #[inline(always)]
    fn mask(&self, scores: &mut [f32], panel: usize, first: usize, count: usize) {
        if self.visible(panel * PANEL).saturating_sub(first) >= count {
            return;
        }
        for column in 0..PANEL {
            let visible = self.visible(panel * PANEL + column).saturating_sub(first);
            for key in visible..count {
                scores[key * PANEL + column] = f32::NEG_INFINITY;
            }
        }
    }
}

/// Converts a row of `d` values.
///
/// # Safety
/// `d` values of `element` are readable at `from` and `d` are writable at `to`.
#[inline(always)]
unsafe fn widen<S: Simd>(s: S, from: *const u8, element: KvElement, to: *mut f32, d: usize) {
    if element == KvElement::F32 {
        // SAFETY: as above; the buffers are different memory.
        unsafe { std::ptr::copy_nonoverlapping(from, to.cast(), d * size_of::<f32>()) };
        return;
    }
    let from: *const f16 = from.cast();
    let mut i = 0;
    while i + S::LANES <= d {
        // SAFETY: `i + LANES <= d`.
        unsafe { s.store(to.add(i), s.load_f16(from.add(i))) };
        i += S::LANES;
    }
    while i < d {
        // SAFETY: `i < d`.
        unsafe { *to.add(i) = from.add(i).read_unaligned().to_f32() };
        i += 1;
    }
}

/// One step of the online softmax for PANEL rows: `scores`, `[keys][PANEL]` in units of log 2, become weights relative to the new maximum of
/// their column; `weights`, `[2][PANEL]`, and `sums`, `[d][PANEL]`, are brought to it.
#[inline(always)]
fn softmax_columns<S: Simd>(s: S, scores: &mut [f32], weights: &mut [f32], sums: &mut [f32]) {
    let zero = s.splat(0.0);
    for column in (0..PANEL).step_by(S::LANES) {
        // SAFETY: PANEL is a multiple of LANES, so all accesses at a column of a row of PANEL stay inside that row.
        unsafe {
            let old_max = s.load(weights.as_ptr().add(column));
            let mut max = old_max;
            for row in scores.chunks_exact(PANEL) {
                max = s.max(s.load(row.as_ptr().add(column)), max);
            }
            let mut total = zero;
            for row in scores.chunks_exact_mut(PANEL) {
                let p = row.as_mut_ptr().add(column);
                let weight = s.exp2(s.sub(s.load(p), max));
                s.store(p, weight);
                total = s.add(total, weight);
            }
            let rise = s.sub(max, old_max);
            let factor = s.exp2(s.sub(zero, rise));
            let old_total = s.load(weights.as_ptr().add(PANEL + column));
            s.store(weights.as_mut_ptr().add(column), max);
            s.store(weights.as_mut_ptr().add(PANEL + column), s.fma(old_total, factor, total));
            if s.reduce_max(rise) > 0.0 {
                for row in sums.chunks_exact_mut(PANEL) {
                    let p = row.as_mut_ptr().add(column);
                    s.store(p, s.mul(s.load(p), factor));
                }
            }
        }
    }
}
