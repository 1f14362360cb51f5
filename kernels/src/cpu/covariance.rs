//! Sums of outer products, for adapters that are computed from covariances.

use super::arch::{Kernel, Simd, dispatch};
use super::parts::Parts;
use super::pool::Pool;
use super::tile::{PANEL, Strided, panel_product};
use crate::isa::Isa;

/// Rows whose products are summed in f32 before they are added in f64.
const BLOCK_ROWS: usize = 256;
/// Rows of a block that are copied at a time.
const COPY_ROWS: usize = 64;

/// Adds `sum over rows of x` to `sum` and `sum over rows of x x^T` to `cov`.
///
/// `x`: `n` rows of `dim = sum.len()`, beginning `row_stride` elements apart; `sum`: `[dim]`; `cov`: `[dim][dim]`, symmetric before and after. Products
/// are summed in f32 over at most 256 rows, then in f64. The result does not depend on the number of threads.
///
/// # Panics
/// If the lengths do not fit together.
pub fn covariance_add(pool: &Pool, isa: Isa, x: &[f32], row_stride: usize, n: usize, sum: &mut [f64], cov: &mut [f64]) {
    let dim = sum.len();
    assert_eq!(cov.len(), dim * dim, "the matrix is square");
    if n == 0 || dim == 0 {
        return;
    }
    assert!(row_stride >= dim && (n - 1) * row_stride + dim <= x.len(), "{n} rows of {dim} are inside");
    for row in 0..n {
        for (sum, &x) in sum.iter_mut().zip(&x[row * row_stride..][..dim]) {
            *sum += f64::from(x);
        }
    }
    let panels = dim.div_ceil(PANEL);
    let cov = Parts::new(cov);
    pool.for_each(panels * (panels + 1) / 2, |_, task| {
        let (i, j) = pair(task);
        let mut tile = [0.0; PANEL * PANEL];
        for first in (0..n).step_by(BLOCK_ROWS) {
            let rows = BLOCK_ROWS.min(n - first);
            dispatch(isa, TileProduct { x: &x[first * row_stride..], row_stride, rows, dim, i, j, tile: &mut tile });
            let (height, width) = (PANEL.min(dim - i * PANEL), PANEL.min(dim - j * PANEL));
            for row in 0..height {
                let at = (i * PANEL + row) * dim + j * PANEL;
                // SAFETY: tasks differ in (i, j) or (j, i), so their parts of rows do not overlap.
                let cov = unsafe { cov.get(at..at + width) };
                for (cov, product) in cov.iter_mut().zip(&tile[row * PANEL..]) {
                    *cov += f64::from(*product);
                }
            }
            if i != j {
                for row in 0..width {
                    let at = (j * PANEL + row) * dim + i * PANEL;
                    // SAFETY: as above, this being the mirrored tile.
                    let cov = unsafe { cov.get(at..at + height) };
                    for (column, cov) in cov.iter_mut().enumerate() {
                        *cov += f64::from(tile[column * PANEL + row]);
                    }
                }
            }
        }
    });
}

/// The `task`-th pair `(i, j)` with `j <= i`.
fn pair(task: usize) -> (usize, usize) {
    let mut i = 0;
    let mut before = 0;
    while before + i < task {
        before += i + 1;
        i += 1;
    }
    (i, task - before)
}

/// Products of two panels of columns of `x`.
struct TileProduct<'a> {
    x: &'a [f32],
    row_stride: usize,
    rows: usize,
    dim: usize,
    i: usize,
    j: usize,
    /// `[PANEL][PANEL]`
    tile: &'a mut [f32; PANEL * PANEL],
}

impl Kernel for TileProduct<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut a = [0.0; COPY_ROWS * PANEL];
        let mut b = [0.0; COPY_ROWS * PANEL];
        for first in (0..self.rows).step_by(COPY_ROWS) {
            let rows = COPY_ROWS.min(self.rows - first);
            self.copy_panel(first, rows, self.i, &mut a);
            self.copy_panel(first, rows, self.j, &mut b);
            let a = Strided { start: a.as_ptr(), row_stride: 1, k_stride: PANEL };
            // SAFETY: `a` and `b` have `rows` rows of PANEL, the tile PANEL rows of PANEL.
            unsafe { panel_product(s, a, PANEL, rows, b.as_ptr(), self.tile.as_mut_ptr(), first > 0) };
        }
    }
}

impl TileProduct<'_> {
    /// Copies the columns of one panel; those beyond `dim` stay 0.
    #[inline(always)]
    fn copy_panel(&self, first: usize, rows: usize, panel: usize, to: &mut [f32; COPY_ROWS * PANEL]) {
        let column = panel * PANEL;
        let width = PANEL.min(self.dim - column);
        for (row, to) in to.chunks_exact_mut(PANEL).take(rows).enumerate() {
            to[..width].copy_from_slice(&self.x[(first + row) * self.row_stride + column..][..width]);
        }
    }
}
