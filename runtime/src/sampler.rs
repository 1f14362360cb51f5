//! Choosing the next token from logits.
//!
//! Order of the steps: repeat penalty, temperature, top-k, top-p, min-p, then one draw. Temperature 0 takes the largest logit, and of equal
//! ones the first. The random numbers are ChaCha8 with the seed's eight bytes, little-endian, as the start of an otherwise zero key: a
//! stream that is specified and the same on every machine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// How many of the last tokens the repeat penalty looks at.
pub const REPEAT_WINDOW_TOKENS: usize = 64;
/// Candidates that are sorted at first where only top-p limits them; quadrupled until their probabilities reach it.
const TOP_P_FIRST_COUNT: usize = 256;

/// What can be wrong with sampling.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum SamplerError {
    #[error("{option} is {found}, expected {expected}")]
    Option { option: &'static str, found: f32, expected: &'static str },
    #[error("logit of token {token} is {found}, expected a finite number or minus infinity")]
    Logit { token: usize, found: f32 },
    #[error("no token can be chosen: {count} logits, none above minus infinity")]
    Empty { count: usize },
}

/// How to sample. The default is greedy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the most likely tokens until their probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this many times as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Positive logits of tokens among the last [`REPEAT_WINDOW_TOKENS`] are divided by this, negative ones multiplied; 1 changes nothing.
    pub repeat_penalty: f32,
    /// Of the random numbers.
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repeat_penalty: 1.0, seed: 0 }
    }
}

/// Chooses tokens; the same options and logits give the same tokens.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    random: ChaCha8Rng,
    candidates: Vec<Candidate>,
}

/// A token and, as the steps go on, its logit, its weight against the likeliest, its probability.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    value: f32,
    token: u32,
}

impl Sampler {
    /// Checks the options.
    pub fn new(options: SamplerOptions) -> Result<Self, SamplerError> {
        let check = |option, found: f32, fits: bool, expected| match fits {
            true => Ok(()),
            false => Err(SamplerError::Option { option, found, expected }),
        };
        let SamplerOptions { temperature, top_p, min_p, repeat_penalty, .. } = options;
        check("temperature", temperature, (0.0..=100.0).contains(&temperature), "0 to 100")?;
        check("top-p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0, at most 1")?;
        check("min-p", min_p, (0.0..=1.0).contains(&min_p), "0 to 1")?;
        check(
            "repeat penalty",
            repeat_penalty,
            repeat_penalty > 0.0 && repeat_penalty <= 100.0,
            "above 0, at most 100",
        )?;
        let mut key = [0; 32];
        key[..8].copy_from_slice(&options.seed.to_le_bytes());
        Ok(Self { options, random: ChaCha8Rng::from_seed(key), candidates: Vec::new() })
    }

    /// The options.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Chooses a token. `logits`: `[vocab]`, changed by the repeat penalty; `history`: the tokens so far, oldest first.
    pub fn sample(&mut self, logits: &mut [f32], history: &[u32]) -> Result<u32, SamplerError> {
        let wrong = |logit: &f32| logit.is_nan() || *logit == f32::INFINITY;
        if let Some(token) = logits.iter().position(wrong) {
            return Err(SamplerError::Logit { token, found: logits[token] });
        }
        self.penalise(logits, history);
        let best = greedy(logits).ok_or(SamplerError::Empty { count: logits.len() })?;
        if self.options.temperature == 0.0 {
            return Ok(best);
        }
        self.keep_top_k(logits);
        // Divided after the subtraction, so that a tiny temperature gives minus infinity and not NaN.
        let largest = logits[best as usize];
        let mut total = 0.0;
        for candidate in &mut self.candidates {
            candidate.value = ((candidate.value - largest) / self.options.temperature).exp();
            total += f64::from(candidate.value);
        }
        self.keep_top_p(total);
        Ok(self.draw(best))
    }

    fn penalise(&self, logits: &mut [f32], history: &[u32]) {
        let penalty = self.options.repeat_penalty;
        if penalty == 1.0 {
            return;
        }
        let recent = &history[history.len().saturating_sub(REPEAT_WINDOW_TOKENS)..];
        for (at, &token) in recent.iter().enumerate() {
            let first_time = !recent[..at].contains(&token);
            if let Some(logit) = logits.get_mut(token as usize).filter(|_| first_time) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
    }

    /// Fills the candidates with the `top_k` largest logits, in no order.
    fn keep_top_k(&mut self, logits: &[f32]) {
        self.candidates.clear();
        let all = logits.iter().enumerate().map(|(token, &value)| Candidate { value, token: token as u32 });
        self.candidates.extend(all.filter(|candidate| candidate.value > f32::NEG_INFINITY));
        let count = self.options.top_k;
        if count > 0 && count < self.candidates.len() {
            self.candidates.select_nth_unstable_by(count - 1, likelier);
            self.candidates.truncate(count);
        }
    }

    /// Sorts the likeliest candidates first and cuts them off where top-p and min-p say. `total`: sum of all weights.
    fn keep_top_p(&mut self, total: f64) {
        let SamplerOptions { top_p, min_p, .. } = self.options;
        // The likeliest weighs 1, so min-p is a weight already.
        self.candidates.retain(|candidate| candidate.value >= min_p);
        if top_p == 1.0 {
            // All stay; only what the partial sort of top-k left behind needs an order that does not depend on how it works.
            if self.options.top_k > 0 {
                self.candidates.sort_unstable_by(likelier);
            }
            return;
        }
        let mut sorted = 0;
        let mut sum = 0.0;
        let mut count = TOP_P_FIRST_COUNT;
        while sorted < self.candidates.len() {
            let rest = &mut self.candidates[sorted..];
            let step = count.min(rest.len());
            if step < rest.len() {
                rest.select_nth_unstable_by(step - 1, likelier);
            }
            rest[..step].sort_unstable_by(likelier);
            for at in sorted..sorted + step {
                sum += f64::from(self.candidates[at].value);
                if sum >= f64::from(top_p) * total {
                    self.candidates.truncate(at + 1);
                    return;
                }
            }
            sorted += step;
            count *= 4;
        }
    }

    /// One draw, in proportion to the weights.
    fn draw(&mut self, best: u32) -> u32 {
        let total: f64 = self.candidates.iter().map(|candidate| f64::from(candidate.value)).sum();
        // The upper 53 bits are a number from 0 to below 1.
        let point = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
        let mut sum = 0.0;
        for candidate in &self.candidates {
            sum += f64::from(candidate.value);
            if point < sum {
                return candidate.token;
            }
        }
        // Only rounding of the last sum can lead here.
        self.candidates.last().map_or(best, |candidate| candidate.token)
    }
}

/// The first of the largest logits; `None` if there is none above minus infinity.
pub fn greedy(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut largest = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > largest {
            (best, largest) = (Some(token as u32), logit);
        }
    }
    best
}

/// Larger values first, of equal ones the lower token: a total order, so that a partial sort keeps the same candidates everywhere.
fn likelier(left: &Candidate, right: &Candidate) -> std::cmp::Ordering {
    right.value.total_cmp(&left.value).then(left.token.cmp(&right.token))
}
