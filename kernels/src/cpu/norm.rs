//! RMS norm, gated activation, sums and log-softmax: the elementwise steps between products.

use super::arch::{Kernel, Simd, dispatch, exp, load_partial, store_partial};
use crate::isa::Isa;

/// `out[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight`, row by row.
///
/// `x`, `out`: `[n][dim]`, `weight`: `[dim]`. A NaN or infinity in a row makes NaN of (at least) that element of the row.
///
/// # Panics
/// If `x` is not whole rows or `out` has another length.
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let dim = weight.len();
    assert_eq!(x.len(), out.len(), "input and output of a norm have one shape");
    if dim == 0 {
        assert!(x.is_empty(), "rows of no elements");
        return;
    }
    assert_eq!(x.len() % dim, 0, "rows are whole");
    dispatch(isa, RmsNorm { x, weight, eps, out });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let dim = self.weight.len();
        for (x, out) in self.x.chunks_exact(dim).zip(self.out.chunks_exact_mut(dim)) {
            let mean = sum_of_squares(s, x) / dim as f32;
            let factor = s.splat(1.0 / (mean + self.eps).sqrt());
            let mut i = 0;
            while i + S::LANES <= dim {
                // SAFETY: all three slices hold `dim` elements.
                unsafe {
                    let v = s.mul(s.load(x.as_ptr().add(i)), factor);
                    s.store(out.as_mut_ptr().add(i), s.mul(v, s.load(self.weight.as_ptr().add(i))));
                }
                i += S::LANES;
            }
            // SAFETY: the rest of all three slices.
            unsafe {
                let n = dim - i;
                let v = s.mul(load_partial(s, x.as_ptr().add(i), n), factor);
                store_partial(s, out.as_mut_ptr().add(i), s.mul(v, load_partial(s, self.weight.as_ptr().add(i), n)), n);
            }
        }
    }
}

#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sums = [s.splat(0.0); 4];
    let mut i = 0;
    while i + 4 * S::LANES <= x.len() {
        for j in 0..4 {
            // SAFETY: `i + 4 * LANES` is inside `x`.
            let v = unsafe { s.load(x.as_ptr().add(i + j * S::LANES)) };
            sums[j] = s.fma(v, v, sums[j]);
        }
        i += 4 * S::LANES;
    }
    while i < x.len() {
        let n = S::LANES.min(x.len() - i);
        // SAFETY: `i + n` is inside `x`.
        let v = unsafe { load_partial(s, x.as_ptr().add(i), n) };
        sums[0] = s.fma(v, v, sums[0]);
        i += n;
    }
    s.reduce_add(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}

/// `gate = silu(gate) * up`, with `silu(x) = x / (1 + e^-x)`. Both `[n]`.
///
/// NaN stays NaN; `silu` of minus infinity is NaN, of infinity infinity.
///
/// # Panics
/// If the lengths differ.
pub fn silu_mul(isa: Isa, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up projection have one shape");
    dispatch(isa, SiluMul { gate, up });
}

struct SiluMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = self.gate.len();
        let (gate, up) = (self.gate.as_mut_ptr(), self.up.as_ptr());
        let mut i = 0;
        while i + S::LANES <= len {
            // SAFETY: both slices hold `len` elements.
            unsafe { s.store(gate.add(i), silu_times(s, s.load(gate.add(i)), s.load(up.add(i)))) };
            i += S::LANES;
        }
        let n = len - i;
        // SAFETY: the rest of both slices.
        unsafe {
            let v = silu_times(s, load_partial(s, gate.add(i), n), load_partial(s, up.add(i), n));
            store_partial(s, gate.add(i), v, n);
        }
    }
}

#[inline(always)]
fn silu_times<S: Simd>(s: S, x: S::F, up: S::F) -> S::F {
    let denominator = s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), x)));
    s.mul(s.div(x, denominator), up)
}

/// `a += b`, elementwise. Both `[n]`.
///
/// # Panics
/// If the lengths differ.
pub fn add_assign(isa: Isa, a: &mut [f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "both sides of a sum have one shape");
    dispatch(isa, AddAssign { a, b });
}

struct AddAssign<'a> {
    a: &'a mut [f32],
    b: &'a [f32],
}

impl Kernel for AddAssign<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = self.a.len();
        let (a, b) = (self.a.as_mut_ptr(), self.b.as_ptr());
        let mut i = 0;
        while i + S::LANES <= len {
            // SAFETY: both slices hold `len` elements.
            unsafe { s.store(a.add(i), s.add(s.load(a.add(i)), s.load(b.add(i)))) };
            i += S::LANES;
        }
        let n = len - i;
        // SAFETY: the rest of both slices.
        unsafe { store_partial(s, a.add(i), s.add(load_partial(s, a.add(i), n), load_partial(s, b.add(i), n)), n) };
    }
}

/// Logarithms of the softmax of `logits`, accumulated in f64. Both `[n]`.
///
/// If any logit is NaN or plus infinity, or all are minus infinity, all results are NaN.
///
/// # Panics
/// If the lengths differ.
pub fn log_softmax(logits: &[f32], out: &mut [f32]) {
    assert_eq!(logits.len(), out.len(), "input and output of log-softmax have one shape");
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    let log_sum = f64::from(max) + sum.ln();
    for (out, &x) in out.iter_mut().zip(logits) {
        *out = (f64::from(x) - log_sum) as f32;
    }
}
