//! Real models against exact f32 arithmetic and the peer (values in `tests/data`, made by `tests/make_golden.py`).

#![expect(clippy::print_stdout, reason = "the measured distances belong into the test's output")]

use forebay::{Engine, EngineOptions, KvMemory, SessionOptions};
use forebay_kernels::Precision;
use forebay_tests::golden::{Golden, GoldenLogits, golden_qwen, golden_smollm2, qwen, smollm2};
use std::path::Path;
use std::sync::Arc;

/// Each check below runs for every model that is there.
macro_rules! for_each_model {
    ($($check:ident),* $(,)?) => {
        mod llama {
            $(#[test]
            fn $check() {
                if let Some(path) = super::smollm2() { super::$check(&path, super::golden_smollm2()) }
            })*
        }
        mod qwen2 {
            $(#[test]
            fn $check() {
                if let Some(path) = super::qwen() { super::$check(&path, super::golden_qwen()) }
            })*
        }
    };
}

for_each_model!(
    prefill_matches_exact_arithmetic,
    decode_matches_exact_arithmetic,
    fast_kernels_are_as_close_as_the_peer,
    greedy_continuations_match,
);

fn engine(path: &Path, precision: Precision) -> Arc<Engine> {
    Engine::open(path, EngineOptions { precision, ..EngineOptions::default() }).expect("the model opens")
}

fn full(capacity: usize) -> SessionOptions {
    SessionOptions { kv_memory: KvMemory::Full, ..SessionOptions::new(capacity) }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::MIN, f32::max) as f64;
    let sum: f64 = logits.iter().map(|&x| (x as f64 - max).exp()).sum();
    logits.iter().map(|&x| x as f64 - max - sum.ln()).collect()
}

fn arg_max(values: &[f32]) -> usize {
    (0..values.len()).fold(0, |best, i| if values[i] > values[best] { i } else { best })
}

/// Prefill over the golden text: log-probabilities, arg-max and next-token likelihood of exact arithmetic.
fn prefill_matches_exact_arithmetic(path: &Path, golden: Golden) {
    let (engine, golden) = (engine(path, Precision::Exact), golden.logits);
    let mut session = engine.session(&full(golden.ids.len())).unwrap();
    let mut all: Vec<Vec<f32>> = Vec::new();
    session.prefill_with(&golden.ids, &mut |_| true, Some(&mut |_, l| all.push(l.to_vec()))).unwrap();
    assert_eq!(all.len(), golden.ids.len());
    check_exact(&golden, &all);
}

/// Tokens that go through the decode path in exact arithmetic, which is slow.
const DECODE_TOKENS: usize = 160;

/// The same, one step at a time through the decode path.
fn decode_matches_exact_arithmetic(path: &Path, golden: Golden) {
    let (engine, golden) = (engine(path, Precision::Exact), golden.logits);
    let mut session = engine.session(&full(golden.ids.len())).unwrap();
    let all: Vec<Vec<f32>> = golden.ids[..DECODE_TOKENS]
        .iter()
        .map(|&t| {
            session.step(t).unwrap();
            session.logits().to_vec()
        })
        .collect();
    check_exact(&golden, &all);
}

fn check_exact(golden: &GoldenLogits, all: &[Vec<f32>]) {
    let (mut worst, mut differing) = (0.0f64, 0);
    for (&position, top) in golden.positions.iter().zip(&golden.exact_top32_logprobs) {
        if position >= all.len() {
            continue;
        }
        let ours = log_softmax(&all[position]);
        for &(token, expected) in top {
            worst = worst.max((ours[token] - expected).abs());
        }
    }
    for (i, logits) in all.iter().enumerate() {
        let (ours, exact) = (arg_max(logits), golden.exact_argmax_all_positions[i]);
        if ours != exact {
            differing += 1;
            let gap = logits[ours] - logits[exact];
            assert!(gap < 2e-3, "position {i}: arg-max {ours} instead of {exact}, {gap} apart: not a tie");
        }
        if let (Some(&next), Some(&nll)) = (golden.ids.get(i + 1), golden.exact_nll_next_token.get(i)) {
            worst = worst.max((-log_softmax(logits)[next as usize] - nll).abs());
        }
    }
    println!("largest difference of a log-probability: {worst:.2e}; arg-max differs at {differing} ties");
    assert!(worst < 1e-3, "log-probabilities differ by {worst}");
}

/// The 8-bit kernels are no farther from exact arithmetic than the peer's, in mean KL over the golden text.
fn fast_kernels_are_as_close_as_the_peer(path: &Path, golden: Golden) {
    let (exact, fast, golden) = (engine(path, Precision::Exact), engine(path, Precision::Fast), golden.logits);
    let mut exact = exact.session(&full(golden.ids.len())).unwrap();
    let mut fast = fast.session(&full(golden.ids.len())).unwrap();
    let mut sum = 0.0;
    // Prefill is in f32 throughout; the steps are what the 8-bit products compute.
    let mut compare = |i: usize, logits: &[f32]| {
        fast.step(golden.ids[i]).unwrap();
        let (p, q) = (log_softmax(logits), log_softmax(fast.logits()));
        sum += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
    };
    exact.prefill_with(&golden.ids, &mut |_| true, Some(&mut compare)).unwrap();
    let kl = sum / golden.ids.len() as f64;
    println!("mean KL of the fast kernels to exact: {kl:.5}; the peer's: {:.5}", golden.kl_exact_to_llama_cpp_mean);
    assert!(
        kl <= golden.kl_exact_to_llama_cpp_mean,
        "{kl} is more than the peer's {}",
        golden.kl_exact_to_llama_cpp_mean
    );
}

/// Greedy continuations equal the peer's until two tokens are closer than the arithmetic of either resolves.
fn greedy_continuations_match(path: &Path, golden: Golden) {
    let engine = engine(path, Precision::Fast);
    let mut equal = 0;
    for case in golden.greedy {
        let mut session = engine.session(&full(case.prompt_ids.len() + case.greedy_ids.len())).unwrap();
        session.prefill(&case.prompt_ids, &mut |_| true).unwrap();
        for (i, (&expected, &margin)) in case.greedy_ids.iter().zip(&case.margin_to_second_logit).enumerate() {
            let ours = arg_max(session.logits()) as u32;
            if ours != expected {
                assert!(
                    margin < 0.25,
                    "{:?}: token {i} is {ours}, not {expected}, at a margin of {margin}",
                    case.prompt
                );
                break;
            }
            equal += 1;
            session.step(ours).unwrap();
        }
    }
    assert!(equal > 0);
    println!("{equal} greedy tokens equal");
}
