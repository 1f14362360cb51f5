//! Integer dot products of the formats with one scale for 32 weights: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.

use super::row::{RowDot, RowShape};
use super::{BLOCK, GROUP_MAX, PIECE, Simd};
use crate::cpu::activations::Activations;

/// Where a format keeps the codes of a block of 32 weights. Every block starts with the f16 scale, and is longer than 4 bytes.
pub(crate) trait Block32 {
    /// Bytes of one block.
    const BYTES: usize;
    /// Whether an f16 minimum that is added to all weights follows the scale.
    const HAS_MIN: bool;
    /// Code of the weight 0 where codes are unsigned and there is no minimum.
    const ZERO: u8;
    /// Whether codes are signed bytes.
    const SIGNED: bool;

    /// Codes 0..16 and 16..32 of the blocks at `p + at[i]`.
    ///
    /// # Safety
    ///
    /// There is a whole block at each of the first `GROUP` offsets.
    unsafe fn codes<S: Simd>(simd: S, p: *const u8, at: [usize; GROUP_MAX]) -> [S::Bytes; 2];
}

/// The layout is described at the decoder of the same name in `quant.rs`; these follow it.
macro_rules! nibble_format {
    ($name:ident, $bytes:expr, min: $min:expr, zero: $zero:expr, codes: $codes:expr, fifth: $fifth:expr) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name;
        impl Block32 for $name {
            const BYTES: usize = $bytes;
            const HAS_MIN: bool = $min;
            const ZERO: u8 = $zero;
            const SIGNED: bool = false;

            #[inline(always)]
            unsafe fn codes<S: Simd>(simd: S, p: *const u8, at: [usize; GROUP_MAX]) -> [S::Bytes; 2] {
                // SAFETY: the 16 bytes of nibbles and the 4 of fifth bits lie in the blocks that the caller vouches for.
                unsafe {
                    let codes = simd.nibbles(simd.gather(p.add($codes), at));
                    let fifth: Option<usize> = $fifth;
                    let Some(fifth) = fifth else { return codes };
                    let bits = [simd.gather_bits(p.add(fifth), at), simd.gather_bits(p.add(fifth + 2), at)];
                    [simd.or(codes[0], bits[0]), simd.or(codes[1], bits[1])]
                }
            }
        }
    };
}

nibble_format!(Q4_0, 18, min: false, zero: 8, codes: 2, fifth: None);
nibble_format!(Q4_1, 20, min: true, zero: 0, codes: 4, fifth: None);
nibble_format!(Q5_0, 22, min: false, zero: 16, codes: 6, fifth: Some(2));
nibble_format!(Q5_1, 24, min: true, zero: 0, codes: 8, fifth: Some(4));

#[derive(Clone, Copy)]
pub(crate) struct Q8_0;

impl Block32 for Q8_0 {
    const BYTES: usize = 34;
    const HAS_MIN: bool = false;
    const ZERO: u8 = 0;
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn codes<S: Simd>(simd: S, p: *const u8, at: [usize; GROUP_MAX]) -> [S::Bytes; 2] {
        // SAFETY: the 32 bytes of codes lie in the blocks that the caller vouches for.
        unsafe { [simd.gather(p.add(2), at), simd.gather(p.add(2 + PIECE), at)] }
    }
}

impl<Q: Block32 + Copy> RowDot for Q {
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const N: usize>(
        self,
        simd: S,
        w: *const u8,
        shape: RowShape,
        x: &Activations,
        first: usize,
    ) -> [[f32; N]; R] {
        let blocks = shape.cols / BLOCK;
        let whole = blocks / S::GROUP;
        let mut acc = [[simd.zero(); N]; R];
        let mut mins = [[simd.zero_pairs(); N]; R];
        for step in 0..whole.max(blocks.div_ceil(S::GROUP)) {
            let present = blocks - step * S::GROUP;
            // In the last step pieces beyond the row repeat its last block; the activations there are 0.
            let mut at = [0; GROUP_MAX];
            for (i, at) in at.iter_mut().enumerate() {
                *at = if step < whole { i } else { i.min(present - 1) } * Q::BYTES;
            }
            // SAFETY: the caller vouches for `R` rows of whole blocks at `w` and that `x` has rows `first..first + N` of the same
            // length, in the layout of `S`; `at` stays within the row.
            unsafe {
                let mut codes_x = [[simd.splat_bytes(0); 2]; N];
                let mut offsets = [simd.zero_ints(); N];
                for n in 0..N {
                    codes_x[n] = x.codes(simd, first + n, step);
                    offsets[n] = if Q::SIGNED {
                        simd.signed_bias(codes_x[n])
                    } else {
                        simd.dot2([simd.splat_bytes(Q::ZERO); 2], codes_x[n])
                    };
                }
                for r in 0..R {
                    let p = w.add(r * shape.row_bytes + step * S::GROUP * Q::BYTES);
                    for line in (0..S::GROUP * Q::BYTES).step_by(64) {
                        simd.prefetch(w.wrapping_add(shape.prefetch + (step * R + r) * S::GROUP * Q::BYTES + line));
                    }
                    let codes = Q::codes(simd, p, at);
                    // Without a minimum the second half of the pair is codes, which `spread_first` leaves out.
                    let scales = simd.gather_half_pairs(p, at);
                    for n in 0..N {
                        let scales = simd.mul_pairs(scales, x.scale_sum_pairs(simd, first + n, step));
                        let dot = if Q::SIGNED {
                            simd.dot2_signed(codes, codes_x[n], offsets[n])
                        } else if Q::ZERO != 0 {
                            simd.sub_ints(simd.dot2(codes, codes_x[n]), offsets[n])
                        } else {
                            simd.dot2(codes, codes_x[n])
                        };
                        acc[r][n] = simd.fma(simd.to_floats(dot), simd.spread_first(scales), acc[r][n]);
                        if Q::HAS_MIN {
                            mins[r][n] = simd.add_pairs(mins[r][n], scales);
                        }
                    }
                }
            }
        }
        let mut dots = [[0.0; N]; R];
        for r in 0..R {
            for n in 0..N {
                dots[r][n] = simd.sum(acc[r][n]);
                if Q::HAS_MIN {
                    dots[r][n] += simd.sum_second(mins[r][n]);
                }
            }
        }
        dots
    }
}
