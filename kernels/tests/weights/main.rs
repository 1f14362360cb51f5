//! Weight products and decoding: every format, on every instruction set of the machine, against f64 and against the scalar twin.

mod reference;

use forebay_kernels::{Activations, GemmScratch, GemvJob, Isa, Pool, Precision, Weight, WeightType};
use forebay_kernels::{dequantize_rows, gemm, gemv};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng};
use reference::{Fenced, Guarded, Value, decode_all, random_floats, random_weights};

/// Unit roundoff of f32.
const ROUNDOFF: f64 = f32::EPSILON as f64 / 2.0;

fn rng(seed: u64) -> TestRng {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
}

/// A product to compute and what it should be.
struct Case {
    dtype: WeightType,
    rows: usize,
    cols: usize,
    n: usize,
    data: Guarded,
    x: Vec<f32>,
}

impl Case {
    fn new(dtype: WeightType, rows: usize, cols: usize, n: usize, slack: usize, seed: u64) -> Case {
        let mut rng = rng(seed);
        let data = Guarded::new(&random_weights(dtype, rows, cols, &mut rng), slack);
        let x = random_floats(n * cols, &mut rng);
        Case { dtype, rows, cols, n, data, x }
    }

    fn weight(&self) -> Weight<'_> {
        Weight::new(self.dtype, self.rows, self.cols, self.data.bytes()).unwrap()
    }

    fn gemv(&self, isa: Isa, precision: Precision, threads: usize) -> Vec<f32> {
        let mut x = Activations::new(self.n, self.cols);
        x.set(isa, &self.x, self.n, self.cols, precision);
        let mut out = Fenced::new(self.n * self.rows);
        gemv(&Pool::new(threads), isa, &x, &mut [GemvJob { weight: self.weight(), out: out.values() }]);
        out.finish()
    }

    /// Compares `[n][rows]` results, added to `initial`, with f64. Each product may be off by the rounding of its terms, and by `input_error(x, at)` times
    /// the weight for the activation at `at` of row `x`.
    fn check(&self, found: &[f32], initial: f64, input_error: impl Fn(&[f32], usize) -> f64) {
        let weights: Vec<Value> = decode_all(&self.weight());
        for n in 0..self.n {
            let x = &self.x[n * self.cols..(n + 1) * self.cols];
            for row in 0..self.rows {
                let (mut expected, mut magnitude, mut from_input) = (initial, initial, 0.0);
                for (at, weight) in weights[row * self.cols..(row + 1) * self.cols].iter().enumerate() {
                    expected += weight.value * f64::from(x[at]);
                    magnitude += weight.magnitude * f64::from(x[at]).abs();
                    from_input += weight.value.abs() * input_error(x, at);
                }
                // Decoding rounds a few times, a product and its sum once each; sums are at most `cols` deep.
                let bound = from_input
                    + (self.cols + 8) as f64 * ROUNDOFF * (magnitude + from_input)
                    + f64::from(f32::MIN_POSITIVE);
                let found = f64::from(found[n * self.rows + row]);
                let name = self.dtype.name();
                assert!(
                    (found - expected).abs() <= bound,
                    "{name} n {n} row {row}: {found} for {expected}, bound {bound}"
                );
            }
        }
    }
}

/// Half a step of the 8-bit code of an activation, and the rounding of the arithmetic that makes it.
fn code_error(x: &[f32], at: usize) -> f64 {
    let block = &x[at / 32 * 32..(at / 32 + 1) * 32];
    let max = block.iter().fold(0f32, |max, value| max.max(value.abs()));
    f64::from(max) / 254.0 * (1.0 + 1e-4)
}

fn dtypes() -> impl Strategy<Value = WeightType> {
    proptest::sample::select(WeightType::ALL.to_vec())
}

/// Columns that `dtype` allows: for float types any number, else up to eleven blocks (three of 256).
fn cols_of(dtype: WeightType, choice: usize) -> usize {
    match dtype.block_len() {
        1 => 1 + choice % 150,
        32 => 32 * (1 + choice % 11),
        _ => 256 * (1 + choice % 3),
    }
}

fn config() -> Config {
    Config { failure_persistence: None, ..Config::default() }
}

macro_rules! on_each_isa {
    ($($(#[$when:meta])? $module:ident: $isa:expr;)*) => {$(
        $(#[$when])?
        mod $module {
            use super::*;

            const ISA: Isa = $isa;

            /// Whether the tests can run here; says so once if not.
            fn here() -> bool {
                static SAY: std::sync::Once = std::sync::Once::new();
                if !ISA.is_available() {
                    SAY.call_once(|| {
                        use std::io::Write;
                        let _ = writeln!(std::io::stderr(), "skipped: this machine has no {}", ISA.name());
                    });
                }
                ISA.is_available()
            }

            proptest! {
                #![proptest_config(config())]

                #[test]
                fn exact_product_is_within_rounding(
                    dtype in dtypes(), rows in 1usize..70, choice in 0usize..1000, n in 1usize..=5, slack in 0usize..64, seed: u64,
                ) {
                    if !here() { return Ok(()); }
                    let case = Case::new(dtype, rows, cols_of(dtype, choice), n, slack, seed);
                    case.check(&case.gemv(ISA, Precision::Exact, 1), 0.0, |_, _| 0.0);
                }

                #[test]
                fn fast_product_is_within_rounding_and_half_a_code(
                    dtype in dtypes(), rows in 1usize..70, choice in 0usize..1000, n in 1usize..=5, slack in 0usize..64, seed: u64,
                ) {
                    if !here() { return Ok(()); }
                    let case = Case::new(dtype, rows, cols_of(dtype, choice), n, slack, seed);
                    let found = case.gemv(ISA, Precision::Fast, 1);
                    case.check(&found, 0.0, |x, at| if dtype.is_float() { 0.0 } else { code_error(x, at) });
                }

                #[test]
                fn fast_product_is_that_of_the_scalar_twin(
                    dtype in dtypes(), rows in 1usize..20, choice in 0usize..1000, n in 1usize..=5, slack in 0usize..64, seed: u64,
                ) {
                    if !here() { return Ok(()); }
                    let case = Case::new(dtype, rows, cols_of(dtype, choice), n, slack, seed);
                    let twin = case.gemv(Isa::Scalar, Precision::Fast, 1);
                    let found = case.gemv(ISA, Precision::Fast, 1);
                    let weights = decode_all(&case.weight());
                    for (i, (found, twin)) in found.iter().zip(&twin).enumerate() {
                        let (n, row) = (i / rows, i % rows);
                        let cols = case.cols;
                        // The same integers on both: only sums of floats differ, each term at most twice its exact magnitude.
                        let magnitude: f64 = (0..cols)
                            .map(|at| 2.0 * weights[row * cols + at].magnitude * f64::from(case.x[n * cols + at]).abs().max(1.0 / 127.0))
                            .sum();
                        let bound = (cols + 8) as f64 * ROUNDOFF * magnitude;
                        prop_assert!(f64::from(found - twin).abs() <= bound, "{} for {} at {i}, bound {bound}", found, twin);
                    }
                }

                #[test]
                fn decoding_has_the_bits_of_the_scalar_twin(
                    dtype in dtypes(), rows in 1usize..9, choice in 0usize..1000, slack in 0usize..64, first in 0usize..8, seed: u64,
                ) {
                    if !here() { return Ok(()); }
                    let case = Case::new(dtype, rows, cols_of(dtype, choice), 0, slack, seed);
                    let first = first % rows;
                    let decode = |isa: Isa| {
                        let mut out = Fenced::new((rows - first) * case.cols);
                        dequantize_rows(isa, &case.weight(), first, out.values());
                        out.finish()
                    };
                    let found = decode(ISA);
                    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                    prop_assert_eq!(bits(&found), bits(&decode(Isa::Scalar)));
                    for (found, expected) in found.iter().zip(&decode_all(&case.weight())[first * case.cols..]) {
                        prop_assert!((f64::from(*found) - expected.value).abs() <= 4.0 * ROUNDOFF * expected.magnitude);
                    }
                }

                #[test]
                fn results_do_not_depend_on_threads_jobs_or_companions(
                    dtype in dtypes(), rows in 1usize..300, choice in 0usize..1000, n in 1usize..=5, fast: bool, seed: u64,
                ) {
                    if !here() { return Ok(()); }
                    let case = Case::new(dtype, rows, cols_of(dtype, choice), n, 0, seed);
                    let precision = if fast { Precision::Fast } else { Precision::Exact };
                    let alone = case.gemv(ISA, precision, 1);
                    for threads in [2, 7] {
                        prop_assert_eq!(&alone, &case.gemv(ISA, precision, threads));
                    }
                    let mut x = Activations::new(5, case.cols);
                    let mut outs: Vec<Vec<f32>> = vec![vec![0.0; rows]; 10];
                    let last = (n - 1) * case.cols;
                    x.set(ISA, &case.x[last..], 1, case.cols, precision);
                    let mut jobs: Vec<GemvJob> =
                        outs.iter_mut().map(|out| GemvJob { weight: case.weight(), out }).collect();
                    gemv(&Pool::new(2), ISA, &x, &mut jobs);
                    for out in outs {
                        prop_assert_eq!(&alone[(n - 1) * rows..], &out);
                    }
                }

                #[test]
                fn matrix_product_is_within_rounding_on_any_number_of_threads(
                    dtype in dtypes(), rows in 1usize..200, choice in 0usize..1000, n in 0usize..40, slack in 0usize..64, add: bool, seed: u64,
                ) {
                    if !here() { return Ok(()); }
                    let case = Case::new(dtype, rows, cols_of(dtype, choice), n, slack, seed);
                    let product = |threads: usize| {
                        let mut scratch = GemmScratch::new(threads, case.cols);
                        let mut out = Fenced::new(n * rows);
                        out.values().fill(if add { 2.0 } else { f32::NAN });
                        gemm(&Pool::new(threads), ISA, &case.weight(), &case.x, out.values(), add, &mut scratch);
                        out.finish()
                    };
                    let found = product(1);
                    for threads in [2, 7] {
                        prop_assert_eq!(&found, &product(threads));
                    }
                    case.check(&found, if add { 2.0 } else { 0.0 }, |_, _| 0.0);
                }
            }

            #[test]
            fn a_value_that_is_not_finite_shows_in_every_product_with_it() {
                if !here() { return; }
                for dtype in WeightType::ALL {
                    for (bad, precision) in [
                        (f32::NAN, Precision::Fast), (f32::INFINITY, Precision::Fast), (f32::NEG_INFINITY, Precision::Fast),
                        (f32::NAN, Precision::Exact), (f32::INFINITY, Precision::Exact),
                    ] {
                        let mut case = Case::new(dtype, 9, 256, 2, 0, 1);
                        case.x[256 + 77] = bad;
                        let found = case.gemv(ISA, precision, 1);
                        assert!(found[..9].iter().all(|value| value.is_finite()), "{}: another row of activations", dtype.name());
                        assert!(found[9..].iter().all(|value| !value.is_finite()), "{} {bad} {precision:?}", dtype.name());
                    }
                }
            }

            #[test]
            fn activations_of_zero_and_next_to_zero_give_zero() {
                if !here() { return; }
                for dtype in WeightType::ALL {
                    let mut case = Case::new(dtype, 5, 512, 1, 0, 2);
                    case.x.fill(0.0);
                    assert!(case.gemv(ISA, Precision::Fast, 1).iter().all(|&value| value == 0.0));
                    case.x.fill(1e-40);
                    assert!(case.gemv(ISA, Precision::Fast, 1).iter().all(|value| value.abs() < 1e-30));
                }
            }
        }
    )*};
}

on_each_isa! {
    scalar: Isa::Scalar;
    #[cfg(target_arch = "x86_64")]
    avx2: Isa::Avx2;
    #[cfg(target_arch = "x86_64")]
    avx512: Isa::Avx512;
    #[cfg(target_arch = "aarch64")]
    neon: Isa::Neon;
}
