//! Small dense products with f16 matrices: sketch projections and their query side.

use half::f16;

use super::arch::{Kernel, Simd, dispatch};
use crate::isa::Isa;

/// Rows of the matrix that [`dot_tile`] takes at a time.
pub(crate) const TILE: usize = 4;

/// `out[row] = sum over col of m[row][col] * x[col]`.
///
/// `m`: `[rows][cols]`, `x`: `[cols]`, `out`: `[rows]`. It is also the query side of a sketch, `q B`, where `B` is stored `[rank][d]`.
///
/// # Panics
/// If the lengths do not fit together.
pub fn matvec_f16(isa: Isa, m: &[f16], x: &[f32], out: &mut [f32]) {
    project(isa, m, x, x.len(), out);
}

/// `out[i][r] = sum over j of a[r][j] * x[i][j]`: each row of `x` times the transpose of `a`.
///
/// `a`: `[rank][dim]`, `x`: `[n][dim]`, `out`: `[n][rank]`. Runs on the calling thread. NaN and infinities spread as in any sum of products.
///
/// # Panics
/// If the lengths do not fit together.
pub fn project(isa: Isa, a: &[f16], x: &[f32], dim: usize, out: &mut [f32]) {
    if dim == 0 {
        assert!(a.is_empty() && x.is_empty(), "rows of no elements");
        out.fill(0.0);
        return;
    }
    assert!(a.len().is_multiple_of(dim) && x.len().is_multiple_of(dim), "rows are whole");
    let (rank, n) = (a.len() / dim, x.len() / dim);
    assert_eq!(out.len(), n * rank, "one result per row of `x` and row of `a`");
    dispatch(isa, Project { a, x, dim, rank, out });
}

struct Project<'a> {
    a: &'a [f16],
    x: &'a [f32],
    dim: usize,
    rank: usize,
    out: &'a mut [f32],
}

impl Kernel for Project<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (dim, rank) = (self.dim, self.rank);
        for (x, out) in self.x.chunks(VECTORS_MAX * dim).zip(self.out.chunks_mut(VECTORS_MAX * rank.max(1))) {
            let vectors = x.len() / dim;
            let mut first = 0;
            while first < rank {
                let count = TILE.min(rank - first);
                let mut rows = [self.a.as_ptr(); TILE];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = self.a[(first + i.min(count - 1)) * dim..].as_ptr();
                }
                let mut dots = [0.0f32; VECTORS_MAX * TILE];
                // SAFETY: each row pointer is the start of a whole row of `dim`; `x` holds `vectors` rows of `dim`; `dots` holds
                // `vectors` times four results.
                unsafe { dot_vectors(s, rows, x.as_ptr(), dim, vectors, dim, dots.as_mut_ptr(), TILE) };
                for i in 0..vectors {
                    out[i * rank + first..][..count].copy_from_slice(&dots[i * TILE..][..count]);
                }
                first += TILE;
            }
        }
    }
}

/// Vectors that [`Project`] multiplies with each row of the matrix while it is in registers or the nearest cache.
const VECTORS_MAX: usize = 8;

/// `out[v * out_stride + t] = sum over i in 0..d of rows[t][i] * x[v * x_stride + i]` for four rows and `vectors` vectors.
///
/// # Safety
/// Each row holds `d` values, `x` holds `vectors` rows of `d` at `x_stride`, and four values are writable for each vector.
#[inline(always)]
pub(crate) unsafe fn dot_vectors<S: Simd>(
    s: S,
    rows: [*const f16; TILE],
    x: *const f32,
    x_stride: usize,
    vectors: usize,
    d: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let mut v = 0;
    while v < vectors {
        let count = S::DOT_VECTORS.min(vectors - v);
        // SAFETY: `v + count <= vectors`; the rest is the caller's promise.
        unsafe {
            let (x, out) = (x.add(v * x_stride), out.add(v * out_stride));
            match count {
                1 => dot_tile::<S, 1>(s, rows, x, x_stride, d, out, out_stride),
                2 => dot_tile::<S, 2>(s, rows, x, x_stride, d, out, out_stride),
                3 => dot_tile::<S, 3>(s, rows, x, x_stride, d, out, out_stride),
                _ => dot_tile::<S, 4>(s, rows, x, x_stride, d, out, out_stride),
            }
        }
        v += count;
    }
}

/// [`dot_vectors`] for `R` vectors, all sums in registers.
///
/// # Safety
/// As [`dot_vectors`].
#[inline(always)]
unsafe fn dot_tile<S: Simd, const R: usize>(
    s: S,
    rows: [*const f16; TILE],
    x: *const f32,
    x_stride: usize,
    d: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let mut sums = [[s.splat(0.0); TILE]; R];
    let mut i = 0;
    while i + S::LANES <= d {
        let mut row = [s.splat(0.0); TILE];
        for t in 0..TILE {
            // SAFETY: `i + LANES <= d`, and each row holds `d` values.
            row[t] = unsafe { s.load_f16(rows[t].add(i)) };
        }
        for v in 0..R {
            // SAFETY: `i + LANES <= d`, and each vector holds `d` values.
            let x = unsafe { s.load(x.add(v * x_stride + i)) };
            for t in 0..TILE {
                sums[v][t] = s.fma(row[t], x, sums[v][t]);
            }
        }
        i += S::LANES;
    }
    for v in 0..R {
        // SAFETY: four values per vector are writable by the caller's promise.
        unsafe { s.reduce_add4(sums[v], out.add(v * out_stride)) };
    }
    while i < d {
        for t in 0..TILE {
            for v in 0..R {
                // SAFETY: `i < d`; rows, vectors and results as above.
                unsafe {
                    *out.add(v * out_stride + t) += rows[t].add(i).read_unaligned().to_f32() * *x.add(v * x_stride + i)
                };
            }
        }
        i += 1;
    }
}
