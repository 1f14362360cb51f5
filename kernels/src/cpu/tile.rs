//! The f32 matrix microkernel that prefill attention and covariances are made of.

use super::arch::Simd;

/// Columns of a panel: three vectors of the widest instruction set, and a multiple of the microkernel's width for all others.
pub(crate) const PANEL: usize = 48;
/// The most rows of a microkernel.
pub(crate) const TILE_ROWS_MAX: usize = 8;

/// A matrix of which element `(row, k)` lies at `start[row * row_stride + k * k_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Strided {
    pub start: *const f32,
    pub row_stride: usize,
    pub k_stride: usize,
}

/// `c[row][j] = sum over k of a[row][k] * b[k][j]`, plus what `c` was if `add`.
///
/// `a`: `[rows][depth]` as its strides say, `b`: `[depth][PANEL]`, `c`: `[rows][PANEL]`.
///
/// # Safety
/// All these elements are readable, those of `c` writable, and `c` overlaps neither of the others.
#[inline(always)]
pub(crate) unsafe fn panel_product<S: Simd>(
    s: S,
    a: Strided,
    rows: usize,
    depth: usize,
    b: *const f32,
    c: *mut f32,
    add: bool,
) {
    let mut row = 0;
    // SAFETY: each call stays inside `rows`; the rest is the caller's promise.
    unsafe {
        // Sums in registers: 8 x 3 where there are 32 vectors, 6 x 2 where there are 16 (4 x 3 leaves too few for operands).
        if S::TILE_ROWS == 8 {
            while row + 8 <= rows {
                row_tile::<S, 8, 3>(s, a, row, depth, b, c, add);
                row += 8;
            }
            while row + 4 <= rows {
                row_tile::<S, 4, 3>(s, a, row, depth, b, c, add);
                row += 4;
            }
            while row < rows {
                row_tile::<S, 1, 3>(s, a, row, depth, b, c, add);
                row += 1;
            }
        } else {
            while row + 6 <= rows {
                row_tile::<S, 6, 2>(s, a, row, depth, b, c, add);
                row += 6;
            }
            while row + 4 <= rows {
                row_tile::<S, 4, 2>(s, a, row, depth, b, c, add);
                row += 4;
            }
            while row < rows {
                row_tile::<S, 1, 2>(s, a, row, depth, b, c, add);
                row += 1;
            }
        }
    }
}

/// `M` rows of [`panel_product`] from `row` on, `N` vectors of columns at a time.
///
/// # Safety
/// As [`panel_product`], and `row + M <= rows`.
#[inline(always)]
unsafe fn row_tile<S: Simd, const M: usize, const N: usize>(
    s: S,
    a: Strided,
    row: usize,
    depth: usize,
    b: *const f32,
    c: *mut f32,
    add: bool,
) {
    let mut column = 0;
    while column < PANEL {
        // SAFETY: PANEL is a multiple of `N * LANES` (3 of 16 or 4 lanes, 2 of 8 or 1); the rest is the caller's promise.
        unsafe {
            let a_row = a.start.add(row * a.row_stride);
            let c_row = c.add(row * PANEL + column);
            let mut acc = [[s.splat(0.0); N]; M];
            if add {
                for m in 0..M {
                    for j in 0..N {
                        acc[m][j] = s.load(c_row.add(m * PANEL + j * S::LANES));
                    }
                }
            }
            for k in 0..depth {
                let b_row = b.add(k * PANEL + column);
                let mut b = [s.splat(0.0); N];
                for j in 0..N {
                    b[j] = s.load(b_row.add(j * S::LANES));
                }
                for m in 0..M {
                    let a = s.splat(*a_row.add(m * a.row_stride + k * a.k_stride));
                    for j in 0..N {
                        acc[m][j] = s.fma(a, b[j], acc[m][j]);
                    }
                }
            }
            for m in 0..M {
                for j in 0..N {
                    s.store(c_row.add(m * PANEL + j * S::LANES), acc[m][j]);
                }
            }
        }
        column += N * S::LANES;
    }
}
