//! A decode step over the tiers: predict and submit, append, attend, keep what was fetched, complete groups.

use super::Compute;
use super::block_table::BlockTable;
use super::tier::{RESIDENT_REGION, STAGING_REGION, TieredCache};
use crate::config::Aggregate;
use crate::error::{Error, Result};
use crate::store::PlanLimits;
use forebay_kernels::attention::{AttentionScratch, KvPiece, attend};
use forebay_kernels::select::top_groups;
use std::ops::Range;

impl TieredCache {
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
        let (Some(adapter), Some(predictor)) = (&self.adapters[layer], &mut self.predictor) else {
            return Err(Error::internal("scoring without a sketch"));
        };
        let scores = predictor.score(compute, adapter, &self.sketch[layer], complete, q);
        let scores = &scores[candidates.clone()];
        top_groups(scores, count, &mut self.order, out);
        if self.config.score_floor > 0.0 && self.config.aggregate != Aggregate::Sum {
            // A score is the sum of the probabilities of all queries.
            let floor = self.config.score_floor * self.sizes.score_queries as f32;
            out.retain(|&g| scores[g as usize] >= floor);
        }
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
        let (Some(adapter), Some(predictor)) = (&self.adapters[layer], &mut self.predictor) else {
            return Ok(());
        };
        let scores = predictor.score(compute, adapter, &self.sketch[layer], complete, q);
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
