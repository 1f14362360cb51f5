//! Dot products in f32: float weights, and quantised weights that are decoded first.

use super::Simd;
use super::row::{RowDot, RowShape};
use crate::cpu::activations::Activations;

/// Largest vector in bytes of f32.
const VECTOR_BYTES_MAX: usize = 64;

/// A float type of weights.
pub(crate) trait FloatType: Copy {
    /// Bytes of one weight.
    const BYTES: usize;

    /// # Safety
    ///
    /// `WIDTH` weights are readable at `p`.
    unsafe fn load<S: Simd>(simd: S, p: *const u8) -> S::Floats;
}

macro_rules! float_type {
    ($name:ident, $bytes:expr, $load:ident) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name;
        impl FloatType for $name {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn load<S: Simd>(simd: S, p: *const u8) -> S::Floats {
                // SAFETY: the caller vouches for `WIDTH` weights at `p`.
                unsafe { simd.$load(p) }
            }
        }
    };
}

float_type!(F32, 4, load_f32_bytes);
float_type!(F16, 2, load_f16);
float_type!(BF16, 2, load_bf16);

/// Rows of float weights.
#[derive(Clone, Copy)]
pub(crate) struct FloatRow<T: FloatType>(pub(crate) T);

impl<T: FloatType> RowDot for FloatRow<T> {
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const N: usize>(
        self,
        simd: S,
        w: *const u8,
        shape: RowShape,
        x: &Activations,
        first: usize,
    ) -> [[f32; N]; R] {
        // Two sums for each dot product: one fused multiply-add takes about four cycles, and two start in each.
        let mut acc = [[[simd.zero(); 2]; N]; R];
        let mut xs = [std::ptr::null(); N];
        for n in 0..N {
            xs[n] = x.floats(first + n).as_ptr();
        }
        let whole = shape.cols / S::WIDTH;
        // SAFETY: the caller vouches for `R` rows of `cols` weights at `w` and `N` rows of `x`, which are padded with zeros to whole
        // vectors; every vector of weights that is read lies within its row or in the zeroed `last`.
        unsafe {
            for pair in 0..whole / 2 {
                for r in 0..R {
                    let p = w.add(r * shape.row_bytes + 2 * pair * S::WIDTH * T::BYTES);
                    for line in (0..2 * S::WIDTH * T::BYTES).step_by(64) {
                        simd.prefetch(w.wrapping_add(shape.prefetch + (pair * R + r) * 2 * S::WIDTH * T::BYTES + line));
                    }
                    for half in 0..2 {
                        let weights = T::load(simd, p.add(half * S::WIDTH * T::BYTES));
                        for n in 0..N {
                            let values = simd.load(xs[n].add((2 * pair + half) * S::WIDTH));
                            acc[r][n][half] = simd.fma(weights, values, acc[r][n][half]);
                        }
                    }
                }
            }
            for vector in whole / 2 * 2..shape.cols.div_ceil(S::WIDTH) {
                for r in 0..R {
                    let mut last = [0u8; VECTOR_BYTES_MAX];
                    let bytes = (shape.cols - vector * S::WIDTH).min(S::WIDTH) * T::BYTES;
                    let p = w.add(r * shape.row_bytes + vector * S::WIDTH * T::BYTES);
                    p.copy_to_nonoverlapping(last.as_mut_ptr(), bytes);
                    let weights = T::load(simd, last.as_ptr());
                    for n in 0..N {
                        let values = simd.load(xs[n].add(vector * S::WIDTH));
                        acc[r][n][0] = simd.fma(weights, values, acc[r][n][0]);
                    }
                }
            }
        }
        let mut dots = [[0.0; N]; R];
        for r in 0..R {
            for n in 0..N {
                dots[r][n] = simd.sum(simd.add(acc[r][n][0], acc[r][n][1]));
            }
        }
        dots
    }
}
