//! What a weight format has to do: dot products of its rows with activations.

use super::Simd;
use crate::cpu::activations::Activations;

/// Where the rows of a product lie.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowShape {
    /// Weights in a row.
    pub(crate) cols: usize,
    /// Bytes of a row.
    pub(crate) row_bytes: usize,
    /// How far ahead of what is read now the next cache lines are asked for, in bytes.
    pub(crate) prefetch: usize,
}

/// Dot products of a few rows of one weight format with a few rows of activations.
pub(crate) trait RowDot: Copy {
    /// `[R][N]` dot products of the `R` rows at `w` with activation rows `first..first + N`. The bits of each do not depend on `R`
    /// and `N`.
    ///
    /// # Safety
    ///
    /// `R` rows of `shape` are readable at `w`; `x` has those rows, `shape.cols` long, quantised for `S` if the format needs that.
    unsafe fn dots<S: Simd, const R: usize, const N: usize>(
        self,
        simd: S,
        w: *const u8,
        shape: RowShape,
        x: &Activations,
        first: usize,
    ) -> [[f32; N]; R];
}
