//! Invariants of the KV tiers, on a tiny random model with f32 weights (so that no 8-bit rounding hides a difference).

use forebay::config::Policy;
use forebay::store::{Fault, FaultOptions, IoBackend};
use forebay::{Engine, EngineOptions, Error, KvMemory, Session, SessionOptions};
use forebay_tests::tiny_model::{TinyModel, write_tiny_model};
use std::sync::Arc;

struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let model = TinyModel { layers: 3, ..TinyModel::default() };
        write_tiny_model(&dir.path().join("tiny.gguf"), &model).unwrap();
        std::fs::create_dir(dir.path().join("store")).unwrap();
        Fixture { dir }
    }

    fn engine(&self, change: impl FnOnce(&mut EngineOptions)) -> Arc<Engine> {
        let mut options =
            EngineOptions { store_dir: self.dir.path().join("store"), threads: 2, ..EngineOptions::default() };
        change(&mut options);
        Engine::open(&self.dir.path().join("tiny.gguf"), options).unwrap()
    }

    fn left_in_store(&self) -> usize {
        std::fs::read_dir(self.dir.path().join("store")).unwrap().count()
    }
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i * 7 + i * 3 + 11) % 250).collect()
}

fn forebay(capacity: usize, overrides: &str) -> SessionOptions {
    SessionOptions {
        kv_memory: KvMemory::Bytes(u64::MAX),
        overrides: overrides.into(),
        ..SessionOptions::new(capacity)
    }
}

fn full(capacity: usize) -> SessionOptions {
    SessionOptions { policy: Policy::Full, ..SessionOptions::new(capacity) }
}

fn prefill(session: &mut Session, tokens: &[u32]) {
    session.prefill(tokens, &mut |_| true).unwrap();
}

/// Largest difference of two rows of logits, as a share of the largest logit.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    let scale = a.iter().fold(0.0f32, |m, x| m.max(x.abs())).max(1e-6);
    a.iter().zip(b).fold(0.0f32, |m, (x, y)| m.max((x - y).abs())) / scale
}

/// Both caches hold the same f16 values; only the order of f32 sums differs.
const SAME: f32 = 2e-5;

/// With everything selected the tiers are exact: all group sizes, both backends, odd lengths, any way of reusing and merging.
#[test]
fn everything_selected_equals_the_full_cache() {
    let fixture = Fixture::new();
    let text = tokens(211);
    let (prompt, rest) = text.split_at(149);
    let mut expected = Vec::new();
    let engine = fixture.engine(|_| {});
    let mut session = engine.session(&full(text.len())).unwrap();
    prefill(&mut session, prompt);
    for &token in rest {
        session.step(token).unwrap();
        expected.push(session.logits().to_vec());
    }
    for io in [IoBackend::Uring, IoBackend::Pread] {
        let engine = fixture.engine(|o| o.io = io);
        for group in 1..=16 {
            let reuse = [0, 3, 500][group % 3];
            let (gap, replacement) = (group % 4, if group % 2 == 0 { "fifo" } else { "lru" });
            let set = format!(
                "group={group},sketch_pool=1,rank=8,selected_groups=500,reuse_groups={reuse},window=8,sinks=3,merge_gap={gap},\
                 replacement={replacement}"
            );
            let mut session = engine.session(&forebay(text.len(), &set)).unwrap();
            prefill(&mut session, prompt);
            for (i, (&token, expected)) in rest.iter().zip(&expected).enumerate() {
                session.step(token).unwrap();
                let d = difference(expected, session.logits());
                assert!(d < SAME, "{io:?}, {set}: step {i} differs by {d}");
            }
            let stats = session.stats();
            assert!(stats.groups_selected > 0 && stats.disk_bytes_read > 0);
            assert_eq!(stats.groups_reused > 0, reuse > 0);
        }
    }
    assert_eq!(fixture.left_in_store(), 0);
}

#[test]
fn load_all_equals_the_full_cache() {
    let fixture = Fixture::new();
    let text = tokens(180);
    let engine = fixture.engine(|_| {});
    let mut exact = engine.session(&full(text.len())).unwrap();
    let options = SessionOptions { policy: Policy::LoadAll, ..SessionOptions::new(text.len()) };
    let mut loaded = engine.session(&options).unwrap();
    prefill(&mut exact, &text[..100]);
    prefill(&mut loaded, &text[..100]);
    for &token in &text[100..] {
        exact.step(token).unwrap();
        loaded.step(token).unwrap();
        assert!(difference(exact.logits(), loaded.logits()) < SAME);
    }
}

/// A selection that leaves something out differs, or the tests above could not fail.
#[test]
fn a_small_selection_differs_from_the_full_cache() {
    let fixture = Fixture::new();
    let text = tokens(300);
    let engine = fixture.engine(|_| {});
    let mut exact = engine.session(&full(text.len())).unwrap();
    let mut small = engine
        .session(&forebay(text.len(), "group=4,sketch_pool=1,rank=8,selected_groups=2,window=4,sinks=0"))
        .unwrap();
    prefill(&mut exact, &text[..299]);
    prefill(&mut small, &text[..299]);
    exact.step(text[299]).unwrap();
    small.step(text[299]).unwrap();
    assert!(difference(exact.logits(), small.logits()) > 100.0 * SAME);
}

/// What would write too much is refused before anything happens, and the session goes on as far as its budget reaches.
#[test]
fn a_write_budget_holds_for_prompts_and_steps() {
    let fixture = Fixture::new();
    let engine = fixture.engine(|_| {});
    let set = "group=4,rank=8,sketch_pool=1,selected_groups=12,reuse_groups=0,window=8";
    let text = tokens(200);
    let mut free = engine.session(&forebay(200, set)).unwrap();
    prefill(&mut free, &text[..80]);
    let budget = free.stats().disk_bytes_written;
    let limited = SessionOptions { write_budget: Some(budget), ..forebay(200, set) };
    let mut session = engine.session(&limited).unwrap();
    let error = session.prefill(&text[..120], &mut |_| true).unwrap_err().to_string();
    assert!(error.contains("write budget") && session.tokens().is_empty(), "{error}");
    prefill(&mut session, &text[..80]);
    assert_eq!(session.stats().disk_bytes_written, budget);
    text[80..83].iter().for_each(|&token| session.step(token).unwrap());
    // The fourth token completes a group, which there is no budget to write.
    let error = session.step(text[83]).unwrap_err().to_string();
    assert!(error.contains("write budget") && session.tokens().len() == 83, "{error}");
    assert_eq!(session.stats().disk_bytes_written, budget);
}

/// Groups that are predicted to get next to no attention are not read.
#[test]
fn a_floor_saves_reads() {
    let fixture = Fixture::new();
    let engine = fixture.engine(|_| {});
    let text = tokens(400);
    let reads = [0.0, 0.05, 0.999].map(|floor| {
        let set =
            format!("group=4,rank=8,sketch_pool=1,selected_groups=12,reuse_groups=0,window=8,score_floor={floor}");
        let mut session = engine.session(&forebay(text.len(), &set)).unwrap();
        prefill(&mut session, &text[..380]);
        text[380..].iter().for_each(|&token| session.step(token).unwrap());
        assert!(session.logits().iter().all(|x| x.is_finite()));
        session.stats().groups_selected
    });
    assert!(reads[0] > reads[1] && reads[1] > reads[2] && reads[2] == 0, "{reads:?}");
    for wrong in ["score_floor=1", "score_floor=-0.1", "score_floor=NaN", "score_floor=much"] {
        let error = engine.session(&forebay(400, wrong)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("score_floor"), "{error}");
    }
}

/// Every setting runs, and the text does not depend on the number of threads, to the bit.
#[test]
fn results_do_not_depend_on_threads() {
    let fixture = Fixture::new();
    let text = tokens(600);
    for set in [
        "group=4,rank=8,sketch=i4,sketch_pool=2,aggregate=softmax,adapter=query-aware,selected_groups=10,reuse_groups=5",
        "group=8,rank=16,sketch=i8,sketch_pool=1,aggregate=softmax-kv,adapter=centred,selected_groups=6,refine_groups=3",
        "group=2,rank=4,sketch=f16,sketch_pool=1,aggregate=sum,adapter=pca,selected_groups=20,reuse_groups=40,window=2",
    ] {
        let runs: Vec<Vec<f32>> = [1, 2, 7]
            .iter()
            .map(|&threads| {
                let engine = fixture.engine(|o| o.threads = threads);
                let mut session = engine.session(&forebay(700, set)).unwrap();
                prefill(&mut session, &text);
                (0..40).for_each(|i| session.step(i * 5 % 250).unwrap());
                session.logits().to_vec()
            })
            .collect();
        assert!(runs[0].iter().all(|x| x.is_finite()));
        assert!(runs[0] == runs[1] && runs[1] == runs[2], "{set}");
    }
}

/// One token, exactly a group, one more and one less; then on past the window, where the projections come from the store.
#[test]
fn short_prompts_grow_into_long_sequences() {
    let fixture = Fixture::new();
    let engine = fixture.engine(|_| {});
    let set = "group=8,rank=8,sketch_pool=1,selected_groups=500,window=16,sinks=4,reuse_groups=4";
    for length in [1, 7, 8, 9, 16] {
        let text = tokens(length + 120);
        let mut exact = engine.session(&full(text.len())).unwrap();
        let mut tiered = engine.session(&forebay(text.len(), set)).unwrap();
        let selecting = set.replace("selected_groups=500", "selected_groups=3");
        let mut selective = engine.session(&forebay(text.len(), &selecting)).unwrap();
        for session in [&mut exact, &mut tiered, &mut selective] {
            prefill(session, &text[..length]);
        }
        for &token in &text[length..] {
            exact.step(token).unwrap();
            tiered.step(token).unwrap();
            selective.step(token).unwrap();
            assert!(difference(exact.logits(), tiered.logits()) < SAME);
        }
        assert!(selective.logits().iter().all(|x| x.is_finite()));
        assert_eq!(selective.adapter_kind(), Some(forebay::config::AdapterKind::Centred), "made from stored keys");
    }
}

/// A prompt that goes through in chunks, and a prompt that follows steps, read earlier K/V back from the store.
#[test]
fn prefill_in_parts_equals_prefill_at_once() {
    let fixture = Fixture::new();
    let engine = fixture.engine(|_| {});
    let text = tokens(1500);
    let set = "group=16,rank=8,sketch_pool=1,selected_groups=500,window=32,sinks=4,reuse_groups=4";
    let mut exact = engine.session(&full(text.len())).unwrap();
    let options = SessionOptions { prefill_memory: 0, ..forebay(text.len(), set) };
    let mut tiered = engine.session(&options).unwrap();
    for session in [&mut exact, &mut tiered] {
        prefill(session, &text[..1100]);
        text[1100..1105].iter().for_each(|&t| session.step(t).unwrap());
        prefill(session, &text[1105..1490]);
    }
    assert!(difference(exact.logits(), tiered.logits()) < SAME);
    for &token in &text[1490..] {
        exact.step(token).unwrap();
        tiered.step(token).unwrap();
        assert!(difference(exact.logits(), tiered.logits()) < SAME);
    }
    let whole = engine.session(&forebay(text.len(), set)).unwrap();
    assert!(tiered.plan().prefill_bytes() < whole.plan().prefill_bytes());
}

/// Reads that fail make steps fail; the session is as before, and the step succeeds when it is tried again.
#[test]
fn a_failed_step_can_be_repeated() {
    let fixture = Fixture::new();
    let text = tokens(400);
    let set = "group=4,rank=8,sketch_pool=1,selected_groups=30,reuse_groups=10,window=16,refine_groups=4";
    let run = |faults: Option<FaultOptions>| {
        let engine = fixture.engine(|o| o.faults = faults);
        let mut session = engine.session(&forebay(500, set)).unwrap();
        prefill(&mut session, &text);
        let mut failures = 0;
        for i in 0..60 {
            while let Err(e) = session.step(i * 7 % 250) {
                assert!(matches!(e, Error::Store(_)), "{e}");
                assert_eq!(session.tokens().len(), 400 + i as usize);
                failures += 1;
                assert!(failures < 10_000, "the device recovers");
            }
        }
        (session.logits().to_vec(), failures)
    };
    let (expected, none) = run(None);
    // A flipped bit is found by the record's checksum; one in ten reads, and one in ten of the second tries.
    let faults = FaultOptions {
        seed: 0x5eed,
        per_million: vec![(Fault::BitFlip, 100_000)],
        latency_max: std::time::Duration::ZERO,
        skip: 1,
        fires_max: None,
    };
    let (found, failures) = run(Some(faults));
    assert_eq!(none, 0);
    assert!(failures > 0, "a fault run in which no fault fired");
    assert!(difference(&expected, &found) < SAME, "after {failures} failed steps");
}

#[test]
fn what_does_not_fit_is_refused() {
    let fixture = Fixture::new();
    let engine = fixture.engine(|_| {});
    let mut session = engine.session(&forebay(50, "group=4,sketch_pool=1,rank=8")).unwrap();
    let error = session.prefill(&tokens(51), &mut |_| true).unwrap_err();
    assert!(matches!(error, Error::ContextFull { requested: 51, context: 50 }));
    prefill(&mut session, &tokens(50));
    assert!(matches!(session.step(1).unwrap_err(), Error::ContextFull { .. }));
    assert!(session.prefill(&[], &mut |_| true).is_err());
    assert!(matches!(session.step(1_000_000).unwrap_err(), Error::Argument { .. }));

    let tight = SessionOptions { kv_memory: KvMemory::Bytes(1000), ..SessionOptions::new(4000) };
    let Err(Error::Budget { given: 1000, smallest, .. }) = engine.session(&tight) else {
        panic!("1000 bytes are not enough")
    };
    let fits = SessionOptions { kv_memory: KvMemory::Bytes(smallest), ..SessionOptions::new(4000) };
    let session = engine.session(&fits).unwrap();
    assert!(session.stats().kv_memory_bytes <= smallest);
    let below = SessionOptions { kv_memory: KvMemory::Bytes(smallest - 1), ..SessionOptions::new(4000) };
    assert!(engine.session(&below).is_err(), "the named budget is the smallest");

    for bad in ["group=0", "group=7,sketch_pool=2", "rank=1000", "nonsense=1", "group", "sketch=i2", "lookahead=2"] {
        assert!(engine.session(&forebay(100, bad)).is_err(), "{bad}");
    }
}

/// A prefill that is stopped leaves an empty session that works.
#[test]
fn a_stopped_prefill_leaves_a_usable_session() {
    let fixture = Fixture::new();
    let engine = fixture.engine(|_| {});
    let text = tokens(900);
    let set = "group=4,rank=8,sketch_pool=1,selected_groups=500,window=16";
    let mut exact = engine.session(&full(1000)).unwrap();
    let mut session = engine.session(&forebay(1000, set)).unwrap();
    assert!(matches!(session.prefill(&text, &mut |p| p.done < 3), Err(Error::Cancelled)));
    assert!(session.tokens().is_empty());
    let handle = session.cancel_handle();
    handle.cancel();
    assert!(matches!(session.prefill(&text, &mut |_| true), Err(Error::Cancelled)));
    handle.clear();
    prefill(&mut exact, &text);
    prefill(&mut session, &text);
    exact.step(9).unwrap();
    session.step(9).unwrap();
    assert!(difference(exact.logits(), session.logits()) < SAME);
}
