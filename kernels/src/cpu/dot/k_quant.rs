//! Integer dot products of the K-quants: blocks of 256 weights, sub-blocks of 32 with their own small integer scale.

use super::row::{RowDot, RowShape};
use super::{BLOCK, GROUP_MAX, PIECE, Simd};
use crate::cpu::activations::Activations;
use crate::quant::k_scales;

/// Sub-blocks of 32 weights in a block.
const SUB_BLOCKS: usize = 8;
/// Weights in a block.
const SUPER: usize = SUB_BLOCKS * BLOCK;

/// # Safety
///
/// Two bytes are readable at `p`.
#[inline(always)]
unsafe fn half<S: Simd>(simd: S, p: *const u8) -> f32 {
    // SAFETY: the caller vouches for the two bytes.
    simd.half(u16::from_le_bytes(unsafe { p.cast::<[u8; 2]>().read_unaligned() }))
}

#[inline(always)]
fn prefetch<S: Simd>(simd: S, p: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        simd.prefetch(p.wrapping_add(line));
    }
}

/// Q4_K, or Q5_K if `FIFTH`. The layout is described at the decoders `q4_k` and `q5_k` in `quant.rs`.
#[derive(Clone, Copy)]
pub(crate) struct ScaleMin<const FIFTH: bool>;

impl<const FIFTH: bool> ScaleMin<FIFTH> {
    const NIBBLES: usize = if FIFTH { 48 } else { 16 };
    const BYTES: usize = Self::NIBBLES + SUPER / 2;

    /// Codes 0..16 and 16..32 of sub-blocks `GROUP step..`.
    ///
    /// # Safety
    ///
    /// There is a whole block at `p`.
    #[inline(always)]
    unsafe fn codes<S: Simd>(simd: S, p: *const u8, step: usize) -> [S::Bytes; 2] {
        let (mut at, mut by, mut fifth) = ([0; GROUP_MAX], [0; GROUP_MAX], [0; GROUP_MAX]);
        for i in 0..S::GROUP {
            let sub = step * S::GROUP + i;
            at[i] = Self::NIBBLES + 32 * (sub / 2);
            by[i] = 4 * (sub % 2) as u8;
            fifth[i] = sub as u8;
        }
        let mut codes = [simd.splat_bytes(0); 2];
        for half in 0..2 {
            // SAFETY: offsets are below 16 or 48 plus 128, the length of the block that the caller vouches for.
            codes[half] = simd.shift_mask(unsafe { simd.gather(p.add(PIECE * half), at) }, by, 0xf);
            if FIFTH {
                // SAFETY: the 32 bytes of fifth bits start at 16.
                let high = unsafe { simd.gather(p.add(16 + PIECE * half), [0; GROUP_MAX]) };
                codes[half] = simd.or(codes[half], simd.shift_left_4(simd.shift_mask(high, fifth, 1)));
            }
        }
        codes
    }
}

impl<const FIFTH: bool> RowDot for ScaleMin<FIFTH> {
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const N: usize>(
        self,
        simd: S,
        w: *const u8,
        shape: RowShape,
        x: &Activations,
        first: usize,
    ) -> [[f32; N]; R] {
        let mut acc = [[simd.zero(); N]; R];
        let mut mins = [[simd.zero_oct(); N]; R];
        for block in 0..shape.cols / SUPER {
            for r in 0..R {
                // SAFETY: the caller vouches for `R` rows of whole blocks at `w`, and that `x` has rows `first..first + N` of the
                // same length, in the layout of `S`.
                unsafe {
                    let p = w.add(r * shape.row_bytes + block * Self::BYTES);
                    prefetch(simd, p.wrapping_add(shape.prefetch), Self::BYTES);
                    let (scales, block_mins) = k_scales(p.add(4).cast::<[u8; 12]>().read_unaligned());
                    let scales = simd.scale_oct(simd.oct_from_bytes(scales), half(simd, p));
                    let block_mins = simd.scale_oct(simd.oct_from_bytes(block_mins), -half(simd, p.add(2)));
                    let mut products = [scales; N];
                    for n in 0..N {
                        products[n] = simd.mul_oct(scales, x.scales_oct(simd, first + n, block));
                        mins[r][n] = simd.fma_oct(block_mins, x.sums_oct(simd, first + n, block), mins[r][n]);
                    }
                    for step in 0..SUB_BLOCKS / S::GROUP {
                        let codes = Self::codes(simd, p, step);
                        for n in 0..N {
                            let codes_x = x.codes(simd, first + n, block * (SUB_BLOCKS / S::GROUP) + step);
                            let dot = simd.to_floats(simd.dot2(codes, codes_x));
                            acc[r][n] = simd.fma(dot, simd.spread_oct(products[n], step), acc[r][n]);
                        }
                    }
                }
            }
        }
        let mut dots = [[0.0; N]; R];
        for r in 0..R {
            for n in 0..N {
                dots[r][n] = simd.sum(acc[r][n]) + simd.sum_oct(mins[r][n]);
            }
        }
        dots
    }
}

/// Q6_K. The layout is described at the decoder `q6_k` in `quant.rs`.
#[derive(Clone, Copy)]
pub(crate) struct Q6K;

impl Q6K {
    const BYTES: usize = 210;
    const ZERO: u8 = 32;

    /// Codes 0..16 and 16..32 of sub-blocks `GROUP step..`.
    ///
    /// # Safety
    ///
    /// There is a whole block at `p`.
    #[inline(always)]
    unsafe fn codes<S: Simd>(simd: S, p: *const u8, step: usize) -> [S::Bytes; 2] {
        let (mut low_at, mut high_at) = ([0; GROUP_MAX], [0; GROUP_MAX]);
        let (mut low_by, mut high_by) = ([0; GROUP_MAX], [0; GROUP_MAX]);
        for i in 0..S::GROUP {
            let sub = step * S::GROUP + i;
            low_at[i] = 64 * (sub / 4) + 32 * (sub % 2);
            low_by[i] = 4 * (sub % 4 / 2) as u8;
            high_at[i] = 128 + 32 * (sub / 4);
            high_by[i] = 2 * (sub % 4) as u8;
        }
        let mut codes = [simd.splat_bytes(0); 2];
        for half in 0..2 {
            // SAFETY: offsets are at most 112 and 176, and 16 bytes each are read of the 210 that the caller vouches for.
            let (low, high) =
                unsafe { (simd.gather(p.add(PIECE * half), low_at), simd.gather(p.add(PIECE * half), high_at)) };
            let high = simd.shift_left_4(simd.shift_mask(high, high_by, 3));
            codes[half] = simd.or(simd.shift_mask(low, low_by, 0xf), high);
        }
        codes
    }
}

impl RowDot for Q6K {
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const N: usize>(
        self,
        simd: S,
        w: *const u8,
        shape: RowShape,
        x: &Activations,
        first: usize,
    ) -> [[f32; N]; R] {
        let mut acc = [[simd.zero(); N]; R];
        for block in 0..shape.cols / SUPER {
            for r in 0..R {
                // SAFETY: the caller vouches for `R` rows of whole blocks at `w`, and that `x` has rows `first..first + N` of the
                // same length, in the layout of `S`.
                unsafe {
                    let p = w.add(r * shape.row_bytes + block * Self::BYTES);
                    prefetch(simd, p.wrapping_add(shape.prefetch), Self::BYTES);
                    let d = half(simd, p.add(208));
                    let mut scales = [simd.zero_oct(); N];
                    for n in 0..N {
                        scales[n] = simd.scale_oct(x.scales_oct(simd, first + n, block), d);
                    }
                    for step in 0..SUB_BLOCKS / S::GROUP {
                        let codes = Self::codes(simd, p, step);
                        let mut scale = [simd.zero_ints(); 2];
                        for half in 0..2 {
                            let mut at = [0; GROUP_MAX];
                            for i in 0..S::GROUP {
                                at[i] = (2 * (step * S::GROUP + i) + half) as u8;
                            }
                            scale[half] = simd.spread_scales(p.add(192), at);
                        }
                        let zero = simd.splat_bytes(Self::ZERO);
                        for n in 0..N {
                            let codes_x = x.codes(simd, first + n, block * (SUB_BLOCKS / S::GROUP) + step);
                            let low = simd.sub_ints(simd.dot(codes[0], codes_x[0]), simd.dot(zero, codes_x[0]));
                            let high = simd.sub_ints(simd.dot(codes[1], codes_x[1]), simd.dot(zero, codes_x[1]));
                            let dot = simd.add_ints(simd.mul_ints(low, scale[0]), simd.mul_ints(high, scale[1]));
                            let dot = simd.to_floats(dot);
                            acc[r][n] = simd.fma(dot, simd.spread_oct(scales[n], step), acc[r][n]);
                        }
                    }
                }
            }
        }
        let mut dots = [[0.0; N]; R];
        for r in 0..R {
            for n in 0..N {
                dots[r][n] = simd.sum(acc[r][n]);
            }
        }
        dots
    }
}
