//! After the first steps, the store allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use forebay::store::{Arena, DiskClass, PlanLimits, ReadPlan, Store, StoreLayout, StoreOptions, probe, staging_slots};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_decode_step_allocates_nothing() {
    const LAYERS: u32 = 4;
    const GROUPS: u32 = 400;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layout = StoreLayout::new(LAYERS, GROUPS, 1536, probe(dir.path()).unwrap()).unwrap();
    let stride = u64::from(layout.stride());
    let staging = staging_slots(100, 3) as u64 * stride;
    let arena = Arena::new((2 * staging + u64::from(GROUPS) * stride) as usize).unwrap();
    for throttle in [DiskClass::Native, DiskClass::Nvme] {
        let mut options = StoreOptions::new(dir.path());
        options.throttle = throttle;
        let mut store = Store::create(options, layout, &[Arc::clone(&arena)]).unwrap();
        for layer in 0..LAYERS {
            let ticket = store.submit_write(layer, 0, GROUPS, 0, 2 * staging).unwrap();
            store.wait(ticket).unwrap();
        }
        let mut plan = ReadPlan::with_capacity(100);
        let limits = PlanLimits { merge_gap: 3, extent_bytes_max: 1 << 20, ..PlanLimits::default() };
        let mut groups = Vec::with_capacity(100);
        let mut step = |round: u32| {
            let mut pending = None;
            for layer in 0..LAYERS {
                groups.clear();
                groups.extend((0..100).map(|i| i * 4 + (i * 7 + round + layer) % 4));
                plan.build(&layout, layer, &groups, limits).unwrap();
                let ticket = store.submit_reads(&plan, 0, u64::from(layer % 2) * staging).unwrap();
                if let Some(before) = pending.replace(ticket) {
                    store.wait(before).unwrap();
                }
                store.poll().unwrap();
            }
            store.wait(pending.take().unwrap()).unwrap();
            let _ = store.submit_write(round % LAYERS, round % GROUPS, 1, 0, 2 * staging).unwrap();
        };
        (0..3).for_each(&mut step);
        let before = ALLOCATIONS.with(Cell::get);
        (3..60).for_each(&mut step);
        assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0, "{throttle}");
    }
}
