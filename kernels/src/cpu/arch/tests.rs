//! Every instruction set of this machine against plain arithmetic.

use super::*;

/// Applies one vector operation to lanes taken from `x`, `y`, `z`.
struct Lanewise<'a> {
    op: &'a str,
    x: &'a [f32],
    y: &'a [f32],
    z: &'a [f32],
}

impl Kernel for Lanewise<'_> {
    type Output = Vec<f32>;
    fn run<S: Simd>(self, s: S) -> Vec<f32> {
        let mut out = vec![0.0; self.x.len()];
        for i in (0..self.x.len()).step_by(S::LANES) {
            let n = S::LANES.min(self.x.len() - i);
            // SAFETY: `n` values from `i` on are inside all four slices of one length.
            unsafe {
                let x = load_partial(s, self.x.as_ptr().add(i), n);
                let y = load_partial(s, self.y.as_ptr().add(i), n);
                let z = load_partial(s, self.z.as_ptr().add(i), n);
                let v = match self.op {
                    "add" => s.add(x, y),
                    "sub" => s.sub(x, y),
                    "mul" => s.mul(x, y),
                    "div" => s.div(x, y),
                    "fma" => s.fma(x, y, z),
                    "max" => s.max(x, y),
                    "min" => s.min(x, y),
                    "round" => s.round(x),
                    "zero_below" => s.zero_below(x, y, z),
                    "exp2" => s.exp2(x),
                    "exp2_coarse" => s.exp2_coarse(s.min(x, s.sub(s.splat(0.0), x))),
                    "exp" => exp(s, x),
                    other => unreachable!("{other}"),
                };
                store_partial(s, out.as_mut_ptr().add(i), v, n);
            }
        }
        out
    }
}

struct Reductions<'a> {
    x: &'a [f32],
}

impl Kernel for Reductions<'_> {
    /// Lanes, sum, maximum, four sums.
    type Output = (usize, f32, f32, [f32; 4]);
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut four = [0.0; 4];
        // SAFETY: `x` holds four times LANES_MAX values, and `four` four.
        unsafe {
            let v = |i: usize| s.load(self.x.as_ptr().add(i * S::LANES));
            s.reduce_add4([v(0), v(1), v(2), v(3)], four.as_mut_ptr());
            (S::LANES, s.reduce_add(v(0)), s.reduce_max(v(0)), four)
        }
    }
}

struct Integers<'a> {
    rows: &'a [u32],
    q: u32,
}

impl Kernel for Integers<'_> {
    /// Signed dot products, dot products of the low nibbles, and of the high ones; small enough to be exact.
    type Output = (Vec<f32>, Vec<f32>, Vec<f32>);
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let n = self.rows.len();
        let (mut full, mut low, mut high) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
        let q = s.splat_i(self.q);
        let q_sum: i32 = self.q.to_le_bytes().iter().map(|&b| i32::from(b as i8)).sum();
        let mask = s.splat_i(0x0f0f_0f0f);
        assert!(n.is_multiple_of(S::LANES));
        for i in (0..n).step_by(S::LANES) {
            // SAFETY: LANES values from `i` on are inside all vectors.
            unsafe {
                let zero = s.splat_i(0);
                let sum = s.dot4(zero, s.load_i(self.rows.as_ptr().add(i)), q);
                let sum = s.sub_i(sum, s.splat_i((S::ROW_BIAS * q_sum) as u32));
                let rows = s.load_i(self.rows.as_ptr().add(i));
                let low_sum = s.dot4_nibbles(zero, s.and_i(rows, mask), q);
                let high_sum = s.dot4_nibbles(zero, s.and_i(s.shift_right_4(rows), mask), q);
                s.store(full.as_mut_ptr().add(i), s.to_f32(sum));
                s.store(low.as_mut_ptr().add(i), s.to_f32(low_sum));
                s.store(high.as_mut_ptr().add(i), s.to_f32(high_sum));
            }
        }
        (full, low, high)
    }
}

fn dot_bytes(a: [u8; 4], b: [u8; 4], part: impl Fn(u8) -> i32) -> f32 {
    a.iter().zip(b).map(|(&a, b)| part(a) * i32::from(b as i8)).sum::<i32>() as f32
}

fn samples() -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let mut x: Vec<f32> = (-300..300).map(|i| i as f32 * 0.497).collect();
    x.extend([
        0.0,
        -0.0,
        0.5,
        1.5,
        2.5,
        -0.5,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        1e-30,
        127.0,
        -126.0,
        -126.5,
        -87.0,
        88.0,
    ]);
    let y = x.iter().rev().copied().collect();
    let z = x.iter().enumerate().map(|(i, x)| x * (i % 7) as f32).collect();
    (x, y, z)
}

fn is_close(a: f32, b: f32, tolerance: f32) -> bool {
    a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= tolerance * b.abs()
}

#[test]
fn lanes_do_what_scalars_do() {
    let (x, y, z) = samples();
    type Op = fn(f32, f32, f32) -> f32;
    let ops: [(&str, f32, Op); 12] = [
        ("add", 0.0, |x, y, _| x + y),
        ("sub", 0.0, |x, y, _| x - y),
        ("mul", 0.0, |x, y, _| x * y),
        ("div", 0.0, |x, y, _| x / y),
        ("fma", 0.0, |x, y, z| x.mul_add(y, z)),
        ("max", 0.0, |x, y, _| if x > y { x } else { y }),
        ("min", 0.0, |x, y, _| if x < y { x } else { y }),
        ("round", 0.0, |x, _, _| x.round_ties_even()),
        ("zero_below", 0.0, |x, y, z| if y < z { 0.0 } else { x }),
        ("exp2", 3e-7, |x, _, _| if x < -126.0 { 0.0 } else { x.min(127.0).exp2() + if x.is_nan() { x } else { 0.0 } }),
        // Only for numbers that are not positive, of which the others here are made.
        ("exp2_coarse", 2e-4, |x, _, _| (-x.abs()).max(-126.0).exp2() + if x.is_nan() { x } else { 0.0 }),
        ("exp", 3e-7, |x, _, _| if x < -87.3 { 0.0 } else { x.min(88.3).exp() + if x.is_nan() { x } else { 0.0 } }),
    ];
    for isa in Isa::available() {
        for (op, tolerance, expected) in ops {
            let found = dispatch(isa, Lanewise { op, x: &x, y: &y, z: &z });
            for i in 0..x.len() {
                let expected = expected(x[i], y[i], z[i]);
                // Two roundings in the scalar twin; of a maximum with NaN any of the two is allowed.
                let sum_of_magnitudes = (x[i] * y[i]).abs() + z[i].abs();
                let twice_rounded =
                    op == "fma" && (found[i] - expected).abs() <= 2.0 * f32::EPSILON * sum_of_magnitudes;
                let any_of_two = matches!(op, "max" | "min") && (x[i].is_nan() || y[i].is_nan());
                assert!(
                    is_close(found[i], expected, tolerance) || twice_rounded || any_of_two,
                    "{isa:?} {op}({}, {}, {}): expected {expected}, found {}",
                    x[i],
                    y[i],
                    z[i],
                    found[i]
                );
            }
        }
    }
}

#[test]
fn reductions_add_up() {
    let x: Vec<f32> = (0..4 * LANES_MAX).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
    for isa in Isa::available() {
        let (lanes, sum, max, four) = dispatch(isa, Reductions { x: &x });
        let sums: Vec<f32> = x.chunks_exact(lanes).map(|lanes| lanes.iter().sum()).take(4).collect();
        assert_eq!(four[..], sums[..], "{isa:?}");
        assert_eq!(sum, sums[0], "{isa:?}");
        assert_eq!(max, x[..lanes].iter().copied().fold(f32::NEG_INFINITY, f32::max), "{isa:?}");
    }
}

#[test]
fn integer_dot_products_are_exact() {
    let mut rows: Vec<u32> = (0..64u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
    rows.extend([0x7f7f_7f7f, 0x8181_8181, 0, 0xffff_ffff, 0x7f81_7f81, 1, 0x0f0f_0f0f, 0xf0f0_f0f0]);
    rows.extend([0; 8]);
    // Bytes of a row are at least -127.
    let rows: Vec<u32> =
        rows.iter().map(|w| u32::from_le_bytes(w.to_le_bytes().map(|b| if b == 0x80 { 0x81 } else { b }))).collect();
    for isa in Isa::available() {
        for q in [0x7f7f_7f7fu32, 0x8181_8181, 0x0102_0304, 0xfe7f_8103, 0] {
            let (full, low, high) = dispatch(isa, Integers { rows: &rows, q });
            for (i, &row) in rows.iter().enumerate() {
                let (row, q) = (row.to_le_bytes(), q.to_le_bytes());
                assert_eq!(full[i], dot_bytes(row, q, |b| i32::from(b as i8)), "{isa:?}");
                assert_eq!(low[i], dot_bytes(row, q, |b| i32::from(b & 15)), "{isa:?}");
                assert_eq!(high[i], dot_bytes(row, q, |b| i32::from(b >> 4)), "{isa:?}");
            }
        }
    }
}
