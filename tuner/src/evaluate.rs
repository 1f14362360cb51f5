//! Teacher-forced steps over a text: how far the next token's distribution is from that of the full cache.

use crate::divergence::{Distribution, Mean};
use forebay::config::Policy;
use forebay::{CancelHandle, Engine, Progress, Result, Session, SessionOptions, SessionStats};
use serde::Serialize;
use std::sync::Arc;

/// What a run tells its caller while it works.
pub struct Watch<'a> {
    /// Is given the handle that cancels each session before the session works.
    pub session: &'a mut dyn FnMut(CancelHandle),
    /// Is told the progress of prefill, and stops it by returning `false`.
    pub progress: &'a mut dyn FnMut(Progress) -> bool,
}

/// The full cache's logits on a text: what policies are compared with.
pub struct Reference {
    /// The text: `context` tokens of prefill, then one token per step, then the one that follows the last step.
    tokens: Vec<u32>,
    context: usize,
    /// `[steps][vocab]`.
    logits: Vec<f32>,
    vocab: usize,
    /// The session that made them.
    pub stats: SessionStats,
}

/// Per-step values of one policy on one text.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The policy.
    pub policy: Policy,
    /// Divergence from the full cache's distribution, nats.
    pub kl: Vec<f64>,
    /// 1 where both have the same likeliest token, else 0.
    pub agreement: Vec<f64>,
    /// Negative log-probability of the text's next token under the full cache, nats.
    pub nll_full: Vec<f64>,
    /// The same under the policy.
    pub nll: Vec<f64>,
    /// The policy's session.
    pub stats: SessionStats,
    /// Its settings; null under policy `full`.
    pub settings: serde_json::Value,
}

/// Tokens that an evaluation of `steps` steps after `context` tokens needs.
pub fn tokens_needed(context: usize, steps: usize) -> usize {
    context.saturating_add(steps).saturating_add(1)
}

impl Reference {
    /// Runs policy `full` over `tokens`, of which there are at least two and [`tokens_needed`].
    pub fn new(
        engine: &Arc<Engine>,
        tokens: &[u32],
        context: usize,
        steps: usize,
        watch: &mut Watch,
    ) -> Result<Reference> {
        let tokens = tokens[..tokens_needed(context, steps)].to_vec();
        let options = SessionOptions { policy: Policy::Full, ..SessionOptions::new(context + steps) };
        let vocab = engine.model().config().vocab;
        let mut logits = Vec::with_capacity(steps * vocab);
        let session = run(engine, &options, &tokens, context, watch, &mut |_, step| logits.extend_from_slice(step))?;
        Ok(Reference { tokens, context, logits, vocab, stats: session.stats() })
    }

    /// Steps taken.
    pub fn steps(&self) -> usize {
        self.tokens.len() - self.context - 1
    }

    /// Runs the same text through a session made with `options` (whose capacity holds it) and compares step by step.
    pub fn compare(&self, engine: &Arc<Engine>, options: &SessionOptions, watch: &mut Watch) -> Result<Comparison> {
        let steps = self.steps();
        let values = || Vec::with_capacity(steps);
        let (mut kl, mut agreement, mut nll_full, mut nll) = (values(), values(), values(), values());
        let session = run(engine, options, &self.tokens, self.context, watch, &mut |step, logits| {
            let full = Distribution::new(&self.logits[step * self.vocab..(step + 1) * self.vocab]);
            let other = Distribution::new(logits);
            let next = self.tokens[self.context + step + 1] as usize;
            kl.push(full.divergence(&other));
            agreement.push(if full.argmax() == other.argmax() { 1.0 } else { 0.0 });
            nll_full.push(-full.log_probability(next));
            nll.push(-other.log_probability(next));
        })?;
        let settings = serde_json::to_value(session.config()).unwrap_or(serde_json::Value::Null);
        Ok(Comparison { policy: session.policy(), kl, agreement, nll_full, nll, stats: session.stats(), settings })
    }
}

/// Prefill of the first `context` tokens, then a step per further token but the last; `each(step, logits)` after every step.
///
/// The logits that prefill itself leaves are not looked at: prefill is exact under every policy.
fn run(
    engine: &Arc<Engine>,
    options: &SessionOptions,
    tokens: &[u32],
    context: usize,
    watch: &mut Watch,
    each: &mut dyn FnMut(usize, &[f32]),
) -> Result<Session> {
    let mut session = engine.session(options)?;
    (watch.session)(session.cancel_handle());
    session.prefill(&tokens[..context], watch.progress)?;
    for (step, &token) in tokens[context..tokens.len() - 1].iter().enumerate() {
        session.step(token)?;
        each(step, session.logits());
    }
    Ok(session)
}

/// One policy's results over one or more texts, with the names of the command contract.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyReport {
    /// The policy.
    pub policy: &'static str,
    /// Mean divergence from the full cache, nats per token.
    pub kl: f64,
    /// Standard error of that mean, steps taken as independent.
    pub kl_standard_error: f64,
    /// Share of steps with the same likeliest token.
    pub agreement: f64,
    /// Standard error of that share.
    pub agreement_standard_error: f64,
    /// Mean negative log-probability of the next token under the full cache.
    pub nll_full: f64,
    /// The same under the policy.
    pub nll: f64,
    /// Steps, over all texts.
    pub steps: usize,
    /// KV-side memory of a session.
    pub kv_memory_bytes: u64,
    /// A full f16 cache of the same tokens.
    pub kv_full_bytes: u64,
    /// Share of selected groups that were in memory already.
    pub reuse_rate: f64,
    /// Bytes read from the store, over all texts.
    pub disk_bytes_read: u64,
    /// Reads of the store, over all texts.
    pub disk_reads: u64,
    /// Seconds of prefill and of steps, over all texts.
    pub seconds: f64,
    /// Tokens per second of prefill.
    pub prefill_tokens_per_second: f64,
    /// Steps per second.
    pub decode_tokens_per_second: f64,
    /// Steps per second of the full cache.
    pub decode_tokens_per_second_full: f64,
    /// Seconds in which steps stood still for reads.
    pub io_wait_seconds: f64,
    /// Seconds in which at least one read was under way.
    pub io_busy_seconds: f64,
    /// Settings of the tiers; null under policy `full`.
    pub settings: serde_json::Value,
    /// One row per text where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<TextReport>,
}

/// A policy on one text of several.
#[derive(Clone, Debug, Serialize)]
pub struct TextReport {
    /// The file.
    pub text: String,
    /// Mean divergence.
    pub kl: f64,
    /// Standard error of that mean.
    pub kl_standard_error: f64,
    /// Share of steps with the same likeliest token.
    pub agreement: f64,
    /// Mean negative log-probability under the full cache.
    pub nll_full: f64,
    /// The same under the policy.
    pub nll: f64,
    /// Share of selected groups that were in memory already.
    pub reuse_rate: f64,
}

/// Puts one policy's comparisons (at least one) on named texts together. `full`: the references' sessions.
pub fn report(comparisons: &[(String, Comparison)], full: &[&SessionStats]) -> Option<PolicyReport> {
    let first = &comparisons.first()?.1;
    let all = |values: fn(&Comparison) -> &Vec<f64>| -> Mean {
        Mean::of(&comparisons.iter().flat_map(|(_, c)| values(c).iter().copied()).collect::<Vec<_>>())
    };
    let sum = |value: fn(&SessionStats) -> u64| comparisons.iter().map(|(_, c)| value(&c.stats)).sum::<u64>();
    let seconds = |value: fn(&SessionStats) -> f64| comparisons.iter().map(|(_, c)| value(&c.stats)).sum::<f64>();
    let rate = |count: u64, seconds: f64| if count > 0 && seconds > 0.0 { count as f64 / seconds } else { 0.0 };
    let (kl, agreement) = (all(|c| &c.kl), all(|c| &c.agreement));
    let selected = sum(|s| s.groups_selected);
    let text = |(name, c): &(String, Comparison)| {
        let kl = Mean::of(&c.kl);
        TextReport {
            text: name.clone(),
            kl: kl.mean,
            kl_standard_error: kl.standard_error,
            agreement: Mean::of(&c.agreement).mean,
            nll_full: Mean::of(&c.nll_full).mean,
            nll: Mean::of(&c.nll).mean,
            reuse_rate: c.stats.reuse_rate(),
        }
    };
    Some(PolicyReport {
        policy: first.policy.name(),
        kl: kl.mean,
        kl_standard_error: kl.standard_error,
        agreement: agreement.mean,
        agreement_standard_error: agreement.standard_error,
        nll_full: all(|c| &c.nll_full).mean,
        nll: all(|c| &c.nll).mean,
        steps: comparisons.iter().map(|(_, c)| c.kl.len()).sum(),
        kv_memory_bytes: comparisons.iter().map(|(_, c)| c.stats.kv_memory_bytes).max().unwrap_or(0),
        kv_full_bytes: comparisons.iter().map(|(_, c)| c.stats.kv_full_bytes).max().unwrap_or(0),
        reuse_rate: if selected > 0 { sum(|s| s.groups_reused) as f64 / selected as f64 } else { 0.0 },
        disk_bytes_read: sum(|s| s.disk_bytes_read),
        disk_reads: sum(|s| s.disk_reads),
        seconds: seconds(|s| s.prefill_seconds + s.decode_seconds),
        prefill_tokens_per_second: rate(sum(|s| s.prompt_tokens), seconds(|s| s.prefill_seconds)),
        decode_tokens_per_second: rate(sum(|s| s.steps), seconds(|s| s.decode_seconds)),
        decode_tokens_per_second_full: rate(
            full.iter().map(|s| s.steps).sum(),
            full.iter().map(|s| s.decode_seconds).sum(),
        ),
        io_wait_seconds: seconds(|s| s.io_wait_seconds),
        io_busy_seconds: seconds(|s| s.io_busy_seconds),
        settings: first.settings.clone(),
        texts: if comparisons.len() > 1 { comparisons.iter().map(text).collect() } else { Vec::new() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(kl: &[f64], agreement: &[f64]) -> Comparison {
        let n = kl.len() as u64;
        let stats = SessionStats { steps: n, decode_seconds: 0.5, disk_bytes_read: 10, ..SessionStats::default() };
        Comparison {
            policy: Policy::Window,
            kl: kl.to_vec(),
            agreement: agreement.to_vec(),
            nll_full: vec![1.0; kl.len()],
            nll: vec![2.0; kl.len()],
            stats,
            settings: serde_json::Value::Null,
        }
    }

    #[test]
    fn several_texts_are_averaged_and_listed() {
        let full = SessionStats { steps: 4, decode_seconds: 2.0, ..SessionStats::default() };
        let texts = [
            ("a".to_string(), comparison(&[0.1, 0.3], &[1.0, 0.0])),
            ("b".to_string(), comparison(&[0.0, 0.0], &[1.0, 1.0])),
        ];
        let r = report(&texts, &[&full]).unwrap();
        assert!((r.kl - 0.1).abs() < 1e-12 && (r.agreement - 0.75).abs() < 1e-12);
        assert_eq!((r.steps, r.disk_bytes_read, r.texts.len()), (4, 20, 2));
        assert_eq!((r.decode_tokens_per_second, r.decode_tokens_per_second_full), (4.0, 2.0));
        assert!((r.texts[0].kl - 0.2).abs() < 1e-12 && r.texts[1].kl == 0.0);
        assert!(report(&texts[..1], &[&full]).unwrap().texts.is_empty());
        assert!(report(&[], &[]).is_none());
    }
}
