//! Projections of the key sketch: `row = A (k - mu)` and `query = B[g] q` (algorithms: key sketch).

use crate::config::AdapterKind;
use crate::error::{Error, Result};
use faer::{Mat, Side};
use half::f16;

/// Sums over the tokens of one layer from which its projections are made.
#[derive(Debug, Clone)]
pub struct Moments {
    /// Tokens summed.
    pub key_count: usize,
    /// Sum of keys, `[kv_heads * head_dim]`.
    pub key_sum: Vec<f64>,
    /// Sum of `k k^T`, `[kv_heads * head_dim]` square.
    pub key_outer: Vec<f64>,
    /// Queries summed per KV head.
    pub query_count: usize,
    /// Sum of `q q^T` of the query heads that share a KV head, `[kv_heads][head_dim][head_dim]`.
    pub query_outer: Vec<f64>,
    kv_heads: usize,
    head_dim: usize,
}

impl Moments {
    /// Empty sums.
    pub fn new(kv_heads: usize, head_dim: usize) -> Moments {
        let dim = kv_heads * head_dim;
        Moments {
            key_count: 0,
            key_sum: vec![0.0; dim],
            key_outer: vec![0.0; dim * dim],
            query_count: 0,
            query_outer: vec![0.0; dim * head_dim],
            kv_heads,
            head_dim,
        }
    }

    /// Bytes of the sums.
    pub fn bytes(kv_heads: usize, head_dim: usize) -> usize {
        let dim = kv_heads * head_dim;
        (dim + dim * dim + dim * head_dim) * size_of::<f64>()
    }

    /// Back to empty.
    pub fn clear(&mut self) {
        self.key_count = 0;
        self.query_count = 0;
        for sums in [&mut self.key_sum, &mut self.key_outer, &mut self.query_outer] {
            sums.fill(0.0);
        }
    }
}

/// The projections of one layer.
#[derive(Debug)]
pub struct Adapter {
    /// How they were made; `QueryAware` falls back to `Centred` when no queries were seen.
    pub kind: AdapterKind,
    /// `mu`, `[kv_heads * head_dim]`.
    pub mean: Box<[f32]>,
    /// `A`, `[rank][kv_heads * head_dim]`.
    pub key_side: Box<[f16]>,
    /// `B`, `[kv_heads][rank][head_dim]`.
    pub query_side: Box<[f16]>,
}

/// Eigenvalues of the query moment below this share of their mean are raised to it before the inverse is taken.
const QUERY_EIGENVALUE_FLOOR: f64 = 1e-2;

impl Adapter {
    /// Bytes of the projections of one layer.
    pub fn bytes(kv_heads: usize, head_dim: usize, rank: usize) -> usize {
        let dim = kv_heads * head_dim;
        dim * size_of::<f32>() + 2 * rank * dim * size_of::<f16>()
    }

    /// Projections of rank `rank` from the sums of one layer.
    ///
    /// `pca` and `centred` take the leading eigenvectors of the (centred) second moment of the keys. `query-aware` takes
    /// those of `S C S`, where `S` is the block-diagonal symmetric root of the queries' second moment. The coordinates are
    /// then mixed by an orthonormal DCT-II, which leaves every score as it is and spreads a row's energy evenly over its
    /// values, so that one scale per row wastes none of the few levels of i4.
    pub fn fit(kind: AdapterKind, moments: &Moments, rank: usize) -> Result<Adapter> {
        let (kv_heads, d) = (moments.kv_heads, moments.head_dim);
        let dim = kv_heads * d;
        if moments.key_count == 0 || rank == 0 || rank > dim {
            return Err(Error::internal(format!(
                "adapter of rank {rank} from {} keys of {dim} values",
                moments.key_count
            )));
        }
        let kind =
            if kind == AdapterKind::QueryAware && moments.query_count == 0 { AdapterKind::Centred } else { kind };
        let count = moments.key_count as f64;
        let mean: Vec<f64> = match kind {
            AdapterKind::Pca => vec![0.0; dim],
            AdapterKind::Centred | AdapterKind::QueryAware => moments.key_sum.iter().map(|s| s / count).collect(),
        };
        let keys = Mat::from_fn(dim, dim, |i, j| moments.key_outer[i * dim + j] / count - mean[i] * mean[j]);

        // Per KV head: symmetric root of the query moment and its inverse; the identity where queries do not count.
        let mut root = Mat::<f64>::identity(dim, dim);
        let mut inverse = Mat::<f64>::identity(dim, dim);
        if kind == AdapterKind::QueryAware {
            for head in 0..kv_heads {
                let outer = &moments.query_outer[head * d * d..(head + 1) * d * d];
                let (s, s_inverse) = symmetric_root(outer, d, moments.query_count as f64)?;
                root.as_mut().submatrix_mut(head * d, head * d, d, d).copy_from(&s);
                inverse.as_mut().submatrix_mut(head * d, head * d, d, d).copy_from(&s_inverse);
            }
        }
        let weighted = &root * &keys * &root;
        let (_, vectors) = eigen_descending(&weighted)?;
        let mix = dct(rank);
        let u = vectors.as_ref().subcols(0, rank) * &mix;
        let key_side = &root * &u;
        let query_side = &inverse * &u;

        // One scalar moves between the two sides, so that both stay well inside the range of f16.
        let scale = (rank as f64).sqrt() / key_side.norm_l2().max(f64::MIN_POSITIVE);
        let mut a = Vec::with_capacity(rank * dim);
        for j in 0..rank {
            a.extend((0..dim).map(|i| f16::from_f64(key_side[(i, j)] * scale)));
        }
        let mut b = Vec::with_capacity(rank * dim);
        for head in 0..kv_heads {
            for j in 0..rank {
                b.extend((0..d).map(|i| f16::from_f64(query_side[(head * d + i, j)] / scale)));
            }
        }
        if a.iter().chain(&b).any(|x| !x.is_finite()) {
            return Err(Error::internal("sketch projection is not finite: keys or queries of this model exceed f16"));
        }
        Ok(Adapter { kind, mean: mean.iter().map(|&m| m as f32).collect(), key_side: a.into(), query_side: b.into() })
    }
}

/// `(S, S^-1)` with `S S = outer / count`, eigenvalues floored.
fn symmetric_root(outer: &[f64], d: usize, count: f64) -> Result<(Mat<f64>, Mat<f64>)> {
    let moment = Mat::from_fn(d, d, |i, j| outer[i * d + j] / count);
    let (values, vectors) = eigen_descending(&moment)?;
    let mean = values.iter().sum::<f64>() / d as f64;
    let floor = (mean * QUERY_EIGENVALUE_FLOOR).max(f64::MIN_POSITIVE.sqrt());
    let root = |power: f64| {
        let scaled = Mat::from_fn(d, d, |i, j| vectors[(i, j)] * values[j].max(floor).powf(power));
        &scaled * vectors.transpose()
    };
    Ok((root(0.5), root(-0.5)))
}

/// Eigenvalues from the largest down, with eigenvectors as columns.
fn eigen_descending(matrix: &Mat<f64>) -> Result<(Vec<f64>, Mat<f64>)> {
    let n = matrix.nrows();
    let eigen = matrix
        .self_adjoint_eigen(Side::Lower)
        .map_err(|e| Error::internal(format!("eigenvalues of a {n} by {n} moment matrix: {e:?}")))?;
    let (values, vectors) = (eigen.S().column_vector(), eigen.U());
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    Ok((order.iter().map(|&i| values[i]).collect(), Mat::from_fn(n, n, |i, j| vectors[(i, order[j])])))
}

/// Orthonormal DCT-II of size `n`: no entry is larger than `sqrt(2 / n)`.
fn dct(n: usize) -> Mat<f64> {
    Mat::from_fn(n, n, |i, j| {
        let norm = if i == 0 { (1.0 / n as f64).sqrt() } else { (2.0 / n as f64).sqrt() };
        norm * (std::f64::consts::PI * (j as f64 + 0.5) * i as f64 / n as f64).cos()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deterministic values in -1..1.
    fn noise(seed: &mut u64) -> f64 {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*seed >> 33) as f64 / (1u64 << 30) as f64 - 1.0
    }

    fn score_error(kind: AdapterKind, rank: usize) -> f64 {
        let (kv_heads, d, tokens) = (2, 8, 300);
        let dim = kv_heads * d;
        let mut seed = 7;
        let mut moments = Moments::new(kv_heads, d);
        // Queries live mostly in the last two dimensions of a head, keys mostly in the first four, with a large mean.
        let key = |seed: &mut u64| -> Vec<f64> {
            (0..dim).map(|i| 3.0 + noise(seed) * if i % d < 4 { 2.0 } else { 0.6 }).collect()
        };
        let query =
            |seed: &mut u64| -> Vec<f64> { (0..d).map(|i| noise(seed) * if i >= 6 { 4.0 } else { 0.1 }).collect() };
        let keys: Vec<_> = (0..tokens).map(|_| key(&mut seed)).collect();
        let queries: Vec<_> = (0..tokens).map(|_| query(&mut seed)).collect();
        for (k, q) in keys.iter().zip(&queries) {
            moments.key_count += 1;
            moments.query_count += 1;
            for i in 0..dim {
                moments.key_sum[i] += k[i];
                for j in 0..dim {
                    moments.key_outer[i * dim + j] += k[i] * k[j];
                }
            }
            for head in 0..kv_heads {
                for i in 0..d {
                    for j in 0..d {
                        moments.query_outer[(head * d + i) * d + j] += q[i] * q[j];
                    }
                }
            }
        }
        let adapter = Adapter::fit(kind, &moments, rank).unwrap();
        let (mut error, mut total) = (0.0, 0.0);
        for q in queries.iter().take(40) {
            for head in 0..kv_heads {
                // Scores matter up to a constant over tokens.
                let mut differences = Vec::new();
                let mut exact = Vec::new();
                for k in keys.iter().take(40) {
                    let truth: f64 = (0..d).map(|i| q[i] * k[head * d + i]).sum();
                    let mut estimate = 0.0;
                    for j in 0..rank {
                        let row: f64 = (0..dim)
                            .map(|i| adapter.key_side[j * dim + i].to_f64() * (k[i] - f64::from(adapter.mean[i])))
                            .sum();
                        let projected: f64 =
                            (0..d).map(|i| adapter.query_side[(head * rank + j) * d + i].to_f64() * q[i]).sum();
                        estimate += row * projected;
                    }
                    differences.push(truth - estimate);
                    exact.push(truth);
                }
                let spread = |x: &[f64]| {
                    let mean = x.iter().sum::<f64>() / x.len() as f64;
                    x.iter().map(|v| (v - mean).powi(2)).sum::<f64>()
                };
                error += spread(&differences);
                total += spread(&exact);
            }
        }
        error / total
    }

    #[test]
    fn full_rank_reproduces_scores() {
        for kind in [AdapterKind::Pca, AdapterKind::Centred, AdapterKind::QueryAware] {
            let error = score_error(kind, 16);
            assert!(error < 1e-4, "{kind:?}: {error}");
        }
    }

    #[test]
    fn query_aware_is_better_where_queries_are_not_isotropic() {
        let aware = score_error(AdapterKind::QueryAware, 4);
        let centred = score_error(AdapterKind::Centred, 4);
        assert!(aware < 0.2 * centred, "query-aware {aware}, centred {centred}");
    }

    #[test]
    fn no_keys_is_an_error() {
        assert!(Adapter::fit(AdapterKind::Pca, &Moments::new(1, 4), 2).is_err());
    }
}
