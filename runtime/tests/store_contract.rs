//! One contract for every backend and kind of file system.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay::store::{
    Alignment, Arena, IoBackend, PlanLimits, ReadPlan, Store, StoreError, StoreLayout, StoreOptions, probe,
    staging_slots,
};

/// Where a case keeps its file.
#[derive(Clone, Copy)]
enum Medium {
    /// The build directory's file system, with direct I/O where it has it.
    Direct,
    /// The same through the page cache.
    Cached,
    /// tmpfs.
    Tmpfs,
}

impl Medium {
    fn dir(self) -> Option<tempfile::TempDir> {
        let parent = match self {
            Medium::Direct | Medium::Cached => PathBuf::from(env!("CARGO_TARGET_TMPDIR")),
            Medium::Tmpfs => PathBuf::from("/dev/shm"),
        };
        if !parent.is_dir() {
            eprintln!("skipped: {} is not there", parent.display());
            return None;
        }
        Some(tempfile::tempdir_in(parent).unwrap())
    }
}

/// A store with one arena.
struct Case {
    store: Store,
    arena: Arc<Arena>,
    layout: StoreLayout,
    dir: tempfile::TempDir,
}

const LAYERS: u32 = 3;
const GROUPS: u32 = 96;

impl Case {
    fn new(backend: IoBackend, medium: Medium, record_bytes: u32) -> Option<Self> {
        Self::with(backend, medium, record_bytes, GROUPS, |_| {})
    }

    fn with(
        backend: IoBackend,
        medium: Medium,
        record_bytes: u32,
        groups: u32,
        adjust: impl FnOnce(&mut StoreOptions),
    ) -> Option<Self> {
        let dir = medium.dir()?;
        let alignment = probe(dir.path()).unwrap();
        let layout = StoreLayout::new(LAYERS, groups, record_bytes, alignment).unwrap();
        let arena = Arena::new(4 * groups as usize * layout.stride() as usize).unwrap();
        let mut options = StoreOptions::new(dir.path());
        options.backend = backend;
        options.buffered = matches!(medium, Medium::Cached);
        adjust(&mut options);
        let store = Store::create(options, layout, &[Arc::clone(&arena)]).unwrap();
        let caps = store.capabilities();
        assert_eq!(caps.backend == "pread", matches!(backend, IoBackend::Pread));
        assert!(!caps.direct || matches!(medium, Medium::Direct));
        Some(Self { store, arena, layout, dir })
    }

    /// Second half of the arena: where reads land.
    fn staging(&self) -> u64 {
        self.arena.len() as u64 / 2 / self.stride() as u64 * self.stride() as u64
    }

    fn stride(&self) -> usize {
        self.layout.stride() as usize
    }

    /// Puts the records of `groups` at the arena's start.
    fn fill(&mut self, layer: u32, groups: std::ops::Range<u32>) {
        for (i, group) in groups.enumerate() {
            let at = i * self.stride();
            // SAFETY: no transfer of the first half is in flight: every write of these tests is waited for.
            let bytes = unsafe { self.arena.slice_mut(at..at + self.stride()) };
            bytes.copy_from_slice(&record(layer, group, bytes.len()));
        }
    }

    fn write(&mut self, layer: u32, groups: std::ops::Range<u32>) {
        self.fill(layer, groups.clone());
        let ticket = self.store.submit_write(layer, groups.start, groups.len() as u32, 0, 0).unwrap();
        self.store.wait(ticket).unwrap();
        self.store.wait_writes().unwrap();
    }

    fn write_all(&mut self) {
        for layer in 0..LAYERS {
            self.write(layer, 0..self.layout.groups_per_layer());
        }
    }

    fn check(&self, layer: u32, group: u32, offset: u64) {
        let at = offset as usize;
        // SAFETY: the read of these bytes was waited for.
        let found = unsafe { self.arena.slice(at..at + self.layout.record_bytes() as usize) };
        assert!(found == record(layer, group, found.len()), "layer {layer} group {group}");
    }

    fn check_plan(&self, plan: &ReadPlan, offset: u64) {
        for (&group, &slot) in plan.groups().iter().zip(plan.slots()) {
            self.check(plan.layer(), group, offset + u64::from(slot) * self.stride() as u64);
        }
    }

    fn plan(&self, layer: u32, groups: &[u32], limits: PlanLimits) -> ReadPlan {
        let mut plan = ReadPlan::with_capacity(groups.len());
        plan.build(&self.layout, layer, groups, limits).unwrap();
        plan
    }
}

fn xorshift(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Bytes that differ between any two records, and along each.
fn record(layer: u32, group: u32, length: usize) -> Vec<u8> {
    let mut state = (u64::from(layer) << 32 | u64::from(group)) ^ 0x9e37_79b9_7f4a_7c15;
    (0..length).map(|_| (xorshift(&mut state) >> 24) as u8).collect()
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).unwrap().next().is_none()
}

/// Record bytes of group sizes 1 to 16 of a small model, and odd lengths.
fn record_lengths() -> Vec<u32> {
    let groups = (1..=16).map(|group| 2 * 3 * group * 64 * 2);
    groups.chain([1, 511, 513, 4095, 4097, 12_345]).collect()
}

fn reads_back_bit_for_bit(backend: IoBackend, medium: Medium) {
    for record_bytes in record_lengths() {
        let Some(mut case) = Case::new(backend, medium, record_bytes) else { return };
        case.write_all();
        let staging = case.staging();
        for layer in (0..LAYERS).rev() {
            case.store.read_groups_blocking(layer, 0, GROUPS, 0, staging).unwrap();
            for group in 0..GROUPS {
                case.check(layer, group, staging + u64::from(group) * case.stride() as u64);
            }
        }
    }
}

fn merges_extents_and_gaps(backend: IoBackend, medium: Medium) {
    let Some(mut case) = Case::new(backend, medium, 1536) else { return };
    case.write_all();
    let groups = [0, 1, 2, 5, 9, 10, 20, 21, 22, 23, 24, 25, 40, 95];
    for (merge_gap, groups_max) in [(0, 1), (0, 4), (0, 1000), (2, 1000), (3, 5), (100, 1000)] {
        let limits = PlanLimits { merge_gap, extent_bytes_max: groups_max * case.layout.stride() };
        let plan = case.plan(1, &groups, limits);
        assert!(plan.slot_count() as usize <= staging_slots(groups.len(), merge_gap));
        let before = case.store.stats();
        let ticket = case.store.submit_reads(&plan, 0, case.staging()).unwrap();
        case.store.wait(ticket).unwrap();
        case.check_plan(&plan, case.staging());
        let after = case.store.stats();
        assert_eq!(after.reads - before.reads, plan.extents().len() as u64);
        assert_eq!(after.read_requests - before.read_requests, groups.len() as u64);
        assert_eq!(after.bytes_read - before.bytes_read, plan.staging_bytes());
    }
    let empty = case.plan(2, &[], PlanLimits::default());
    let ticket = case.store.submit_reads(&empty, 0, 0).unwrap();
    case.store.wait(ticket).unwrap();
}

fn tickets_in_any_order(backend: IoBackend, medium: Medium) {
    let Some(mut case) = Case::new(backend, medium, 768) else { return };
    case.write_all();
    let plans: Vec<_> =
        (0..6).map(|i| case.plan(i % LAYERS, &[i, i + 7, i + 30, i + 31], PlanLimits::default())).collect();
    let offsets: Vec<u64> = (0..6).map(|i| case.staging() + (i * 8 * case.stride()) as u64).collect();
    let mut tickets = Vec::new();
    for (plan, &offset) in plans.iter().zip(&offsets) {
        tickets.push(Some(case.store.submit_reads(plan, 0, offset).unwrap()));
    }
    for i in [3, 0, 5, 1, 4, 2] {
        case.store.wait(tickets[i].take().unwrap()).unwrap();
        case.check_plan(&plans[i], offsets[i]);
    }
}

fn more_reads_than_the_ring_holds(backend: IoBackend, medium: Medium) {
    let Some(mut case) = Case::with(backend, medium, 512, 3000, |_| {}) else { return };
    case.write_all();
    // Every other group: nothing merges. 1500 reads are more than the queue holds, too.
    let groups: Vec<u32> = (0..3000).step_by(2).collect();
    let plan = case.plan(2, &groups, PlanLimits::default());
    assert!(plan.extents().len() > forebay::store::TRANSFERS_MAX);
    let ticket = case.store.submit_reads(&plan, 0, case.staging()).unwrap();
    case.store.wait(ticket).unwrap();
    case.check_plan(&plan, case.staging());
}

fn reads_while_writing(backend: IoBackend, medium: Medium) {
    let Some(mut case) = Case::new(backend, medium, 40_000) else { return };
    case.write(0, 0..GROUPS);
    let staging = case.staging();
    case.fill(1, 0..GROUPS);
    let write = case.store.submit_write(1, 0, GROUPS, 0, 0).unwrap();
    let other = case.plan(0, &[3, 50, 90], PlanLimits::default());
    let ticket = case.store.submit_reads(&other, 0, staging).unwrap();
    case.store.wait(ticket).unwrap();
    case.check_plan(&other, staging);
    // A read of what is being written waits for the write.
    let own = case.plan(1, &[0, 47, 95], PlanLimits::default());
    let ticket = case.store.submit_reads(&own, 0, staging).unwrap();
    case.store.wait(ticket).unwrap();
    case.check_plan(&own, staging);
    case.store.wait(write).unwrap();
    assert_eq!(case.store.stats().bytes_written, case.layout.file_offset(2, 0));
}

fn misuse_is_refused_and_harmless(backend: IoBackend, medium: Medium) {
    let Some(mut case) = Case::new(backend, medium, 512) else { return };
    case.write(0, 0..GROUPS);
    let staging = case.staging();
    let plan = case.plan(0, &[1, 2, 3], PlanLimits::default());
    let stride = case.stride() as u64;
    let end = case.arena.len() as u64;
    for (region, offset) in [(0, end - 2 * stride), (9, 0), (0, u64::MAX)] {
        let refused = case.store.submit_reads(&plan, region, offset).unwrap_err();
        assert!(matches!(refused, StoreError::BufferRange { .. }), "{refused}");
    }
    let unwritten = case.plan(1, &[0], PlanLimits::default());
    let refused = case.store.submit_reads(&unwritten, 0, 0).unwrap_err();
    assert_eq!(refused, StoreError::NeverWritten { layer: 1, group: 0 });
    for (layer, first, count) in [(LAYERS, 0, 1), (0, GROUPS, 1), (0, 0, GROUPS + 1), (0, 0, 0)] {
        assert!(matches!(case.store.submit_write(layer, first, count, 0, 0), Err(StoreError::Request { .. })));
        assert!(matches!(case.store.submit_read_range(layer, first, count, 0, 0), Err(StoreError::Request { .. })));
    }
    // A buffer, and a group, that an unwaited read owns.
    let ticket = case.store.submit_reads(&plan, 0, staging).unwrap();
    let refused = case.store.submit_reads(&plan, 0, staging + 2 * stride).unwrap_err();
    assert!(matches!(refused, StoreError::BufferBusy { .. }), "{refused}");
    let refused = case.store.submit_write(0, 3, 1, 0, 0).unwrap_err();
    assert!(matches!(refused, StoreError::GroupBusy { layer: 0, group: 3 }), "{refused}");
    case.store.wait(ticket).unwrap();
    case.check_plan(&plan, staging);
    // Forgotten tickets are cleared away by a drain.
    let ticket = case.store.submit_reads(&plan, 0, staging).unwrap();
    case.store.drain().unwrap();
    assert!(matches!(case.store.wait(ticket), Err(StoreError::StaleTicket(_))));
    let ticket = case.store.submit_reads(&plan, 0, staging).unwrap();
    case.store.wait(ticket).unwrap();
    case.check_plan(&plan, staging);
}

fn misaligned_buffers_are_errors(backend: IoBackend, medium: Medium) {
    let Some(mut case) = Case::new(backend, medium, 512) else { return };
    let stats = case.store.stats();
    let refused = case.store.submit_write(0, 0, 1, 0, 1).unwrap_err();
    assert!(matches!(refused, StoreError::Misaligned { .. }), "{refused}");
    assert_eq!(case.store.stats().bytes_written, stats.bytes_written);
    assert!(!case.store.is_written(0, 0));
    case.write(0, 0..1);
    let plan = case.plan(0, &[0], PlanLimits::default());
    let refused = case.store.submit_reads(&plan, 0, case.staging() + 1).unwrap_err();
    assert!(matches!(refused, StoreError::Misaligned { .. }), "{refused}");
    case.store.read_groups_blocking(0, 0, 1, 0, 0).unwrap();
    case.check(0, 0, 0);
}

fn a_dropped_store_leaves_the_arena_in_peace(backend: IoBackend, medium: Medium) {
    for _ in 0..10 {
        let Some(mut case) = Case::new(backend, medium, 65_536) else { return };
        case.write_all();
        let plan = case.plan(0, &(0..GROUPS).step_by(2).collect::<Vec<_>>(), PlanLimits::default());
        let _unwaited = case.store.submit_reads(&plan, 0, case.staging()).unwrap();
        let _unwaited = case.store.submit_write(1, 0, GROUPS, 0, 0).unwrap();
        let Case { store, arena, dir, .. } = case;
        drop(store);
        assert_eq!(Arc::strong_count(&arena), 1);
        // SAFETY: the store is gone and waited for everything.
        unsafe { arena.slice_mut(0..arena.len()) }.fill(0xa5);
        std::thread::yield_now();
        // SAFETY: as above.
        assert!(unsafe { arena.slice(0..arena.len()) }.iter().all(|&b| b == 0xa5));
        assert!(is_empty(dir.path()));
    }
}

fn the_file_is_private_and_reserved(backend: IoBackend, medium: Medium) {
    use std::os::unix::fs::MetadataExt;
    // A size that no other test has, to find the file among the open ones.
    let Some(case) = Case::with(backend, medium, 4096, 177, |_| {}) else { return };
    assert!(is_empty(case.dir.path()));
    let device = std::fs::metadata(case.dir.path()).unwrap().dev();
    let ours: Vec<_> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::metadata(entry.unwrap().path()).ok())
        .filter(|meta| meta.nlink() == 0 && meta.dev() == device && meta.len() == case.layout.file_bytes())
        .collect();
    assert!(!ours.is_empty());
    assert!(ours.iter().all(|meta| meta.mode() & 0o777 == 0o600 && meta.blocks() * 512 >= meta.len()));
}

fn a_write_budget_is_enforced_before_the_write(backend: IoBackend, medium: Medium) {
    let budget = 4096 + 10 * 4096;
    let Some(mut case) = Case::with(backend, medium, 4096, GROUPS, |o| o.write_budget_bytes = Some(budget)) else {
        return;
    };
    case.write(0, 0..10);
    let refused = case.store.submit_write(0, 10, 1, 0, 0).unwrap_err();
    assert!(matches!(refused, StoreError::WriteBudget { wanted_bytes: 4096, .. }), "{refused}");
    assert_eq!(case.store.stats().bytes_written, budget);
    assert!(!case.store.is_written(0, 10));
    // What is there can still be read.
    case.store.read_groups_blocking(0, 0, 10, 0, 0).unwrap();
}

fn random_rewrites_and_reads(backend: IoBackend, medium: Medium) {
    let Some(mut case) = Case::new(backend, medium, 2000) else { return };
    case.write_all();
    let mut state = 0x139_408d_cbbf_7a44;
    let mut random = |bound: u64| xorshift(&mut state) % bound;
    for _ in 0..200 {
        let layer = random(LAYERS.into()) as u32;
        let groups: BTreeSet<u32> = (0..random(30)).map(|_| random(GROUPS.into()) as u32).collect();
        let limits = PlanLimits { merge_gap: random(4) as u32, extent_bytes_max: 1 << (9 + random(8)) };
        let plan = case.plan(layer, &Vec::from_iter(groups), limits);
        let ticket = case.store.submit_reads(&plan, 0, case.staging()).unwrap();
        case.store.poll().unwrap();
        case.store.wait(ticket).unwrap();
        case.check_plan(&plan, case.staging());
        let first = random(u64::from(GROUPS) - 3) as u32;
        case.write(layer, first..first + 3);
    }
}

macro_rules! contract {
    ($($backend:ident $medium:ident as $name:ident),+; $tests:tt) => {
        $(contract!(@module $backend $medium $name $tests);)+
    };
    (@module $backend:ident $medium:ident $name:ident [$($test:ident),+ $(,)?]) => {
        mod $name {
            use super::*;
            $(#[test]
            fn $test() {
                super::$test(IoBackend::$backend, Medium::$medium);
            })+
        }
    };
}

contract!(
    Uring Direct as uring_direct,
    Uring Cached as uring_cached,
    Uring Tmpfs as uring_tmpfs,
    Pread Direct as pread_direct,
    Pread Cached as pread_cached,
    Pread Tmpfs as pread_tmpfs;
    [
        reads_back_bit_for_bit,
        merges_extents_and_gaps,
        tickets_in_any_order,
        more_reads_than_the_ring_holds,
        reads_while_writing,
        misuse_is_refused_and_harmless,
        misaligned_buffers_are_errors,
        a_dropped_store_leaves_the_arena_in_peace,
        the_file_is_private_and_reserved,
        a_write_budget_is_enforced_before_the_write,
        random_rewrites_and_reads,
    ]
);

#[test]
fn a_layout_of_another_alignment_is_an_error() {
    let dir = Medium::Direct.dir().unwrap();
    let layout = StoreLayout::new(1, 1, 100, Alignment { memory: 1, offset: 1 }).unwrap();
    let refused = Store::create(StoreOptions::new(dir.path()), layout, &[]).unwrap_err();
    assert!(matches!(refused, StoreError::Layout { what: "stride", .. }), "{refused}");
}
