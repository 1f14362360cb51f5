//! Norms, rotary embedding, conversions, small products and covariances against plain f64 arithmetic.

mod common;

use common::*;
use forebay_kernels::rope::{RopeStyle, RopeTable, rope_apply, rope_apply_partial};
use forebay_kernels::{Isa, Pool, convert, covariance, dense, norm};
use half::f16;

for_each_isa!(
    rms_norm,
    silu_mul,
    add_assign,
    rope_both_styles,
    rope_of_a_part_leaves_the_rest,
    f16_conversions_are_exact,
    project,
    covariance_matches_and_does_not_depend_on_threads,
);

const LENGTHS: [usize; 16] = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 193];

fn f64s(x: &[f32]) -> impl Iterator<Item = f64> + '_ {
    x.iter().map(|&x| f64::from(x))
}

fn rms_norm(isa: Isa) {
    let mut random = Random::new(1);
    for dim in LENGTHS {
        for offset in 0..5 {
            let x = Guarded::with(&random.f32s(3 * dim), offset, 9.0);
            let weight = Guarded::with(&random.f32s(dim), 4 - offset, 9.0);
            let mut out = Guarded::new(3 * dim, offset, 7.5);
            norm::rms_norm(isa, x.get(), weight.get(), 1e-5, out.get_mut());
            for (x, out) in x.get().chunks(dim).zip(out.checked().chunks(dim)) {
                let mean = f64s(x).map(|x| x * x).sum::<f64>() / dim as f64;
                let factor = 1.0 / (mean + 1e-5).sqrt();
                let expected: Vec<f64> = f64s(x).zip(f64s(weight.get())).map(|(x, w)| x * factor * w).collect();
                // The mean's relative error is at most that of a sum of `dim` squares.
                assert_close(out, &expected, |i| expected[i].abs() * EPSILON * (dim as f64 + 4.0), "rms_norm");
            }
        }
    }
    let mut out = [0.0; 20];
    let mut x = [1.0; 20];
    x[17] = f32::NAN;
    norm::rms_norm(isa, &x, &[1.0; 10], 1e-5, &mut out);
    assert!(out[..10].iter().all(|x| x.is_finite()) && out[17].is_nan());
}

fn silu_mul(isa: Isa) {
    let mut random = Random::new(2);
    for len in LENGTHS {
        for offset in 0..4 {
            let values: Vec<f32> = random.f32s(len).iter().map(|x| x * 30.0).collect();
            let up = Guarded::with(&random.f32s(len), 3 - offset, 9.0);
            let mut gate = Guarded::with(&values, offset, 7.5);
            norm::silu_mul(isa, gate.get_mut(), up.get());
            let expected: Vec<f64> =
                f64s(&values).zip(f64s(up.get())).map(|(x, up)| x / (1.0 + (-x).exp()) * up).collect();
            assert_close(gate.checked(), &expected, |i| expected[i].abs() * EPSILON * 8.0, "silu");
        }
    }
    let mut gate = [f32::NAN, f32::INFINITY, -200.0, 200.0, 0.0];
    norm::silu_mul(isa, &mut gate, &[1.0; 5]);
    assert!(
        gate[0].is_nan() && gate[1] == f32::INFINITY && gate[2].abs() < 1e-30 && gate[3] == 200.0 && gate[4] == 0.0
    );
}

fn add_assign(isa: Isa) {
    let mut random = Random::new(3);
    for len in LENGTHS {
        let x = random.f32s(len);
        let y = Guarded::with(&random.f32s(len), 1, 9.0);
        let mut sum = Guarded::with(&x, 3, 7.5);
        norm::add_assign(isa, sum.get_mut(), y.get());
        let expected: Vec<f32> = x.iter().zip(y.get()).map(|(x, y)| x + y).collect();
        assert_eq!(sum.checked(), expected);
    }
}

#[test]
fn log_softmax_sums_to_one() {
    let logits = Random::new(4).f32s(1000);
    let mut out = vec![0.0; 1000];
    norm::log_softmax(&logits, &mut out);
    let sum: f64 = f64s(&out).map(f64::exp).sum();
    assert!((sum - 1.0).abs() < 1e-5);
    let shift = f64::from(out[0]) - f64::from(logits[0]);
    let expected: Vec<f64> = f64s(&logits).map(|x| x + shift).collect();
    assert_close(&out, &expected, |_| 8.0 * 2.0 * EPSILON, "differences stay");
    norm::log_softmax(&[0.0, f32::NAN], &mut out[..2]);
    assert!(out[0].is_nan() && out[1].is_nan());
}

#[test]
fn rope_angles_follow_the_formula() {
    let factors = [1.0, 2.0, 4.0, 8.0];
    let table = RopeTable::new(16, 8, 10_000.0, Some(&factors), 0.5);
    assert_eq!(table.rope_dims(), 8);
    let (mut cos, mut sin) = ([9.0; 8], [9.0; 8]);
    for position in [0, 1, 77, 131_071] {
        table.angles(position, &mut cos, &mut sin);
        for pair in 0..8 {
            let angle = if pair < 4 {
                position as f64 * 0.5 * 10_000f64.powf(-2.0 * pair as f64 / 8.0) / f64::from(factors[pair])
            } else {
                0.0
            };
            assert!((f64::from(cos[pair]) - angle.cos()).abs() <= EPSILON, "cosine of pair {pair} at {position}");
            assert!((f64::from(sin[pair]) - angle.sin()).abs() <= EPSILON, "sine of pair {pair} at {position}");
        }
    }
}

fn rotated(style: RopeStyle, x: &[f32], cos: &[f32], sin: &[f32]) -> Vec<f64> {
    let pairs = cos.len();
    let mut out: Vec<f64> = f64s(x).collect();
    for pair in 0..pairs {
        let (a, b) = match style {
            RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
            RopeStyle::Halves => (pair, pair + pairs),
        };
        let (cos, sin) = (f64::from(cos[pair]), f64::from(sin[pair]));
        (out[a], out[b]) = (out[a] * cos - out[b] * sin, out[a] * sin + out[b] * cos);
    }
    out
}

fn rope_both_styles(isa: Isa) {
    let mut random = Random::new(5);
    for d in [2, 6, 10, 34, 64, 80, 128] {
        for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
            let table = RopeTable::new(d, d, 100_000.0, None, 1.0);
            let (mut cos, mut sin) = (vec![0.0; d / 2], vec![0.0; d / 2]);
            table.angles(123, &mut cos, &mut sin);
            let values = random.f32s(3 * d);
            let mut x = Guarded::with(&values, 3, 7.5);
            rope_apply(isa, style, x.get_mut(), &cos, &sin);
            for (found, x) in x.checked().chunks(d).zip(values.chunks(d)) {
                assert_close(found, &rotated(style, x, &cos, &sin), |_| 3.0 * EPSILON, "rotated head");
            }
        }
    }
}

fn rope_of_a_part_leaves_the_rest(isa: Isa) {
    let (cos, sin) = ([0.6; 6], [0.8; 6]);
    for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
        let values = Random::new(6).f32s(2 * 20);
        let mut x = Guarded::with(&values, 1, 7.5);
        rope_apply_partial(isa, style, x.get_mut(), 20, &cos, &sin);
        for (found, x) in x.checked().chunks(20).zip(values.chunks(20)) {
            assert_close(&found[..12], &rotated(style, &x[..12], &cos, &sin), |_| 3.0 * EPSILON, "rotated part");
            assert_eq!(found[12..], x[12..]);
        }
    }
}

fn f16_conversions_are_exact(isa: Isa) {
    let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let mut floats = Guarded::new(halves.len(), 1, 7.5);
    convert::f16_to_f32(isa, &halves, floats.get_mut());
    for (half, float) in halves.iter().zip(floats.checked()) {
        assert!(half.to_f32().to_bits() == float.to_bits() || half.is_nan() && float.is_nan(), "{half:?}");
    }
    let mut random = Random::new(7);
    for len in LENGTHS {
        let mut values: Vec<f32> = random.f32s(len).iter().map(|x| x * 10f32.powi(random_exponent(len))).collect();
        values[0] = [f32::NAN, f32::INFINITY, 65_519.9, 65_520.0, -1e9, 1e-9][len % 6];
        let mut out = Guarded::new(len, 3, f16::from_f32(7.5));
        convert::f32_to_f16(isa, &values, out.get_mut());
        for (x, found) in values.iter().zip(out.checked()) {
            let expected = f16::from_f32(*x);
            assert!(expected.to_bits() == found.to_bits() || expected.is_nan() && found.is_nan(), "{x}");
        }
    }
}

fn random_exponent(seed: usize) -> i32 {
    (seed % 9) as i32 - 5
}

fn project(isa: Isa) {
    let mut random = Random::new(8);
    for dim in [1, 3, 8, 16, 23, 64, 80, 192] {
        for (rank, n) in [(1, 1), (3, 2), (4, 3), (5, 9), (24, 17), (48, 1)] {
            let a = Guarded::with(&random.f16s(rank * dim), 1, f16::MAX);
            let x = Guarded::with(&random.f32s(n * dim), 2, f32::MAX);
            let mut out = Guarded::new(n * rank, 3, 7.5);
            dense::project(isa, a.get(), x.get(), dim, out.get_mut());
            let mut expected = Vec::new();
            let mut magnitudes = Vec::new();
            for x in x.get().chunks(dim) {
                for a in a.get().chunks(dim) {
                    let (sum, magnitude) = dot(a.iter().map(|a| a.to_f64()), f64s(x));
                    expected.push(sum);
                    magnitudes.push(magnitude);
                }
            }
            assert_close(out.checked(), &expected, |i| magnitudes[i] * EPSILON * dim as f64, "projection");
            let mut first = Guarded::new(rank, 1, 7.5);
            dense::matvec_f16(isa, a.get(), &x.get()[..dim], first.get_mut());
            assert_close(
                first.checked(),
                &expected[..rank],
                |i| magnitudes[i] * EPSILON * dim as f64,
                "matrix times vector",
            );
        }
    }
}

fn covariance_matches_and_does_not_depend_on_threads(isa: Isa) {
    let mut random = Random::new(9);
    for (n, dim, stride) in [(1, 1, 1), (5, 3, 4), (300, 47, 50), (257, 96, 96), (70, 100, 128)] {
        let x = random.f32s((n - 1) * stride + dim);
        let mut results = Vec::new();
        for threads in [1, 2, 7] {
            let pool = Pool::new(threads);
            let mut sum = vec![0.5; dim];
            let mut cov = vec![0.25; dim * dim];
            covariance::covariance_add(&pool, isa, &x, stride, n, &mut sum, &mut cov);
            results.push((sum, cov));
        }
        let (sum, cov) = &results[0];
        for i in 0..dim {
            let column = |i: usize| (0..n).map(|row| f64::from(x[row * stride + i])).collect::<Vec<_>>();
            assert!((column(i).iter().sum::<f64>() + 0.5 - sum[i]).abs() <= 1e-12 * n as f64);
            for j in 0..dim {
                let (expected, magnitude) = dot(column(i), column(j));
                let found = cov[i * dim + j] - 0.25;
                assert!((found - expected).abs() <= magnitude * EPSILON * 256.0 + 1e-12, "({i}, {j})");
                assert_eq!(cov[i * dim + j], cov[j * dim + i], "symmetric");
            }
        }
        assert!(results.iter().all(|result| *result == results[0]), "the same with any number of threads");
    }
}
