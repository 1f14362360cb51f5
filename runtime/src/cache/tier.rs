//! The tiers of one sequence, and a decode step over them.

use super::Compute;
use super::adapter::Adapter;
use super::block_table::BlockTable;
use super::group::GroupLayout;
use super::predictor::Predictor;
use super::prefill::{PrefillBuffers, PrefillState};
use super::reuse::SlotTable;
use crate::config::{CacheConfig, Selection};
use crate::error::{Error, Result};
use crate::plan::{ModelShape, TierSizes};
use crate::store::{Arena, PlanLimits, ReadPlan, Store, Ticket};
use forebay_kernels::attention::{AttentionScratch, KvPiece, attend};
use forebay_kernels::select::{top_groups, top_groups_scratch};
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
const RESIDENT_REGION: u32 = 0;
const STAGING_REGION: u32 = 1;
pub(super) const PREFILL_REGION: u32 = 2;

/// What is selected for one layer, and where its groups are. Two exist: the layer at hand and the next one.
struct Fetch {
    layer: Option<usize>,
    /// All selected groups, ascending.
    selected: Vec<u32>,
    /// Selected groups that are not in the reuse buffer, ascending.
    missing: Vec<u32>,
    plan: ReadPlan,
    ticket: Option<Ticket>,
    /// Groups fetched late, ascending, with their own plan.
    refined: Vec<u32>,
    refine_plan: ReadPlan,
}

/// Sinks, window, sketch and reuse buffer of one sequence in memory; its groups in the store.
pub struct TieredCache {
    pub(super) shape: ModelShape,
    pub(super) config: CacheConfig,
    pub(super) sizes: TierSizes,
    capacity: usize,
    /// `[layers][sinks, window ring, reuse slots]` records.
    resident: Arc<Arena>,
    /// Two halves of `staging_slots` records.
    staging: Arc<Arena>,
    /// `[layers][sketch_rows][row_bytes]`.
    pub(super) sketch: Vec<u8>,
    pub(super) adapters: Vec<Option<Adapter>>,
    slots: Vec<SlotTable>,
    pub(super) store: Option<Store>,
    predictor: Option<Predictor>,
    fetches: [Fetch; 2],
    table: BlockTable,
    order: Vec<u32>,
    /// One key and one sketch row, for the group that a step completes.
    pub(super) key_row: Vec<f32>,
    pub(super) sketch_row: Vec<f32>,
    pub(super) tokens: usize,
    group_writes: Vec<Ticket>,
    pub(super) buffers: PrefillBuffers,
    pub(super) prefill: Option<PrefillState>,
    stats: TierStats,
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
            sketch: vec![0; shape.layers * sizes.sketch_rows * sizes.row_bytes],
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
    fn candidates(&self) -> Range<usize> {
        let end = self.window_start(self.group_now());
        self.sizes.sink_slots.min(end)..end
    }

    fn resident_range(&self, layer: usize, slot: usize) -> Range<usize> {
        let stride = self.sizes.layout.stride;
        let start = (layer * self.sizes.resident_slots() + slot) * stride;
        start..start + stride
    }

    fn sink_range(&self, layer: usize, group: usize) -> Range<usize> {
        self.resident_range(layer, group)
    }

    fn window_range(&self, layer: usize, group: usize) -> Range<usize> {
        self.resident_range(layer, self.sizes.sink_slots + group % self.sizes.window_slots)
    }

    fn reuse_range(&self, layer: usize, slot: usize) -> Range<usize> {
        self.resident_range(layer, self.sizes.sink_slots + self.sizes.window_slots + slot)
    }

    fn staging_range(&self, half: usize, slot: usize) -> Range<usize> {
        let stride = self.sizes.layout.stride;
        let start = (half * self.sizes.staging_slots + slot) * stride;
        start..start + stride
    }

    /// A resident record to read.
    ///
    /// # Safety
    /// Nothing writes to the record while the slice lives: slots and sinks are written by [`Self::copy_to`], the window by
    /// [`Self::window_record`], both through `&mut self`; no I/O reads into the resident arena.
    unsafe fn resident_record(&self, range: Range<usize>) -> &[u8] {
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

    pub(super) fn sketch_range(&self, layer: usize, groups: Range<usize>) -> Range<usize> {
        let rows = self.sizes.layout.group / self.config.sketch_pool;
        let base = layer * self.sizes.sketch_rows;
        (base + groups.start * rows) * self.sizes.row_bytes..(base + groups.end * rows) * self.sizes.row_bytes
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

    // A step.

    /// Selects the groups of `layer` by predicted queries and submits the reads of those that are not in memory.
    ///
    /// On an error nothing has changed but the reads in flight; the call can be repeated.
    pub fn predict(&mut self, compute: &Compute<'_>, layer: usize, q: &[f32]) -> Result<()> {
        if self.sizes.selected == 0 {
            return Ok(());
        }
        let half = layer % 2;
        if let (Some(ticket), Some(store)) = (self.fetches[half].ticket.take(), &mut self.store) {
            // Left over from a step that failed; its result no longer matters, its buffer does.
            let _ = store.wait(ticket);
        }
        self.fetches[half].layer = None;
        let candidates = self.candidates();
        let wanted = self.sizes.selected;
        let mut selected = std::mem::take(&mut self.fetches[half].selected);
        selected.clear();
        if candidates.len() <= wanted {
            selected.extend(candidates.clone().map(|g| g as u32));
        } else {
            let outcome = self.score_top(compute, layer, q, candidates.clone(), wanted, &mut selected);
            if let Err(e) = outcome {
                self.fetches[half].selected = selected;
                return Err(e);
            }
        }
        let fetch = &mut self.fetches[half];
        fetch.selected = selected;
        fetch.refined.clear();
        fetch.missing.clear();
        let slots = &mut self.slots[layer];
        slots.release();
        for &group in &fetch.selected {
            match slots.find(group) {
                Some(slot) => slots.touch(slot),
                None => fetch.missing.push(group),
            }
        }
        if fetch.missing.is_empty() {
            fetch.layer = Some(layer);
            return Ok(());
        }
        let store = self.store.as_mut().ok_or_else(|| Error::internal("groups to fetch but no store"))?;
        let bytes = half * self.sizes.staging_slots * self.sizes.layout.stride;
        let limits = PlanLimits {
            merge_gap: self.config.merge_gap as u32,
            slots_max: self.sizes.predicted_slots() as u32,
            ..PlanLimits::default()
        };
        fetch.plan.build(store.layout(), layer as u32, &fetch.missing, limits)?;
        fetch.ticket = Some(store.submit_reads(&fetch.plan, STAGING_REGION, bytes as u64)?);
        fetch.layer = Some(layer);
        Ok(())
    }

    /// The best `count` of `candidates` into `out`, ascending.
    fn score_top(
        &mut self,
        compute: &Compute<'_>,
        layer: usize,
        q: &[f32],
        candidates: Range<usize>,
        count: usize,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        if self.adapters[layer].is_none() {
            self.fit_from_store(compute, layer)?;
        }
        let complete = self.group_now();
        let rows = self.sketch_range(layer, 0..complete);
        let (Some(adapter), Some(predictor)) = (&self.adapters[layer], &mut self.predictor) else {
            return Err(Error::internal("scoring without a sketch"));
        };
        let scores = predictor.score(compute, adapter, &self.sketch[rows], complete, q);
        top_groups(&scores[candidates.clone()], count, &mut self.order, out);
        out.iter_mut().for_each(|g| *g += candidates.start as u32);
        Ok(())
    }

    /// Stores the key and value of the token at hand in the window.
    pub fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        if self.tokens >= self.capacity {
            return Err(Error::ContextFull { requested: self.tokens + 1, context: self.capacity });
        }
        let (layout, group) = (self.sizes.layout, self.group_now());
        let index = self.tokens % layout.group;
        layout.write_token(self.window_record(layer, group), index, k, v);
        Ok(())
    }

    /// Attention of the token at hand over sinks, selected groups and window.
    pub fn attend(
        &mut self,
        compute: &Compute<'_>,
        layer: usize,
        q: &[f32],
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) -> Result<()> {
        let half = layer % 2;
        if self.sizes.selected > 0 {
            if self.fetches[half].layer != Some(layer) {
                // Nothing predicted this layer: select with its true queries.
                self.predict(compute, layer, q)?;
            }
            if self.sizes.refine > 0 {
                self.refine(compute, layer, q)?;
            }
            if let (Some(ticket), Some(store)) = (self.fetches[half].ticket.take(), &mut self.store)
                && let Err(e) = store.wait(ticket)
            {
                self.fetches[half].layer = None;
                return Err(e.into());
            }
        }
        let mut table = std::mem::replace(&mut self.table, BlockTable::new(0));
        table.fill(self.pieces(layer), |pieces| {
            let layout = &self.sizes.layout;
            attend(compute.pool, compute.isa, q, pieces, layout.kv_heads, layout.head_dim, compute.scale, scratch, out);
        });
        self.table = table;
        if self.sizes.selected > 0 {
            self.keep_fetched(layer);
        }
        Ok(())
    }

    /// The pieces of a layer whose reads are complete.
    fn pieces(&self, layer: usize) -> impl Iterator<Item = KvPiece<'_>> {
        let (half, layout) = (layer % 2, &self.sizes.layout);
        let now = self.group_now();
        let filled = self.tokens % layout.group + 1;
        let window = self.window_start(now);
        // SAFETY: for all resident and staging records below: `&self` is held while the pieces live, so none of the writers
        // (all `&mut self`) runs; reads into this half of staging have been waited for, and the other half is not touched here.
        let resident = move |range| unsafe { self.resident_record(range) };
        // SAFETY: as above.
        let staged = move |slot| unsafe { self.staging.slice(self.staging_range(half, slot)) };
        let sinks =
            (0..self.sizes.sink_slots.min(window)).map(move |g| (resident(self.sink_range(layer, g)), layout.group));
        let fetch = &self.fetches[half];
        let late_base = self.sizes.predicted_slots();
        let selected = (self.sizes.selected > 0).then_some(()).into_iter().flat_map(move |()| {
            let mut missing = 0;
            fetch.selected.iter().map(move |&group| {
                if fetch.missing.get(missing) == Some(&group) {
                    missing += 1;
                    (staged(fetch.plan.slots()[missing - 1] as usize), layout.group)
                } else {
                    let slot = self.slots[layer].find(group).unwrap_or_default();
                    (resident(self.reuse_range(layer, slot)), layout.group)
                }
            })
        });
        let refined = (0..fetch.refined.len())
            .map(move |i| (staged(late_base + fetch.refine_plan.slots()[i] as usize), layout.group));
        let rolling = (window..=now)
            .map(move |g| (resident(self.window_range(layer, g)), if g == now { filled } else { layout.group }));
        sinks.chain(selected).chain(refined).chain(rolling).map(move |(record, tokens)| layout.piece(record, tokens))
    }

    /// Late refinement: up to `refine_groups` of the groups that the true queries rank highest and the prediction missed.
    fn refine(&mut self, compute: &Compute<'_>, layer: usize, q: &[f32]) -> Result<()> {
        let candidates = self.candidates();
        let half = layer % 2;
        if candidates.len() <= self.fetches[half].selected.len() {
            return Ok(());
        }
        let mut refined = std::mem::take(&mut self.fetches[half].refined);
        refined.clear();
        let outcome = self.score_missed(compute, layer, q, candidates, &mut refined);
        self.fetches[half].refined = refined;
        outcome?;
        let slots = &mut self.slots[layer];
        let fetch = &mut self.fetches[half];
        self.stats.refined += fetch.refined.len() as u64;
        // A group that the reuse buffer holds joins the selected ones; the others are read at once.
        let mut at = 0;
        while at < fetch.refined.len() {
            let group = fetch.refined[at];
            match slots.find(group) {
                Some(slot) => {
                    slots.touch(slot);
                    fetch.refined.remove(at);
                    let position = fetch.selected.partition_point(|&g| g < group);
                    fetch.selected.insert(position, group);
                }
                None => at += 1,
            }
        }
        if fetch.refined.is_empty() {
            return Ok(());
        }
        let store = self.store.as_mut().ok_or_else(|| Error::internal("groups to fetch but no store"))?;
        fetch.refine_plan.build(store.layout(), layer as u32, &fetch.refined, PlanLimits::default())?;
        let base = half * self.sizes.staging_slots + self.sizes.predicted_slots();
        let ticket =
            store.submit_reads(&fetch.refine_plan, STAGING_REGION, (base * self.sizes.layout.stride) as u64)?;
        if let Err(e) = store.wait(ticket) {
            fetch.refined.clear();
            fetch.layer = None;
            return Err(e.into());
        }
        Ok(())
    }

    /// The groups that true queries rank among the best `selected` and that are not selected, best `refine` of them, ascending.
    fn score_missed(
        &mut self,
        compute: &Compute<'_>,
        layer: usize,
        q: &[f32],
        candidates: Range<usize>,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let complete = self.group_now();
        let rows = self.sketch_range(layer, 0..complete);
        let (Some(adapter), Some(predictor)) = (&self.adapters[layer], &mut self.predictor) else {
            return Ok(());
        };
        let scores = predictor.score(compute, adapter, &self.sketch[rows], complete, q);
        for &group in &self.fetches[layer % 2].selected {
            scores[group as usize] = f32::NEG_INFINITY;
        }
        let count = self.sizes.refine.min(candidates.len() - self.fetches[layer % 2].selected.len());
        top_groups(&scores[candidates.clone()], count, &mut self.order, out);
        out.iter_mut().for_each(|g| *g += candidates.start as u32);
        Ok(())
    }

    /// Copies fetched groups into the reuse buffer, as far as it has slots that this step does not read.
    fn keep_fetched(&mut self, layer: usize) {
        let half = layer % 2;
        let late_base = self.sizes.predicted_slots();
        let fetch = &self.fetches[half];
        self.stats.selected += fetch.selected.len() as u64;
        self.stats.reused += (fetch.selected.len() - fetch.missing.len()) as u64;
        let stride = self.sizes.layout.stride;
        for i in 0..fetch.missing.len() + fetch.refined.len() {
            let (group, staged) = match fetch.missing.get(i) {
                Some(&group) => (group, fetch.plan.slots()[i] as usize),
                None => {
                    let i = i - fetch.missing.len();
                    (fetch.refined[i], late_base + fetch.refine_plan.slots()[i] as usize)
                }
            };
            let Some(slot) = self.slots[layer].insert(group) else { break };
            let from = (half * self.sizes.staging_slots + staged) * stride;
            let to =
                (layer * self.sizes.resident_slots() + self.sizes.sink_slots + self.sizes.window_slots + slot) * stride;
            // SAFETY: the reads into this half of staging are complete, no I/O touches reuse slots, and `&mut self` excludes
            // other slices of either arena.
            unsafe {
                self.resident.slice_mut(to..to + stride).copy_from_slice(self.staging.slice(from..from + stride));
            }
        }
        self.slots[layer].release();
        self.fetches[half].layer = None;
    }

    /// Ends the step: where its token completes a group, the group gets its sketch rows and goes to the store.
    pub fn commit_token(&mut self, compute: &Compute<'_>) -> Result<()> {
        let group = self.group_now();
        if (self.tokens + 1).is_multiple_of(self.sizes.layout.group) {
            self.complete_group(compute, group)?;
        }
        self.tokens += 1;
        Ok(())
    }

    fn complete_group(&mut self, compute: &Compute<'_>, group: usize) -> Result<()> {
        // The window slot that the next group takes belonged to a group written at least one group ago.
        if let Some(store) = &mut self.store {
            for ticket in self.group_writes.drain(..) {
                store.wait(ticket)?;
            }
        }
        for layer in 0..self.shape.layers {
            let range = self.window_range(layer, group);
            let resident = self.resident.clone();
            // SAFETY: nothing writes to the window before the next token, and this function only reads the record.
            let record = unsafe { resident.slice(range.clone()) };
            if group < self.sizes.sink_slots {
                self.set_sink(layer, group, record);
            }
            self.encode_rows(compute, layer, group, record);
            if let Some(store) = &mut self.store {
                let (layer, group, offset) = (layer as u32, group as u32, range.start as u64);
                self.group_writes.push(store.submit_write(layer, group, 1, RESIDENT_REGION, offset)?);
            }
        }
        if self.sizes.window_slots == 1
            && let Some(store) = &mut self.store
        {
            // Without a window the next token overwrites this very slot.
            for ticket in self.group_writes.drain(..) {
                store.wait(ticket)?;
            }
        }
        Ok(())
    }
}
