//! The vector trait that the f32 kernels are written over, and the choice of its implementation at run time.
//!
//! An algorithm is a [`Kernel`]: a value with its arguments and one `run` that is generic over [`Simd`]. [`dispatch`] calls it with the token
//! of the instruction set asked for, inside a function compiled for that set. All on the way down must be `#[inline(always)]`, so that it is
//! compiled for the set too; so closures have no place inside.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use half::f16;

use crate::isa::Isa;

/// Vectors of `LANES` f32 values and of as many 32-bit integers.
///
/// A value of the implementing type proves that the machine has the instruction set, which makes all methods without pointers safe.
pub(crate) trait Simd: Copy {
    /// f32 values per vector.
    const LANES: usize;
    /// Query heads (or vectors) that [`super::dense::dot_tile`] takes per load of four rows: as many as registers allow.
    const DOT_VECTORS: usize;
    /// Vectors of a value row that the weighted sum keeps in registers, for four heads each.
    const SUM_VECTORS: usize;
    /// Rows of the matrix microkernel: 8, of 3 vectors each, or 6, of 2.
    const TILE_ROWS: usize;
    /// What [`Simd::dot4`] adds to the signed bytes of a row: 0, or 128 where the machine multiplies unsigned with signed ones.
    const ROW_BIAS: i32;

    /// f32 vector.
    type F: Copy;
    /// Vector of 32-bit integers, or of four bytes each.
    type I: Copy;

    fn splat(self, x: f32) -> Self::F;
    /// # Safety
    /// `LANES` values are readable at `p`; no alignment is needed.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// # Safety
    /// `LANES` values are writable at `p`; no alignment is needed.
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// Loads and converts; exact.
    ///
    /// # Safety
    /// `LANES` values are readable at `p`; no alignment is needed, not even that of f16.
    unsafe fn load_f16(self, p: *const f16) -> Self::F;
    /// Rounds to nearest even and stores.
    ///
    /// # Safety
    /// `LANES` values are writable at `p`; no alignment is needed, not even that of f16.
    unsafe fn store_f16(self, p: *mut f16, v: Self::F);

    /// Asks for the cache line of `p`, which may be any address.
    fn prefetch(self, p: *const f16);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; if either is NaN, `b` or NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; if either is NaN, `b` or NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// To the nearest integer, ties to even.
    fn round(self, v: Self::F) -> Self::F;
    /// `v * 2^n` for integers `n` from -126 to 127; NaN where `v` is NaN.
    fn scale_pow2(self, v: Self::F, n: Self::F) -> Self::F;
    /// `v` where `x` is at least `limit` or NaN, else 0.
    fn zero_below(self, v: Self::F, x: Self::F, limit: Self::F) -> Self::F;
    /// Sum of all lanes.
    fn reduce_add(self, v: Self::F) -> f32;
    /// Largest lane; unspecified if any is NaN.
    fn reduce_max(self, v: Self::F) -> f32;
    /// Stores the four sums of lanes at `p`.
    ///
    /// # Safety
    /// 4 values are writable at `p`.
    unsafe fn reduce_add4(self, v: [Self::F; 4], p: *mut f32);

    fn splat_i(self, x: u32) -> Self::I;
    /// # Safety
    /// `LANES` values are readable at `p`; no alignment is needed.
    unsafe fn load_i(self, p: *const u32) -> Self::I;
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Logical shift right of each 32-bit lane by 4.
    fn shift_right_4(self, v: Self::I) -> Self::I;
    /// Per lane: `acc` plus the dot product of four signed bytes of `rows`, each with [`Simd::ROW_BIAS`] added, and four signed bytes of `q`.
    fn dot4(self, acc: Self::I, rows: Self::I, q: Self::I) -> Self::I;
    /// The same for bytes of `rows` from 0 to 15.
    fn dot4_nibbles(self, acc: Self::I, rows: Self::I, q: Self::I) -> Self::I;
    fn to_f32(self, v: Self::I) -> Self::F;

    /// `2^x` to 3e-7; 0 below -126, 2^127 from 127 on, NaN stays.
    #[inline(always)]
    fn exp2(self, x: Self::F) -> Self::F {
        let limit = self.splat(-126.0);
        let clamped = self.min(self.splat(127.0), self.max(limit, x));
        let n = self.round(clamped);
        self.zero_below(self.scale_pow2(one_plus(self, self.sub(clamped, n), &EXP2_5), n), x, limit)
    }

    /// `2^x` for `x` of at most 0, to 2e-4: for weights that are rounded to f16 anyway. 2^-126 below -126, NaN stays.
    #[inline(always)]
    fn exp2_coarse(self, x: Self::F) -> Self::F {
        let clamped = self.max(self.splat(-126.0), x);
        let n = self.round(clamped);
        self.scale_pow2(one_plus(self, self.sub(clamped, n), &EXP2_3), n)
    }
}

/// `(2^x - 1) / x` on [-1/2, 1/2], interpolated at Chebyshev nodes; lowest power first.
const EXP2_3: [f32; 3] = [std::f32::consts::LN_2, 0.242_035_33, 0.055_754_65];
/// The same, two degrees more.
pub(super) const EXP2_5: [f32; 5] = [std::f32::consts::LN_2, 0.240_223_5, 0.055_503_81, 0.009_666_368, 0.001_338_130_2];
/// `(e^x - 1) / x` on [-ln 2 / 2, ln 2 / 2], the same way.
const EXP_6: [f32; 6] = [1.0, 0.5, 0.166_665_05, 0.041_666_467, 0.008_369_149, 0.001_393_364_3];

/// `1 + x * (c[0] + c[1] x + ...)`.
#[inline(always)]
pub(super) fn one_plus<S: Simd, const N: usize>(s: S, x: S::F, c: &[f32; N]) -> S::F {
    let mut p = s.splat(c[N - 1]);
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        p = s.fma(p, x, s.splat(c[i]));
    }
    s.fma(p, x, s.splat(1.0))
}

/// `e^x` to 2e-7; 0 below -87.3, 2.4e38 above 88.3, NaN stays.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    let limit = s.splat(-87.3);
    let clamped = s.min(s.splat(88.3), s.max(limit, x));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first with so few bits that its products with n are exact.
    let r = s.fma(n, s.splat(-0.693_359_4), clamped);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    s.zero_below(s.scale_pow2(one_plus(s, r, &EXP_6), n), x, limit)
}

/// The most lanes of any implementation.
pub(crate) const LANES_MAX: usize = 16;

/// Loads the first `n` lanes, 0 in the others.
///
/// # Safety
/// `n <= LANES` values are readable at `p`.
#[inline(always)]
pub(crate) unsafe fn load_partial<S: Simd>(s: S, p: *const f32, n: usize) -> S::F {
    let mut lanes = [0.0; LANES_MAX];
    for i in 0..n {
        // SAFETY: `i < n`, and the caller promises `n` values.
        lanes[i] = unsafe { *p.add(i) };
    }
    // SAFETY: the array holds `LANES_MAX` values.
    unsafe { s.load(lanes.as_ptr()) }
}

/// Stores the first `n` lanes.
///
/// # Safety
/// `n <= LANES` values are writable at `p`.
#[inline(always)]
pub(crate) unsafe fn store_partial<S: Simd>(s: S, p: *mut f32, v: S::F, n: usize) {
    let mut lanes = [0.0; LANES_MAX];
    // SAFETY: the array holds `LANES_MAX` values.
    unsafe { s.store(lanes.as_mut_ptr(), v) };
    for i in 0..n {
        // SAFETY: `i < n`, and the caller promises `n` values.
        unsafe { *p.add(i) = lanes[i] };
    }
}

/// An algorithm with its arguments.
pub(crate) trait Kernel {
    type Output;
    /// Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Runs `kernel` with the vectors of `isa`, or scalar ones where the machine does not have it.
#[inline]
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa.usable() {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            // SAFETY: `usable` returned it, so the machine has AVX2, FMA and F16C.
            unsafe { avx2::run(kernel) }
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => {
            // SAFETY: `usable` returned it, so the machine has AVX-512 F, BW, VL, DQ and VNNI.
            unsafe { avx512::run(kernel) }
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon if std::arch::is_aarch64_feature_detected!("dotprod") => {
            // SAFETY: `usable` returned it, and the dot-product extension was just found.
            unsafe { neon::run_dotprod(kernel) }
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => {
            // SAFETY: `usable` returned it, so the machine has NEON.
            unsafe { neon::run(kernel) }
        }
        _ => kernel.run(scalar::Scalar),
    }
}

#[cfg(test)]
mod tests;
