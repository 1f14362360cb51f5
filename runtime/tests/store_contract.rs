//! One contract for every backend and kind of file system.

#![expect(clippy::print_stderr, reason = "a test says what it skips")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay::store::{
    Alignment, Arena, IoBackend, PlanLimits, ReadPlan, Store, StoreError, StoreLayout, StoreOptions, probe,
    staging_slots,
};
use forebay_kernels::Pool;

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
        if backend == IoBackend::Auto {
            // With threads that compute, and without anything in the background.
            options.pool = Some(Arc::new(Pool::new(2)));
        }
        options.buffered = matches!(medium, Medium::Cached);
        adjust(&mut options);
        let store = Store::create(options, layout, &[Arc::clone(&arena)]).unwrap();
        let caps = store.capabilities();
        assert_eq!(caps.backend == "io_uring", backend == IoBackend::Uring);
        assert_eq!(caps.background, backend != IoBackend::Auto);
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
        let limits =
            PlanLimits { merge_gap, extent_bytes_max: groups_max * case.layout.stride(), ..PlanLimits::default() };
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
        let limits =
            PlanLimits { merge_gap: random(4) as u32, extent_bytes_max: 1 << (9 + random(8)), ..PlanLimits::default() };
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
    Pread Tmpfs as pread_tmpfs,
    Auto Tmpfs as inline_tmpfs;
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

#[test]
fn an_absent_directory_and_a_file_are_named() {
    let dir = Medium::Direct.dir().unwrap();
    let absent = dir.path().join("nowhere");
    assert_eq!(probe(&absent).unwrap_err(), StoreError::DirAbsent(absent.clone()));
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for path in [file.clone(), file.join("below")] {
        let refused = probe(&path).unwrap_err();
        assert_eq!(refused, StoreError::DirNotDirectory(path.clone()));
        assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
    }
}

/// A tmpfs of its own, gone with the value. `None`, and a word about it, where mounting is not allowed.
struct Mount(tempfile::TempDir);

impl Mount {
    fn tmpfs(options: &str) -> Option<Self> {
        let dir = Medium::Direct.dir()?;
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(dir.path())
            .stderr(std::process::Stdio::null())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self(dir));
        }
        eprintln!("skipped: a tmpfs with {options} cannot be mounted here");
        None
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmounted = std::process::Command::new("umount").arg(self.0.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()));
    }
}

#[test]
fn a_read_only_directory_is_named() {
    let Some(mount) = Mount::tmpfs("ro") else { return };
    let refused = probe(mount.0.path()).unwrap_err();
    assert!(matches!(&refused, StoreError::DirNotWritable { path, .. } if path == mount.0.path()), "{refused}");
}

#[test]
fn a_full_file_system_is_an_error_before_anything_is_written() {
    let Some(mount) = Mount::tmpfs("size=1m") else { return };
    let dir = mount.0.path();
    let alignment = probe(dir).unwrap();
    let arena = Arena::new(1 << 20).unwrap();
    let layout = StoreLayout::new(2, 128, 4096, alignment).unwrap();
    let refused = Store::create(StoreOptions::new(dir), layout, &[Arc::clone(&arena)]).unwrap_err();
    let StoreError::NoSpace { needed_bytes, free_bytes, .. } = refused else { panic!("{refused}") };
    assert_eq!(needed_bytes, layout.file_bytes());
    assert!(free_bytes <= 1 << 20 && free_bytes > 0);
    // What fits, fits, whole, and a second store in the rest of it does not.
    let layout = StoreLayout::new(2, 100, 4096, alignment).unwrap();
    let mut store = Store::create(StoreOptions::new(dir), layout, &[Arc::clone(&arena)]).unwrap();
    assert!(matches!(Store::create(StoreOptions::new(dir), layout, &[]), Err(StoreError::NoSpace { .. })));
    for layer in 0..2 {
        let ticket = store.submit_write(layer, 0, 100, 0, 0).unwrap();
        store.wait(ticket).unwrap();
    }
    drop(store);
    assert!(is_empty(dir));
}

const CHILD_DIR: &str = "FOREBAY_TEST_CHILD_DIR";

/// Not a test by itself: the process that `a_killed_process_leaves_nothing` kills.
#[test]
fn child_that_writes_until_it_is_killed() {
    let Ok(dir) = std::env::var(CHILD_DIR) else { return };
    let layout = StoreLayout::new(LAYERS, GROUPS, 4096, probe(Path::new(&dir)).unwrap()).unwrap();
    let arena = Arena::new((GROUPS * layout.stride()) as usize).unwrap();
    loop {
        let mut store = Store::create(StoreOptions::new(&dir), layout, &[Arc::clone(&arena)]).unwrap();
        for layer in 0..LAYERS {
            let ticket = store.submit_write(layer, 0, GROUPS, 0, 0).unwrap();
            store.wait(ticket).unwrap();
        }
    }
}

#[test]
fn a_killed_process_leaves_nothing() {
    let dir = Medium::Direct.dir().unwrap();
    for round in 0..10 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_writes_until_it_is_killed"])
            .env(CHILD_DIR, dir.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20 + 13 * round));
        assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_empty(dir.path()));
    }
}

#[test]
fn two_stores_in_one_directory_do_not_meet() {
    let dir = Medium::Direct.dir().unwrap();
    let layout = StoreLayout::new(1, GROUPS, 4096, probe(dir.path()).unwrap()).unwrap();
    let arenas = [0, 1].map(|_| Arena::new(2 * (GROUPS * layout.stride()) as usize).unwrap());
    let mut stores = arenas
        .each_ref()
        .map(|arena| Store::create(StoreOptions::new(dir.path()), layout, &[Arc::clone(arena)]).unwrap());
    for (i, (store, arena)) in stores.iter_mut().zip(&arenas).enumerate() {
        // SAFETY: nothing is in flight.
        unsafe { arena.slice_mut(0..arena.len() / 2) }.fill(i as u8 + 1);
        let ticket = store.submit_write(0, 0, GROUPS, 0, 0).unwrap();
        store.wait(ticket).unwrap();
    }
    let [first, second] = &mut stores;
    let ticket = first.submit_read_range(0, 0, GROUPS, 0, arenas[0].len() as u64 / 2).unwrap();
    assert!(matches!(second.wait(ticket), Err(StoreError::StaleTicket(_))));
    for (i, (store, arena)) in stores.iter_mut().zip(&arenas).enumerate() {
        store.drain().unwrap();
        store.read_groups_blocking(0, 0, GROUPS, 0, arena.len() as u64 / 2).unwrap();
        // SAFETY: the read was waited for.
        assert!(unsafe { arena.slice(arena.len() / 2..arena.len()) }.iter().all(|&b| b == i as u8 + 1));
    }
}

#[test]
fn reads_are_profiled() {
    use forebay::store::{DiskClass, ProfileOptions, profile};
    let dir = Medium::Direct.dir().unwrap();
    let options = ProfileOptions { file_bytes: 8 << 20, reads: 64, rounds: 1, ..Default::default() };
    let samples = profile(dir.path(), &[4096, 16384], &[1, 8], &options).unwrap();
    let points: Vec<_> = samples.iter().map(|sample| (sample.bytes, sample.depth)).collect();
    assert_eq!(points, [(4096, 1), (4096, 8), (16384, 1), (16384, 8)]);
    assert!(samples.iter().all(|s| s.seconds_per_read > 0.0 && s.latency_seconds > 0.0 && s.reads > 0));
    let emmc = ProfileOptions { throttle: DiskClass::Emmc, ..options };
    let slow = profile(dir.path(), &[16384], &[1, 8], &emmc).unwrap();
    let model = DiskClass::Emmc.profile().unwrap().read;
    assert!(slow[0].seconds_per_read >= (model.latency + model.transfer(16384)).as_secs_f64());
    assert!(slow[1].seconds_per_read >= model.interval(16384).as_secs_f64() * 0.9);
    for (sizes, depths) in [(&[0][..], &[1][..]), (&[16 << 20], &[1]), (&[4096], &[0]), (&[4096], &[100_000])] {
        assert!(matches!(profile(dir.path(), sizes, depths, &options), Err(StoreError::Request { .. })));
    }
    assert!(is_empty(dir.path()));
}
