//! Integer dot products of the K-quants: blocks of 256 weights, sub-blocks of 32 with their own small integer scale.

use super::{BLOCK, GROUP_MAX, PIECE, RowDot, RowShape, Simd};
use crate::cpu::gemv::Activations;
use crate::quant::k_scales;
use std::array::from_fn;

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
        let sub = |i: usize| step * S::GROUP + i % S::GROUP;
        let by = from_fn(|i| 4 * (sub(i) % 2) as u8);
        from_fn(|half| {
            let at = from_fn(|i| Self::NIBBLES + 32 * (sub(i) / 2) + PIECE * half);
            // SAFETY: offsets are below 16 or 48 plus 128, the length of the block that the caller vouches for.
            let low = simd.shift_mask(unsafe { simd.gather(p, at) }, by, 0xf);
            if !FIFTH {
                return low;
            }
            // SAFETY: the 32 bytes of fifth bits start at 16.
            let high = unsafe { simd.gather(p, [16 + PIECE * half; GROUP_MAX]) };
            simd.or(low, simd.shift_left_4(simd.shift_mask(high, from_fn(|i| sub(i) as u8), 1)))
        })
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
                    let scales: [S::Oct; N] = from_fn(|n| simd.mul_oct(scales, x.scales_oct(simd, first + n, block)));
                    for n in 0..N {
                        mins[r][n] = simd.fma_oct(block_mins, x.sums_oct(simd, first + n, block), mins[r][n]);
                    }
                    for step in 0..SUB_BLOCKS / S::GROUP {
                        let codes = Self::codes(simd, p, step);
                        for n in 0..N {
                            let codes_x = x.codes(simd, first + n, block * (SUB_BLOCKS / S::GROUP) + step);
                            let dot = simd.to_floats(simd.dot2(codes, codes_x));
                            acc[r][n] = simd.fma(dot, simd.spread_oct(scales[n], step), acc[r][n]);
                        }
                    }
                }
            }
        }
        from_fn(|r| from_fn(|n| simd.sum(acc[r][n]) + simd.sum_oct(mins[r][n])))
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
        let sub = |i: usize| step * S::GROUP + i % S::GROUP;
        from_fn(|half| {
            let low_at = from_fn(|i| 64 * (sub(i) / 4) + 32 * (sub(i) % 2) + PIECE * half);
            let high_at = from_fn(|i| 128 + 32 * (sub(i) / 4) + PIECE * half);
            // SAFETY: offsets are at most 112 and 176, and 16 bytes each are read of the 210 that the caller vouches for.
            let (low, high) = unsafe { (simd.gather(p, low_at), simd.gather(p, high_at)) };
            let low = simd.shift_mask(low, from_fn(|i| 4 * (sub(i) % 4 / 2) as u8), 0xf);
            let high = simd.shift_mask(high, from_fn(|i| 2 * (sub(i) % 4) as u8), 3);
            simd.or(low, simd.shift_left_4(high))
        })
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
                    let scales: [S::Oct; N] = from_fn(|n| simd.scale_oct(x.scales_oct(simd, first + n, block), d));
                    for step in 0..SUB_BLOCKS / S::GROUP {
                        let codes = Self::codes(simd, p, step);
                        let scale: [S::Ints; 2] = from_fn(|half| {
                            let at = from_fn(|i| (2 * (step * S::GROUP + i % S::GROUP) + half) as u8);
                            simd.spread_scales(p.add(192), at)
                        });
                        for n in 0..N {
                            let codes_x = x.codes(simd, first + n, block * (SUB_BLOCKS / S::GROUP) + step);
                            let zero = simd.splat_bytes(Self::ZERO);
                            let products: [S::Ints; 2] = from_fn(|half| {
                                let dot =
                                    simd.sub_ints(simd.dot(codes[half], codes_x[half]), simd.dot(zero, codes_x[half]));
                                simd.mul_ints(dot, scale[half])
                            });
                            let dot = simd.to_floats(simd.add_ints(products[0], products[1]));
                            acc[r][n] = simd.fma(dot, simd.spread_oct(scales[n], step), acc[r][n]);
                        }
                    }
                }
            }
        }
        from_fn(|r| from_fn(|n| simd.sum(acc[r][n])))
    }
}
