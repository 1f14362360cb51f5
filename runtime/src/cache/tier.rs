//! What the tiers of one sequence hold, and where it lies.

use super::adapter::Adapter;
use super::block_table::BlockTable;
use super::group::GroupLayout;
use super::predictor::Predictor;
use super::prefill::{PrefillBuffers, PrefillState};
use super::reuse::SlotTable;
use crate::config::{CacheConfig, Selection};
use crate::error::{Error, Result};
use crate::plan::{ModelShape, TierSizes};
use crate::store::{Arena, ReadPlan, Store, Ticket};
use forebay_kernels::select::top_groups_scratch;
use forebay_kernels::sketch::SketchRows;
use std::ops::Range;
use std::sync::Arc;

/// Counters of the tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Groups selected, over layers and steps.
    pub selected: u64,
    /// Of those, groups that the reuse buffer held.
    pub reused: u64,
    /// Groups fetched late.
    pub refined: u64,
}

/// Arenas of the store, by number.
pub(super) const RESIDENT_REGION: u32 = 0;
pub(super) const STAGING_REGION: u32 = 1;
pub(super) const PREFILL_REGION: u32 = 2;

/// What is selected for one layer, and where its groups are. Two exist: the layer at hand and the next one.
pub(super) struct Fetch {
    pub(super) layer: Option<usize>,
    /// All selected groups, ascending.
    pub(super) selected: Vec<u32>,
    /// Selected groups that are not in the reuse buffer, ascending.
    pub(super) missing: Vec<u32>,
    pub(super) plan: ReadPlan,
    pub(super) ticket: Option<Ticket>,
    /// Groups fetched late, ascending, with their own plan.
    pub(super) refined: Vec<u32>,
    pub(super) refine_plan: ReadPlan,
}

/// Sinks, window, sketch and reuse buffer of one sequence in memory; its groups in the store.
pub struct TieredCache {
    pub(super) shape: ModelShape,
    pub(super) config: CacheConfig,
    pub(super) sizes: TierSizes,
    pub(super) capacity: usize,
    /// `[layers][sinks, window ring, reuse slots]` records.
    pub(super) resident: Arc<Arena>,
    /// Two halves of `staging_slots` records.
    pub(super) staging: Arc<Arena>,
    /// One per layer; empty ones where nothing is scored.
    pub(super) sketch: Vec<SketchRows>,
    pub(super) adapters: Vec<Option<Adapter>>,
    pub(super) slots: Vec<SlotTable>,
    pub(super) store: Option<Store>,
    pub(super) predictor: Option<Predictor>,
    pub(super) fetches: [Fetch; 2],
    pub(super) table: BlockTable,
    pub(super) order: Vec<u32>,
    /// One key and one sketch row, for the group that a step completes.
    pub(super) key_row: Vec<f32>,
    pub(super) sketch_row: Vec<f32>,
    pub(super) tokens: usize,
    pub(super) group_writes: Vec<Ticket>,
    pub(super) buffers: PrefillBuffers,
    pub(super) prefill: Option<PrefillState>,
    pub(super) stats: TierStats,
}

impl TieredCache {
    /// Takes all memory of the tiers; `open_store` makes the store over the three arenas (resident, staging, prefill) and is called only
    /// when something can ever be fetched.
    pub fn new(
        shape: ModelShape,
        config: CacheConfig,
        capacity: usize,
        prefill_tokens: usize,
        alignment: usize,
        open_store: impl FnOnce(&GroupLayout, usize, usize, &[Arc<Arena>]) -> Result<Store>,
    ) -> Result<TieredCache> {
        let sizes = TierSizes::new(&shape, &config, capacity, alignment);
        let stride = sizes.layout.stride;
        let resident = Arena::new((shape.layers * sizes.resident_slots() * stride).max(stride))?;
        let staging = Arena::new((2 * sizes.staging_slots * stride).max(stride))?;
        let buffers = PrefillBuffers::new(&sizes.layout, prefill_tokens)?;
        let store = if sizes.stored_groups() > 0 {
            Some(open_store(
                &sizes.layout,
                sizes.stored_groups(),
                sizes.selected,
                &[resident.clone(), staging.clone(), buffers.arena().clone()],
            )?)
        } else {
            None
        };
        let fetch = || Fetch {
            layer: None,
            selected: Vec::with_capacity(sizes.selected + sizes.refine),
            missing: Vec::with_capacity(sizes.selected),
            plan: ReadPlan::with_capacity(sizes.selected),
            ticket: None,
            refined: Vec::with_capacity(sizes.refine),
            refine_plan: ReadPlan::with_capacity(sizes.refine),
        };
        Ok(TieredCache {
            sketch: (0..shape.layers)
                .map(|_| SketchRows::new(config.sketch.kernel(), config.rank, sizes.sketch_rows))
                .collect(),
            adapters: (0..shape.layers).map(|_| None).collect(),
            slots: (0..if sizes.selected > 0 { shape.layers } else { 0 })
                .map(|_| SlotTable::new(sizes.reuse_slots, sizes.groups, config.replacement))
                .collect(),
            predictor: (sizes.sketch_rows > 0).then(|| Predictor::new(&shape, &config, &sizes)),
            fetches: [fetch(), fetch()],
            table: BlockTable::new(sizes.pieces()),
            order: Vec::with_capacity(top_groups_scratch(sizes.selected.max(sizes.refine))),
            key_row: vec![0.0; sizes.layout.key_dim()],
            sketch_row: vec![0.0; config.rank],
            tokens: 0,
            group_writes: Vec::with_capacity(shape.layers),
            buffers,
            prefill: None,
            stats: TierStats::default(),
            shape,
            config,
            sizes,
            capacity,
            resident,
            staging,
            store,
        })
    }

    /// Tokens held.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Most pieces of a block table, and most tokens of one.
    pub fn pieces_max(&self) -> (usize, usize) {
        (self.sizes.pieces(), self.sizes.layout.group)
    }

    /// Counters since the session began.
    pub fn stats(&self) -> TierStats {
        self.stats
    }

    /// The store, where there is one.
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// How the sketch's projections were made, once they are.
    pub fn adapter_kind(&self) -> Option<crate::config::AdapterKind> {
        self.adapters.first().and_then(|a| a.as_ref()).map(|a| a.kind)
    }

    /// Errors where the groups that `count` more tokens complete would exceed the store's write budget.
    pub fn check_write_budget(&self, count: usize) -> Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        let groups = (self.tokens + count) / self.sizes.layout.group - self.group_now();
        Ok(store.check_write_budget((groups * self.shape.layers * self.sizes.layout.stride) as u64)?)
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.drain();
        self.tokens = 0;
        self.adapters.iter_mut().for_each(|a| *a = None);
        self.slots.iter_mut().for_each(SlotTable::clear);
        self.prefill = None;
        self.buffers.release();
    }

    /// Record geometry.
    pub fn layout(&self) -> GroupLayout {
        self.sizes.layout
    }

    /// Waits for everything in flight; results are dropped, the store keeps what it has to say (a latched write error).
    pub(super) fn drain(&mut self) {
        if let Some(store) = &mut self.store {
            for fetch in &mut self.fetches {
                if let Some(ticket) = fetch.ticket.take() {
                    let _ = store.wait(ticket);
                }
                fetch.layer = None;
            }
            for ticket in self.group_writes.drain(..) {
                let _ = store.wait(ticket);
            }
            let _ = store.wait_writes();
        }
    }

    /// Whether decode wants queries predicted.
    pub fn wants_prediction(&self) -> bool {
        self.config.selection == Selection::Sketch && self.sizes.selected > 0
    }

    // Where things lie.

    pub(super) fn group_now(&self) -> usize {
        self.tokens / self.sizes.layout.group
    }

    /// First complete group of the rolling window while group `now` is being filled.
    pub(super) fn window_start(&self, now: usize) -> usize {
        now.saturating_sub(self.sizes.window_slots - 1)
    }

    /// Groups that are neither sinks nor window.
    pub(super) fn candidates(&self) -> Range<usize> {
        let end = self.window_start(self.group_now());
        self.sizes.sink_slots.min(end)..end
    }

    fn resident_range(&self, layer: usize, slot: usize) -> Range<usize> {
        let stride = self.sizes.layout.stride;
        let start = (layer * self.sizes.resident_slots() + slot) * stride;
        start..start + stride
    }

    pub(super) fn sink_range(&self, layer: usize, group: usize) -> Range<usize> {
        self.resident_range(layer, group)
    }

    pub(super) fn window_range(&self, layer: usize, group: usize) -> Range<usize> {
        self.resident_range(layer, self.sizes.sink_slots + group % self.sizes.window_slots)
    }

    pub(super) fn reuse_range(&self, layer: usize, slot: usize) -> Range<usize> {
        self.resident_range(layer, self.sizes.sink_slots + self.sizes.window_slots + slot)
    }

    pub(super) fn staging_range(&self, half: usize, slot: usize) -> Range<usize> {
        let stride = self.sizes.layout.stride;
        let start = (half * self.sizes.staging_slots + slot) * stride;
        start..start + stride
    }

    /// A resident record to read.
    ///
    /// # Safety
    /// Nothing writes to the record while the slice lives: slots and sinks are written by [`Self::copy_to`], the window by
    /// [`Self::window_record`], both through `&mut self`; no I/O reads into the resident arena.
    pub(super) unsafe fn resident_record(&self, range: Range<usize>) -> &[u8] {
        // SAFETY: as above.
        unsafe { self.resident.slice(range) }
    }

    /// The window record of a group, to write.
    pub(super) fn window_record(&mut self, layer: usize, group: usize) -> &mut [u8] {
        let range = self.window_range(layer, group);
        // SAFETY: `&mut self` excludes other slices; a store write that still reads the slot's previous group was waited for when
        // the group after it was committed (`commit_token`, `prefill_commit`).
        unsafe { self.resident.slice_mut(range) }
    }

    /// Copies a record into the sinks (`group < sink_slots`).
    pub(super) fn set_sink(&mut self, layer: usize, group: usize, record: &[u8]) {
        let range = self.sink_range(layer, group);
        // SAFETY: `&mut self` excludes other slices, and no I/O touches sink records.
        unsafe { self.resident.slice_mut(range) }.copy_from_slice(record);
    }

    /// Groups before `now` that are still resident: sinks and window.
    pub(super) fn resident_groups(&self, now: usize) -> impl Iterator<Item = usize> + use<> {
        let window = self.window_start(now);
        (0..self.sizes.sink_slots.min(window)).chain(window..now)
    }

    /// Where the record of a group of [`Self::resident_groups`] lies.
    pub(super) fn group_record(&self, layer: usize, group: usize, now: usize) -> (Arc<Arena>, Range<usize>) {
        let range = if group < self.window_start(now) {
            self.sink_range(layer, group)
        } else {
            self.window_range(layer, group)
        };
        (self.resident.clone(), range)
    }

    /// Reads consecutive groups into the layer's half of staging and waits for them.
    pub(super) fn read_into_staging(
        &mut self,
        layer: usize,
        groups: Range<usize>,
    ) -> Result<(Arc<Arena>, Range<usize>)> {
        let half = layer % 2;
        let start = self.staging_range(half, 0).start;
        let bytes = groups.len() * self.sizes.layout.stride;
        let store = self.store.as_mut().ok_or_else(|| Error::internal("no store to read from"))?;
        let (first, count) = (groups.start as u32, groups.len() as u32);
        store.read_groups_blocking(layer as u32, first, count, STAGING_REGION, start as u64)?;
        Ok((self.staging.clone(), start..start + bytes))
    }
}
