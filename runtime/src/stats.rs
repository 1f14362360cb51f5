//! What a session did, in the terms of the programs' JSON.

/// Counters and times of one session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SessionStats {
    /// Tokens that went through prefill.
    pub prompt_tokens: u64,
    /// Seconds of prefill.
    pub prefill_seconds: f64,
    /// Steps of decode.
    pub steps: u64,
    /// Seconds of decode steps, sampling not counted.
    pub decode_seconds: f64,
    /// All KV-side memory, planned and held.
    pub kv_memory_bytes: u64,
    /// What a full f16 cache of the tokens now held takes.
    pub kv_full_bytes: u64,
    /// Most bytes that prefill held besides.
    pub prefill_peak_bytes: u64,
    /// Bytes written to the store.
    pub disk_bytes_written: u64,
    /// Bytes read from the store, decode and prefill.
    pub disk_bytes_read: u64,
    /// Read requests to the device.
    pub disk_reads: u64,
    /// Groups selected, over layers and steps.
    pub groups_selected: u64,
    /// Of those, groups that the reuse buffer held.
    pub groups_reused: u64,
    /// Groups fetched late.
    pub groups_refined: u64,
    /// Seconds in which decode stood still for reads.
    pub io_wait_seconds: f64,
    /// Seconds in which at least one read was under way.
    pub io_busy_seconds: f64,
}

impl SessionStats {
    /// Share of selected groups that were in memory already; 0 before anything was selected.
    pub fn reuse_rate(&self) -> f64 {
        if self.groups_selected == 0 { 0.0 } else { self.groups_reused as f64 / self.groups_selected as f64 }
    }

    /// Steps per second; 0 before the first.
    pub fn decode_tokens_per_second(&self) -> f64 {
        if self.decode_seconds > 0.0 { self.steps as f64 / self.decode_seconds } else { 0.0 }
    }
}
