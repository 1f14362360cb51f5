//! The kernels of a decode step allocate nothing once their buffers are there.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::Random;
use forebay_kernels::attention::{AttentionScratch, KvPiece, attend};
use forebay_kernels::prefill_attention::{KvElement, KvRecords, PrefillAttention};
use forebay_kernels::select::{top_groups, top_groups_scratch};
use forebay_kernels::sketch::{ScoreScratch, SketchQueries, SketchRows, SketchType, group_scores};
use forebay_kernels::{Isa, Pool, dense, norm};

/// The system's allocator with a count.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations during `f`.
fn allocations(f: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    f();
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

#[test]
fn a_decode_step_allocates_nothing() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8; 10]))), 1, "the count counts");
    let mut random = Random::new(50);
    let (heads, kv_heads, d, tokens, rank) = (6, 2, 64, 4000, 24);
    let pool = Pool::new(2);
    let q = random.f32s(heads * d);
    let (k, v) = (random.f16s(tokens * kv_heads * d), random.f16s(tokens * kv_heads * d));
    let mut out = vec![0.0; heads * d];
    let mut attention = AttentionScratch::new(heads, d, tokens, 2);

    let mut queries = SketchQueries::new(heads, rank);
    let mut scores = ScoreScratch::new(heads, tokens);
    let mut rows = SketchRows::new(SketchType::I4, rank, tokens);
    let row = vec![0.5; rank];
    let mut group_score = vec![0.0; tokens / 4];
    let (mut candidates, mut selected) = (Vec::with_capacity(top_groups_scratch(100)), Vec::with_capacity(100));

    let bytes: Vec<u8> = random.f16s(2 * 64 * kv_heads * d).iter().flat_map(|x| x.to_le_bytes()).collect();
    let records =
        KvRecords { bytes: &bytes, stride: 4 * 4 * kv_heads * d, group: 4, kv_heads, d, element: KvElement::F16 };
    let mut prefill = PrefillAttention::new(2, heads, kv_heads, d, 1);

    let a = random.f16s(rank * d);
    let mut projected = vec![0.0; heads * rank];
    for isa in Isa::available() {
        // Every length up to the limit, as the partitions depend on it.
        let count = allocations(|| {
            for tokens in [1, 2000, 2047, 2048, 2049, 2050, 3000, 3999, 4000] {
                let piece = KvPiece { k: &k, v: &v, capacity: 4000, tokens };
                attend(&pool, isa, &q, &[piece], kv_heads, d, 0.1, &mut attention, &mut out);
            }
        });
        assert_eq!(count, 0, "attention with {isa:?}");
        let count = allocations(|| {
            dense::project(isa, &a, &q, d, &mut projected);
            queries.set(isa, &projected, heads, rank);
            for softmax in [false, true] {
                rows.set(tokens - 1, &row);
                group_scores(&pool, isa, &rows, tokens, 4, &queries, softmax, None, &mut scores, &mut group_score);
            }
            top_groups(&group_score, 100, &mut candidates, &mut selected);
            norm::silu_mul(isa, &mut out, &q);
        });
        assert_eq!(count, 0, "selection with {isa:?}");
        let count = allocations(|| {
            prefill.begin(1);
            prefill.accumulate(&pool, isa, &q, 63, &records, 0, 64, 0.1);
            prefill.finish(&mut out);
        });
        assert_eq!(count, 0, "prefill attention with {isa:?}");
    }
}
