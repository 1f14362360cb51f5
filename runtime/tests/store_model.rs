//! Random operations on a faulty device against a plain reference in memory.

#![expect(clippy::print_stderr, reason = "a test says its seed")]

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use forebay::store::{
    Arena, DiskClass, FAULTS, Fault, FaultOptions, IoBackend, PlanLimits, ReadPlan, Store, StoreError, StoreLayout,
    StoreOptions, Ticket, probe, staging_slots,
};

const LAYERS: u32 = 4;
const GROUPS: u32 = 64;
const RECORD_BYTES: u32 = 1400;
const OPERATIONS: u32 = 10_000;
const STAGING_AREAS: usize = 4;
const WRITE_AREAS: usize = 3;
const PLAN_GROUPS_MAX: usize = 24;
const GAP_MAX: u32 = 3;
const WRITE_GROUPS_MAX: u32 = 8;
/// A step that fails is repeated this often at most; at these fault rates that fails once in 10^20 runs.
const REPEATS_MAX: u32 = 40;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u32) -> u32 {
        (self.next() >> 20) as u32 % bound
    }
}

/// The contents of one version of a record.
fn record(layer: u32, group: u32, version: u32) -> Vec<u8> {
    let mut random = Random(u64::from(version) << 32 ^ u64::from(layer) << 20 ^ u64::from(group) | 1 << 63);
    (0..RECORD_BYTES).map(|_| (random.next() >> 30) as u8).collect()
}

struct Pending {
    ticket: Ticket,
    plan: ReadPlan,
    fired_before: u64,
}

struct Model {
    random: Random,
    store: Store,
    dir: tempfile::TempDir,
    backend: IoBackend,
    arena: Arc<Arena>,
    layout: StoreLayout,
    /// Version of each record that was written.
    versions: HashMap<(u32, u32), u32>,
    next_version: u32,
    reads: Vec<Option<Pending>>,
    writes: Vec<Option<Ticket>>,
    fired: Vec<u64>,
    failed_steps: u32,
    latched: u32,
}

fn faults(seed: u64) -> FaultOptions {
    FaultOptions {
        seed,
        per_million: vec![
            (Fault::Latency, 5000),
            (Fault::Interrupted, 10_000),
            (Fault::Short, 20_000),
            (Fault::Nothing, 1000),
            (Fault::Io, 1500),
            (Fault::NoSpace, 4000),
            (Fault::BitFlip, 8000),
            (Fault::Misdirected, 4000),
        ],
        latency_max: Duration::from_millis(1),
        skip: 1,
        fires_max: None,
    }
}

impl Model {
    fn new(seed: u64, backend: IoBackend) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let layout = StoreLayout::new(LAYERS, GROUPS, RECORD_BYTES, probe(dir.path()).unwrap()).unwrap();
        let strides = STAGING_AREAS * staging_slots(PLAN_GROUPS_MAX, GAP_MAX)
            + WRITE_AREAS * WRITE_GROUPS_MAX as usize
            + GROUPS as usize;
        let arena = Arena::new(strides * layout.stride() as usize).unwrap();
        let mut random = Random(seed | 1);
        let store = Self::open(&mut random, &dir, backend, layout, &arena);
        Self {
            random,
            store,
            dir,
            backend,
            arena,
            layout,
            versions: HashMap::new(),
            next_version: 1,
            reads: (0..STAGING_AREAS).map(|_| None).collect(),
            writes: (0..WRITE_AREAS).map(|_| None).collect(),
            fired: vec![0; FAULTS.len()],
            failed_steps: 0,
            latched: 0,
        }
    }

    fn open(
        random: &mut Random,
        dir: &tempfile::TempDir,
        backend: IoBackend,
        layout: StoreLayout,
        arena: &Arc<Arena>,
    ) -> Store {
        let mut options = StoreOptions::new(dir.path());
        options.backend = backend;
        options.plan_groups_max = PLAN_GROUPS_MAX;
        options.faults = Some(faults(random.next()));
        Store::create(options, layout, &[Arc::clone(arena)]).unwrap()
    }

    fn stride(&self) -> u64 {
        self.layout.stride().into()
    }

    fn staging(&self, area: usize) -> u64 {
        (area * staging_slots(PLAN_GROUPS_MAX, GAP_MAX)) as u64 * self.stride()
    }

    fn write_area(&self, area: usize) -> u64 {
        self.staging(STAGING_AREAS) + (area as u64 * u64::from(WRITE_GROUPS_MAX)) * self.stride()
    }

    fn range_area(&self) -> u64 {
        self.write_area(WRITE_AREAS)
    }

    fn check(&self, layer: u32, group: u32, offset: u64) {
        let at = offset as usize;
        // SAFETY: the read of these bytes was waited for.
        let found = unsafe { self.arena.slice(at..at + RECORD_BYTES as usize) };
        let version = self.versions[&(layer, group)];
        assert!(found == record(layer, group, version), "layer {layer} group {group} version {version}");
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..30 => self.write(),
            30..60 => self.submit_reads(),
            60..85 => {
                let area = self.random.below(STAGING_AREAS as u32) as usize;
                self.wait_reads(area);
            }
            85..92 => self.read_range(),
            92..96 => {
                let polled = self.store.poll();
                self.expect_usable(polled);
            }
            96..99 => {
                let waited = self.store.wait_writes();
                self.expect_usable(waited);
            }
            _ => {
                self.reads.iter_mut().for_each(|read| *read = None);
                let drained = self.store.drain();
                self.expect_usable(drained);
            }
        }
    }

    /// A write error may come out of any call; then the store is closed for good, and a fresh one takes its place.
    fn expect_usable(&mut self, result: Result<(), StoreError>) {
        if let Err(e) = result {
            self.reopen(e);
        }
    }

    fn reopen(&mut self, e: StoreError) {
        assert!(matches!(e, StoreError::Latched(_)), "{e}");
        assert!(self.store.fault_counts().total() > 0);
        for _ in 0..2 {
            assert!(matches!(self.store.wait_writes(), Err(StoreError::Latched(_))));
            assert!(matches!(self.store.submit_write(0, 0, 1, 0, self.range_area()), Err(StoreError::Latched(_))));
        }
        self.tally();
        self.latched += 1;
        self.store = Self::open(&mut self.random, &self.dir, self.backend, self.layout, &self.arena);
        self.versions.clear();
        self.reads.iter_mut().for_each(|read| *read = None);
        self.writes.iter_mut().for_each(|write| *write = None);
    }

    fn tally(&mut self) {
        for (sum, &fault) in self.fired.iter_mut().zip(&FAULTS) {
            *sum += self.store.fault_counts().of(fault);
        }
    }

    fn write(&mut self) {
        let layer = self.random.below(LAYERS);
        let count = 1 + self.random.below(WRITE_GROUPS_MAX);
        let first = self.random.below(GROUPS - count + 1);
        let area = self.random.below(WRITE_AREAS as u32) as usize;
        if let Some(ticket) = self.writes[area].take() {
            let waited = self.store.wait(ticket);
            if waited.is_err() {
                return self.expect_usable(waited);
            }
        }
        let wanted = first..first + count;
        let busy =
            self.reads.iter().flatten().any(|read| {
                read.plan.layer() == layer && read.plan.groups().iter().any(|group| wanted.contains(group))
            });
        let offset = self.write_area(area);
        for i in 0..count {
            let at = (offset + u64::from(i) * self.stride()) as usize;
            // SAFETY: the area's last write was waited for, and no read ever goes there.
            unsafe { self.arena.slice_mut(at..at + RECORD_BYTES as usize) }.copy_from_slice(&record(
                layer,
                first + i,
                self.next_version,
            ));
        }
        match self.store.submit_write(layer, first, count, 0, offset) {
            Ok(ticket) => {
                assert!(!busy);
                self.writes[area] = Some(ticket);
                for group in wanted {
                    self.versions.insert((layer, group), self.next_version);
                }
                self.next_version += 1;
            }
            Err(StoreError::GroupBusy { .. }) => assert!(busy),
            Err(e) => self.reopen(e),
        }
    }

    fn submit_reads(&mut self) {
        let area = self.random.below(STAGING_AREAS as u32) as usize;
        if self.reads[area].is_some() {
            self.wait_reads(area);
        }
        let layer = self.random.below(LAYERS);
        let count = self.random.below(PLAN_GROUPS_MAX as u32 + 1);
        let mut groups: BTreeSet<u32> = (0..count).map(|_| self.random.below(GROUPS)).collect();
        if self.random.below(10) > 0 {
            groups.retain(|&group| self.versions.contains_key(&(layer, group)));
        }
        let unwritten = groups.iter().find(|&&group| !self.versions.contains_key(&(layer, group))).copied();
        let limits = PlanLimits {
            merge_gap: self.random.below(GAP_MAX + 1),
            extent_bytes_max: self.layout.stride() * (1 + self.random.below(GROUPS)),
            ..PlanLimits::default()
        };
        let mut plan = ReadPlan::with_capacity(groups.len());
        plan.build(&self.layout, layer, &Vec::from_iter(groups), limits).unwrap();
        let fired_before = self.store.fault_counts().total();
        match self.store.submit_reads(&plan, 0, self.staging(area)) {
            Ok(ticket) => {
                assert_eq!(unwritten, None);
                self.reads[area] = Some(Pending { ticket, plan, fired_before });
            }
            Err(StoreError::NeverWritten { group, .. }) => assert_eq!(Some(group), unwritten),
            Err(e) => self.reopen(e),
        }
    }

    fn wait_reads(&mut self, area: usize) {
        let Some(Pending { ticket, plan, fired_before }) = self.reads[area].take() else { return };
        let offset = self.staging(area);
        let mut result = self.store.wait(ticket);
        for _ in 0..REPEATS_MAX {
            let Err(e) = result else { break };
            assert!(self.store.fault_counts().total() > fired_before, "{e}: no fault has fired");
            if matches!(e, StoreError::Latched(_)) {
                return self.reopen(e);
            }
            self.failed_steps += 1;
            result = self.store.submit_reads(&plan, 0, offset).and_then(|ticket| self.store.wait(ticket));
        }
        result.unwrap();
        for (&group, &slot) in plan.groups().iter().zip(plan.slots()) {
            self.check(plan.layer(), group, offset + u64::from(slot) * self.stride());
        }
    }

    fn read_range(&mut self) {
        let layer = self.random.below(LAYERS);
        let first = self.random.below(GROUPS);
        let count = (first..GROUPS).take_while(|&group| self.versions.contains_key(&(layer, group))).count() as u32;
        if count == 0 {
            return;
        }
        let offset = self.range_area();
        let fired_before = self.store.fault_counts().total();
        for _ in 0..REPEATS_MAX {
            match self.store.read_groups_blocking(layer, first, count, 0, offset) {
                Ok(()) => {
                    for group in first..first + count {
                        self.check(layer, group, offset + u64::from(group - first) * self.stride());
                    }
                    return;
                }
                Err(e @ StoreError::Latched(_)) => return self.reopen(e),
                Err(e) => assert!(self.store.fault_counts().total() > fired_before, "{e}: no fault has fired"),
            }
            self.failed_steps += 1;
        }
        panic!("a range could not be read in {REPEATS_MAX} tries");
    }
}

fn fresh_seed() -> u64 {
    match std::env::var("FOREBAY_TEST_SEED") {
        Ok(seed) => seed.parse().expect("FOREBAY_TEST_SEED is a number"),
        Err(_) => std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64,
    }
}

fn random_operations(backend: IoBackend) {
    let seed = fresh_seed();
    eprintln!("{backend:?}: FOREBAY_TEST_SEED={seed}");
    let mut model = Model::new(seed, backend);
    for _ in 0..OPERATIONS {
        model.step();
    }
    model.tally();
    let retries = model.store.stats().checksum_retries;
    eprintln!(
        "{backend:?}: {} failed steps, {} closed stores, {retries} records read again",
        model.failed_steps, model.latched
    );
    for (&fault, &fired) in FAULTS.iter().zip(&model.fired) {
        eprintln!("  {fault:?}: {fired}");
        // Lost writes have a test of their own.
        assert!(fired > 0 || fault == Fault::LostWrite, "seed {seed}: {fault:?} never fired");
    }
    assert!(model.failed_steps > 0 && model.latched > 0, "seed {seed}: the faults changed nothing");
    let Model { store, dir, .. } = model;
    drop(store);
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
}

#[test]
fn random_operations_uring() {
    random_operations(IoBackend::Uring);
}

#[test]
fn random_operations_pread() {
    random_operations(IoBackend::Pread);
}

/// A store with one layer of ten records, written, on a device with one kind of fault.
fn small(fault: Fault, per_million: u32, fires_max: Option<u64>, skip: u64, checksums: bool) -> (Store, Arc<Arena>) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layout = StoreLayout::new(1, 10, 4096, probe(dir.path()).unwrap()).unwrap();
    let arena = Arena::new(20 * layout.stride() as usize).unwrap();
    let mut options = StoreOptions::new(dir.path());
    options.checksums = checksums;
    options.faults =
        Some(FaultOptions { seed: 7, per_million: vec![(fault, per_million)], skip, fires_max, ..Default::default() });
    let mut store = Store::create(options, layout, &[Arc::clone(&arena)]).unwrap();
    for group in 0..10 {
        let at = group as usize * 4096;
        // SAFETY: nothing is in flight.
        unsafe { arena.slice_mut(at..at + RECORD_BYTES as usize) }.copy_from_slice(&record(0, group, 0));
    }
    let ticket = store.submit_write(0, 0, 10, 0, 0).unwrap();
    store.wait(ticket).unwrap();
    (store, arena)
}

#[test]
fn one_wrong_read_is_read_again() {
    for fault in [Fault::BitFlip, Fault::Misdirected] {
        let (mut store, arena) = small(fault, 1_000_000, Some(1), 2, true);
        store.read_groups_blocking(0, 0, 10, 0, 10 * 4096).unwrap();
        assert_eq!(store.fault_counts().of(fault), 1);
        assert!(store.stats().checksum_retries > 0);
        // SAFETY: the reads were waited for.
        let (written, read) = unsafe { (arena.slice(0..40960), arena.slice(40960..81920)) };
        assert!(written == read);
    }
}

#[test]
fn damage_that_stays_names_its_place() {
    for fault in [Fault::BitFlip, Fault::Misdirected] {
        let (mut store, _) = small(fault, 1_000_000, None, 2, true);
        let error = store.read_groups_blocking(0, 3, 1, 0, 10 * 4096).unwrap_err();
        let StoreError::Corrupt { layer: 0, group: 3, file_offset, expected, found } = error else {
            panic!("{error}");
        };
        assert_eq!(file_offset, store.layout().file_offset(0, 3));
        assert_ne!(expected, found);
    }
}

#[test]
fn a_write_that_was_lost_is_found_when_it_is_read() {
    let (mut store, _) = small(Fault::LostWrite, 1_000_000, None, 1, true);
    let error = store.read_groups_blocking(0, 0, 10, 0, 10 * 4096).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { layer: 0, group: 0, .. }), "{error}");
}

#[test]
fn without_checksums_nobody_notices() {
    let (mut store, arena) = small(Fault::Misdirected, 1_000_000, None, 2, false);
    store.read_groups_blocking(0, 3, 1, 0, 10 * 4096).unwrap();
    // SAFETY: the read was waited for.
    let (written, read) = unsafe { (arena.slice(3 * 4096..4 * 4096), arena.slice(40960..45056)) };
    assert!(written != read);
}

#[test]
fn what_never_gets_further_ends() {
    let (mut store, _) = small(Fault::Interrupted, 1_000_000, None, 2, true);
    let error = store.read_groups_blocking(0, 0, 1, 0, 10 * 4096).unwrap_err();
    assert!(matches!(error, StoreError::Retries { tries: forebay::store::TRANSIENT_TRIES_MAX, .. }), "{error}");
}

#[test]
fn the_modelled_disk_is_never_early() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layout = StoreLayout::new(1, 64, 16384, probe(dir.path()).unwrap()).unwrap();
    let arena = Arena::new(64 * layout.stride() as usize).unwrap();
    for (class, backend) in [(DiskClass::Emmc, IoBackend::Auto), (DiskClass::SdCard, IoBackend::Pread)] {
        let mut options = StoreOptions::new(dir.path());
        (options.throttle, options.backend) = (class, backend);
        let mut store = Store::create(options, layout, &[Arc::clone(&arena)]).unwrap();
        let profile = class.profile().unwrap();
        let start = std::time::Instant::now();
        let ticket = store.submit_write(0, 0, 64, 0, 0).unwrap();
        store.wait(ticket).unwrap();
        assert!(start.elapsed() >= profile.write.transfer(1 << 20) + profile.write.latency);
        let mut plan = ReadPlan::default();
        let groups: Vec<u32> = (0..64).step_by(2).collect();
        plan.build(&layout, 0, &groups, PlanLimits::default()).unwrap();
        let start = std::time::Instant::now();
        let ticket = store.submit_reads(&plan, 0, 0).unwrap();
        store.wait(ticket).unwrap();
        let modelled = profile.read.interval(16384) * 31 + profile.read.latency + profile.read.transfer(16384);
        assert!(start.elapsed() >= modelled, "{class}: {:?} of {modelled:?}", start.elapsed());
        let stats = store.stats();
        assert!(stats.io_wait_seconds > 0.0 && stats.io_busy_seconds >= modelled.as_secs_f64());
    }
}
