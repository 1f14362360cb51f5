//! Distances between distributions over the vocabulary, in nats, from logits.

/// A set of logits and what is needed to turn them into log-probabilities.
#[derive(Clone, Copy, Debug)]
pub struct Distribution<'a> {
    logits: &'a [f32],
    /// Logarithm of the sum of the exponentials.
    log_sum: f64,
}

impl<'a> Distribution<'a> {
    /// The softmax of `logits` (`[vocab]`, at least one of them finite, none NaN or plus infinity).
    pub fn new(logits: &'a [f32]) -> Distribution<'a> {
        let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = logits.iter().map(|&l| (f64::from(l) - largest).exp()).sum();
        Distribution { logits, log_sum: largest + sum.ln() }
    }

    /// Log-probability of token `index`.
    pub fn log_probability(&self, index: usize) -> f64 {
        f64::from(self.logits[index]) - self.log_sum
    }

    /// Index of the likeliest token, the first of equal ones.
    pub fn argmax(&self) -> usize {
        forebay::sampler::greedy(self.logits).map_or(0, |token| token as usize)
    }

    /// Kullback-Leibler divergence of `other` from `self`: the sum of `p (ln p - ln q)`, where `p` is `self`. Both have the same
    /// length. Infinite where `other` rules out what `self` does not.
    pub fn divergence(&self, other: &Distribution<'_>) -> f64 {
        debug_assert_eq!(self.logits.len(), other.logits.len());
        let term = |index: usize| {
            let log_p = self.log_probability(index);
            if log_p == f64::NEG_INFINITY { 0.0 } else { log_p.exp() * (log_p - other.log_probability(index)) }
        };
        // Rounding can leave a sum a little below zero.
        (0..self.logits.len()).map(term).sum::<f64>().max(0.0)
    }
}

/// Mean of some values and the standard error of that mean.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Mean {
    /// The mean; 0 of nothing.
    pub mean: f64,
    /// Standard deviation of the values over the root of their number; 0 of fewer than two.
    pub standard_error: f64,
}

impl Mean {
    /// Mean of `values`.
    pub fn of(values: &[f64]) -> Mean {
        let n = values.len() as f64;
        if values.is_empty() {
            return Mean { mean: 0.0, standard_error: 0.0 };
        }
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
        let standard_error = if values.len() < 2 { 0.0 } else { (squares / (n - 1.0) / n).sqrt() };
        Mean { mean, standard_error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divergence(p: &[f32], q: &[f32]) -> f64 {
        Distribution::new(p).divergence(&Distribution::new(q))
    }

    #[test]
    fn divergence_of_two_coins_is_what_the_formula_says() {
        let (p, q) = (0.8f64, 0.3f64);
        let logits = |p: f64| [p.ln() as f32 + 5.0, (1.0 - p).ln() as f32 + 5.0];
        let expected = p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln();
        assert!((divergence(&logits(p), &logits(q)) - expected).abs() < 1e-6);
    }

    #[test]
    fn a_shift_of_all_logits_changes_nothing_and_large_ones_do_not_overflow() {
        let p = [1.0f32, -2.0, 0.5, 3.0];
        let shifted = p.map(|l| l + 1000.0);
        assert!(divergence(&p, &shifted) < 1e-9);
        assert!(
            (Distribution::new(&shifted).log_probability(3) - Distribution::new(&p).log_probability(3)).abs() < 1e-4
        );
    }

    #[test]
    fn divergence_is_not_negative_and_not_symmetric() {
        let (p, q) = ([2.0f32, 0.0, -1.0], [0.0f32, 0.0, 1.5]);
        assert!(divergence(&p, &q) > 0.1 && divergence(&q, &p) > 0.1);
        assert!((divergence(&p, &q) - divergence(&q, &p)).abs() > 1e-3);
    }

    #[test]
    fn a_token_that_is_ruled_out_counts_for_nothing_under_p_and_for_all_under_q() {
        let (some, none) = ([1.0f32, 1.0], [1.0f32, f32::NEG_INFINITY]);
        assert!((divergence(&none, &some) - 2f64.ln()).abs() < 1e-9);
        assert_eq!(divergence(&some, &none), f64::INFINITY);
    }

    #[test]
    fn mean_and_its_error() {
        let m = Mean::of(&[1.0, 2.0, 3.0, 4.0]);
        assert!((m.mean - 2.5).abs() < 1e-12);
        assert!((m.standard_error - (5.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
        assert_eq!(Mean::of(&[]), Mean { mean: 0.0, standard_error: 0.0 });
        assert_eq!(Mean::of(&[7.0]).standard_error, 0.0);
    }
}
