//! Memory is what the plan says: the process's real peak, and no allocation by a decode step.

use forebay::{Engine, EngineOptions, KvMemory, SessionOptions};
use forebay_tests::golden::{golden_smollm2, smollm2};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts allocations; everything else is the system's allocator.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most resident memory of this process so far, bytes.
fn peak_rss() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc is mounted");
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).expect("the kernel says the peak");
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("a number of kilobytes") * 1024
}

/// Besides weights and plan: code, tokenizer with its vocabulary, activations of one row, logits, store bookkeeping, thread stacks.
const BESIDES_THE_PLAN: u64 = 64 << 20;

/// One test, so that the peak is that of one session and no other thread allocates.
#[test]
fn the_plan_holds_and_steps_allocate_nothing() {
    let Some(path) = smollm2() else { return };
    let store = tempfile::tempdir().unwrap();
    let engine =
        Engine::open(&path, EngineOptions { store_dir: store.path().into(), threads: 2, ..EngineOptions::default() })
            .unwrap();
    let text = golden_smollm2().logits.ids;
    let prompt: Vec<u32> = text.iter().cycle().take(3000).copied().collect();
    let capacity = prompt.len() + 80;
    let budget = engine.shape().full_bytes(capacity) / 8;
    let options = SessionOptions { kv_memory: KvMemory::Bytes(budget), ..SessionOptions::new(capacity) };
    let mut session = engine.session(&options).unwrap();
    let plan = session.plan().clone();
    assert!(plan.kv_bytes() <= budget);
    session.prefill(&prompt, &mut |_| true).unwrap();
    let bound = engine.model().weights_bytes() as u64 + plan.kv_bytes() + plan.prefill_bytes() + BESIDES_THE_PLAN;
    let peak = peak_rss();
    assert!(peak <= bound, "peak {peak}, weights, plan and the rest {bound}");
    // The full cache would not have fitted under the bound's KV part: the test can fail.
    assert!(engine.shape().full_bytes(capacity) > plan.kv_bytes() + BESIDES_THE_PLAN / 2);

    // The first steps may fill what is filled lazily, such as the kernel's side of the ring.
    (0..8).for_each(|i| session.step(text[i]).unwrap());
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    (8..72).for_each(|i| session.step(text[i]).unwrap());
    let count = ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert_eq!(count, 0, "allocations by 64 decode steps");
    assert!(session.stats().disk_reads > 0);
}
