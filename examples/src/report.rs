//! The JSON object of `forebay-generate` and `forebay-summarize`.

use crate::generate::SessionFacts;
use crate::output;
use crate::program::Outcome;
use forebay::Engine;
use forebay::config::ConfigSource;
use nix::sys::resource::{UsageWho, getrusage};
use serde::Serialize;
use std::path::Path;

/// Fields as the command contract names them, and a few more. Where a program ran several sessions (a document in parts), counts,
/// seconds and disk traffic are sums over them, and memory, `kv_full_bytes`, `context`, `settings` and `plan` are those of the
/// session with the most KV-side memory.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The text.
    pub text: String,
    /// Tokens generated.
    pub tokens: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens taken over from a saved session.
    pub reused_tokens: u64,
    /// Seconds of prefill.
    pub prefill_seconds: f64,
    /// Seconds of decode steps.
    pub decode_seconds: f64,
    /// Steps per second.
    pub decode_tokens_per_second: f64,
    /// All KV-side memory.
    pub kv_memory_bytes: u64,
    /// What a full f16 cache of the same tokens takes.
    pub kv_full_bytes: u64,
    /// Activations and staged layers of prefill, at most.
    pub prefill_peak_bytes: u64,
    /// Weights in memory.
    pub weights_bytes: u64,
    /// Most memory that the process had resident, the mapped weights included.
    pub peak_rss_bytes: u64,
    /// Bytes written to the store.
    pub disk_bytes_written: u64,
    /// Bytes read from the store.
    pub disk_bytes_read: u64,
    /// Reads of the store.
    pub disk_reads: u64,
    /// Share of selected groups that were in memory already.
    pub reuse_rate: f64,
    /// Seconds in which decode stood still for reads.
    pub io_wait_seconds: f64,
    /// Seconds in which at least one read was under way.
    pub io_busy_seconds: f64,
    /// Policy of the cache.
    pub policy: &'static str,
    /// The configuration file, or `defaults`.
    pub config: String,
    /// `file` or `defaults`.
    pub config_source: &'static str,
    /// Where it was computed.
    pub device: &'static str,
    /// Why generation ended: `end` or `length`.
    pub stop: &'static str,
    /// Tokens that the session had room for.
    pub context: usize,
    /// Threads that computed.
    pub threads: usize,
    /// How the sketch's projections were made, null where there is no sketch.
    pub adapter: serde_json::Value,
    /// What they were made from: `prompt`, `generated text` or null.
    pub adapter_source: Option<&'static str>,
    /// `io_uring`, `pread` or null.
    pub io_backend: Option<&'static str>,
    /// Settings of the KV tiers, null under policy `full`.
    pub settings: serde_json::Value,
    /// Named bytes of the memory plan.
    pub plan: serde_json::Value,
    /// Documents read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<usize>,
    /// Parts that the text was summarised in: 1 where it fitted the context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parts: Option<usize>,
}

/// Name and kind of where settings come from.
pub fn config_names(engine: &Engine) -> (String, &'static str) {
    match engine.config_source() {
        ConfigSource::Defaults => ("defaults".into(), "defaults"),
        ConfigSource::File(path) => (path, "file"),
    }
}

/// Most memory that this process had resident.
pub fn peak_rss_bytes() -> u64 {
    // Linux counts in KiB.
    getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| usage.max_rss().max(0) as u64 * 1024)
}

impl Report {
    /// A report of the sessions `facts` (at least one) of `engine`, the last of which made `text`.
    pub fn new(
        engine: &Engine,
        device: &'static str,
        text: String,
        tokens: usize,
        stop: &'static str,
        facts: &[SessionFacts],
    ) -> Outcome<Report> {
        let Some(largest) = facts.iter().max_by_key(|f| f.stats.kv_memory_bytes) else {
            return Err(crate::Failure::Fault("internal error: a report of no session".into()));
        };
        let sum = |value: fn(&forebay::SessionStats) -> u64| facts.iter().map(|f| value(&f.stats)).sum::<u64>();
        let seconds = |value: fn(&forebay::SessionStats) -> f64| facts.iter().map(|f| value(&f.stats)).sum::<f64>();
        let (steps, decode_seconds) = (sum(|s| s.steps), seconds(|s| s.decode_seconds));
        let (selected, reused) = (sum(|s| s.groups_selected), sum(|s| s.groups_reused));
        let (config, config_source) = config_names(engine);
        Ok(Report {
            text,
            tokens,
            prompt_tokens: sum(|s| s.prompt_tokens),
            reused_tokens: 0,
            prefill_seconds: seconds(|s| s.prefill_seconds),
            decode_seconds,
            decode_tokens_per_second: if steps > 0 { steps as f64 / decode_seconds } else { 0.0 },
            kv_memory_bytes: largest.stats.kv_memory_bytes,
            kv_full_bytes: largest.stats.kv_full_bytes,
            prefill_peak_bytes: facts.iter().map(|f| f.stats.prefill_peak_bytes).max().unwrap_or(0),
            weights_bytes: engine.model().weights_bytes() as u64,
            peak_rss_bytes: peak_rss_bytes(),
            disk_bytes_written: sum(|s| s.disk_bytes_written),
            disk_bytes_read: sum(|s| s.disk_bytes_read),
            disk_reads: sum(|s| s.disk_reads),
            reuse_rate: if selected > 0 { reused as f64 / selected as f64 } else { 0.0 },
            io_wait_seconds: seconds(|s| s.io_wait_seconds),
            io_busy_seconds: seconds(|s| s.io_busy_seconds),
            policy: largest.policy,
            config,
            config_source,
            device,
            stop,
            context: largest.context,
            threads: engine.transformer().pool().threads(),
            adapter: largest.adapter.clone(),
            adapter_source: largest.adapter_source,
            io_backend: largest.io_backend,
            settings: largest.settings.clone(),
            plan: largest.plan.clone(),
            documents: None,
            parts: None,
        })
    }

    /// Ends a program's output: the object itself with `json`, else the end of the line that the text left open; and the object in the
    /// file `stats`.
    pub fn give(&self, json: bool, stats: Option<&Path>) -> Outcome<()> {
        if let Some(path) = stats {
            output::write_json_file(path, self)?;
        }
        if json { output::write_json(self) } else { output::write_text("\n") }
    }
}
