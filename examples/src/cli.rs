//! Command-line options that several programs share, and what they become in the library.

use crate::program::{Failure, Outcome};
use crate::size::parse_size;
use clap::Args;
use forebay::config::Policy;
use forebay::sampler::{Sampler, SamplerOptions};
use forebay::store::{DiskClass, IoBackend};
use forebay::{Engine, EngineOptions, KvMemory, SessionOptions};
use forebay_kernels::Precision;
use std::path::PathBuf;
use std::sync::Arc;

/// Where the arithmetic runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl Device {
    /// The name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        }
    }
}

/// Model, threads and store.
#[derive(Args, Clone, Debug)]
pub struct EngineArgs {
    /// Model file (GGUF)
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    #[command(flatten)]
    compute: ComputeArgs,
}

/// Threads and store, with any model.
#[derive(Args, Clone, Debug)]
pub struct ComputeArgs {
    /// Settings of the KV tiers (forebay.json); without it they follow from the model's shape and the budget
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory for the part of the KV cache that lives on disk; nothing stays there [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    pub store: Option<PathBuf>,
    /// How the store reads and writes: auto, uring, pread
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = parse_io)]
    pub io: IoBackend,
    /// Threads that compute [default: one per physical core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Where to compute
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: Device,
    /// Multiply with f32 activations: slower, closest to exact arithmetic
    #[arg(long)]
    pub exact: bool,
}

impl EngineArgs {
    /// Opens the model, with a store that is as fast as `disk`.
    pub fn open(&self, disk: DiskClass) -> Outcome<Arc<Engine>> {
        Ok(Engine::open(&self.model, self.compute.options(disk)?)?)
    }

    /// Where the arithmetic runs.
    pub fn device(&self) -> Device {
        self.compute.device
    }
}

impl ComputeArgs {
    /// The engine's options, with a store that is as fast as `disk`.
    pub fn options(&self, disk: DiskClass) -> Outcome<EngineOptions> {
        if self.device == Device::Cuda {
            return Err(Failure::usage("--device", "cuda: this build has no CUDA support, expected cpu"));
        }
        Ok(EngineOptions {
            threads: self.threads.map_or(0, |n| n as usize),
            precision: if self.exact { Precision::Exact } else { Precision::Fast },
            store_dir: self.store.clone().unwrap_or_else(std::env::temp_dir),
            disk,
            io: self.io,
            config: self.config.clone(),
            ..EngineOptions::default()
        })
    }
}

/// Memory of the KV side and of prefill.
#[derive(Args, Clone, Debug)]
pub struct MemoryArgs {
    /// Memory of the KV side: a size, a share of the full f16 cache such as 1/13, or full for an exact cache in memory [default: 1/10, or the
    /// least that works]
    #[arg(long, value_name = "SIZE|1/N|full", value_parser = parse_kv_memory)]
    pub kv_memory: Option<KvMemory>,
    /// Memory that prefill may take besides; a longer prompt goes through in parts
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = parse_size)]
    pub prefill_memory: u64,
    /// Most bytes that may be written to the store, which is flash that wears [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub write_budget: Option<u64>,
    /// Replace single settings of the KV tiers, for example group=8,rank=48,sketch=i4
    #[arg(long = "set", value_name = "KEY=VALUE,..", default_value = "")]
    pub overrides: String,
}

impl MemoryArgs {
    /// The options of a session for `capacity` tokens.
    pub fn session(&self, capacity: usize, policy: Policy) -> SessionOptions {
        SessionOptions {
            policy,
            kv_memory: self.kv_memory.unwrap_or(KvMemory::Default),
            prefill_memory: self.prefill_memory,
            overrides: self.overrides.clone(),
            write_budget: self.write_budget,
            ..SessionOptions::new(capacity)
        }
    }
}

/// How the next token is drawn.
#[derive(Args, Clone, Debug)]
pub struct SamplingArgs {
    /// 0 is greedy and deterministic
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// Draw from the K likeliest tokens; 0 is all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,
    /// Draw from the likeliest tokens that together reach this probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f32,
    /// Leave out tokens less likely than this share of the likeliest
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub min_p: f32,
    /// Divide the logits of recent tokens by this; 1 is off [default: 1 in forebay-generate, 1.15 in forebay-summarize]
    #[arg(long, value_name = "R")]
    pub repeat_penalty: Option<f32>,
    /// Seed of the random numbers
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
}

impl SamplingArgs {
    /// The sampler's options, checked.
    pub fn options(&self, default_repeat_penalty: f32) -> Outcome<SamplerOptions> {
        let options = SamplerOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty.unwrap_or(default_repeat_penalty),
            seed: self.seed,
        };
        // Checked here already, so that nothing is read or computed for options that cannot be used.
        Sampler::new(options)?;
        Ok(options)
    }
}

/// Parses a policy's name.
pub fn parse_policy(text: &str) -> Result<Policy, String> {
    text.parse().map_err(|_| format!("expected one of {}", Policy::NAMES.join(", ")))
}

/// Parses the name of a disk class.
pub fn parse_disk(text: &str) -> Result<DiskClass, String> {
    text.parse().map_err(|e| format!("{e}"))
}

/// Parses the name of an I/O backend.
pub fn parse_io(text: &str) -> Result<IoBackend, String> {
    text.parse().map_err(|e| format!("{e}"))
}

fn parse_kv_memory(text: &str) -> Result<KvMemory, String> {
    if text == "full" {
        return Ok(KvMemory::Full);
    }
    if let Some(parts) = text.strip_prefix("1/") {
        return match parts.parse() {
            Ok(parts) if parts > 0 => Ok(KvMemory::Share(parts)),
            _ => Err(format!("{text:?}, expected a share such as 1/13")),
        };
    }
    parse_size(text).map(KvMemory::Bytes).map_err(|e| format!("{e}, a share such as 1/13, or full"))
}

/// Tokens that a session is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextPlan {
    /// Capacity of the session.
    pub capacity: usize,
    /// Most tokens that can be generated.
    pub new_tokens: usize,
}

/// Says that a context is larger than what the model was trained on.
pub fn warn_past_training(context: usize, model_context: usize) {
    if context > model_context {
        log::warn!("--context {context} is more than the {model_context} tokens that the model was trained on");
    }
}

/// Fits a prompt and what is to be generated into `--context` or into the model's context.
///
/// Without `--context` the capacity is what the work needs, and the answer ends at the model's context. A larger `--context` is
/// taken with a warning: the positions past it were never trained.
pub fn plan_context(
    model_context: usize,
    context: Option<usize>,
    prompt: usize,
    new_tokens: usize,
) -> Outcome<ContextPlan> {
    let limit = context.unwrap_or(model_context);
    warn_past_training(limit, model_context);
    if prompt > limit {
        let message = match context {
            Some(context) => {
                format!("--context {context}: the prompt has {prompt} tokens, expected a context of at least that")
            }
            None => format!("the prompt has {prompt} tokens, expected at most the model's context of {model_context}"),
        };
        return Err(Failure::Usage(message));
    }
    // The last token is drawn but never taken into the cache.
    let room = limit - prompt + 1;
    if new_tokens > room {
        log::warn!("at most {room} tokens can follow a prompt of {prompt} in a context of {limit}");
    }
    let new_tokens = new_tokens.min(room);
    let needed = (prompt + new_tokens).min(limit);
    Ok(ContextPlan { capacity: context.unwrap_or(needed), new_tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_context_is_what_the_work_needs_unless_said() {
        assert_eq!(plan_context(100, None, 10, 20).unwrap(), ContextPlan { capacity: 30, new_tokens: 20 });
        assert_eq!(plan_context(100, Some(64), 10, 20).unwrap(), ContextPlan { capacity: 64, new_tokens: 20 });
        assert_eq!(plan_context(100, Some(200), 150, 20).unwrap(), ContextPlan { capacity: 200, new_tokens: 20 });
        assert_eq!(plan_context(100, None, 95, 20).unwrap(), ContextPlan { capacity: 100, new_tokens: 6 });
        assert_eq!(plan_context(100, None, 100, 20).unwrap(), ContextPlan { capacity: 100, new_tokens: 1 });
    }

    #[test]
    fn a_prompt_that_does_not_fit_names_both_numbers() {
        for error in [plan_context(100, None, 101, 1), plan_context(100, Some(64), 101, 1)] {
            let text = error.unwrap_err().to_string();
            assert!(
                text.contains("101") && (text.contains("context of 100") || text.contains("--context 64")),
                "{text}"
            );
        }
    }

    #[test]
    fn kv_memory_is_a_size_a_share_or_full() {
        assert_eq!(parse_kv_memory("full"), Ok(KvMemory::Full));
        assert_eq!(parse_kv_memory("3MiB"), Ok(KvMemory::Bytes(3 << 20)));
        assert_eq!(parse_kv_memory("1/13"), Ok(KvMemory::Share(13)));
        for wrong in ["half", "1/0", "1/x", "2/3", "1/"] {
            assert!(parse_kv_memory(wrong).unwrap_err().contains("expected"), "{wrong}");
        }
    }
}
