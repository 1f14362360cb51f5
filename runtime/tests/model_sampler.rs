//! The sampler: exact where it is greedy, reproducible and in proportion where it draws.

use forebay::sampler::{Sampler, SamplerError, SamplerOptions, greedy};

const WARM: SamplerOptions =
    SamplerOptions { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repeat_penalty: 1.0, seed: 7 };

/// How often each token is drawn.
fn counts(options: SamplerOptions, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(options).unwrap();
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(&mut logits.to_vec(), &[]).unwrap() as usize] += 1;
    }
    counts
}

#[test]
fn greedy_takes_the_first_of_the_largest() {
    let mut sampler = Sampler::new(SamplerOptions::default()).unwrap();
    assert_eq!(sampler.sample(&mut [1.0, 3.0, 3.0, 2.0], &[]), Ok(1));
    assert_eq!(sampler.sample(&mut [f32::NEG_INFINITY, -5.0], &[]), Ok(1));
    assert_eq!(sampler.sample(&mut [f32::MIN], &[]), Ok(0));
    assert_eq!(greedy(&[]), None);
}

#[test]
fn logits_that_are_no_numbers_are_errors() {
    for options in [SamplerOptions::default(), WARM] {
        let mut sampler = Sampler::new(options).unwrap();
        let nan = sampler.sample(&mut [0.0, f32::NAN], &[]).unwrap_err();
        assert_eq!(nan.to_string(), "logit of token 1 is NaN, expected a finite number or minus infinity");
        assert!(matches!(sampler.sample(&mut [f32::INFINITY], &[]), Err(SamplerError::Logit { token: 0, .. })));
        assert_eq!(sampler.sample(&mut [], &[]), Err(SamplerError::Empty { count: 0 }));
        assert_eq!(sampler.sample(&mut [f32::NEG_INFINITY; 2], &[]), Err(SamplerError::Empty { count: 2 }));
    }
}

#[test]
fn options_are_checked() {
    let refused = |options: SamplerOptions| Sampler::new(options).unwrap_err().to_string();
    for temperature in [-0.1, f32::NAN, f32::INFINITY] {
        assert!(refused(SamplerOptions { temperature, ..WARM }).contains("expected 0 to 100"));
    }
    for top_p in [0.0, 1.1, f32::NAN, -1.0] {
        assert!(refused(SamplerOptions { top_p, ..WARM }).starts_with("top-p is"));
    }
    for min_p in [-0.1, 1.1, f32::NAN] {
        assert!(refused(SamplerOptions { min_p, ..WARM }).starts_with("min-p is"));
    }
    for repeat_penalty in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(refused(SamplerOptions { repeat_penalty, ..WARM }).starts_with("repeat penalty is"));
    }
}

#[test]
fn draws_follow_the_probabilities() {
    let logits: Vec<f32> = [0.5f32, 0.25, 0.15, 0.1].iter().map(|p| p.ln()).collect();
    const DRAWS: usize = 20_000;
    for (temperature, expected) in [(1.0, [0.5, 0.25, 0.15, 0.1]), (0.5, [0.7246, 0.1812, 0.0652, 0.029])] {
        let found = counts(SamplerOptions { temperature, ..WARM }, &logits, DRAWS);
        for (count, expected) in found.iter().zip(expected) {
            let share = *count as f64 / DRAWS as f64;
            // Five standard deviations of a binomial share.
            let bound = 5.0 * (expected * (1.0 - expected) / DRAWS as f64).sqrt();
            assert!((share - expected).abs() < bound, "{share} and {expected}");
        }
    }
    // A temperature near zero is greedy and not NaN.
    assert_eq!(counts(SamplerOptions { temperature: 1e-30, ..WARM }, &logits, 100), [100, 0, 0, 0]);
}

#[test]
fn what_is_cut_off_is_never_drawn() {
    let logits: Vec<f32> = [0.1f32, 0.5, 0.15, 0.25].iter().map(|p| p.ln()).collect();
    let drawn = |options| counts(options, &logits, 2_000).iter().map(|&count| count > 0).collect::<Vec<_>>();
    assert_eq!(drawn(WARM), [true; 4]);
    assert_eq!(drawn(SamplerOptions { top_k: 2, ..WARM }), [false, true, false, true]);
    assert_eq!(drawn(SamplerOptions { top_p: 0.6, ..WARM }), [false, true, false, true]);
    assert_eq!(drawn(SamplerOptions { top_p: 0.49, ..WARM }), [false, true, false, false]);
    assert_eq!(drawn(SamplerOptions { min_p: 0.25, ..WARM }), [false, true, true, true]);
    assert_eq!(drawn(SamplerOptions { min_p: 0.45, top_p: 0.99, ..WARM }), [false, true, false, true]);
    assert_eq!(drawn(SamplerOptions { top_k: 1, ..WARM }), [false, true, false, false]);
    // Of equal ones the lower tokens stay.
    assert_eq!(counts(SamplerOptions { top_k: 2, ..WARM }, &[0.0; 5], 500)[2..], [0, 0, 0]);
    // More candidates than are sorted at first: a flat distribution keeps its first half.
    let flat = counts(SamplerOptions { top_p: 0.5, ..WARM }, &[0.0; 4096], 5_000);
    assert!(
        flat[..2048].iter().filter(|&&count| count > 0).count() > 1700 && flat[2048..].iter().all(|&count| count == 0)
    );
}

#[test]
fn recent_tokens_are_penalised_once() {
    let options = SamplerOptions { repeat_penalty: 2.0, ..SamplerOptions::default() };
    let mut sampler = Sampler::new(options).unwrap();
    let mut logits = [4.0, 3.0, -1.0, 0.5];
    assert_eq!(sampler.sample(&mut logits, &[0, 0, 2, 99]), Ok(1));
    assert_eq!(logits, [2.0, 3.0, -2.0, 0.5]);
    // Only the last 64 count.
    let mut history = vec![0];
    history.extend([3; 64]);
    let mut logits = [4.0, 3.0, -1.0, 0.5];
    assert_eq!(sampler.sample(&mut logits, &history), Ok(0));
    assert_eq!(logits, [4.0, 3.0, -1.0, 0.25]);
}

#[test]
fn the_same_seed_draws_the_same_tokens() {
    let logits: Vec<f32> = (0..1000).map(|token| ((token * 37) % 101) as f32 / 20.0).collect();
    let draw = |seed| {
        let mut sampler = Sampler::new(SamplerOptions { seed, top_p: 0.95, ..WARM }).unwrap();
        (0..32).map(|_| sampler.sample(&mut logits.clone(), &[]).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    // The stream is part of the contract: ChaCha8 under the key 7, 64 bits at a time as a fraction of 1 (computed apart).
    let mut sampler = Sampler::new(WARM).unwrap();
    let first: Vec<u32> = (0..8).map(|_| sampler.sample(&mut [0.0; 1000], &[]).unwrap()).collect();
    assert_eq!(first, [764, 465, 5, 301, 386, 336, 354, 193]);
}
