//! f16 to f32 and back.

use half::f16;

use super::arch::{Kernel, Simd, dispatch};
use crate::isa::Isa;

/// Converts exactly. Both `[n]`.
///
/// # Panics
/// If the lengths differ.
pub fn f16_to_f32(isa: Isa, from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "as many values on both sides");
    dispatch(isa, Widen { from, to });
}

/// Converts, rounding to nearest even; what exceeds 65,504 by half a step or more becomes infinity, NaN stays NaN. Both `[n]`.
///
/// # Panics
/// If the lengths differ.
pub fn f32_to_f16(isa: Isa, from: &[f32], to: &mut [f16]) {
    assert_eq!(from.len(), to.len(), "as many values on both sides");
    dispatch(isa, Narrow { from, to });
}

struct Widen<'a> {
    from: &'a [f16],
    to: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut i = 0;
        while i + S::LANES <= self.from.len() {
            // SAFETY: both slices have this length.
            unsafe { s.store(self.to.as_mut_ptr().add(i), s.load_f16(self.from.as_ptr().add(i))) };
            i += S::LANES;
        }
        for (to, from) in self.to[i..].iter_mut().zip(&self.from[i..]) {
            *to = from.to_f32();
        }
    }
}

struct Narrow<'a> {
    from: &'a [f32],
    to: &'a mut [f16],
}

impl Kernel for Narrow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut i = 0;
        while i + S::LANES <= self.from.len() {
            // SAFETY: both slices have this length.
            unsafe { s.store_f16(self.to.as_mut_ptr().add(i), s.load(self.from.as_ptr().add(i))) };
            i += S::LANES;
        }
        for (to, &from) in self.to[i..].iter_mut().zip(&self.from[i..]) {
            *to = f16::from_f32(from);
        }
    }
}
